"""The share of skipped rows is where it was to be: at the end of training, and for a checkpoint that is moved to another one."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
import torch

from depthfx import cli
from depthfx.errors import SettingError, SkipperError
from depthfx.skippers import load_skipper, make_skipper
from depthfx.skippers.flexidepth_checkpoint import save_flexidepth
from depthfx.skippers.train import TrainSettings, evaluate_skipper, read_metrics, settle_checkpoint, settle_skipper
from tests.skippers.train_toys import data, model, settings, skipper, train

TIGHT = 2.0**-10  # what logits are multiplied by: as close as those of a router that was trained for a short time

SHORT = {
    "steps": 12, "penalty": 0.0, "learning_rate": 1e-2, "decision": "straight_through", "target_skip": 0.4, "controller_shift": 1.0,
    "settle_sequences": 80,
}  # fmt: skip


def router(of, gate="hard", factor=1.0, seed=0):
    """Random heads, whose logits lie round a constant that the bias takes off again, as after training."""
    made = make_skipper(of, "flexidepth", "adapter", gate=gate, reduction=4, proj_reduction=4, head_bias=1.0, seed=seed)
    torch.manual_seed(seed)
    with torch.no_grad():
        for policy in made.policies:
            torch.nn.init.normal_(policy.router_head.weight, std=factor)
            policy.router_head.bias.fill_(0.3 * factor)
    return made


def run(folder, of, **changes):
    how = settings(**{**SHORT, **changes})
    given = data(of, 64)  # 80 sequences
    result, records = train(folder, how, of, given, router(of), held_out=given)
    return result, records, evaluate_skipper(of, load_skipper(result.folder, of), given).skipped_share


def test_training_ends_at_its_target(tmp_path):
    of = model()
    result, _, share = run(tmp_path / "on", of)
    assert abs(share - 0.4) <= 0.01 and result.evaluation.skipped_share == pytest.approx(share), "it is measured when it is settled"
    assert abs(run(tmp_path / "off", of, settle_sequences=0, controller_fade=False)[2] - 0.4) > 0.02, "without it, it is not there"
    (line,) = [r for r in read_metrics(tmp_path / "on" / "metrics.jsonl") if r["kind"] == "settled"]
    record = json.loads((result.folder / "config.json").read_text())["training"]["settled"]
    assert (record["target"], record["share"]) == (0.4, line["share"]) and line["tokens"] == 80 * 24
    again, _, _ = run(tmp_path / "on", of)
    assert json.loads((again.folder / "config.json").read_text())["training"]["settled"] == record, "a finished run keeps it"


def test_shifts_fade_with_the_learning_rate(tmp_path):
    of = model()
    moves = {}
    for fade in (True, False):
        trained: Any = router(of)
        seen: list[float] = []
        how = settings(20, penalty=0.0, decision="straight_through", target_skip=0.4, controller_shift=1.0, router_rate=0.0,
                       controller_fade=fade, settle_sequences=0)  # fmt: skip
        note = lambda _, seen=seen, bias=trained.policies[0].router_head.bias: seen.append(float(bias))  # noqa: E731
        train(tmp_path / str(fade), how, of, data(of, 64), trained, on_step=note)
        moves[fade] = [abs(b - a) for a, b in pairwise(seen)]
    assert max(moves[True][-3:]) < 0.1 * max(moves[False][-3:]) and max(moves[False][-3:]) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("gate", ["hard", "mlp"])
@pytest.mark.parametrize("share", [0.1, 0.6])
def test_any_share_is_met(dtype, gate, share):
    of = model(dtype)
    given, made = data(of, 64), router(of, gate).to(dtype)
    found = settle_skipper(of, made, given, share)
    assert found.met and found.share == pytest.approx(evaluate_skipper(of, made, given).skipped_share, abs=1e-6)
    assert abs(found.began - share) > 0.02 and found.tokens == 80 * 24 and (gate == "hard" or found.scale == 1.0)


def test_logits_close_to_zero_survive_16_bits():
    """FP32 and FP16 then skip the same; as the router was, they do not."""
    of, half = model(), model(torch.float16)
    given, made = data(of, 64), router(of, factor=TIGHT)
    found = settle_skipper(of, made, given, 0.3, dtype=torch.float16)
    assert found.scale >= 256
    shares = [evaluate_skipper(m, made.to(m.dtype), given).skipped_share for m in (of, half)]
    assert shares == pytest.approx([0.3, 0.3], abs=0.011)
    plain = router(of, factor=TIGHT)
    with torch.no_grad():
        for policy in plain.policies:
            policy.router_head.bias.sub_(found.offset)
    assert evaluate_skipper(of, plain, given).skipped_share == pytest.approx(0.3, abs=0.011), "scaling changes no decision"
    assert abs(evaluate_skipper(half, plain.to(torch.float16), given).skipped_share - 0.3) > 0.05


def test_a_checkpoint_is_moved(tmp_path):
    of = model()
    save_flexidepth(router(of).to(torch.float16), tmp_path / "old", of, {"steps": 7})
    given = data(of, 64)
    found, evaluation = settle_checkpoint(tmp_path / "old", tmp_path / "new", of, given, 0.25, data(of, 8, seed=2))
    moved = load_skipper(tmp_path / "new", of)
    assert abs(evaluate_skipper(of, moved, given).skipped_share - 0.25) <= 0.01 and found.met
    record = json.loads((tmp_path / "new" / "config.json").read_text())["training"]
    assert record["steps"] == 7 and record["settled"]["target"] == 0.25 and record["settled"]["data"] == given.digest()
    assert record["settled"]["evaluation"]["loss"] == evaluation.loss and record["settled"]["tokens"] == 80 * 24
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("old", "new")]
    assert abs(sizes[0] - sizes[1]) < 200, "still 16 bit"
    with pytest.raises(SkipperError, match="new exists; name a new folder"):
        settle_checkpoint(tmp_path / "old", tmp_path / "new", of, given, 0.25)
    with pytest.raises(SkipperError, match=r"cannot be written .* make room or name another folder"):
        settle_checkpoint(tmp_path / "old", tmp_path / "old" / "config.json" / "x", of, given, 0.25)


def test_what_cannot_be_settled():
    of = model()
    given = data(of, 8)
    for share in (0.0, 1.0, 1.5, "much"):
        with pytest.raises(SkipperError, match=f"share='?{share}'? is not allowed; give a number"):
            settle_skipper(of, router(of), given, share)
    with pytest.raises(SkipperError, match=r"layers \[2, 3\] have no bias in their heads, .* make them with head_bias=1.0"):
        settle_skipper(of, skipper(of, "hard"), given, 0.5)
    same = make_skipper(of, "flexidepth", "adapter", reduction=4, proj_reduction=4, head_bias=1.0)
    with pytest.raises(SkipperError, match=r"0\.0% of the routed rows skip where 50\.0% were wanted, .* same logit"):
        settle_skipper(of, same, given, 0.5)
    for name, value in (("settle_sequences", -1), ("controller_fade", 1)):
        with pytest.raises(SettingError, match=f"{name}={value} is not allowed"):
            TrainSettings(**{name: value})


def test_the_command_line(tmp_path, monkeypatch, capsys):
    of = model()
    save_flexidepth(router(of), tmp_path / "skipper", of)
    letters = [chr(33 + int(i)) for i in torch.randint(0, 60, (1200,), generator=torch.Generator().manual_seed(0))]
    (tmp_path / "text.txt").write_text("".join(letters))
    monkeypatch.setattr(cli, "load", lambda name, device, dtype: (model(), lambda text: {"input_ids": [ord(c) % 90 for c in text]}))
    text = str(tmp_path / "text.txt")
    given = ["skipper", "settle", str(tmp_path / "skipper"), "any", "--device", "cpu", "--share", "0.3", "--tokens", "1000", "--text", text]
    assert cli.main([*given, "--out", str(tmp_path / "new"), "--held-out", text]) == 0
    said = capsys.readouterr().out
    assert "of routed rows skip, " in said and "held out: " in said and load_skipper(tmp_path / "new", of).layers == (2, 3)
    assert cli.main([*given, "--out", str(tmp_path / "new")]) == 1 and "exists; name a new folder" in capsys.readouterr().err
    given[-1] = "nowhere.txt"
    assert cli.main([*given, "--out", str(tmp_path / "b")]) == 1 and "nowhere.txt cannot be read" in capsys.readouterr().err
