"""The memory pool on a device: tensors, streams, graphs, lifetimes, refusals, and memory that goes back to the driver."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from depthfx import errors
from depthfx.alloc.pool.memory_pool import MemoryPool, PoolOutOfMemoryError

MIB = 1 << 20


@pytest.fixture
def pool():
    made = MemoryPool()
    yield made
    gc.collect()
    made.close()
    torch.cuda.empty_cache()
    assert made.stats().mapped_bytes == 0, "no test leaves memory behind"


def _inside(pool: MemoryPool, tensor: torch.Tensor) -> bool:
    first, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    return any(s.address <= first and end <= s.address + s.size for s in pool.snapshot() if s.state == "live")


def _mib(size: int, value: int = 0) -> torch.Tensor:
    return torch.full((size * MIB,), value, dtype=torch.uint8, device="cuda")


def _check_counts(pool: MemoryPool) -> None:
    found, segments = pool.stats(), pool.snapshot()
    assert found.mapped_bytes == sum(s.size for s in segments) == found.live_bytes + found.cached_bytes
    assert found.num_live == sum(s.state == "live" for s in segments) == found.num_mallocs - found.num_frees
    assert found.pending_bytes == found.lost_bytes == found.num_refused_frees == found.num_failed_waits == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64], ids=str)
def test_tensors_lie_in_the_pool(pool, dtype):
    with pool.use():
        small, large = (torch.arange(n, device="cuda").remainder(13).to(dtype) for n in (17, 30 * MIB))
    outside = torch.empty(MIB, device="cuda")
    assert _inside(pool, small) and _inside(pool, large) and not _inside(pool, outside)
    assert torch.equal(large.double().cpu(), torch.arange(30 * MIB).remainder(13).double())
    assert small.double().tolist() == [i % 13 for i in range(17)]
    _check_counts(pool)


def test_library_calls_work_on_pool_memory(pool):
    torch.manual_seed(0)
    # PyTorch allocates the workspace of cuBLAS at a thread's first product on a stream and keeps it: outside, or the pool never empties.
    torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")
    with pool.use():
        a, b = torch.randn(1024, 512, device="cuda"), torch.randn(512, 768, device="cuda")
        product = a @ b
        spectrum = torch.fft.rfft(a).abs()
        copied = product.cpu()
    expected = a.cpu().double() @ b.cpu().double()
    assert (copied.double() - expected).abs().max() < 0.1  # TF32 at worst: 512 products of 2^-11
    assert torch.allclose(spectrum.cpu(), torch.fft.rfft(a.cpu()).abs(), atol=1e-2)


def test_only_the_thread_inside_is_served(pool):
    seen = []

    def work() -> None:
        seen.append(torch.ones(3 * MIB, device="cuda"))

    with pool.use():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        mine = torch.ones(3 * MIB, device="cuda")
    assert _inside(pool, mine) and not _inside(pool, seen[0])


@pytest.mark.alone
def test_free_memory_returns_to_its_start():
    assert bool((_mib(1, 3) == 3).all())  # kernels are loaded
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    pool = MemoryPool()
    with pool.use():
        kept, gone = _mib(64, 3), _mib(512, 4)
    taken = before - torch.cuda.mem_get_info()[0]
    assert taken >= 576 * MIB
    del gone
    assert pool.trim() >= 512 * MIB
    assert before - torch.cuda.mem_get_info()[0] <= taken - 512 * MIB
    assert bool((kept == 3).all())
    _check_counts(pool)
    del kept
    torch.cuda.empty_cache()
    assert pool.close() == 0
    assert before - torch.cuda.mem_get_info()[0] < 8 * MIB
    assert pool.snapshot() == ()


def test_segments_come_back_from_the_cache(pool):
    with pool.use():
        tensors = [_mib(32) for _ in range(4)]
    mapped = pool.stats().mapped_bytes
    outside = _mib(1)
    del tensors
    pool._kept.idle.clear()  # PyTorch hands its idle segments back, the library keeps them
    assert pool.stats().cached_bytes == mapped
    with pool.use():
        again = _mib(128, 9)
    assert pool.stats().mapped_bytes == mapped and pool.stats().num_reuses >= 1
    assert bool((again == 9).all()) and not _inside(pool, outside)


def test_freed_in_any_order_under_empty_cache(pool):
    draw = random.Random(0)
    held: list[tuple[int, torch.Tensor]] = []
    for step in range(300):
        if held and draw.random() < 0.45:
            value, tensor = held.pop(draw.randrange(len(held)))
            assert bool((tensor == value).all()), f"step {step}"
            del tensor
        else:
            with pool.use():
                held.append((step % 251, torch.full((draw.randrange(1, 24 * MIB),), step % 251, dtype=torch.uint8, device="cuda")))
        if step % 20 == 0:
            torch.cuda.empty_cache()
        if step % 37 == 0:
            pool.trim()
    assert all(bool((tensor == value).all()) for value, tensor in held)
    _check_counts(pool)


def test_several_streams(pool):
    streams = [torch.cuda.Stream() for _ in range(4)]
    results = []
    for turn in range(20):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream), pool.use():
                x = torch.full((4 * MIB,), float(turn + index), device="cuda")
                torch.cuda._sleep(200_000)
                y = x * 2
            y.record_stream(torch.cuda.current_stream())
            torch.cuda.current_stream().wait_stream(stream)
            results.append((y == 2 * (turn + index)).all())
            del x, y
        if turn % 5 == 4:
            pool.trim()
    assert torch.stack(results).all().item()
    _check_counts(pool)


def test_trim_waits_for_running_work(pool):
    with pool.use():
        x = torch.ones(64 * MIB, device="cuda")
    torch.cuda._sleep(200_000_000)  # a tenth of a second
    total = x.sum()
    del x
    assert pool.trim() >= 256 * MIB
    assert total.item() == 64 * MIB


def test_threads(pool):
    """All of them are inside at once, at every step."""
    together = threading.Barrier(5, timeout=60)

    def work(seed: int) -> int:
        draw, checked = random.Random(seed), 0
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for step in range(40):
                    with pool.use():
                        together.wait()
                        x = torch.full((draw.randrange(1, 8 * MIB),), seed, dtype=torch.uint8, device="cuda")
                        assert _inside(pool, x), (seed, step)
                        together.wait()
                    assert bool((x == seed).all()), (seed, step)
                    checked += 1
        except BaseException:
            together.abort()
            raise
        return checked

    with ThreadPoolExecutor(5) as workers:
        working = [workers.submit(work, seed) for seed in range(1, 6)]
        faults = [fault for fault in (future.exception() for future in working) if fault is not None]
    assert not faults, faults
    assert [future.result() for future in working] == [40] * 5
    del working
    gc.collect()
    _check_counts(pool)
    pool.trim()
    assert pool.stats().live_bytes == 0


def test_a_thread_may_be_inside_twice(pool):
    with pool.use():
        with pool.use():
            x = _mib(3, 1)
        y = _mib(3, 2)
    assert _inside(pool, x) and _inside(pool, y) and bool((x == 1).all()) and bool((y == 2).all())


def test_a_graph_captured_into_the_pool(pool):
    x = torch.arange(8 * MIB, device="cuda", dtype=torch.float32)
    (x * 2 + 1).sum()  # warm
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.id):
        y = x * 2 + 1
    assert _inside(pool, y)
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert bool((y == value * 2 + 1).all())
    pool.trim()  # must leave the graph's memory alone
    x.fill_(7.0)
    graph.replay()
    assert bool((y == 15.0).all())
    with pytest.raises(errors.MemoryStateError, match="reset the graphs"):
        pool.close()
    del y
    graph.reset()
    pool.trim()
    assert pool.stats().live_bytes == 0


def test_a_graph_over_tensors_of_the_pool(pool):
    with pool.use():
        x, out = torch.ones(MIB, device="cuda"), torch.empty(MIB, device="cuda")
    torch.add(x, 1, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(errors.MemoryStateError, match="captured"):
            pool.trim()
        torch.add(x, 1, out=out)
    x.fill_(41)
    graph.replay()
    assert bool((out == 42).all())


def test_capacity_becomes_an_error_of_both_kinds():
    with MemoryPool(capacity=64 * MIB) as pool:
        with pool.use():
            x = _mib(40, 1)
        with pytest.raises(PoolOutOfMemoryError, match="capacity of 67108864 bytes") as caught, pool.use():
            _mib(40)
        assert isinstance(caught.value, torch.OutOfMemoryError) and isinstance(caught.value, errors.OutOfPhysicalMemoryError)
        assert bool((x == 1).all()) and pool.stats().peak_mapped_bytes <= 64 * MIB
        _check_counts(pool)
        assert torch.ones(4, device="cuda").sum().item() == 4, "the device goes on"
        del x, caught
        gc.collect()
        pool.trim()
        with pool.use():
            y = _mib(50, 2)
        assert bool((y == 2).all())
        del y
        torch.cuda.empty_cache()


@pytest.mark.alone
def test_a_full_device_becomes_an_error_and_poisons_nothing(pool):
    before = pool.stats().mapped_bytes
    with pytest.raises(PoolOutOfMemoryError, match=r"new memory, but CUDA device \d+ has"), pool.use():
        torch.empty(torch.cuda.mem_get_info()[1], dtype=torch.uint8, device="cuda")
    assert pool.stats().mapped_bytes == before
    with pool.use():
        assert _mib(4, 5).sum().item() == 20 * MIB


def test_tensors_outlive_the_pool():
    pool = MemoryPool()
    with pool.use():
        x, y = _mib(30, 6), _mib(30, 7)
    assert pool.close() >= 60 * MIB
    library, device = pool._library, pool.device
    del pool
    gc.collect()
    torch.cuda.empty_cache()
    other = _mib(100, 1)
    assert bool((x == 6).all()) and bool((y == 7).all()) and bool((other == 1).all())
    del x
    torch.cuda.empty_cache()
    assert library.stats(device).mapped_bytes <= 32 * MIB and bool((y == 7).all())
    del y
    torch.cuda.empty_cache()
    assert library.stats(device).mapped_bytes == 0


SCRIPT = """
import torch
from depthfx import errors
from depthfx.alloc.pool.memory_pool import MemoryPool
try:
    pool = MemoryPool()
except errors.MemoryStateError as error:
    assert "expandable_segments" in str(error)
    print("refused")
else:
    with pool.use():
        x = torch.ones(1 << 20, device="cuda")
    assert any(s.address <= x.data_ptr() < s.address + s.size for s in pool.snapshot())
    print("served", x.sum().item())
"""


@pytest.mark.parametrize("variable", ["", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_process_may_end_without_close_and_with_expandable_segments(variable):
    settings = {variable: "expandable_segments:True"} if variable else {}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=os.environ | settings, timeout=110)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in (["served 1048576.0", "refused"] if variable else ["served 1048576.0"])
