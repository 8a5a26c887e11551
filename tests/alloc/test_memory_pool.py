"""MemoryPool over a stand-in for PyTorch's pools: refusals with their type, trim, close, tensors that outlive it. The real one: tests/gpu."""

from __future__ import annotations

import ctypes
import gc
import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import pytest
import torch

from depthfx import errors
from depthfx.alloc.pool import memory_pool
from depthfx.alloc.pool.memory_pool import MemoryPool, PoolOutOfMemoryError
from depthfx.alloc.pool.pool_library import PoolLibrary
from tests.alloc.pool_cases import MIB, FakeDriver


class FakeAllocator:
    """Loads the two functions from the file, as ``CUDAPluggableAllocator`` does."""

    def __init__(self, path, malloc, free):
        library = ctypes.CDLL(path)
        self.malloc, self.free = getattr(library, malloc), getattr(library, free)
        self.malloc.argtypes, self.malloc.restype = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
        self.free.argtypes, self.free.restype = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p], None

    def allocator(self):
        return self


class FakeTorchPool:
    """Keeps idle segments until it goes; those in use are freed by :meth:`empty_cache` once they are idle."""

    made = ended_in_use = 0

    def __init__(self, allocator):
        FakeTorchPool.made += 1
        self.id, self.users, self._allocator = (0, FakeTorchPool.made), 1, allocator
        self.segments: dict[int, list] = {}

    def use_count(self):
        return self.users

    def take(self, size):
        address = self._allocator.malloc(size, 0, None)
        if not address:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.segments[address] = [size, True]
        return address

    def empty_cache(self):
        for address, (size, in_use) in list(self.segments.items()):
            if not in_use:
                self._allocator.free(address, size, 0, None)
                del self.segments[address]

    def __del__(self):
        if _under_way:
            FakeTorchPool.ended_in_use += 1  # PyTorch would end the process
        self.empty_cache()


_under_way: list[tuple[int, FakeTorchPool]] = []  # thread and pool, as PyTorch notes them


@contextmanager
def use_mem_pool(pool, device):
    """PyTorch's rule: a pool that is being used is refused to everybody, after the reference was taken."""
    pool.users += 1
    if any(other is pool for _, other in _under_way):
        raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
    _under_way.append((threading.get_ident(), pool))
    yield
    _under_way[:] = [entry for entry in _under_way if entry[1] is not pool]
    pool.users -= 1


def inside() -> FakeTorchPool:
    """The pool that serves this thread: the first that it entered."""
    return next(pool for thread, pool in _under_way if thread == threading.get_ident())


