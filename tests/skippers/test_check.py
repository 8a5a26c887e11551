"""The check of a skipper: it passes for what training made, and each part of it can fail."""

from __future__ import annotations

import copy
import json

import pytest
import torch

import depthfx
from depthfx import cli
from depthfx.errors import SkipperError
from depthfx.skippers import check as module
from depthfx.skippers.check import check_skipper
from depthfx.skippers.flexidepth_checkpoint import save_flexidepth
from tests.skippers.train_toys import model, skipper, texts


def sequences(of, length=32, count=10):
    from depthfx.skippers.train import make_sequences

    return make_sequences(texts(60), length, of).first(count)


@pytest.mark.parametrize("gate", ["hard", "mlp"])
def test_what_training_makes_passes(gate):
    of = model()
    found = check_skipper(skipper(of, gate), of, sequences(of), depthfx.compile)
    assert found.passed and found.flips == 0 == found.kv_missing == found.kv_broken, found
    assert found.decisions == 2 * 10 * 32 and 0.05 < found.skipped_share < 0.95
    assert max(found.run_error, found.project_error) < 1e-5
    assert all(line.endswith("good") for line in found.lines()[1:]) and "0 of 640 decisions" in found.lines()[-1]


def test_other_routes_and_other_updates_are_found():
    """The compiled model gets another router and another adapter than the training code had."""
    of = model()

    def spoilt(compiled, *, skipper, **options):
        skipper = copy.deepcopy(skipper)
        with torch.no_grad():
            skipper.policies[0].own.router_head.weight.neg_()
            skipper.projectors[1].up_proj.weight.mul_(3)
        served.append(skipper)
        return depthfx.compile(compiled, skipper=skipper, **options)

    served = []
    own = module._set
    module._set = lambda which, mode: [own(s, mode) for s in (which, *served)]
    try:
        found = check_skipper(skipper(of, "hard"), of, sequences(of), spoilt)
    finally:
        module._set = own
    assert not found.passed and found.flips > 50 and found.project_error > 1e-3 and found.run_error < 1e-5
    assert [line.endswith("WRONG") for line in found.lines()] == [False, False, True, False, True]


def test_missing_and_broken_keys_are_found(monkeypatch):
    of = model()

    class Pool:
        """What a step would leave that forgets one layer's values, and one that writes NaN."""

    def served(model_, skipper_, mode, ids):
        pool = model_.engine._runner.kv_pool
        pool[0] = 0.5
        pool[1, :, :, :, :15] = 0.25
        pool[1, 2, 1] = module._MARK  # 15 values of one layer
        pool[0, 1, 0, 0, 3] = float("nan")
        return None, None

    model_ = type("Model", (), {"engine": type("Engine", (), {"_runner": Pool()})()})()
    Pool.kv_pool = torch.zeros(4, 4, 2, 2, 16, 8)
    monkeypatch.setattr(module, "_served", served)
    assert module._pool_faults(model_, skipper(of), torch.zeros(1, 31)) == (15, 1)


def test_sequences_that_do_not_fit_are_refused():
    of = model()
    with pytest.raises(SkipperError, match=r"10 sequences of up to 24 tokens are not allowed; .* multiple of 16"):
        check_skipper(skipper(of), of, sequences(of, 24), depthfx.compile)
    with pytest.raises(SkipperError, match=r"nowhere does not exist"):
        check_skipper("nowhere", of, sequences(of), depthfx.compile)


def test_the_command_line(tmp_path, monkeypatch, capsys):
    of = model()
    save_flexidepth(skipper(of, "hard"), tmp_path / "skipper", of)
    (tmp_path / "text.txt").write_text("A line of text that is not long, but long enough for this. " * 9)
    monkeypatch.setattr(cli, "load", lambda name, device, dtype: (model(), lambda text: {"input_ids": [ord(c) for c in text]}))
    given = [str(tmp_path / "skipper"), "any", "--device", "cpu", "--text", str(tmp_path / "text.txt")]
    kept = tmp_path / "kept" / "check.json"
    assert cli.main(["skipper", "check", *given, "--tokens", "512", "--json", str(kept)]) == 0
    assert "0 of 960 decisions are served another way" in capsys.readouterr().out
    found = json.loads(kept.read_text())
    assert {k: found[k] for k in ("passed", "decisions", "flips", "layers", "dtype", "text")} == {
        "passed": True, "decisions": 960, "flips": 0, "layers": [2, 3], "dtype": "torch.float32", "text": [given[-1]]
    }  # fmt: skip
    monkeypatch.setattr(module.SkipperCheck, "passed", False)
    assert cli.main(["skipper", "check", *given, "--tokens", "16"]) == 1
    with pytest.raises(SkipperError, match=r"check.json/x cannot be written .*name another file, or make room"):
        module.SkipperCheck((2,), 16, 0.0, 0.0, 1e-3, 0, 0, 16, 0, True, 0.5).write(kept / "x", model())
    given[-1] = str(tmp_path / "none.txt")
    assert cli.main(["skipper", "check", *given]) == 1
    assert "none.txt cannot be read" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["skipper", "look", *given])
