"""Training on a tiny model: it learns, its sums do not depend on how a step is cut, and what it learned is what is served."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate.commands import launch

import depthfx
from depthfx.errors import SettingError, SkipperError
from depthfx.lowering.kernel_spec import max_error
from depthfx.skippers import load_skipper, make_skipper
from depthfx.skippers import train as train_package
from depthfx.skippers.train import (
    RELEASED,
    STE_HARD,
    Sequences,
    Stage,
    TrainSettings,
    evaluate_skipper,
    plot_metrics,
    read_metrics,
    routed_training,
)
from depthfx.skippers.train.settings import learning_rate
from tests.skippers.train_toys import data, model, ragged, run_of_several, settings, skipper, texts, train


def mean(records, name):
    return sum(r[name] for r in records) / len(records)


@pytest.mark.parametrize(
    ("gate", "decision"), [("mlp", "hard"), ("mlp", "straight_through"), ("mlp", "soft"), ("hard", "straight_through")]
)
def test_the_loss_falls(tmp_path, gate, decision):
    of = model()
    before, trained = {n: p.clone() for n, p in of.named_parameters()}, skipper(of, gate)
    how = settings(40, learning_rate=1e-2, decision=decision)
    result, records = train(tmp_path, how, of, trained=trained, held_out=data(of, 8, seed=2))
    assert mean(records[-5:], "lm") < mean(records[:5], "lm") - 0.5
    assert result.steps == 40 and result.evaluation.loss < result.evaluation.base_loss + 0.5
    assert all(torch.equal(p, before[n]) for n, p in of.named_parameters()) and all(p.requires_grad for p in of.parameters())


@pytest.mark.parametrize("target", [0.25, 0.75])
def test_the_share_of_skipped_rows_follows_its_target(tmp_path, target):
    how = settings(100, penalty=0.0, final_share=0.3, target_skip=target, max_penalty=5.0, controller_gain=2.0, controller_rate=0.05,
                   controller_memory=0.5)  # fmt: skip
    _, records = train(tmp_path, how)
    assert abs(mean(records[-40:], "skipped_share") - target) < 0.1
    assert abs(records[0]["skipped_share"] - target) > 0.2, "it did not begin there"


def test_the_penalty_makes_rows_skip(tmp_path):
    shares = [train(tmp_path / str(p), settings(20, penalty=p))[1][-1]["skipped_share"] for p in (-2.0, 2.0)]
    assert shares[0] < 0.2 and shares[1] > 0.9


def gradients(folder, of, **how):
    kept, trained = [], skipper(of)
    how = settings(1, clip=1e9, penalty=0.5, distill=0.5, distill_temperature=2.0, **how)
    _, records = train(
        folder, how, of, ragged(of), trained, on_step=lambda _: kept.extend(p.grad.clone() for p in trained.parameters() if p.numel())
    )
    return records[0], kept


def test_accumulation_changes_nothing(tmp_path):
    """Sequences of different lengths, so that a mean of means would be another number."""
    of = model()
    (whole, one), (parts, eight) = gradients(tmp_path / "a", of), gradients(tmp_path / "b", of, micro_batch=1)
    uneven, three = gradients(tmp_path / "c", of, micro_batch=3, recompute=True)
    for name in ("lm", "skip_loss", "distill", "skipped_share", "gradient_norm"):
        assert parts[name] == pytest.approx(whole[name], rel=1e-5) and uneven[name] == pytest.approx(whole[name], rel=1e-5)
    assert whole["distill"] > 0
    for a, b, c in zip(one, eight, three, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(c, a, rtol=1e-4, atol=1e-6)


def test_the_losses_are_what_they_are_called(tmp_path):
    """One step against a plain computation, sequence by sequence."""
    of = model()
    trained, given = skipper(of), ragged(of, 8)
    lm = skip = targets = 0.0
    with routed_training(of, trained) as routing, torch.no_grad():
        for ids, wanted, length in zip(given.ids.long(), given.targets, given.lengths.tolist(), strict=True):
            logits = of(input_ids=ids[None, :length], use_cache=False).logits[0]
            chosen = logits.log_softmax(-1)[torch.arange(length - 1), ids[1:length]]
            lm -= float(chosen[wanted[1:length]].sum())
            targets += int(wanted[1:length].sum())
            skip += float(torch.stack(routing.weights).sum(0).square().sum())
    _, records = train(tmp_path, settings(1), of, given, trained)
    assert records[0]["lm"] == pytest.approx(lm / targets, rel=1e-5)
    assert records[0]["skip_loss"] == pytest.approx(skip / int(given.lengths.sum()), rel=1e-5)


def test_stages_have_their_own_data_and_penalty(tmp_path):
    of = model()
    stages = (Stage(steps=2, penalty=0.1), Stage(name="annealing", epochs=0.5, penalty=0.01))
    given = {"alignment": data(of, 8), "annealing": data(of, 64)}
    result, records = train(tmp_path, settings(stages=stages), of, given)
    assert [r["penalty"] for r in records] == [0.1] * 2 + [0.01] * 5 and result.steps == 7, "80 sequences, batches of 8"
    assert [r["stage"] for r in records[1:3]] == ["alignment", "annealing"]
    with pytest.raises(SkipperError, match="stage 'annealing' has no data; give Sequences"):
        train(tmp_path / "b", settings(stages=stages), of, {"alignment": given["alignment"]})


@pytest.mark.parametrize(("wrong", "reason"), [
    (lambda of, good: [1, 2, 3], "data is a list; give Sequences"),
    (lambda of, good: {"alignment": [[1, 2]]}, "data of stage 'alignment': expected Sequences, found list; make_sequences makes them"),
    (lambda of, good: replace(good, targets=good.targets & False), "none of its 240 tokens is to be predicted .no targets, or sequences of one"),
    (lambda of, good: replace(good, lengths=good.lengths * 0 + 1), "none of its 10 tokens is to be predicted"),
    (lambda of, good: replace(good, ids=good.ids + 1000), "data of stage 'alignment' holds the token id 1[0-9]*, outside the model's vocabulary"),
    (lambda of, good: replace(good, lengths=good.lengths + 1), "lengths from 25 to 25; allowed: 1 to 24"),
    (lambda of, good: good.first(0), "data of stage 'alignment': no sequence is given; give at least one"),
])  # fmt: skip
def test_data_without_anything_to_learn_are_refused(tmp_path, wrong, reason):
    """Before anything is written; the same for what is held out and for what is evaluated."""
    of = model()
    good = data(of, 8)
    given = wrong(of, good)
    with pytest.raises(SkipperError, match=reason):
        train(tmp_path / "run", settings(1), of, given)
    if isinstance(given, Sequences):
        with pytest.raises(SkipperError, match=reason.replace("data of stage 'alignment'", "held_out")):
            train(tmp_path / "run", settings(1), of, good, held_out=given)
        with pytest.raises(SkipperError, match=reason.replace("data of stage 'alignment'", "sequences")):
            evaluate_skipper(of, skipper(of), given)
    assert not (tmp_path / "run").exists()


def test_learning_rate():
    stage = Stage(learning_rate=1.0, warmup_share=0.2)
    rates = [learning_rate(stage, n, 10) for n in range(10)]
    assert rates[:3] == [0.5, 1.0, 1.0] and rates[6] == pytest.approx(0.5) and rates[2:] == sorted(rates[2:], reverse=True)
    assert learning_rate(Stage(learning_rate=2.0, final_share=0.25), 10**6, 10**6) == pytest.approx(0.5)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a result."""
    folder = tmp_path_factory.mktemp("trained")
    of = model()
    train(folder, settings(15, learning_rate=1e-2), of, held_out=data(of, 8, seed=2))
    return folder