@pytest.fixture
def driver(monkeypatch):
    made = FakeDriver()

    def probe(pool):
        torch_pool = inside()
        address = torch_pool.take(1)
        torch_pool.segments[address][1] = False
        return address

    monkeypatch.setattr(memory_pool, "PoolLibrary", lambda: PoolLibrary(str(made.path)))
    monkeypatch.setattr(torch.cuda.memory, "CUDAPluggableAllocator", FakeAllocator)
    monkeypatch.setattr(torch.cuda, "MemPool", FakeTorchPool)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    for name, value in (
        ("is_available", True),
        ("init", None),
        ("current_device", 0),
        ("device_count", 2),
        ("is_current_stream_capturing", False),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(MemoryPool, "_probe", probe)
    return made


def _take(pool: MemoryPool, size: int) -> int:
    with pool.use():
        return inside().take(size)


def test_no_device_is_a_clear_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(errors.BackendUnavailableError, match="needs a CUDA device"):
        MemoryPool()


def test_a_refusal_has_both_types_and_names_the_capacity(driver):
    with MemoryPool(capacity=4 * MIB) as pool:
        with pytest.raises(PoolOutOfMemoryError, match=r"left of the pool's capacity of 4194304 bytes; .*trim\(\)") as caught:
            _take(pool, 8 * MIB)
        assert isinstance(caught.value, errors.OutOfPhysicalMemoryError) and isinstance(caught.value, torch.OutOfMemoryError)
        assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
        with pytest.raises(torch.OutOfMemoryError, match="elsewhere") as foreign, pool.use():
            raise torch.OutOfMemoryError("elsewhere")
        assert type(foreign.value) is torch.OutOfMemoryError, "the pool refused nothing here"


@pytest.mark.parametrize("device", [-1, 2, True, "cuda:0"])
def test_a_wrong_device_is_refused(driver, device):
    with pytest.raises(errors.MemoryRequestError, match=f"device={device!r} is not allowed; .* 0 to 1"):
        MemoryPool(device=device)


@pytest.mark.parametrize("capacity", [0, -1, 1.5, True])
def test_a_wrong_capacity_is_refused(driver, capacity):
    with pytest.raises(errors.MemoryRequestError, match=f"capacity={capacity}"):
        MemoryPool(capacity)


def test_trim_takes_what_pytorch_keeps(driver):
    pool = MemoryPool()
    kept, gone = _take(pool, 10 * MIB), _take(pool, 20 * MIB)
    (torch_pool,), before = pool._kept.idle, pool.id
    torch_pool.segments[gone][1] = False
    del torch_pool.segments[kept]  # a live tensor's
    assert pool.stats().live_bytes == 32 * MIB
    del torch_pool
    assert pool.trim() == 22 * MIB, "the idle segment and that of the probe"
    assert pool.id != before and [s.address for s in pool.snapshot()] == [kept]
    with pool.use():
        assert pool.trim() == 0
    pool._kept.graph_pool.users += 1  # a graph
    held = pool.id
    assert pool.trim() == 0 and pool.id == held
    with pytest.raises(errors.MemoryStateError, match="reset the graphs"):
        pool.close()
    pool._kept.graph_pool.users -= 1
    assert pool.close() == 10 * MIB


def test_tensors_outlive_close_and_the_object(driver):
    pool = MemoryPool()
    address = _take(pool, 4 * MIB)
    (torch_pool,), kept = pool._kept.idle, pool._kept
    with pytest.raises(errors.MemoryStateError, match=r"1 thread\(s\) are inside use"), pool.use():
        pool.close()
    assert pool.close() == 6 * MIB  # torch_pool still holds both segments
    assert pool.close() == 6 * MIB
    with pytest.raises(errors.MemoryStateError, match="closed"), pool.use():
        pass
    with pytest.raises(errors.MemoryStateError, match="closed"):
        pool.trim()
    with pytest.raises(errors.MemoryStateError, match="closed"):
        print(pool.id)
    del pool
    gc.collect()
    assert kept in memory_pool._kept
    ctypes.memset(address, 1, 4 * MIB)
    torch_pool.segments[address][1] = False
    torch_pool.empty_cache()
    assert driver.left() == 0


def test_many_threads_are_inside_at_once(driver):
    """Each has a pool of its own, which later users find again, and every one of them goes with a trim."""
    pool, together = MemoryPool(), threading.Barrier(4, timeout=20)

    def work(seed: int) -> list:
        draw, seen = random.Random(seed), []
        for _ in range(20):
            with pool.use():
                together.wait()
                seen.append(inside())
                address = inside().take(draw.randrange(1, 4 * MIB))
                ctypes.memset(address, seed, 8)
                together.wait()
                assert ctypes.string_at(address, 8) == bytes([seed] * 8)
                inside().segments[address][1] = False
        return seen

    with ThreadPoolExecutor(4) as workers:
        seen = [future.result() for future in [workers.submit(work, seed) for seed in range(1, 5)]]
    assert all(len({id(thread[step]) for thread in seen}) == 4 for step in range(20))
    assert len(pool._kept.idle) == 4 and pool._kept.graph_pool not in pool._kept.idle
    del seen
    pool.trim()
    assert pool.stats().mapped_bytes == 0 and pool._kept.idle == [] and _under_way == []
    assert pool.close() == 0 and driver.left() == 0


def test_a_thread_may_be_inside_twice(driver):
    pool = MemoryPool()
    with pool.use():
        outer = inside()
        with pool.use():
            assert inside() is outer and len(_under_way) == 2
            with pytest.raises(errors.MemoryStateError, match=r"2 thread\(s\) are inside"):
                pool.close()
        assert inside() is outer and len(_under_way) == 1
    del outer
    assert pool.close() == 0 and driver.left() == 0


def test_a_pool_goes_with_the_trim_that_follows_its_last_user_at_once(driver, monkeypatch):
    """It must not wait for the end of the user's call, which comes without the lock: another pool may be in use by then."""
    pool = MemoryPool()
    lock, gone = memory_pool._lock, []

    class Watched:
        def __enter__(self):
            lock.acquire()

        def __exit__(self, *_):
            leaving = bool(pool._kept.idle) and not _under_way
            watched = [weakref.ref(torch_pool) for torch_pool in pool._kept.idle]
            lock.release()
            if leaving and not gone:
                monkeypatch.setattr(memory_pool, "_lock", lock)
                pool.trim()
                gone.extend(ref() is None for ref in watched)

    with pool.use():
        monkeypatch.setattr(memory_pool, "_lock", Watched())
    assert gone == [True]
    assert pool.close() == 0 and driver.left() == 0


def test_a_pool_that_cannot_be_entered_is_kept(driver, monkeypatch):
    pool = MemoryPool()
    held = list(pool._kept.idle)
    monkeypatch.setattr(memory_pool.torch.cuda, "use_mem_pool", lambda *_: use_mem_pool(held[0], 0))
    with pytest.raises(RuntimeError, match="already recording"), pool.use(), pool.use():
        pytest.fail("entered")
    monkeypatch.setattr(memory_pool.torch.cuda, "use_mem_pool", use_mem_pool)
    assert _under_way == [] and len(pool._kept.idle) == 2
    with pytest.raises(errors.MemoryStateError, match="another context uses it"):
        pool.close()
    held.pop().users -= 1
    assert pool.close() == 0 and driver.left() == 0


def test_a_pool_that_is_not_reached_is_refused(driver, monkeypatch):
    monkeypatch.setattr(MemoryPool, "_probe", lambda pool: 0x1000)
    with pytest.raises(errors.MemoryStateError, match=r"at 0x1000, outside of the pool: .*expandable_segments:False"):
        MemoryPool()
    assert driver.left() == 0


def test_captures_are_left_alone(driver, monkeypatch):
    pool = MemoryPool()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for call in (pool.trim, pool.close):
        with pytest.raises(errors.MemoryStateError, match="captured"):
            call()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert pool.close() == 0 and driver.left() == 0
