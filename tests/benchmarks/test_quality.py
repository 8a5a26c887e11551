"""The benchmark of quality on a CPU with a tiny random model: kinds of weights, and a skipper with its controls."""

import json
import sys

import pytest
import quality
import torch

from tests.skippers.train_toys import model, settings, train


def tokenize(text, return_tensors=None):
    return {"input_ids": [ord(c) % 131 for c in text]}


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """The rows of one run, with a tiny model in SmolLM2's place."""
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setattr(
        quality, "load_smollm2", lambda dtype=torch.float32, device="cpu": (model(dtype, max_position_embeddings=512), tokenize)
    )
    letters = torch.randint(33, 123, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    (tmp_path / "text.txt").write_text("".join(map(chr, letters)))

    def run(*options):
        given = ["quality.py", str(tmp_path / "text.txt"), "--tokens", "96", "--window", "32", "--prompts", "2", "--new", "4", *options]
        monkeypatch.setattr(sys, "argv", given)
        quality.main()
        (path,) = (tmp_path / "out").glob("*-quality-*.json")
        return {(r["arm"], r.get("threshold")): r for r in json.loads(path.read_text())["rows"]}

    return run


def test_kinds_of_weights(measured):
    rows = {arm: row for (arm, _), row in measured("--arms", "full", "fast").items()}
    assert list(rows) == ["dense FP16", "nested, full", "nested, fast"]
    assert rows["dense FP16"]["KL to FP16"] == 0.0 and rows["dense FP16"]["same answers"] == 1.0
    assert rows["nested, full"]["KL to FP16"] < 1e-6 and rows["nested, full"]["same answers"] == 1.0
    assert 1e-6 < rows["nested, fast"]["KL to FP16"] < 0.1
    assert rows["dense FP16"]["perplexity"] == pytest.approx(rows["nested, full"]["perplexity"], rel=1e-5)


def test_a_skipper_and_its_controls(measured, tmp_path):
    of = model(max_position_embeddings=512)
    with torch.no_grad():
        for p in of.parameters():
            p.copy_(p.half())
    trained = quality.quality_depth.make_skipper(of, "flexidepth", "adapter", reduction=4, proj_reduction=4, head_bias=0.1, head_std=0.3)
    how = settings(4, penalty=0.0, decision="straight_through", target_skip=0.4, controller_shift=1.0)
    result, _ = train(tmp_path / "run", how, of, trained=trained)
    rows = measured("--skipper", str(result.folder), "--before", str(result.folder), "--thresholds", "0.05", "0.95")
    base, skipper = rows["base", None], rows["skipper", 0.5]
    assert base["KL"] == 0.0 and base["skipped %"] == 0.0 and 10 < skipper["skipped %"] < 90 and skipper["KL"] > 0
    assert skipper["of all %"] == pytest.approx(skipper["skipped %"] / 2) and skipper["decisions"] == 96 * 2
    shares = [rows["skipper, other threshold", t]["skipped %"] for t in (0.05, 0.95)]
    assert shares[0] < skipper["skipped %"] < shares[1], "the curve is over thresholds"
    assert rows["stage one", 0.5]["perplexity"] == skipper["perplexity"]
    for control in ("adapters", "nothing added"):
        assert abs(rows[f"random, {control}", None]["skipped %"] - skipper["skipped %"]) < 12
    for weights in ("16bit", "nested, full"):
        dense, routed = rows[f"served, {weights}, dense", None], rows[f"served, {weights}, routed", 0.5]
        assert dense["KL"] < 1e-6 and dense["flips"] is None and routed["flips"] == 0
        assert routed["perplexity"] == pytest.approx(skipper["perplexity"], rel=1e-4)
    assert rows["served, nested, fast, routed", 0.5]["KL"] > 0
    (picture,) = (tmp_path / "out").glob("*-quality-skipper.png")
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_too_little_text_is_said(measured):
    with pytest.raises(SystemExit, match="the text has 400 tokens; give more of it, or a smaller --window or --prompts"):
        measured("--window", "512")