def test_served_routes_are_those_of_training(trained):
    """Every row of held-out sequences, prompt by prompt, through the compiled model."""
    of = model()
    loaded, held_out = load_skipper(trained / "skipper", of), data(of, 16, seed=3)
    with routed_training(of, loaded) as routing, torch.no_grad():
        logits = of(input_ids=held_out.ids.long(), use_cache=False).logits
        wanted = torch.stack(routing.actions, 1).to(torch.int8)
    assert 0.05 < float(wanted.float().mean()) < 0.95
    served = depthfx.compile(of, skipper=loaded, inductor=False, kv_blocks=64)
    routes, first = served.engine.routes, served.engine._next_id
    routes.record()
    out = served.generate(held_out.ids.long(), max_new_tokens=1, do_sample=False, return_dict_in_generate=True, output_logits=True)
    assert max_error(out.logits[0], logits[:, -1]) < 1e-5
    maps = torch.stack([routes.depth_map(f"request-{first + i}") for i in range(len(held_out))])
    assert maps.shape == wanted.shape and int((maps != wanted).sum()) == 0, "no row decides another way"


def test_the_result_names_its_base_and_its_training(trained):
    config = json.loads((trained / "skipper" / "config.json").read_text())
    assert config["training"]["steps"] == 15 and config["training"]["settings"]["batch_size"] == 8
    of = model()
    found = evaluate_skipper(of, load_skipper(trained / "skipper", of), data(of, 8, seed=2))
    assert found.skipped_share == pytest.approx(sum(config["training"]["evaluation"]["skipped"]) / 2)
    assert found.loss == pytest.approx(config["training"]["evaluation"]["loss"], rel=1e-6)
    for dtype in (torch.bfloat16, torch.float16):  # the same weights, rounded
        assert load_skipper(trained / "skipper", model(dtype)).policies[0].router_enc.weight.dtype is dtype
    nested = depthfx.compile(model(torch.bfloat16), weights="nested", inductor=False, kv_blocks=8)
    assert load_skipper(trained / "skipper", nested).layers == (2, 3)
    other = model()
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.add_(1e-2)
    with pytest.raises(SkipperError, match=r"was trained on other weights than this model's .* load it for its own base model"):
        load_skipper(trained / "skipper", other)
    config["base_identity"] = 7
    (trained / "skipper" / "config.json").write_text(json.dumps(config))
    with pytest.raises(SkipperError, match="base_identity is 7; expected an object of hashes, or none"):
        load_skipper(trained / "skipper", of)
    del config["base_identity"]
    (trained / "skipper" / "config.json").write_text(json.dumps(config))
    assert load_skipper(trained / "skipper", other).layers == (2, 3)


