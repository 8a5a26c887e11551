"""CUDA's virtual memory management: aliasing, all dtypes, stable addresses in a replayed graph, memory given back, failed creates."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from depthfx import errors
from depthfx.alloc.physical_backend import PHYSICAL

pytest.importorskip("cuda.bindings.driver")
GRANULE = 2 << 20


@pytest.fixture
def backend():
    made = PHYSICAL.get("cuda_vmm")()
    yield made
    gc.collect()
    made.close()


def test_granularity_is_two_mebibytes(backend):
    assert backend.granularity() == GRANULE


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_two_addresses_show_the_same_bytes(backend, dtype):
    handles = backend.create_many(3, GRANULE)
    at, other = backend.reserve(3 * GRANULE), backend.reserve(3 * GRANULE)
    backend.map_many(at, 0, handles)
    backend.map_many(other, 0, handles[::-1])
    one, two = (backend.tensor(place, 0, [3, GRANULE // dtype.itemsize], dtype) for place in (at, other))
    assert one.device.type == "cuda" and one._base is None
    written = (torch.arange(one.numel(), device="cuda") % 7).view(one.shape).to(dtype)
    one.copy_(written)
    assert torch.equal(two.flip(0).float(), written.float())


def test_a_replayed_graph_sees_new_memory_at_the_old_address(backend):
    at, handles = backend.reserve(GRANULE), backend.create_many(2, GRANULE)
    backend.map_many(at, 0, handles[:1])
    view = backend.tensor(at, 0, [GRANULE // 4], torch.float32)
    out = torch.empty_like(view, device="cuda")
    torch.add(view.fill_(1), 1, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.add(view, 1, out=out)
    torch.cuda.synchronize()
    del view
    backend.unmap(at, 0, GRANULE)
    backend.map_many(at, 0, handles[1:])
    backend.tensor(at, 0, [GRANULE // 4], torch.float32).fill_(41)
    graph.replay()
    assert bool((out == 42).all())


@pytest.mark.alone
def test_memory_returns_to_the_device(backend):
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    handles = backend.create_many(64, 4 * GRANULE)
    taken = before - torch.cuda.mem_get_info()[0]
    for handle in handles:
        backend.release(handle)
    assert taken >= 256 * GRANULE
    assert before - torch.cuda.mem_get_info()[0] < taken // 4


@pytest.mark.alone
def test_out_of_memory_rolls_back_and_poisons_nothing(backend):
    total = torch.cuda.mem_get_info()[1]
    eighth = total // 8 // GRANULE * GRANULE
    with pytest.raises(errors.OutOfPhysicalMemoryError, match="cuMemCreate"):
        backend.create_many(9, eighth)
    assert backend.snapshot().is_empty
    assert torch.ones(4, device="cuda").sum().item() == 4
    backend.create(GRANULE)


def test_a_fresh_thread_can_call(backend):
    seen = []

    def work() -> None:
        at = backend.reserve(GRANULE)
        backend.map_many(at, 0, backend.create_many(1, GRANULE))
        seen.append(backend.tensor(at, 0, [8], torch.int32).fill_(3).tolist())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [[3] * 8]
