"""What is captured, in which order and into which tensors; CUDA's streams and graphs are stood in for, so the captured steps really run."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import cache
from types import SimpleNamespace

import pytest
import torch

import depthfx
from depthfx.runtime import graphs
from depthfx.runtime.graphs import StepGraphs
from depthfx.runtime.step_form import StepForm, decode_form
from depthfx.skippers import make_skipper
from tests.families.configs import build
from tests.families.harness import engine_over


@pytest.fixture
def captures(monkeypatch):
    """``(event, ...)`` in the order in which they came: workspaces dropped, begin and end of a capture."""
    seen = []
    stream = SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)

    @contextmanager
    def graph(graph, pool, stream, capture_error_mode):
        seen.append(("begin", graph, pool, capture_error_mode))
        yield
        seen.append(("end", graph))

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "the pool")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=None))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(graphs, "_drop_workspaces", lambda: seen.append(("workspaces dropped",)))
    return seen


@cache
def compiled(routed):
    model = build("llama")
    torch.manual_seed(0)
    skipper = make_skipper(model, "random_skip", "identity", layers=(1,)) if routed else None
    return depthfx.compile(model, skipper=skipper, inductor=False, kv_blocks=16, max_batch_size=8)


@pytest.mark.parametrize("routed", [False, True], ids=["dense", "routed"])
def test_every_form_is_run_once_and_captured_once(routed, captures, monkeypatch):
    runner = engine_over(compiled(routed), max_batch_size=4)._runner
    prompts = (StepForm(16, 0, 2), StepForm(16, 4, 2), StepForm(32, 4, 2))
    runner.graphs = captured = StepGraphs(runner, (1, 2, 4), prompts)
    calls, forward = [], runner.forward

    def noted(uploaded, precision, routed, captured):
        calls.append((uploaded.positions.shape[0], uploaded.num_decode_rows, precision, routed))
        assert captured and set(uploaded.positions.tolist()) == {-1}
        return forward(uploaded, precision, routed, captured=captured)

    monkeypatch.setattr(runner, "forward", noted)
    pool = runner.kv_pool.clone()
    captured.capture()
    assert torch.equal(pool, runner.kv_pool), "idle rows wrote KV"
    dense = [(32, 4), (16, 4), (16, 0), (4, 4), (2, 2), (1, 1)]
    steps = [(*form, -1, depth) for form in dense for depth in ((False, True) if routed and form[0] <= 4 else (False,))]
    assert calls == [step for step in steps for _ in range(2)]
    assert [event[0] for event in captures] == ["workspaces dropped", "begin", "end", "workspaces dropped"] * len(steps)
    assert {event[2:] for event in captures if event[0] == "begin"} == {("the pool", "thread_local")}
    stored = captured._graphs
    assert all(graph.form == form for (form, _, _), graph in stored.items()) and len(stored) == len(steps)
    for (form, _, _), graph in stored.items():
        assert graph.logits.shape == (form.num_logits, runner.shape.vocab_size) and graph.tokens.shape == (form.num_logits,)
    assert len({stored[form, -1, False].logits.data_ptr() for form in prompts}) == 1, "forms with prompts share one tensor of logits"
    assert len({stored[decode_form(bucket), -1, False].logits.data_ptr() for bucket in (1, 2, 4)}) == 3
