"""A run that is stopped, by whatever, goes on as if it had not been; what goes wrong leaves the last good state."""

from __future__ import annotations

import json
import resource
import signal

import pytest
import torch
from torch.multiprocessing import ProcessExitedException

from depthfx.errors import SkipperError
from depthfx.skippers.train import Stage, read_metrics
from depthfx.skippers.train.state_file import load_state, save_state
from tests.skippers.train_toys import data, in_process, killed_at, model, settings, skipper, train

TWO_STAGES = settings(
    stages=(Stage(steps=7, learning_rate=3e-3, penalty=0.01), Stage(name="annealing", steps=5, learning_rate=1e-3, penalty=0.001)),
    checkpoint_every=3, target_skip=0.6, evaluate_every=4,
)  # fmt: skip


class Stop(RuntimeError):
    """What a test stops a run with."""


def stop_at(step):
    def on_step(record):
        if record["step"] == step:
            raise Stop

    return on_step


def whole(folder):
    of = model()
    return train(folder, TWO_STAGES, of, held_out=data(of, 4, seed=2))


def assert_same_run(folder, expected):
    """States, metrics and results of two folders are the same, bit for bit."""
    mine, theirs = (load_state(f / "state.pt") for f in (folder, expected))
    assert mine["run"] == theirs["run"] and mine["controller"] == theirs["controller"] and mine["place"] == theirs["place"]
    assert all(torch.equal(t, theirs["skipper"][name]) for name, t in mine["skipper"].items())
    for number, one in mine["optimiser"]["state"].items():
        assert all(torch.equal(value, theirs["optimiser"]["state"][number][key]) for key, value in one.items())
    assert read_metrics(folder / "metrics.jsonl") == read_metrics(expected / "metrics.jsonl")
    for name in ("model.safetensors", "config.json"):
        assert (folder / "skipper" / name).read_bytes() == (expected / "skipper" / name).read_bytes()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    whole(folder)
    return folder


@pytest.mark.parametrize("step", [2, 5, 8, 12])
def test_a_stopped_run_goes_on(tmp_path, uninterrupted, step):
    """Before the first state, in either stage, and after the last step."""
    of = model()
    held_out = data(of, 4, seed=2)
    with pytest.raises(Stop):
        train(tmp_path, TWO_STAGES, of, held_out=held_out, on_step=stop_at(step))
    assert (tmp_path / "state.pt").exists() == (step > 2)
    result, records = train(tmp_path, TWO_STAGES, of, held_out=held_out)
    assert [r["step"] for r in records] == list(range({2: 1, 5: 4, 8: 8, 12: 13}[step], 13)), "from the last state on"
    assert result.steps == 12 and result.evaluation is not None
    assert_same_run(tmp_path, uninterrupted)


def test_a_finished_run_has_nothing_left_to_do(uninterrupted):
    _, records = whole(uninterrupted)
    assert records == []


def test_a_killed_run_goes_on(tmp_path):
    how = settings(8, checkpoint_every=3)
    with pytest.raises(ProcessExitedException) as caught:
        in_process(killed_at, tmp_path / "killed", how, 7)
    assert caught.value.exit_code == -signal.SIGKILL
    assert load_state(tmp_path / "killed" / "state.pt")["place"][:3] == [0, 6, 6]
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')  # as if cut off
    train(tmp_path / "killed", how)
    train(tmp_path / "whole", how)
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


