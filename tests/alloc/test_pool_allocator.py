"""The pool's C library over a fake driver: caching, splitting, capacity, failures, wrong calls, threads, devices."""

from __future__ import annotations

import ctypes
import random
import threading
import time

import pytest

from depthfx import errors
from depthfx.alloc.pool.pool_library import PoolLibrary
from tests.alloc.pool_cases import GRANULE, MIB, FakeDriver, FakePool


def test_freed_segments_come_back_without_driver_calls():
    pool = FakePool()
    address = pool.malloc(20 * MIB, stream=7)
    ctypes.memset(address, 0x5A, 20 * MIB)
    pool.free(address, 20 * MIB)
    assert pool.states() == [("cached", 20)]
    before = pool.driver.count_all()
    assert pool.malloc(20 * MIB, stream=8) == address
    assert pool.driver.count_all() == before, "a cached segment needs no driver, whatever the stream"
    assert pool.stats().num_reuses == 1
    pool.check()


def test_sizes_are_rounded_and_the_request_is_kept():
    pool = FakePool()
    pool.malloc(1)
    pool.malloc(GRANULE + 1, stream=3)
    (one, two) = pool.library.snapshot(0)
    assert [(s.size, s.asked, s.stream, s.state) for s in (one, two)] == [(GRANULE, 1, 0, "live"), (2 * GRANULE, GRANULE + 1, 3, "live")]
    found = pool.stats()
    assert (found.asked_bytes, found.live_bytes, found.num_live) == (GRANULE + 2, 3 * GRANULE, 2)
    pool.check()


def test_split_merge_and_best_fit():
    pool = FakePool()
    sizes = [8, 2, 6, 2, 20, 2]
    at = [pool.malloc(size * MIB) for size in sizes]
    for index in (0, 2, 4):
        pool.free(at[index], sizes[index] * MIB)
    assert pool.states() == [("cached", 8), ("live", 2), ("cached", 6), ("live", 2), ("cached", 20), ("live", 2)]
    small = pool.malloc(4 * MIB)
    assert small == at[2], "the smallest segment that fits"
    assert pool.states()[2:4] == [("live", 4), ("cached", 2)]
    pool.free(small, 4 * MIB)
    for index in (1, 3, 5):
        pool.free(at[index], sizes[index] * MIB)
    assert pool.states() == [("cached", 40)]
    before = pool.driver.calls("cuMemCreate")
    whole = pool.malloc(40 * MIB)
    ctypes.memset(whole, 1, 40 * MIB)
    assert (whole, pool.driver.calls("cuMemCreate")) == (at[0], before)
    pool.check()


def test_a_cached_neighbour_is_extended():
    pool = FakePool()
    first = pool.malloc(10 * MIB)
    pool.free(first, 10 * MIB)
    larger = pool.malloc(16 * MIB)
    ctypes.memset(larger, 1, 16 * MIB)
    assert larger == first
    assert pool.stats().mapped_bytes == 16 * MIB, "only the six missing MiB are new"
    pool.check()


def test_capacity_refuses_and_cached_pieces_make_room():
    pool = FakePool(capacity=32 * MIB)
    at = [pool.malloc(8 * MIB) for _ in range(4)]
    with pytest.raises(
        errors.OutOfPhysicalMemoryError, match=r"2097152 bytes .* exceed the 0 left of the pool's capacity of 33554432 bytes"
    ):
        pool.malloc(GRANULE)
    assert pool.stats().num_refused_mallocs == 1
    pool.check()
    pool.free(at[0], 8 * MIB)
    pool.free(at[2], 8 * MIB)
    pool.malloc(16 * MIB)  # two cached pieces that do not touch: they go to the driver first
    assert pool.stats().mapped_bytes == 32 * MIB
    pool.check()
    with pytest.raises(errors.OutOfPhysicalMemoryError, match="address"):
        pool.malloc(1 << 62)


