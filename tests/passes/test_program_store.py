"""Stored programs: the same graph and the same bits as a fresh capture, and a miss whenever the model could differ."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import types
from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import depthfx
from depthfx.contracts import Decision, Policy, Skipper
from depthfx.passes import pipeline, traces
from depthfx.passes.graph_data import from_data, to_data
from depthfx.passes.print_graph import print_graph
from depthfx.passes.program_key import program_key
from depthfx.passes.program_store import program_file
from depthfx.passes.traces import Traces
from depthfx.report import CompileReport
from depthfx.settings import Settings
from depthfx.skippers import make_skipper
from depthfx.skippers.projectors.identity import Identity
from tests.families.configs import build
from tests.passes.toys import toy

ROWS = torch.tensor([[5, 9, 2, 7, 11, 3, 60, 1]])


def settings_in(folder, **changes) -> Settings:
    return Settings(cache_dir=str(folder), inductor=False, kv_blocks=8, max_batch_size=2, **changes)


def rewritten(model, settings, skipper=None):
    report = CompileReport()
    gm, ctx = pipeline._rewritten(Traces(model, settings, "cpu", skipper), settings, report, lambda: None, routed=skipper is not None)
    return gm, ctx, report


def said(report) -> str:
    return "; ".join(report.sections["caches"])


def forbid_capture(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("the model was captured")

    monkeypatch.setattr(Traces, "get", fail)
    monkeypatch.setattr(torch, "compile", fail)


def logits_of(compiled) -> list[torch.Tensor]:
    out = compiled.generate(ROWS, max_new_tokens=3, do_sample=False, pad_token_id=0, output_logits=True, return_dict_in_generate=True)
    return list(out.logits)


def capture_once(monkeypatch, model):
    """Whatever is captured from now on is a copy of one trace of ``model``, made as dense and routed programs copy theirs."""
    gm, ctx = traces.capture(model, Settings(), "cpu", CompileReport())
    fresh = {"layers": (), "tables": (), "stored": (), "fake_values": ()}

    def copy(model, settings, target, report):
        own = {name: type(getattr(ctx, name))(value) for name, value in fresh.items()}
        return traces._copy(gm), replace(ctx, settings=settings, report=report, weights=dict(ctx.weights), **own)

    monkeypatch.setattr(traces, "capture", copy)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_neox"])
def test_a_loaded_program_is_the_captured_one(family, tmp_path, monkeypatch):
    settings = settings_in(tmp_path)
    capture_once(monkeypatch, build(family))
    fresh, ctx, report = rewritten(build(family), settings)
    assert "miss" in said(report)
    first = logits_of(depthfx.compile(build(family), settings.__class__(**{**settings.__dict__, "program_cache": False})))
    forbid_capture(monkeypatch)
    loaded, loaded_ctx, loaded_report = rewritten(build(family), settings)
    assert "hit" in said(loaded_report)
    assert print_graph(loaded) == print_graph(fresh)
    assert [n.name for n in loaded.graph.nodes] == [n.name for n in fresh.graph.nodes]
    for name in ("weights", "kv_shape", "num_heads", "num_positions"):
        assert getattr(loaded_ctx, name) == getattr(ctx, name)
    assert {n: to_data(t.graph) for n, t in loaded_ctx.tables.items()} == {n: to_data(t.graph) for n, t in ctx.tables.items()}
    others = {s: lines for s, lines in report.sections.items() if s != "caches"}
    assert {s: lines for s, lines in loaded_report.sections.items() if s != "caches"} == others
    second = logits_of(depthfx.compile(build(family), settings))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_a_routed_program_is_kept_apart_and_found_for_its_skipper_alone(tmp_path, monkeypatch):
    settings = settings_in(tmp_path)
    model = build("llama")

    def skipper(rate):
        return make_skipper(model, "random_skip", "identity", rate=rate)

    _, _, dense = rewritten(model, settings)
    fresh, ctx, report = rewritten(model, settings, skipper(0.5))
    assert "miss" in said(dense) and "miss" in said(report) and ctx.skipper is not None
    assert "miss" in said(rewritten(model, settings, skipper(0.25))[2])
    forbid_capture(monkeypatch)
    loaded, loaded_ctx, report = rewritten(build("llama"), settings, skipper(0.5))
    assert "hit" in said(report)
    assert print_graph(loaded) == print_graph(fresh) and loaded_ctx.weights == ctx.weights
    assert "hit" in said(rewritten(model, settings)[2])


def test_strides_and_open_sizes_are_restored(tmp_path):
    fresh, ctx, _ = rewritten(toy(), settings_in(tmp_path))
    loaded, loaded_ctx, _ = rewritten(toy(), settings_in(tmp_path))

    def layout(gm, context):
        tensors = [n.meta["example_value"] for n in gm.graph.nodes if isinstance(n.meta.get("example_value"), torch.Tensor)]
        rows = str(context.row_symbol)
        return [[str(s).replace(rows, "T") for s in (*t.shape, *t.stride()) if "s" not in str(s) or rows in str(s)] for t in tensors]

    assert layout(loaded, loaded_ctx) == layout(fresh, ctx)


def one_layer():
    return build("cohere2", num_hidden_layers=1, layer_types=["sliding_attention"])


def test_inductor_compiles_a_loaded_program(tmp_path):
    settings = Settings(cache_dir=str(tmp_path), kv_blocks=8, max_batch_size=2)
    first = logits_of(depthfx.compile(one_layer(), settings))
    model = depthfx.compile(one_layer(), settings)
    assert "hit" in model.explain()
    for a, b in zip(first, logits_of(model), strict=True):
        assert torch.equal(a, b)


def test_weights_come_from_the_new_model(tmp_path, monkeypatch):
    settings = settings_in(tmp_path)
    capture_once(monkeypatch, toy())
    depthfx.compile(toy(), settings)
    other = toy()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    expected = logits_of(depthfx.compile(other, settings_in(tmp_path, program_cache=False)))
    again = toy()
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.mul_(1.5)
    model = depthfx.compile(again, settings)
    assert "hit" in model.explain()
    for a, b in zip(expected, logits_of(model), strict=True):
        assert torch.equal(a, b)


def test_a_loaded_program_keeps_the_dtype_of_its_kv(tmp_path):
    models = [depthfx.compile(toy(), settings_in(tmp_path, kv_dtype=kind)) for kind in ("auto", "fp8", "auto", "fp8")]
    assert ["hit" in m.explain() for m in models] == [False, False, True, True]
    assert [m.engine._runner.kv_pool.dtype for m in models] == [torch.float32, torch.float8_e4m3fn] * 2
    for a, b in zip(logits_of(models[1]), logits_of(models[3]), strict=True):
        assert torch.equal(a, b)


def test_switched_off_nothing_is_read_or_written(tmp_path):
    _, _, report = rewritten(toy(), settings_in(tmp_path, program_cache=False))
    assert "off" in said(report)
    assert not list(tmp_path.iterdir())


def attribute(model):
    model.model.layers[1].self_attn.scaling *= 2


def hook(model):
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * 2)


def half(model):
    model.to(torch.float16)


def own_forward(model):
    mlp = model.model.layers[2].mlp
    mlp.forward = types.MethodType(lambda self, x: self.down_proj(self.up_proj(x)), mlp)


def other_class(model):
    mlp = model.model.layers[2].mlp
    mlp.__class__ = type(type(mlp).__name__, (type(mlp),), {"forward": lambda self, x: self.down_proj(self.up_proj(x))})


def tied(model):
    model.lm_head.weight = model.model.embed_tokens.weight


def config(model):
    model.config.rms_norm_eps *= 2


@pytest.mark.parametrize("change", [attribute, hook, half, own_forward, other_class, tied, config])
def test_a_changed_model_has_another_key(change):
    model = toy()
    before = program_key(model, Settings(), "cpu")
    assert program_key(toy(), Settings(), "cpu") == before
    change(model)
    assert program_key(model, Settings(), "cpu") != before


def test_a_patched_class_or_function_has_another_key(monkeypatch):
    model = toy()
    keys = {program_key(model, Settings(), "cpu")}
    module = sys.modules[type(model).__module__]

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 1.0)

    def rotate_half(x):
        return x

    patches = (
        (type(model.model.layers[0].mlp), "forward", forward),
        (module, "rotate_half", rotate_half),
        (torch.nn.Linear, "forward", forward),
    )
    for owner, name, function in patches:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, function)
            keys.add(program_key(model, Settings(), "cpu"))
    assert len(keys) == 4


@dataclass(slots=True)
class Slotted:
    """Attributes without a dict."""

    limit: int


class Limit(torch.nn.Module):
    """Without a parameter."""

    def __init__(self, limit):
        super().__init__()
        self.limit = limit


class Reads(Policy):
    """Its code may read ``held``, and the globals below."""

    def __init__(self, held=0):
        super().__init__()
        self.held = held

    def forward(self, rows):
        return Decision(rows.positions < self.held + LISTED[0] + NAMED["limit"] + GROUPED.limit + OTHER_MODULE.limit)


LISTED, NAMED, GROUPED, OTHER_MODULE = [1], {"limit": 1}, types.SimpleNamespace(limit=1), types.ModuleType("somebody_elses")
OTHER_MODULE.limit = 1


def key_of(policy) -> str:
    return program_key(toy(), Settings(), "cpu", Skipper((1,), policy, Identity()))


@pytest.mark.parametrize(
    "make",
    [
        range,
        slice,
        np.int64,
        Slotted,
        lambda n: [Limit(n)],
        lambda n: deque([n]),
        lambda n: types.SimpleNamespace(limit=n),
        lambda n: argparse.Namespace(limit=n),
        lambda n: types.MappingProxyType({"limit": n}),
        lambda n: np.full(3, n),
    ],
)
def test_whatever_holds_a_number_of_a_policy_is_in_the_key(make):
    assert key_of(Reads(make(1))) == key_of(Reads(make(1))) != key_of(Reads(make(2)))


def test_what_a_policy_reads_of_its_module_and_of_others_is_in_the_key(monkeypatch):
    keys = {key_of(Reads())}
    for owner, name in ((sys.modules[__name__], "LISTED"), (NAMED, "limit"), (GROUPED, "limit"), (OTHER_MODULE, "limit")):
        with monkeypatch.context() as patch:
            (patch.setitem if owner is NAMED else patch.setattr)(owner, name, [2])
            keys.add(key_of(Reads()))
    assert len(keys) == 5 and key_of(Reads()) in keys


def test_settings_and_target_are_in_the_key_where_they_shape_the_graph():
    model = toy()
    shaping = ({}, {"fuse": False}, {"block_tokens": 32}, {"max_model_len": 32}, {"kv_dtype": "fp8"})
    keys = [program_key(model, Settings(**s), "cpu") for s in shaping]
    keys.append(program_key(model, Settings(), "cuda"))
    assert len(set(keys)) == 6
    for same in ({"kv_blocks": 7}, {"check": True}, {"inductor": False}):
        assert program_key(model, Settings(**same), "cpu") == keys[0]


def test_other_models_of_the_process_change_no_key():
    before = program_key(toy(), Settings(), "cpu")
    depthfx.compile(build("gemma2"), inductor=False, kv_blocks=8, max_batch_size=2, program_cache=False)
    assert program_key(toy(), Settings(), "cpu") == before


def corrupted(text: str) -> dict[str, bytes]:
    _, _, body = text.partition("\n")
    return {
        "empty": b"",
        "truncated": text[: len(text) // 2].encode(),
        "other bytes": b"\xff\xfe" * 100,
        "flipped": text.replace("placeholder", "placehelder", 1).encode(),
        "other format": ("9" + text[1:]).encode(),
        "no digest": body.encode(),
    }


@pytest.fixture(scope="module")
def kept():
    """Graph and context of the toy, captured once."""
    return pipeline._captured(Traces(toy(), Settings(), "cpu", None), CompileReport(), routed=False)


@pytest.fixture
def stored(kept, tmp_path, monkeypatch):
    """The toy's file, the settings that find it, and a list that grows where the model would be captured; :func:`kept` is what that gives."""
    captured = []
    monkeypatch.setattr(pipeline, "_captured", lambda *args, **options: captured.append(args) or kept)
    settings = settings_in(tmp_path)
    rewritten(toy(), settings)
    return program_file(program_key(toy(), settings, "cpu"), settings), settings, captured


