"""Every file in examples/ runs and does what its docstring says."""

import dataclasses
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from depthfx import smollm2

FOLDER = Path(__file__).resolve().parents[1] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where the tracing of a policy looks for what its code names
    spec.loader.exec_module(module)
    return module


def run(name, *arguments):
    module = load(name)
    return module.main(arguments) if arguments else module.main()


def test_quickstart():
    assert run("quickstart") == "The capital of France is Paris."


def test_engine():
    answers = run("engine")
    assert set(answers) == {"gravity", "water", "late"}
    assert answers["gravity"].startswith(" a fundamental concept in physics that describes the curvature of spacetime")
    assert "Paris" in answers["late"]


def keep_layers(monkeypatch, count):
    """The model without most of its layers, which are all alike: tracing, training and Inductor take their time for each."""
    load = smollm2.load_smollm2

    def first_layers(*options):
        model, tokenizer = load(*options)
        del model.model.layers[count:]
        model.config.num_hidden_layers = count
        return model, tokenizer

    monkeypatch.setattr(smollm2, "load_smollm2", first_layers)


def test_torch_compile(monkeypatch):
    keep_layers(monkeypatch, 2)
    assert run("torch_compile") < 1e-3  # FP32 logits, sums in another order


def test_own_kernel():
    assert run("own_kernel") == 0.0


def test_own_policy():
    assert run("own_policy") == "The capital of France is Paris.\n\nThe French language is a language that is"


def test_train_skipper(monkeypatch, capsys):
    keep_layers(monkeypatch, 8)
    assert 0.05 < run("train_skipper", "--layers", "4", "5", "6", "7") < 0.95
    assert "The capital of France is" in capsys.readouterr().out


class Second:
    """What the second of two processes sees; the first one has made the texts by the time it need not wait any more."""

    def __init__(self):
        self.count, self.is_main = 2, False

    def wait(self):
        own = Path(self.folder, "own.jsonl")
        own.write_text("".join(json.dumps({"text": f"words {i} " * 9}) + "\n" for i in range(50)))


def test_several_processes_have_the_same_folder_and_one_of_them_writes(monkeypatch, tmp_path, capsys):
    keep_layers(monkeypatch, 2)
    example = load("train_skipper")
    monkeypatch.setattr(example, "Workers", Second)
    with pytest.raises(SystemExit, match="2 processes share one folder, so a temporary one does not do; name it with --out FOLDER"):
        example.main(())
    monkeypatch.setattr(Second, "folder", tmp_path / "run", raising=False)
    given = []

    def train(model, skipper, data, folder, settings, held_out):
        given.append((folder, sorted(p.name for p in folder.iterdir())))
        return SimpleNamespace(evaluation=SimpleNamespace(skipped_share=0.25), folder=folder)

    monkeypatch.setattr(example, "train_skipper", train)
    assert example.main(("--layers", "0", "1", "--chats", "8", "--out", str(tmp_path / "run"))) == 0.25
    assert given == [(tmp_path / "run", ["own.jsonl"])] and os.listdir(tmp_path / "run") == ["own.jsonl"], "which the first one made"
    assert capsys.readouterr().out == ""


def test_the_preset_trains_the_skipper_in_the_package():
    record = json.loads((smollm2.SKIPPER / "config.json").read_text())
    example = load("train_skipper")
    asked = example.parse_arguments(("--preset", "smollm2"))
    assert json.loads(json.dumps(dataclasses.asdict(example.settings_of(asked)))) == record["training"]["settings"]
    names = {"layers": "routing_layers", "router": "router_reduction_factor", "adapter": "proj_reduction_factor"}
    assert {ours: getattr(asked, ours) for ours in names} == {ours: record[theirs] for ours, theirs in names.items()}
    assert record["training"]["tokens"] == (asked.steps + asked.annealing) * asked.batch * asked.length


def test_steps_are_given_or_found(capsys):
    with pytest.raises(SystemExit):
        load("train_skipper").parse_arguments(("--preset", "smollm2", "--minutes", "4", "--steps", "100"))
    assert "--minutes 4 chooses the numbers of steps; leave out --steps" in capsys.readouterr().err


def test_all_are_tested():
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_") and "_the_" not in name and "_are_" not in name}
    assert {p.stem for p in FOLDER.glob("*.py")} == tested