def test_driver_out_of_memory_uses_what_is_cached_first():
    pool = FakePool()
    pool.driver.set_memory(0, 32 * MIB)
    at = [pool.malloc(8 * MIB) for _ in range(4)]
    pool.free(at[1], 8 * MIB)
    pool.free(at[3], 8 * MIB)
    pool.malloc(16 * MIB)
    pool.check()
    with pytest.raises(errors.OutOfPhysicalMemoryError, match="cuMemCreate failed with CUDA_ERROR_OUT_OF_MEMORY"):
        pool.malloc(GRANULE)
    pool.check()


def test_what_the_device_cannot_hold_is_refused_before_any_handle():
    pool = FakePool()
    pool.driver.set_memory(0, 128 * MIB)
    kept = pool.malloc(40 * MIB)
    before = pool.driver.calls("cuMemCreate")
    with pytest.raises(errors.OutOfPhysicalMemoryError, match=f"{100 * MIB} bytes of new memory, but CUDA device 0 has {88 * MIB} free"):
        pool.malloc(100 * MIB)
    assert pool.driver.calls("cuMemCreate") == before
    pool.free(kept, 40 * MIB)
    pool.malloc(100 * MIB)
    pool.check()


@pytest.mark.parametrize("call", ["cuMemGetInfo_v2", "cuMemCreate", "cuMemMap", "cuMemRelease", "cuMemSetAccess", "cuCtxPushCurrent_v2"])
@pytest.mark.parametrize("nth", [1, 3])
def test_a_failure_half_way_rolls_back(call, nth):
    pool = FakePool()
    kept = pool.malloc(4 * MIB)
    if call in ("cuMemGetInfo_v2", "cuMemSetAccess", "cuCtxPushCurrent_v2") and nth == 3:
        nth = 1  # one call for all handles
    before = (pool.states(), pool.stats().mapped_bytes)
    pool.driver.fail(call, nth, 719)
    with pytest.raises(errors.DriverError, match="told by the driver") as caught:
        pool.malloc(100 * MIB)  # four handles
    assert caught.value.call == call.removesuffix("_v2") and caught.value.code == "CUDA_ERROR_OTHER"
    assert (pool.states(), pool.stats().mapped_bytes) == before
    if call != "cuMemRelease":  # there the driver itself keeps the handle
        pool.check()
    address = pool.malloc(100 * MIB)
    ctypes.memset(address, 3, 100 * MIB)
    ctypes.memset(kept, 3, 4 * MIB)
    assert pool.library.last_error() is None, "no error sticks"


def test_a_rollback_that_the_driver_refuses_is_counted_and_tried_again():
    pool = FakePool()
    pool.driver.fail("cuMemSetAccess", 1, 719)
    pool.driver.fail("cuMemUnmap", 1, 719)
    with pytest.raises(errors.DriverError, match="cuMemSetAccess"):
        pool.malloc(40 * MIB)
    assert pool.states() == [("lost", 8)]
    pool.check()
    ctypes.memset(pool.malloc(40 * MIB), 1, 40 * MIB)
    assert pool.library.trim(0) == 8 * MIB
    assert pool.states() == [("live", 40)]
    pool.check()


@pytest.mark.parametrize("size", [0, -1, -(1 << 40)])
def test_wrong_sizes_are_refused(size):
    pool = FakePool()
    with pytest.raises(errors.MemoryRequestError, match=f"{size} bytes"):
        pool.malloc(size)
    pool.check()


@pytest.mark.parametrize("device", [-1, 64, 1 << 20])
def test_wrong_devices_are_refused(device):
    pool = FakePool()
    for call in (lambda: pool.library.malloc(1, device), lambda: pool.library.free(1, 1, device), lambda: pool.library.trim(device)):
        with pytest.raises(errors.MemoryRequestError, match=f"device {device} "):
            call()
    with pytest.raises(errors.DriverError, match="cuDeviceGet"):
        pool.library.malloc(1, 5)