@pytest.mark.parametrize("kind", sorted(corrupted("1 \n")))
def test_a_damaged_file_is_a_miss_and_is_rewritten(kind, stored):
    path, settings, captured = stored
    good = path.read_text()
    path.write_bytes(corrupted(good)[kind])
    _, _, report = rewritten(toy(), settings)
    assert "miss" in said(report) and str(path) in said(report)
    assert path.read_text() == good and len(captured) == 2
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert "hit" in said(rewritten(toy(), settings)[2]) and len(captured) == 2


@pytest.mark.parametrize("edit", ["function", "op", "nodes", "order"])
def test_a_foreign_file_with_a_right_digest_is_a_miss(edit, stored):
    from depthfx.passes import program_store

    path, settings, captured = stored
    body = json.loads(path.read_text().partition("\n")[2])
    call = next(i for i, n in enumerate(body["nodes"]) if n[1] == "call_function")
    if edit == "function":
        body["nodes"][call][2] = "os:system"
    elif edit == "op":
        body["nodes"][call][1] = "call_module"
    elif edit == "nodes":
        del body["nodes"]
    else:
        body["nodes"][call], body["nodes"][-2] = body["nodes"][-2], body["nodes"][call]
    text = json.dumps(body)
    path.write_text(f"{program_store._FORMAT} {program_store._digest(text)}\n{text}")
    assert "miss" in said(rewritten(toy(), settings)[2]) and len(captured) == 2
    assert "hit" in said(rewritten(toy(), settings)[2]) and len(captured) == 2


