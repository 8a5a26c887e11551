"""The map of RandomSkip arms on a CPU: one compiled model for all of them, a limit that stops it, and the arithmetic of its changes."""

import json
import sys
from dataclasses import replace

import common
import load_metrics
import pytest
import skip_map
import torch
from dial import Dial
from transformers import LlamaConfig

from depthfx.contracts import Rows
from depthfx.skippers.policies.random_skip import RandomSkip

SHAPE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
    "max_position_embeddings": 64,
}  # fmt: skip
TINY = """--shape tiny --kv-blocks 16 --max-batch 4 --max-len 64 --no-inductor --requests 4 --of-saturation 0.5 --input-tokens fixed:24
--shared-prefix 16 --output-tokens fixed:6 --skip-rates 0.75 --skip-depths 0.5 1 --limit 1000""".split()


def test_the_map_of_one_compiled_model(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(common.SHAPES, "tiny", (LlamaConfig, SHAPE))
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["skip_map.py", *TINY])
    ended = []
    monkeypatch.setattr(skip_map, "completion_rate", lambda requests: ended.extend(r.finished for r in requests) or 40.0)
    left = iter([1000.0, 1000.0, 0.0])  # as printed, before the first cell, before the second one
    monkeypatch.setattr(skip_map.SkipMap, "left", lambda self: next(left))
    monkeypatch.setattr(skip_map.load_arms, "load_model", once(skip_map.load_arms.load_model))
    skip_map.main()
    (path,) = tmp_path.glob("*-skip-map-run.json")
    rows = json.loads(path.read_text())["rows"]
    runs = {r["arm"]: r for r in rows if r["kind"] == "run"}
    assert ended == [True] * 4 and [r["requests/s"] for r in rows if r["kind"] == "saturation"] == [40.0]
    assert [r["arm"] for r in rows if r["kind"] == "run"] == ["dense", "routed", "auto"]
    assert {(r["r"], r["d"], r["finished"], r["output tokens"]) for r in runs.values()} == {(0.75, 0.5, 4, 24)}
    assert "skip share" not in runs["dense"] and 0.2 < runs["routed"]["skip share"] < 0.55  # 0.375 expected
    assert all(runs[arm]["num_reused_tokens"] >= 16 for arm in ("dense", "routed"))  # the last one comes 52 ms after the first
    assert runs["auto"]["num_probes"] + runs["auto"]["run rows"] > 0 and runs["auto"]["answer share"] is not None
    (cell,) = (r for r in rows if r["kind"] == "cell")
    assert cell["routed %"] == pytest.approx((runs["routed"]["mean E2E s"] / runs["dense"]["mean E2E s"] - 1) * 100)
    assert cell["auto %"] == pytest.approx((runs["auto"]["mean E2E s"] / runs["dense"]["mean E2E s"] - 1) * 100)
    assert cell["routed +-"] > 0 and cell["interval"] == "over requests"
    out = capsys.readouterr().out
    assert "2 cells of 3 x 1 runs: expected to take" in out
    assert "stopped by --limit 1000 s after 1 of 2 cells; missing (r x d): 75% x 100% at 20/s" in out
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def once(function):
    """``function``, which may be called one time."""
    calls = []

    def called(*args):
        assert not calls, "a second model was made"
        calls.append(args)
        return function(*args)

    return called


def test_the_dial_skips_what_random_skip_does():
    ids, positions = torch.arange(40) * 7919, torch.arange(40)
    dial, alike, ones, hidden = Dial(8), Dial(8, by_request=False), torch.ones(40, dtype=torch.bool), torch.zeros(40, 4)
    for rate, depth in ((0.25, 0.75), (0.75, 0.25), (1.0, 1.0), (0.5, 0.5)):
        dial.turn(rate, depth)
        alike.turn(rate, depth)
        policy = RandomSkip(rate, depth, 1234)
        for place in range(8):
            rows = Rows(hidden, hidden, ids, positions, ones, ones, place, 8)
            assert torch.equal(dial(rows).actions, policy(rows).actions)
            assert torch.equal(alike(rows).actions, alike(replace(rows, request_ids=ids + 5)).actions)
        assert not torch.equal(dial(rows).actions, dial(replace(rows, request_ids=ids + 5)).actions) or rate == 1.0


def served(*times):
    return [load_metrics.RequestTimes(i, 0.0, 1, token_s=[t], finished=True) for i, t in enumerate(times)]


def test_changes_of_one_run_and_of_several():
    change, width = skip_map.change_of([served(1.0, 2.0, 3.0)], [served(0.5, 1.0, 1.5)])
    assert (change, width) == (pytest.approx(-50.0), pytest.approx(0.0))
    change, width = skip_map.change_of([served(1.0, 3.0)], [served(1.0, 1.0)])
    assert change == pytest.approx(-50.0)
    assert width == pytest.approx(196 * 0.5**0.5 / (2 * 2**0.5))  # residuals of b - a / 2: 0.5 and -0.5
    assert skip_map.change_of([served(2.0)], [served(1.0)]) == (pytest.approx(-50.0), None)
    several = skip_map.change_of([served(1.0), served(2.0)], [served(0.8), served(1.2)])
    assert several == load_metrics.paired_change([1.0, 2.0], [0.8, 1.2])