def test_wrong_frees_are_refused_and_change_nothing():
    pool = FakePool()
    address = pool.malloc(4 * MIB)
    for wrong, size in ((0, 1), (address + GRANULE, 4 * MIB), (address - GRANULE, 4 * MIB), (1 << 60, 1)):
        with pytest.raises(errors.MemoryStateError, match="no live segment"):
            pool.free(wrong, size)
    for size in (4 * MIB - 1, -1, 0):
        with pytest.raises(errors.MemoryRequestError, match=f"cannot be freed with {size}"):
            pool.free(address, size)
    with pytest.raises(errors.MemoryStateError, match="device 1"):
        pool.library.free(address, 4 * MIB, 1)
    assert pool.states() == [("live", 4)]
    pool.free(address, 4 * MIB)
    with pytest.raises(errors.MemoryStateError, match="freed twice"):
        pool.free(address, 4 * MIB)
    assert pool.stats().num_refused_frees == 8 and pool.library.stats(1).num_refused_frees == 1
    assert pool.states() == [("cached", 4)]
    pool.check()


def test_nothing_is_reused_or_unmapped_before_the_device_is_done():
    pool = FakePool()
    address = pool.malloc(4 * MIB)
    pool.driver.set_busy(0, 1)
    pool.driver.fail("cuCtxSynchronize", 1, 900)  # as under a capture
    with pytest.raises(errors.DriverError, match="cuCtxSynchronize"):
        pool.free(address, 4 * MIB)
    assert pool.states() == [("pending", 4)] and pool.stats().num_failed_waits == 1
    assert pool.malloc(4 * MIB) != address, "queued work may still name it"
    pool.driver.fail("cuCtxSynchronize", 1, 900)
    with pytest.raises(errors.DriverError, match="cuCtxSynchronize"):
        pool.library.trim(0)
    assert pool.library.trim(0) == 4 * MIB
    pool.check()


def test_other_threads_go_on_while_one_waits():
    pool = FakePool()
    address = pool.malloc(4 * MIB)
    pool.driver.hold_waits(1)
    waiter = threading.Thread(target=pool.free, args=(address, 4 * MIB))
    waiter.start()
    try:
        end = time.monotonic() + 20
        while not pool.driver.num_held():
            assert time.monotonic() < end
        other = pool.malloc(4 * MIB)
        assert other != address
        assert pool.states() == [("pending", 4), ("live", 4)]
    finally:
        pool.driver.hold_waits(0)
        waiter.join()
    assert pool.states() == [("cached", 4), ("live", 4)]
    pool.check()


def test_trim_keeps_handles_with_a_live_byte():
    pool = FakePool()
    first = pool.malloc(20 * MIB)
    second = pool.malloc(20 * MIB)
    pool.free(first, 20 * MIB)
    small = pool.malloc(2 * MIB)
    pool.free(second, 20 * MIB)
    assert small == first
    assert pool.library.trim(0) == 20 * MIB
    assert pool.states() == [("live", 2), ("cached", 18)]
    pool.free(small, 2 * MIB)
    pool.driver.fail("cuMemUnmap", 1, 719)
    with pytest.raises(errors.DriverError, match="cuMemUnmap"):
        pool.library.trim(0)
    assert pool.states() == [("cached", 20)]
    assert pool.library.trim(0) == 20 * MIB and pool.library.trim(0) == 0
    pool.check()


def test_close_gives_everything_back_and_refuses_from_then_on():
    pool = FakePool()
    pool.free(pool.malloc(4 * MIB), 4 * MIB)
    kept, size = pool.malloc(2 * MIB), 2 * MIB
    assert pool.library.close(0) == 4 * MIB, "the live tensor's handle"
    with pytest.raises(errors.MemoryStateError, match="closed"):
        pool.malloc(1)
    ctypes.memset(kept, 1, size)
    pool.driver.set_busy(0, 1)
    pool.free(kept, size)
    assert pool.driver.left() == 0 and pool.driver.violations() == 0
    assert pool.library.close(0) == 0 == pool.library.trim(0)
    for call in (lambda: pool.malloc(1), lambda: pool.library.open(0)):
        with pytest.raises(errors.MemoryStateError, match="closed"):
            call()
    with pytest.raises(errors.MemoryStateError, match="no live segment"):
        pool.free(kept, size)