def test_only_listed_places_are_called():
    for target in ("os:system", "builtins:eval", "torch:float16", "torch.ops:aten.nothing.default"):
        with pytest.raises((KeyError, ValueError, AttributeError)):
            from_data([["x", "call_function", target, [], {"dict": []}]])


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "programs").write_text("a file where the folder should be")
    _, _, report = rewritten(toy(), settings_in(tmp_path))
    assert "not kept" in said(report)


def test_two_processes_at_once_find_the_same_key(tmp_path):
    code = (
        "from tests.passes.test_program_store import *; import pathlib; print('ready', flush=True); input(); "
        f"print(said(rewritten(toy(), settings_in(pathlib.Path({str(tmp_path)!r})))[2]), program_key(toy(), Settings(), 'cpu'))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "ready\n"
        other.stdin.write("go\n")
        other.stdin.flush()
        mine = said(rewritten(toy(), settings_in(tmp_path))[2])
        theirs = other.communicate()[0]
    assert other.returncode == 0 and all("miss" in text or "hit" in text for text in (mine, theirs))
    assert theirs.split()[-1] == program_key(toy(), Settings(), "cpu")
    assert len(list((tmp_path / "programs").iterdir())) == 1
    assert "hit" in said(rewritten(toy(), settings_in(tmp_path))[2])
