"""The skipper that is shipped for SmolLM2: it loads, is small, says how it was trained, and skips what it says."""

from __future__ import annotations

import io
import json
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from depthfx import demo, smollm2
from depthfx.skippers import load_skipper
from depthfx.skippers.flexidepth_checkpoint import save_flexidepth
from depthfx.skippers.train import routed_training
from depthfx.skippers.train.settle import TOLERANCE
from tests.skippers.train_toys import model, skipper

LICENCE = Path(__file__).resolve().parents[2] / "LICENSE"


def test_the_shipped_skipper_stays_near_the_model():
    folder = smollm2.shipped_skipper()
    assert folder is not None and folder.name == "smollm2_skipper"
    of, tokenizer = smollm2.load_smollm2()
    loaded = load_skipper(folder, of)
    training = json.loads((folder / "config.json").read_text())["training"]
    settled = training["settled"]
    assert len(loaded.layers) == 18 and training["steps"] == 1615 and abs(settled["share"] - settled["target"]) <= TOLERANCE
    ids = tokenizer(LICENCE.read_text()[:2500], return_tensors="pt")["input_ids"]  # a text that it was not trained on
    with routed_training(of, loaded, "straight_through") as routing, routing.served(), torch.no_grad():
        ours = of(input_ids=ids, use_cache=False).logits[0]
        skipped = 1 - torch.stack(routing.actions).float().mean()
        with routing.off():
            base = of(input_ids=ids, use_cache=False).logits[0]
    targets = ids[0, 1:]
    loss, base_loss = (torch.nn.functional.cross_entropy(x[:-1], targets) for x in (ours, base))
    # Found: 20.7 % of routed rows, 0.045 nats more, 81 % of likeliest tokens the same; without the adapters 0.195 nats and 73 %.
    assert 0.15 < skipped < 0.3 and loss < base_loss + 0.1 and (ours.argmax(-1) == base.argmax(-1)).float().mean() > 0.77


def test_what_is_shipped_is_small_and_readable():
    files = {file.name: file.stat() for file in smollm2.SKIPPER.iterdir()}
    assert sorted(files) == ["config.json", "model.safetensors"] and files["model.safetensors"].st_size < 4_000_000
    assert all(stat.S_IMODE(found.st_mode) & 0o444 == 0o444 for found in files.values())


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
    out = io.StringIO()
    ours = demo.Measured(answers=[[5, 6, 7], [5, 6, 7]], batch_rate=12.0)
    demo.show_skipping(tmp_path, "cpu", torch.float32, 6, ("What?", "Why?"), ours, out)
    text = out.getvalue()
    share = float(text.split("% of all layer passes")[0].split()[-1])
    counts = of.engine.routes.counts()
    assert 0 < share < 50 and share == pytest.approx(100 * counts.skipped_share * 2 / 4, abs=15)
    assert "in 2 routed layers of 4" in text and "tokens/s for 2 questions, 12 without the skipper" in text


def test_the_demo_says_where_skipping_is_slower():
    assert demo.pace_beside(90.0, 99.0, 8) == (
        "90 tokens/s for 8 questions, 99 without the skipper. Here routing costs more than it saves: the layers of so small a model are cheap."
    )
    assert demo.pace_beside(99.0, 90.0, 8) == "99 tokens/s for 8 questions, 90 without the skipper."
