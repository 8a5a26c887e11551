"""The skipper that is shipped for SmolLM2: where there is one it loads, is small, and says how it was trained."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace

import pytest
import torch

import depthfx
from depthfx import demo, smollm2
from depthfx.skippers import load_skipper
from depthfx.skippers.flexidepth_checkpoint import save_flexidepth
from depthfx.skippers.train.settle import TOLERANCE
from tests.skippers.train_toys import model, skipper


def test_the_shipped_skipper_loads():
    folder = smollm2.shipped_skipper()
    assert folder is None or folder.name == "smollm2_skipper"
    if folder is not None:
        loaded = load_skipper(folder, smollm2.load_smollm2()[0])
        record = json.loads((folder / "config.json").read_text())["training"]
        found = record["settled"]
        assert len(loaded.layers) >= 5 and record["steps"] > 0 and abs(found["share"] - found["target"]) <= TOLERANCE
        assert (folder / "model.safetensors").stat().st_size < 4_000_000


def test_a_copy_without_one_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "SKIPPER", tmp_path)
    assert smollm2.shipped_skipper() is None
    (tmp_path / "config.json").write_text("{}")
    assert smollm2.shipped_skipper() == tmp_path


def test_the_demo_shows_what_was_skipped(tmp_path, monkeypatch):
    of = model()
    save_flexidepth(skipper(of, "hard"), tmp_path, of)
    of.generation_config.eos_token_id = 1
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: " ".join(map(str, ids)))
    monkeypatch.setattr(demo, "load_smollm2", lambda dtype, device: (of, tokenizer))
    monkeypatch.setattr(demo, "chat_ids", lambda tokenizer, question: list(question.encode()))
    compile = depthfx.compile
    monkeypatch.setattr(depthfx, "compile", lambda *args, **options: compile(*args, inductor=False, **options))
    out = io.StringIO()
    ours = demo.Measured(answers=[[5, 6, 7], [5, 6, 7]], batch_rate=12.0)
    demo.show_skipping(tmp_path, "cpu", torch.float32, 6, ("What?", "Why?"), ours, out)
    text = out.getvalue()
    share = float(text.split("% of all layer passes")[0].split()[-1])
    counts = of.engine.routes.counts()
    assert 0 < share < 50 and share == pytest.approx(100 * counts.skipped_share * 2 / 4, abs=15)
    assert "in 2 routed layers of 4" in text and "tokens/s for 2 questions, 12 without the skipper" in text