def test_a_full_disk_keeps_the_old_state(tmp_path):
    """The operating system refuses to write more than some bytes into one file."""
    how = settings(6, checkpoint_every=2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(record):
        if record["step"] == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))

    try:
        with pytest.raises(SkipperError, match=r"state.pt cannot be written \(.*\); the old one is kept: make room"):
            train(tmp_path / "full", how, on_step=fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert load_state(tmp_path / "full" / "state.pt")["place"][2] == 2
    assert sorted(p.name for p in (tmp_path / "full").iterdir()) == ["metrics.jsonl", "state.pt"], "no half file"
    train(tmp_path / "full", how)
    train(tmp_path / "whole", how)
    assert_same_run(tmp_path / "full", tmp_path / "whole")


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    of, how = model(), settings(6, checkpoint_every=2)
    trained, kept = skipper(of), {}
    good, bad = of.lm_head.weight.clone(), of.lm_head.weight.clone()
    bad[3] = float("nan")

    def poison(record):
        if record["step"] == 3:
            kept.update({n: p.detach().clone() for n, p in trained.named_parameters()})
            of.lm_head.weight.data.copy_(bad)

    with pytest.raises(
        SkipperError, match=r"step 4: the loss is not finite \(cross-entropy nan.*state.pt is as it was: check the data, or lower"
    ):
        train(tmp_path, how, of, trained=trained, on_step=poison)
    assert all(torch.equal(p, kept[n]) for n, p in trained.named_parameters()), "stopped before any weight changed"
    assert load_state(tmp_path / "state.pt")["place"][2] == 2
    of.lm_head.weight.data.copy_(good)
    _, records = train(tmp_path, how, of, trained=trained)
    assert [r["step"] for r in records] == [3, 4, 5, 6]


def test_other_runs_are_refused(tmp_path):
    of, how = model(), settings(2)
    train(tmp_path, how, of)
    with pytest.raises(SkipperError, match="holds a run already; set resume=True to go on with it, or name another folder"):
        train(tmp_path, how, of, resume=False)
    for changed, given, reason in (
        ({"clip": 2.0}, of, "of another run: clip differ"), ({"seed": 1}, of, "seed differ"),
    ):  # fmt: skip
        with pytest.raises(SkipperError, match=reason):
            train(tmp_path, settings(2, **changed), given)
    with pytest.raises(SkipperError, match="of another run: data differ"):
        train(tmp_path, how, of, data(of, seed=5))
    with pytest.raises(SkipperError, match="of another run: skipper differ"):
        train(tmp_path, how, of, trained=skipper(of).__class__((3,), skipper(of).policies[0], skipper(of).projectors[0], "mlp"))
    with torch.no_grad():
        of.model.embed_tokens.weight.mul_(1.01)
    with pytest.raises(SkipperError, match="of another run: model differ"):
        train(tmp_path, how, of)
    train(tmp_path, settings(2, micro_batch=4, checkpoint_every=1), model())  # these may change


@pytest.mark.parametrize("content", [b"", b"not a state", b"PK\x03\x04 cut off"])
def test_broken_states_are_refused(tmp_path, content):
    (tmp_path / "state.pt").write_bytes(content)
    with pytest.raises(SkipperError, match=r"state.pt cannot be read .* delete it to begin anew"):
        train(tmp_path, settings(1))
    save_state(tmp_path / "state.pt", {"a": 1})
    assert load_state(tmp_path / "state.pt")["a"] == 1
    torch.save({"version": 99}, tmp_path / "state.pt")
    with pytest.raises(SkipperError, match="is no state of training of version 1"):
        load_state(tmp_path / "state.pt")
    assert json.dumps(read_metrics(__file__)) == "[]"


@pytest.mark.parametrize(("spoil", "reason"), [
    (lambda state: state.pop("run"), "KeyError: 'run'"),
    (lambda state: state.pop("optimiser"), "KeyError: 'optimiser'"),
    (lambda state: state.update(run=7), "AttributeError: 'int' object"),
    (lambda state: state["skipper"].popitem(), "RuntimeError: Error.* in loading state_dict"),
    (lambda state: state.update(place=[0]), "ValueError: not enough values"),
])  # fmt: skip
def test_damaged_states_are_refused(tmp_path, spoil, reason):
    train(tmp_path, settings(1))
    state = load_state(tmp_path / "state.pt")
    spoil(state)
    save_state(tmp_path / "state.pt", state)
    with pytest.raises(
        SkipperError, match=rf"(?s)state.pt is damaged: {reason}.*; delete it to begin anew, or put a whole one in its place"
    ):
        train(tmp_path, settings(1))


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SkipperError, match=r"cannot be made .*name a folder that can be written"):
        train(tmp_path / "file" / "run", settings(1))