def test_two_devices_are_apart():
    pool = FakePool(capacity=4 * MIB)
    pool.library.open(1, 8 * MIB)
    first, second = pool.library.malloc(4 * MIB, 0), pool.library.malloc(8 * MIB, 1)
    assert (pool.driver.used(0), pool.driver.used(1)) == (4 * MIB, 8 * MIB)
    pool.driver.set_busy(0, 1)
    pool.library.free(second, 8 * MIB, 1)
    assert pool.library.trim(1) == 8 * MIB and pool.driver.used(0) == 4 * MIB
    assert pool.driver.violations() == 0, "device 1 needed no wait for device 0"
    pool.library.free(first, 4 * MIB, 0)
    assert pool.library.trim(0) == 4 * MIB and pool.driver.violations() == 0
    with pytest.raises(errors.MemoryStateError, match="open already"):
        pool.library.open(1)
    assert pool.library.close(0) == pool.library.close(1) == 0 == pool.driver.left()


def test_pools_are_apart():
    one, two = FakePool(capacity=2 * MIB), FakePool()
    one.malloc(1)
    two.malloc(8 * MIB)
    assert one.stats().mapped_bytes == 2 * MIB and two.stats().mapped_bytes == 8 * MIB
    with pytest.raises(errors.OutOfPhysicalMemoryError):
        one.malloc(1)
    assert two.library.last_error() is None


def test_drivers_without_what_is_needed():
    with pytest.raises(errors.BackendUnavailableError, match=r"libnowhere.so cannot be loaded"):
        PoolLibrary(driver="libnowhere.so")
    with pytest.raises(errors.BackendUnavailableError, match=r"libm.so.6 has no cuInit"):
        PoolLibrary(driver="libm.so.6")
    driver = FakeDriver()
    driver.set_vmm(0)
    library = PoolLibrary(driver=str(driver.path))
    with pytest.raises(errors.BackendUnavailableError, match="no virtual memory management"):
        library.open(0)
    driver.set_vmm(1)
    driver.fail("cuMemAddressReserve", 1, 2)
    with pytest.raises(errors.OutOfPhysicalMemoryError, match="cuMemAddressReserve"):
        library.open(0)
    assert driver.left() == 0
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(errors.MemoryRequestError, match=f"capacity={wrong}"):
            library.open(0, capacity=wrong)
    library.open(0)
    assert library.stats(0).range_bytes == 4 << 30


def test_no_compiler_is_a_clear_error(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(errors.BackendUnavailableError, match="no cc or gcc on PATH"):
        PoolLibrary()


def test_errors_belong_to_their_thread():
    pool = FakePool()
    with pytest.raises(errors.MemoryRequestError):
        pool.malloc(0)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(pool.library.last_error()))
    thread.start()
    thread.join()
    assert seen == [None] and isinstance(pool.library.last_error(), errors.MemoryRequestError)


def _hammer(pool: FakePool, seed: int, rounds: int, faults: list[str]) -> None:
    draw = random.Random(seed)
    held: list[tuple[int, int]] = []
    word = ctypes.c_uint64.from_address
    for step in range(rounds):
        if held and (draw.random() < 0.5 or len(held) == 12):
            address, size = held.pop(draw.randrange(len(held)))
            if (word(address).value, word(address + size - 8).value) != (seed, address):
                faults.append(f"thread {seed}, step {step}: {address:#x} was written by another")
            pool.free(address, size)
        else:
            size = draw.randrange(1, 6 * GRANULE) + 16 & ~7
            try:
                address = pool.malloc(size)
            except errors.OutOfPhysicalMemoryError:
                continue
            word(address).value, word(address + size - 8).value = seed, address
            held.append((address, size))
        if step % 997 == 0:
            pool.library.trim(0)
    for address, size in held:
        pool.free(address, size)


def test_eight_threads_hammer_one_pool():
    pool = FakePool(capacity=256 * MIB)
    faults: list[str] = []
    threads = [threading.Thread(target=_hammer, args=(pool, seed, 12_500, faults)) for seed in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    found = pool.stats()
    assert found.num_mallocs == found.num_frees > 40_000 and found.num_live == 0
    assert found.peak_mapped_bytes <= 256 * MIB
    assert found.num_refused_frees == found.num_failed_waits == found.lost_bytes == 0
    pool.check()
    pool.library.trim(0)
    assert pool.states() == [] and pool.library.close(0) == 0 == pool.driver.left()
