"""The whole script on a CPU: a trace, an arm that lends and skips against a plain one, rates and capacity, report and picture."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from depthfx import cli

ROOT = Path(__file__).resolve().parents[2]
TINY = """--shape smollm2 --layers 2 --kv-blocks 10 --unit-mib 0.25 --max-batch 8 --max-len 128 --no-inductor --base-batch 2 --base-context 24
--base-steps 6 --base-stat mean --slo-gaps 1000 --slo-ttft 1000""".split()


def run(tmp_path, *options):
    environment = {**os.environ, "OUT": str(tmp_path), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)  # the CPU's own kernels are twenty times faster
    command = [sys.executable, "-m", "depthfx", "bench", "load", *TINY, *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("*-load-*.json")
    return json.loads(path.read_text())["rows"], path.with_suffix(".png"), done.stdout


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_arms_under_load(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n" + "".join(f"{i // 4},{20 + i},{13 + i % 3}\n" for i in range(8)))
    arms = ["static-fp16", "elastic+routed"]
    options = (
        "--factors 4 --requests 8 --capacity 12 24 --resolution 0.5 --warm-up 3 --own-shares 0.5 --base-shares 1.25 --skip-rate 0.5 --skip-depth 1"
    ).split()
    rows, picture, printed = run(tmp_path, "--arrivals", str(trace), "--arms", *arms, *options)
    (slo,) = (r for r in rows if r["kind"] == "SLO")
    assert slo["gap_s"] == pytest.approx(1000 * slo["T_base"]["mean"])
    plain, elastic = (r for r in rows if r["kind"] == "run" and "capacity of" not in r)
    parts = [(r["arm"], r["capacity of"], r["rate"]) for r in rows if r["kind"] == "run" and "capacity of" in r]
    assert parts == [(arms[0], "baseline", 30.0), (arms[1], "own", 12.0), (arms[1], "baseline", 30.0)]
    assert [plain["arm"], elastic["arm"]] == arms
    for row in (plain, elastic):
        assert row["rate"] == pytest.approx(28.0)  # seven gaps in one second, four times as fast
        assert row["finished"] == row["requests"] == 8
        assert row["output tokens"] == sum(13 + i % 3 for i in range(8))
        assert row["SLO %"] == 100.0
        assert row["full %"] + row["mixed %"] + row["fast %"] == pytest.approx(100.0)
        assert 0 < row["mean TTFT s"] < row["mean E2E s"] <= row["p99 E2E s"]
    assert (plain["full %"], plain["transitions"]) == (100.0, 0)
    assert plain["peak KV %"] > 30.0  # how many requests meet depends on the pace of the machine
    assert elastic["num_lends"] > 0 and elastic["lent GiB"] > 0 and elastic["full %"] < 100.0
    assert 0.3 < elastic["skip share"] < 0.7
    assert [r["status"] for r in rows if r["kind"] == "capacity"] == ["at least", "at least"]
    means = [r for r in rows if r["kind"] == "mean" and r["arm"] == arms[1]]
    assert sorted(r["rate"] for r in means) == pytest.approx([12.0, 24.0, 28.0, 30.0]), "those of the search too"
    means = [r for r in means if r["rate"] == elastic["rate"]]
    (change,) = (r["mean E2E s vs static-fp16 %"] for r in means)
    assert change == pytest.approx((elastic["mean E2E s"] / plain["mean E2E s"] - 1) * 100)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "elastic+routed" in printed


def test_what_was_run_is_shown_after_a_signal(monkeypatch):
    import load

    shown = []

    def interrupted(bench, name, repeat):
        shown.append(name)
        if repeat:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setattr(sys, "argv", "load --shape smollm2 --arms elastic --rates 1 --repeats 3".split())
    monkeypatch.setattr(load, "Bench", lambda args: "bench")
    monkeypatch.setattr(load, "sweep", interrupted)
    monkeypatch.setattr(load, "show", shown.append)
    try:
        assert load.main() == 130
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert shown == ["elastic", "elastic", "bench"]


def test_load_is_listed(capsys):
    assert cli.main(["bench"]) == 0
    names = capsys.readouterr().out.split()
    assert "load" in names
    assert not {"load_arms", "load_drive", "load_metrics", "load_options", "load_plots", "load_workload"} & set(names)
