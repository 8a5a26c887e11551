"""Traces, for both programs, and stored: what a capture yields, for whatever settings the model is compiled with next."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from depthfx.errors import UnsupportedModelError
from depthfx.passes import context, pipeline, program_store, traces
from depthfx.passes.context import layer_key
from depthfx.passes.graph_data import to_data
from depthfx.passes.print_graph import print_graph
from depthfx.passes.program_key import trace_key
from depthfx.passes.program_store import trace_file
from depthfx.passes.traces import Traces
from depthfx.report import CompileReport
from depthfx.settings import Settings
from depthfx.skippers import make_skipper
from tests.families.configs import build
from tests.passes.toys import toy, with_mlp


@pytest.fixture
def captures(monkeypatch):
    """A list that grows where a model is captured."""
    taken, own = [], traces.capture
    monkeypatch.setattr(traces, "capture", lambda *args: taken.append(args[0]) or own(*args))
    return taken


def taken_from(model, settings):
    report = CompileReport()
    gm, ctx = Traces(model, settings, "cpu", None).get(report, routed=False, stored=True)
    return gm, ctx, "; ".join(report.sections.get("caches", []))


def modules_of(node):
    """Paths and names of classes, as passes read them."""
    return [(path, getattr(c, "__name__", c)) for path, c in node.meta.get("nn_module_stack", {}).values()]


def layouts(gm, ctx):
    """Shape, strides, offset and dtype of every tensor, T and R by name."""
    inputs = {n.name: n.meta["example_value"] for n in gm.graph.nodes if n.op == "placeholder"}
    names = {str(ctx.row_symbol): "T", str(inputs["logit_rows"].shape[0]): "R"}
    tensors = [n.meta["example_value"] for n in gm.graph.nodes if isinstance(n.meta.get("example_value"), torch.Tensor)]
    texts = [f"{tuple(t.shape)} {t.stride()} {t.storage_offset()} {t.dtype}" for t in tensors]
    return [re.sub(r"\bs\d+\b", lambda found: names[found[0]], text) for text in texts]


def test_a_stored_trace_is_the_captured_one_and_is_rewritten_alike(tmp_path, captures, monkeypatch):
    fresh, ctx, said = taken_from(build("gemma2"), Settings(cache_dir=str(tmp_path)))
    other = Settings(cache_dir=str(tmp_path), weights="nested", kv_dtype="fp8", block_tokens=8)
    computed, own = [], context._fake_value
    monkeypatch.setattr(context, "_fake_value", lambda node, ctx: computed.append(node) or own(node, ctx))
    stored, stored_ctx, stored_said = taken_from(build("gemma2"), other)
    assert len(computed) < 0.1 * len(stored.graph.nodes), "layouts are read, not computed"
    assert len(captures) == 1 and said == "" and "trace: found" in stored_said
    assert print_graph(stored) == print_graph(fresh)
    assert to_data(stored.graph) == to_data(fresh.graph)
    assert list(map(modules_of, stored.graph.nodes)) == list(map(modules_of, fresh.graph.nodes))
    assert {layer_key(n) for n in stored.graph.nodes} == {None, ("model.layers", 0), ("model.layers", 1)}
    assert layouts(stored, stored_ctx) == layouts(fresh, ctx)
    for field in ("weights", "num_positions", "target", "skipper"):
        assert getattr(stored_ctx, field) == getattr(ctx, field)
    again = replace(ctx, settings=other, report=CompileReport())
    pipeline.run_passes(fresh, again)
    pipeline.run_passes(stored, stored_ctx)
    assert print_graph(stored) == print_graph(fresh) and stored_ctx.weights == again.weights and stored_ctx.kv_shape == again.kv_shape
    assert {s: lines for s, lines in stored_ctx.report.sections.items() if s != "caches"} == dict(again.report.sections)


def test_one_trace_serves_both_programs(captures):
    model = build("gemma2")
    both = Traces(model, Settings(), "cpu", make_skipper(model, "flexidepth", "adapter", gate="mlp"))
    shared, shared_ctx = both.get(CompileReport(), routed=False)
    alone, alone_ctx = Traces(model, Settings(), "cpu", None).get(CompileReport(), routed=False)
    both.get(CompileReport(), routed=True)
    assert len(captures) == 2
    assert print_graph(shared) == print_graph(alone) and shared_ctx.weights == alone_ctx.weights


def test_a_model_that_does_not_fit_is_refused_alike(tmp_path, captures):
    model, messages = with_mlp(lambda module, x: x.flip(1)), []
    for _ in range(2):
        gm, ctx, _ = taken_from(model, Settings(cache_dir=str(tmp_path)))
        with pytest.raises(UnsupportedModelError) as error:
            pipeline.run_passes(gm, ctx)
        messages.append(str(error.value))
    assert len(captures) == 1 and messages[0] == messages[1] and "in model.layers.1.mlp (Call)" in messages[0]


def test_one_setting_is_in_the_key():
    model = toy()
    key = trace_key(model, Settings(), "cpu")
    for same in ({"weights": "nested"}, {"kv_dtype": "fp8"}, {"fuse": False}, {"block_tokens": 32}):
        assert trace_key(model, Settings(**same), "cpu") == key
    assert len({key, trace_key(model, Settings(max_model_len=32), "cpu"), trace_key(model, Settings(), "cuda")}) == 3
    model.config.rms_norm_eps *= 2
    assert trace_key(model, Settings(), "cpu") != key


@pytest.fixture(scope="module")
def kept():
    """Graph and context of a toy, captured once."""
    return Traces(toy(num_hidden_layers=1), Settings(), "cpu", None).get(CompileReport(), routed=False)


def signed(body):
    return f"{program_store._FORMAT} {program_store._digest(body)}\n{body}"


DAMAGE = {
    "empty": lambda good: "",
    "cut": lambda good: good[: len(good) // 2],
    "flipped": lambda good: good.replace("placeholder", "placehelder", 1),
    "one node more": lambda good: signed(good.partition("\n")[2].replace('"stack_of": [', '"stack_of": [0, ', 1)),
    "foreign function": lambda good: signed(good.partition("\n")[2].replace("torch.ops:depthfx.attention", "os:system", 1)),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_trace_is_captured_again(kind, kept, tmp_path, monkeypatch):
    settings, taken = Settings(cache_dir=str(tmp_path)), []
    monkeypatch.setattr(traces, "capture", lambda *args: taken.append(0) or kept)
    taken_from(toy(), settings)
    path = trace_file(trace_key(toy(), settings, "cpu"), settings)
    good = path.read_text()
    path.write_text(DAMAGE[kind](good))
    assert path.read_text() != good
    assert f"trace: {path} is damaged" in taken_from(toy(), settings)[2]
    assert path.read_text() == good and len(taken) == 2
    assert "trace: found" in taken_from(toy(), settings)[2] and len(taken) == 2


def test_a_graph_that_plain_data_cannot_name_is_said(kept, tmp_path, monkeypatch):
    gm, ctx = kept
    ctx = replace(ctx, report=CompileReport())
    monkeypatch.setattr(traces, "capture", lambda *args: (gm, ctx))
    monkeypatch.setattr(next(n for n in gm.graph.nodes if n.op == "call_function"), "target", taken_from)
    taken_from(toy(), Settings(cache_dir=str(tmp_path)))
    assert "trace: not kept: it holds the function tests.passes.test_trace_store.taken_from" in ctx.report.sections["caches"][0]
    assert not list(tmp_path.iterdir())
