"""Conditional nodes in captured steps: the body that the count asks for runs, whatever the replay before; whole models likewise."""

from __future__ import annotations

import gc

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from depthfx.lowering import ops
from depthfx.lowering.graph_switch import Choice, GraphSwitch, switching, unavailable
from tests.runtime.switched_cases import Case, check_same

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no conditional nodes: {unavailable()}")


@pytest.mark.parametrize("pdl", [False, True])
def test_the_device_picks_the_body(pdl):
    """Kernels before, inside and behind the node, under dependent launch too; matrix products of cuBLAS inside."""
    device, step, rows = torch.device("cuda"), 64, 200
    switch, counts = GraphSwitch(device), torch.zeros(2, dtype=torch.int32, device=device)
    x = torch.randn(rows, 256, device=device, dtype=torch.float16)
    w = torch.randn(256, 256, device=device, dtype=torch.float16) / 16
    ones, out = torch.ones(256, device=device, dtype=torch.float16), torch.zeros(rows, 256, device=device, dtype=torch.float16)

    def run(size, mark):
        out[:size].copy_(ops.rms_norm(ops.rms_norm(x[:size], ones, 1e-6) @ w.T, ones, 1e-6))
        out[rows - 1].fill_(mark)

    sizes = [64, 128, 192, 200]
    bodies = [None, *(lambda n=n, i=i: run(n, i + 1) for i, n in enumerate(sizes)), lambda: run(rows, 9)]

    def forward():
        out.zero_()
        *_, chosen = switch.choose([Choice(counts, 0, step, whole=5)])
        normed = ops.rms_norm(x, ones, 1e-6)  # between the choice and the node
        switch.run(chosen, bodies)
        return ops.rms_norm(out, ones, 1e-6), normed

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    ops.enable_pdl(pdl)
    try:
        with torch.cuda.stream(stream):
            forward()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            behind, _ = forward()
    finally:
        ops.enable_pdl(False)
    for mine, other in ((0, 7), (1, 3), (64, 1), (65, 100), (0, 0), (200, 0), (150, 50), (192, 8), (193, 7), (10, 0), (0, 200), (128, 72)):
        counts.copy_(torch.tensor([mine, other]))
        graph.replay()
        found, after = out.clone(), behind.clone()
        number = Choice(torch.tensor([mine, other]), 0, step, whole=5).now()
        out.zero_()
        if number:
            run(*((rows, 9) if number == 5 else (sizes[number - 1], number)))
        assert torch.equal(found, out), (mine, other)
        torch.testing.assert_close(after, ops.rms_norm(out, ones, 1e-6), rtol=0, atol=0)


@pytest.mark.parametrize(("family", "weights", "projector"), [
    ("llama", "16bit", "adapter"), ("gemma2", "16bit", "adapter"), ("gpt_neox", "16bit", "identity"), ("llama", "nested", "adapter"),
])  # fmt: skip
def test_captured_steps_of_many_rows(family, weights, projector):
    """Against cohorts that the host gathers, from one share to the next in one graph."""
    case = Case(family, torch.float16, "cuda", weights, projector)
    assert case.runner.graphs.switch is not None and "chosen on the device" in str(case.model.explain())
    for share in (0.5, 0.0, 1.0, 0.05, 0.95, 0.5):
        case.skip(share)
        check_same(case.replay(), case.step(captured=False), share, 5e-3)
    with switching(None):  # in place, as small graphs are
        check_same(case.step(captured=True), case.replay(), 0.5, 5e-3)
    case.model.engine.close()


@pytest.mark.alone
def test_memory_of_the_bodies_goes_with_the_model():
    free = []
    for _ in range(3):
        case = Case("llama", torch.float16, "cuda")
        case.skip(0.5)
        case.replay()
        case.model.engine.close()
        del case
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info()[0])
    assert free[2] >= free[1] - (4 << 20), free  # the first one leaves libraries and cuBLAS workspaces behind
