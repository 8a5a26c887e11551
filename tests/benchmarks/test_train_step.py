"""The benchmark of training steps on a CPU with a tiny model: arms in turn, what it reads from the shipped config, LoRA there or not."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import train_step
from torch import nn

from tests.skippers.train_toys import model, settings, train


class Lora(nn.Module):
    """A linear with another one of rank 1 beside it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.lora_A = nn.Linear(inner.in_features, 1, bias=False)
        self.lora_B = nn.Linear(1, inner.out_features, bias=False)

    def forward(self, x):
        return self.inner(x) + self.lora_B(self.lora_A(x))


class Adapted(nn.Module):
    """What a stand-in for peft makes of a model."""

    def __init__(self, base, config):
        super().__init__()
        self.base = base
        self.chosen = [b.self_attn for i, b in enumerate(base.model.layers) if i in (config.layers_to_transform or range(99))]
        for attention in self.chosen:
            attention.q_proj = Lora(attention.q_proj)

    def forward(self, **given):
        dtypes = {p.dtype for name, p in self.named_parameters() if "lora" in name}
        assert dtypes == {self.base.dtype} and not torch.is_autocast_enabled("cpu"), "as the trainer: rounded, and no autocast"
        return self.base(**given)

    def unload(self):
        for attention in self.chosen:
            attention.q_proj = attention.q_proj.inner


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A trained skipper of a tiny model in the place of the one in the package; the dtypes and models that were asked for."""
    of = model()
    result, _ = train(tmp_path / "run", settings(2, penalty=0.0, distill=0.5, micro_batch=2), of)
    monkeypatch.setattr(train_step, "shipped_skipper", lambda: result.folder)
    monkeypatch.setattr(train_step, "load_smollm2", lambda dtype, device: (of.to(dtype), None))
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    return of


def rows_of(tmp_path, monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["train_step.py", "--rounds", "2", "--steps", "5", *options])
    train_step.main()
    (path,) = (tmp_path / "out").glob("*-train-step.json")
    return {row["what"]: row for row in json.loads(path.read_text())["rows"]}


@pytest.mark.parametrize("dtype", ["bfloat16"])  # parameters are rounded
def test_arms_take_turns_and_learn_by_the_same_loss(tmp_path, monkeypatch, shipped, dtype, capsys):
    peft = ModuleType("peft")
    peft.LoraConfig, peft.get_peft_model, peft.__version__ = SimpleNamespace, Adapted, "stand-in"
    monkeypatch.setitem(sys.modules, "peft", peft)
    order, losses, own = [], [], train_step.measure
    monkeypatch.setattr(train_step, "measure", lambda name, *rest: order.append(name) or own(name, *rest))
    sums = train_step.sum_losses
    monkeypatch.setattr(train_step, "sum_losses", lambda *given: losses.append(given[0]) or sums(*given))
    rows = rows_of(tmp_path, monkeypatch, "--dtype", dtype)
    assert order == [*train_step.ARMS, *reversed(train_step.ARMS)] and list(rows) == list(train_step.ARMS)
    assert {name: row["layers"] for name, row in rows.items()} == {
        "lora": [2, 3], "skipper": [2, 3], "distilled": [2, 3], "lora, all": [0, 1, 2, 3]
    }  # fmt: skip
    assert len(losses) == 2 * 2 * 5 * 4 and {tuple(x.shape) for x in losses} == {(2, 24, 131)}, "8 sequences of 24 a step, 2 at once"
    assert all(x.dtype is getattr(torch, dtype) for x in losses)
    for row in rows.values():
        assert len(row["times"]) == 2 * 2 and row["p10 ms"] <= row["step ms"] <= row["p90 ms"] and row["of lora, pairs"]["n"] == 4
    assert rows["lora"]["trained parameters"] == 2 * 128 and rows["lora, all"]["trained parameters"] == 4 * 128
    assert rows["skipper"]["of lora"] == pytest.approx(rows["skipper"]["step ms"] / rows["lora"]["step ms"])
    assert not any("lora" in name for name, _ in shipped.named_parameters()), "the base is itself again"
    assert "8 sequences of 24 tokens a step, 2 at once" in capsys.readouterr().out


def test_without_peft_its_arms_are_left_out_and_named(tmp_path, monkeypatch, shipped, capsys):
    monkeypatch.setitem(sys.modules, "peft", None)
    rows = rows_of(tmp_path, monkeypatch, "--dtype", "float32", "--batch", "4", "--length", "16")
    assert list(rows) == ["skipper", "distilled"] and "of lora" not in rows["skipper"]
    out = capsys.readouterr().out
    assert "without lora: that arm is the package peft, which is not installed (pip install peft)" in out
    assert "4 sequences of 16 tokens a step" in out


def test_what_cannot_be_measured_is_said(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_step.py", "--steps", "3"])
    with pytest.raises(SystemExit):
        train_step.main()
    assert "--steps 3: 3 of them are left out; give more" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["train_step.py"])
    monkeypatch.setattr(train_step, "shipped_skipper", lambda: None)
    with pytest.raises(SystemExit, match="holds no trained skipper for SmolLM2"):
        train_step.main()