def test_plot(trained, tmp_path):
    plot_metrics(trained / "metrics.jsonl", tmp_path / "plot.png", (2, 3))
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"
    kinds = [r["kind"] for r in read_metrics(trained / "metrics.jsonl")]
    assert kinds == ["step"] * 15 + ["evaluation"]
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(SkipperError, match="holds no step, so there is nothing to plot"):
        plot_metrics(tmp_path / "empty.jsonl", tmp_path / "plot.png", (2, 3))


def test_two_processes_are_one(tmp_path, monkeypatch):
    """Under `accelerate launch`, whose code hands on to that of `torchrun`; both are at hand here, so only what they start is imported anew."""
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    options = (
        "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no --main_process_port 0 --module".split()
    )
    kept = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)}
    try:
        launch.launch_command(launch.launch_command_parser().parse_args([*options, "tests.skippers.train_toys", str(tmp_path)]))
    finally:
        for which, handler in kept.items():
            signal.signal(which, handler)
    records, loss = run_of_several(tmp_path / "one")
    for rank in (0, 1):
        theirs, their_loss = torch.load(tmp_path / f"records{rank}.pt")
        assert their_loss == pytest.approx(loss, rel=1e-5)
        for a, b in zip(theirs, records, strict=True):
            assert a["lm"] == pytest.approx(b["lm"], rel=1e-4) and a["gradient_norm"] == pytest.approx(b["gradient_norm"], rel=1e-3)
    config = json.loads((tmp_path / "run" / "skipper" / "config.json").read_text())
    assert config["training"]["processes"] == 2 and len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 5


def test_the_shortest_way_is_as_its_text_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [line.strip().replace("512", "32") for line in train_package.__doc__.splitlines() if line.startswith("    ")]
    names = {**vars(train_package), "depthfx": depthfx, "make_skipper": make_skipper, "load_skipper": load_skipper}
    names.update(model=model(), texts=texts(20), tokenizer=None)
    monkeypatch.setenv("DEPTHFX_INDUCTOR", "0")
    monkeypatch.setenv("DEPTHFX_KV_BLOCKS", "8")
    exec("\n".join(lines), names)
    assert len(lines) == 4 and names["result"].steps == 2 and names["model"].engine.routes is not None


def test_fp16_and_bf16_learn(tmp_path):
    for dtype in (torch.float16, torch.bfloat16):
        of = model(dtype)
        trained = skipper(of)
        _, records = train(tmp_path / str(dtype), settings(12, learning_rate=1e-2), of, trained=trained)
        assert records[-1]["lm"] < records[0]["lm"] and trained.policies[0].router_enc.weight.dtype is dtype


@pytest.mark.parametrize(("changes", "reason"), [
    ({"batch_size": 0}, "batch_size=0 is not allowed; give an integer of at least 1"),
    ({"micro_batch": 2.0}, "micro_batch=2.0 is not allowed"),
    ({"clip": 0}, "clip=0 is not allowed; give a finite number above 0"),
    ({"decision": "firm"}, "decision='firm' is not known; allowed: hard, straight_through, soft"),
    ({"target_skip": 1.5}, "target_skip=1.5 is not allowed; give a finite number of at least 0 and at most 1"),
    ({"betas": (0.9,)}, "give a tuple of two numbers"),
    ({"stages": ()}, "give a tuple of at least one Stage"),
    ({"stages": (Stage(), Stage())}, "each needs a name of its own"),
    ({"distill": float("nan")}, "distill=nan is not allowed"),
    ({"target_skip": 0.5, "stages": (Stage(penalty=3.0),)}, "stage penalty=3.0 is not allowed"),
])  # fmt: skip
def test_settings_are_refused(changes, reason):
    with pytest.raises(SettingError, match=reason):
        TrainSettings(**changes)


def test_presets_and_parts():
    assert [(s.name, s.penalty) for s in RELEASED.stages] == [("alignment", 1e-4), ("annealing", 1e-5)]
    assert (RELEASED.decision, STE_HARD.decision, RELEASED.batch_size, RELEASED.betas) == ("hard", "straight_through", 32, (0.9, 0.95))
    with pytest.raises(SettingError, match="stage learning_rate=0 is not allowed"):
        Stage(learning_rate=0)
    of = model()
    with pytest.raises(SkipperError, match="layer 2 has RandomSkip and Identity; only policy flexidepth"):
        train("unused", settings(), of, trained=make_skipper(of))


def test_missing_packages_are_named(tmp_path, trained, monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(SkipperError, match=r"training needs the package accelerate; install depthfx\[train\]"):
        train(tmp_path, settings(1))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SkipperError, match=r"a plot needs the package matplotlib; install depthfx\[train\]"):
        plot_metrics(trained / "metrics.jsonl", tmp_path / "plot.png", (2, 3))
