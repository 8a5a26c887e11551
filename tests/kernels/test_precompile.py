"""Kernel variants that workers compile are the ones that the launches load; a lost worker or a bad variant loses nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import triton

from depthfx.lowering.precompile import KernelWorkers
from depthfx.report import CompileReport

ROOT = Path(__file__).resolve().parents[2]


def run(tmp_path, *words: str) -> dict:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.kernels.precompile_for_hopper", *words]
    out = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout.splitlines()[-1])


def test_workers_fill_the_cache_that_launches_read_and_one_may_die(tmp_path):
    facts = run(tmp_path, "kill")
    assert len(facts["before"]) >= 4 and not any(facts["before"])
    assert facts["loaded"] == [True] * len(facts["before"])
    assert all(facts["ended"]) and facts["hook"]
    assert f"{len(facts['before'])} of {len(facts['before'])} variants compiled" in facts["lines"][0]
    # a row of several layers' results is aligned by chance: no step may meet a kernel that the warm-up did not
    assert facts["of_layers"] == {"_scatter_rows_kernel": 1, "_select_rows_kernel": 1}
    # a thread that serves meanwhile launches its kernel, and a second dry run waits for the end of the first
    (launch,) = facts["launched"]
    assert launch[3:] == ["0", "loaded", "known"] and facts["turns"] == ["first, 1 found", "third, 1 found"]


def test_a_variant_that_fails_is_listed_with_its_reason(tmp_path):
    facts = run(tmp_path, "broken")
    assert len(facts["before"]) >= 4 and not any(facts["before"])
    assert facts["loaded"] == [True] * len(facts["before"])
    assert "left to their first launch: 1" in facts["lines"][1] and "no_such_kernel" in facts["lines"][1]
    assert all(facts["ended"])


def test_inductor_does_not_move_the_cache_away_from_the_workers(monkeypatch):
    """Inductor's own kernels, such as those of a skipper's policy, name a folder of Triton's cache where nobody has yet."""
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setitem(vars(triton.knobs.cache), "dir", "")
    del triton.knobs.cache.dir
    before = triton.knobs.cache.dir
    KernelWorkers(CompileReport(), enabled=False)
    assert os.environ.setdefault("TRITON_CACHE_DIR", "/elsewhere") == before  # as CachingAutotuner does
    assert triton.knobs.cache.dir == before
