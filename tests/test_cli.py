"""The command line: parsing, errors, streaming text, the screen and the figures of the demo."""

import io
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import depthfx
from depthfx import cli, demo, demo_burst, memory_picture
from depthfx.smollm2 import load_smollm2

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def tokenizer():
    return load_smollm2()[1]


def test_version_as_a_module():
    out = subprocess.run([sys.executable, "-m", "depthfx", "version"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert out.returncode == 0, out.stderr
    assert out.stdout.splitlines()[0] == f"depthfx {depthfx.__version__}"
    assert f"torch {torch.__version__}" in out.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nothing"],
        ["generate", "smollm2"],
        ["demo", "--max-new-tokens", "0"],
        ["demo", "--max-new-tokens", "x"],
        ["demo", "--device", "cup"],
        ["demo", "--dtype", "int8"],
    ],
)
def test_wrong_usage_ends_with_two(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2
    assert "usage: depthfx" in capsys.readouterr().err


def test_a_reader_that_leaves_and_an_interrupt_end_quietly(monkeypatch, capsys):
    command = subprocess.Popen([sys.executable, "-m", "depthfx", "version"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    command.stdout.close()
    assert (command.stderr.read(), command.wait(60)) == (b"", 141)

    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_version", interrupted)
    assert cli.main(["version"]) == 130
    assert not "".join(capsys.readouterr())


def test_a_wrong_model_is_explained(tmp_path, capsys):
    assert cli.main(["explain", str(tmp_path), "--device", "cpu"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("depthfx: ")
    assert "config.json" in error


def test_a_folder_without_weights_and_a_missing_device_are_explained(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert cli.main(["explain", str(tmp_path), "--device", "cpu"]) == 1
    assert "cannot be loaded" in capsys.readouterr().err
    for spoilt in ("[]", '{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 3}'):
        (tmp_path / "config.json").write_text(spoilt)
        for command in ("explain", "tune"):
            assert cli.main([command, str(tmp_path), "--device", "cpu"]) == 1
            assert capsys.readouterr().err.startswith("depthfx: ")
    assert cli.main(["demo", "--device", "cuda:99"]) == 1
    assert "--device cuda:99" in capsys.readouterr().err


def test_bench_lists_runs_and_refuses(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(cli, "BENCHMARKS", tmp_path / "benchmarks")
    assert cli.main(["bench"]) == 1
    assert "checkout" in capfd.readouterr().err
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "probe.py").write_text("import sys\nif __name__ == '__main__':\n    print(sys.argv[1:])\n    sys.exit(5)\n")
    (tmp_path / "benchmarks" / "common.py").write_text("x = 1\n")
    assert cli.main(["bench"]) == 0
    assert capfd.readouterr().out == "probe\n"
    assert cli.main(["bench", "other"]) == 1
    assert "known: probe" in capfd.readouterr().err
    assert cli.main(["bench", "probe", "--quick", "3"]) == 5
    assert capfd.readouterr().out == "['--quick', '3']\n"


def test_place_fills_in_the_defaults():
    assert cli.place(SimpleNamespace(device="cpu", dtype=None)) == ("cpu", torch.float32)
    assert cli.place(SimpleNamespace(device="cuda:1", dtype=None)) == ("cuda:1", torch.float16)
    assert cli.place(SimpleNamespace(device="cpu", dtype="bfloat16")) == ("cpu", torch.bfloat16)


def test_pieces_hold_back_incomplete_characters(tokenizer):
    text = "Tower 🗼 of café"
    ids = tokenizer(text)["input_ids"]
    parts = list(cli.pieces(tokenizer, ids))
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)
    assert len(parts) > 3
    cut = next(k for k in range(1, len(ids)) if tokenizer.decode(ids[:k]).endswith("\ufffd"))
    assert "".join(cli.pieces(tokenizer, ids[:cut])) == tokenizer.decode(ids[:cut])


def test_eos_ids():
    def model(ids):
        return SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=ids))

    assert [cli.eos_ids(model(ids)) for ids in (None, 2, [2, 3])] == [(), (2,), (2, 3)]


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self):
        return True


def _screen(out):
    screen = demo.Screen(out, ("first?", "second?"), lambda ids: " ".join(map(str, ids)))
    screen.show(0, [1], False)
    screen.show(1, [7, 8], True)
    screen.show(0, [1, 2], True)
    return out.getvalue()


def test_screen_without_a_terminal_prints_complete_answers():
    assert _screen(io.StringIO()) == "2. second?\n   7 8\n1. first?\n   1 2\n"


def test_screen_on_a_terminal_redraws_open_answers():
    text = _screen(Terminal())
    assert "\x1b[2A\x1b[J" in text  # two open lines wiped
    assert text.endswith("\x1b[1A\x1b[J1. \x1b[1mfirst?\x1b[0m\n   1 2\n")


def test_table_and_comparison(tokenizer):
    ours = demo.Measured(single_rate=40.0, batch_rate=100.0, peak_bytes=1 << 30)
    theirs = demo.Measured(single_rate=20.0, batch_rate=80.0, peak_bytes=1 << 29)
    lines = demo.table(ours, theirs, 8).splitlines()
    assert any(line.split() == ["tokens/s,", "batch", "1", "40.0", "20.0", "2.00x"] for line in lines)
    assert any(line.split() == ["tokens/s,", "batch", "8", "100.0", "80.0", "1.25x"] for line in lines)
    assert demo.compare([[5], [6, 7]], [[5], [6, 7]], tokenizer, torch.float32).startswith("2 of 2")
    told = demo.compare([[5], [6, 7]], [[5], [6, 8]], tokenizer, torch.float32)
    assert told.startswith("1 of 2")
    assert "question 2 parts at token 1" in told


class StubEngine:
    """Answers each prompt with its first token, counted up, one token for each request and step."""

    def __init__(self):
        self.open = {}

    def add(self, prompt, sampling=None, request_id=None):
        self.open[str(len(self.open))] = [prompt[0], sampling]
        return str(len(self.open) - 1)

    def has_unfinished(self):
        return any(left for _, left in self.open.values())

    def step(self):
        outputs = []
        for request_id, state in self.open.items():
            if state[1]:
                state[0] += 1
                state[1] -= 1
                outputs.append(SimpleNamespace(request_id=request_id, new_token_ids=[state[0]], finished=state[1] == 0, error=None))
        return outputs


def test_serve_collects_in_order_of_prompts():
    seen = []
    screen = SimpleNamespace(show=lambda i, ids, finished: seen.append((i, len(ids), finished)))
    assert demo.serve(StubEngine(), [[10], [20]], 2, screen) == [[11, 12], [21, 22]]
    assert seen == [(0, 1, False), (1, 1, False), (0, 2, True), (1, 2, True)]


def test_eager_side_answers_and_measures():
    measured = demo.measure_eager("cpu", torch.float32, 12, demo.QUESTIONS[:2])
    assert measured.answers[0] == [504, 3575, 282, 4649, 314, 7042, 30]  # "The capital of France is Paris."
    assert len(measured.answers[1]) == 12
    assert measured.batch_rate > 0
    assert measured.peak_bytes > 500 << 20


def residuals(model):
    return {name: m.lower.clone() for name, m in model.named_modules() if getattr(m, "lower", None) is not None}


@pytest.fixture
def burst_on_two_layers(monkeypatch):
    """The burst's model cut to two layers; what its engine counted beside what `run_burst` says, and whether residuals came back."""
    seen = {}

    def load(dtype, device):
        model, tokenizer = load_smollm2(dtype, device)
        model.model.layers, model.config.num_hidden_layers = model.model.layers[:2], 2
        return model, tokenizer

    def run(model, prompts, burst):
        before = residuals(model)
        found = run_burst(model, prompts, burst)
        seen.update(found=found, stats=model.engine.stats(), moved=model.engine.control.stats(), precision=model.precision())
        seen["layout"] = model.engine.control.shared.layout
        seen["same"] = bool(before) and all(torch.equal(before[name], t) for name, t in residuals(model).items())
        return found

    run_burst = demo_burst.run_burst
    monkeypatch.setattr(demo_burst, "load_smollm2", load)
    monkeypatch.setattr(demo_burst, "run_burst", run)
    return seen


def test_demo(capfd, tmp_path, burst_on_two_layers):
    picture, burst = tmp_path / "new" / "burst.png", demo_burst.Burst(num_requests=7, max_new_tokens=6, kv_blocks=4)
    assert demo.run_demo("cpu", torch.float32, 8, picture, demo.QUESTIONS[:3], burst) == 0
    out = capfd.readouterr().out
    assert out.count("The capital of France is Paris.") == 2  # once with layers left out
    share = float(out.split("% of all layer passes were left out, in 18 routed layers of 30.")[0].split()[-1])
    assert 5 < share < 25 and "3 of 3 greedy answers are the same" in out
    stats, moved, found = (burst_on_two_layers[name] for name in ("stats", "moved", "found"))
    assert f"7 of 7 requests answered, which came within {found.span:.2f} s: {stats.num_tokens - 4} tokens in " in out  # 4: the warm-up
    layout = burst_on_two_layers["layout"]
    units = f"{layout.num_units} units of {layout.unit_bytes / (1 << 20):.1f} MiB, {moved.num_lends} lends, {moved.num_restores} restores"
    assert f"KV blocks: 4 at rest, {found.peak_blocks} at the peak; {units}" in out
    assert moved.num_lends == moved.num_restores > 0 and stats.kv.num_open == 4 < found.peak_blocks
    steps = {mode: number - 4 * (mode == "full") for mode, number in stats.steps_by_precision.items()}
    assert f"{sum(steps.values())} steps: " + ", ".join(f"{n / sum(steps.values()):.0%} in {mode}" for mode, n in steps.items()) in out
    assert steps["fast"] + steps["mixed"] > 0
    assert burst_on_two_layers["same"] and set(burst_on_two_layers["precision"].values()) == {"full"}
    assert len(found.first_tokens) == 7 and all(wait > 0 for _, wait in found.first_tokens)
    assert out.rstrip().endswith(f"picture: {picture}") and picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ((0, 0, 0), [("fast", 0.0, 2.0)]),
        ((3, 3, 1, 0, 3), [("full", 0.0, 1.0), ("mixed", 1.0, 2.0), ("fast", 2.0, 3.0), ("full", 3.0, 4.0)]),
    ],
)
def test_bands_of_precision(entries, expected):
    samples = [SimpleNamespace(time_s=7.0 + second, num_full_entries=full) for second, full in enumerate(entries)]
    assert memory_picture.bands(samples) == expected


def test_a_burst_without_matplotlib_has_no_picture(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    found = SimpleNamespace(samples=[0, 1], first_tokens=[], requests=2, rest_blocks=4)
    assert demo_burst.draw(found, tmp_path / "burst.png") == "a picture of it needs the package matplotlib: pip install depthfx[demo]"
    assert not list(tmp_path.iterdir())


def test_generate_and_explain(capfd):
    arguments = ["smollm2", "--device", "cpu"]
    assert cli.main(["generate", *arguments, "--chat", "--prompt", "What is the capital of France?", "--max-new-tokens", "12"]) == 0
    assert capfd.readouterr().out == "The capital of France is Paris.\n"
    assert cli.main(["explain", *arguments]) == 0
    assert "30" in capfd.readouterr().out  # layers


def tiny_folder(folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 50,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**sizes)).half()
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[3, 5] = 2.5
    model.save_pretrained(folder)
    return model


def test_inspect_and_convert(tmp_path, capfd):
    model = tiny_folder(tmp_path / "plain")
    assert cli.main(["convert", str(tmp_path / "plain"), str(tmp_path / "nested"), "--device", "cpu"]) == 0
    said = capfd.readouterr().out.splitlines()
    assert said[1].startswith("1 x nested_e4m3_scaled:") and said[2] == "full precision is exact" and "depthfx.load" in said[3]
    tables = []
    for folder in ("plain", "nested"):
        assert cli.main(["inspect", str(tmp_path / folder)]) == 0
        tables.append(sorted(capfd.readouterr().out.splitlines()))
    assert tables[0] == tables[1]
    lines = tables[0]
    assert len(lines) == 1 + 7 + 2 + 1  # a heading, seven linears without the LM head, two sums, the rule
    assert "rule: the first format that holds every value of a weight: nested_e4m3, nested_e4m3_scaled, nested_e5m2, plain16" in lines
    by_name = {line.split()[0]: line for line in lines}
    assert "nested_e4m3_scaled: " in cli.compiled(depthfx.load(tmp_path / "nested")).explain()  # as it is stored
    assert "nested_e4m3_scaled" in by_name["model.layers.0.self_attn.q_proj.weight"]
    down = by_name["model.layers.0.mlp.down_proj.weight"].split()
    assert down[4] == "nested_e4m3" and down[6:] == ["exact", "6,144", "6,144"] and 2 < float(down[5].rstrip("%")) < 3
    state = depthfx.load(tmp_path / "nested").state_dict()
    assert all(torch.equal(state[name], t) for name, t in model.state_dict().items())


def test_inspect_and_convert_explain_mistakes(tmp_path, capfd):
    for arguments in (["inspect", str(tmp_path)], ["convert", str(tmp_path), str(tmp_path / "out"), "--device", "cpu"]):
        assert cli.main(arguments) == 1
        assert "no folder with a config.json" in capfd.readouterr().err


def test_inspect_counts_what_the_cast_changes(tmp_path, capfd):
    tiny_folder(tmp_path / "half")
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tmp_path / "half", dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, :3] = 0.1
    model.save_pretrained(tmp_path / "single")
    assert cli.main(["inspect", str(tmp_path / "single")]) == 0
    line = next(x for x in capfd.readouterr().out.splitlines() if "down_proj" in x)
    assert line.split()[6] == "3"
