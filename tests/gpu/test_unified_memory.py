"""Unified memory on CUDA: residuals destroyed by KV and restored, order of copies and kernels, pinning, memory given back."""

from __future__ import annotations

import gc
import random
import time

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from depthfx import errors
from depthfx.alloc import backup
from depthfx.alloc.backup import HostBackup
from depthfx.alloc.content_hash import content_hash
from depthfx.alloc.physical_backend import PHYSICAL
from depthfx.alloc.restore_worker import RestoreWorker
from depthfx.alloc.unified_memory import UnifiedMemory
from depthfx.alloc.units import UnitLayout

pytest.importorskip("cuda.bindings.driver")
MIB = 1 << 20
UNIT, NUM_UNITS, BLOCK = 32 * MIB, 8, 2 * MIB
USED = NUM_UNITS * UNIT - 5 * MIB - 3  # the last unit is part empty, and its end is no whole word
SPANS = [(0, 40 * MIB + 128), (40 * MIB + 128, 100 * MIB), (100 * MIB, USED)]
SLOW = 400_000_000  # cycles: about 0.2 s
WAIT = 60.0


def build(num_units: int = NUM_UNITS, unit: int = UNIT) -> UnifiedMemory:
    layout = UnitLayout(unit, unit // BLOCK, 3, ((0, num_units * unit),))
    return UnifiedMemory.build(PHYSICAL.get("cuda_vmm")(), layout, 3 * BLOCK)


def warm_up(memory: UnifiedMemory, host: HostBackup) -> None:
    """Loads the kernels and makes the streams that tests use behind a slow kernel, where loading could wait for it; changes no byte."""
    torch.cuda._sleep(1)
    kv_of(memory, 0)[:BLOCK].fill_(0)
    worker = RestoreWorker("cuda")
    worker.copy_all([target_of(memory, host, 0)], [host.unit(0)], torch.cuda.current_stream().record_event())
    worker.close(WAIT)


@pytest.fixture
def loaded():
    """Memory with random residual bytes, their pinned host copy, a worker; all given back at the end."""
    memory = build()
    torch.manual_seed(0)
    memory.home_bytes_tensor().random_(0, 256)
    host = HostBackup.take(memory.home_bytes_tensor(), USED, UNIT, pin=True, spans=SPANS)
    warm_up(memory, host)
    worker = RestoreWorker("cuda")
    yield memory, host, worker
    worker.close(WAIT)
    torch.cuda.synchronize()
    host.close()
    memory.close()


def target_of(memory: UnifiedMemory, host: HostBackup, unit: int) -> torch.Tensor:
    return memory.unit_bytes_tensor(unit)[: host.unit(unit).numel()]


def kv_of(memory: UnifiedMemory, unit: int) -> torch.Tensor:
    """A unit's bytes at their KV address."""
    first = 3 * BLOCK + unit * UNIT
    return memory.kv_tensor([memory.kv_bytes], torch.uint8)[first : first + UNIT]


def slow_event() -> torch.cuda.Event:
    """An event behind a slow kernel on a stream of its own."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLOW)
    return stream.record_event()


@pytest.mark.parametrize("count", [1, 7, 4096, 4 * MIB, 9 * MIB + 5])
def test_hash_is_the_same_on_both_devices(count):
    data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    assert content_hash(data) == content_hash(data.cuda())
    one_off = data.cuda()
    one_off[count // 2] ^= 128
    assert content_hash(one_off) != content_hash(data)


def test_kv_destroys_residuals_and_the_worker_restores_them(loaded):
    memory, host, worker = loaded
    home = memory.home_bytes_tensor()
    assert host.verify(home) == 3
    assert [content_hash(host._content()[a:b]) for a, b in SPANS] == [host.hashes[span] for span in SPANS]
    for unit in range(NUM_UNITS):
        kv_of(memory, unit).fill_(0xAB)
    after = torch.cuda.current_stream().record_event()
    with pytest.raises(errors.InternalError, match="overwritten"):
        host.verify(home)
    for unit in range(NUM_UNITS):
        worker.submit(unit, target_of(memory, host, unit), host.unit(unit), after)
    assert worker.wait_idle(WAIT) and worker.poll() == list(range(NUM_UNITS))
    assert host.verify(home) == 3
    assert worker.copied_bytes == USED
    print(f"\nin chunks: {USED / worker.seconds_busy / 1e9:.1f} GB/s")
    home.zero_()
    torch.cuda.synchronize()
    start = time.perf_counter()
    worker.copy_all([target_of(memory, host, u) for u in range(NUM_UNITS)], [host.unit(u) for u in range(NUM_UNITS)])
    print(f"in one shot: {USED / (time.perf_counter() - start) / 1e9:.1f} GB/s")
    assert host.verify(home) == 3


def test_copies_wait_for_the_last_step_that_names_the_unit(loaded):
    """The step ends in a write to the unit; a copy that did not wait would be overwritten."""
    memory, host, worker = loaded
    torch.cuda._sleep(SLOW)
    kv_of(memory, 1).fill_(3)
    after = torch.cuda.current_stream().record_event()
    worker.submit(1, target_of(memory, host, 1), host.unit(1), after)
    assert not after.query(), "the slow kernel is too fast for this test"
    assert worker.wait_idle(WAIT) and after.query() and worker.poll() == [1]
    assert host.verify(memory.home_bytes_tensor()) == 3


def test_kv_written_behind_the_event_of_a_cancel_stays(loaded):
    memory, host, _ = loaded
    other = RestoreWorker("cuda", max_in_flight=4)
    other.copier.hold("after chunk")
    after = slow_event()  # holds the chunks in the queue
    other.submit(2, target_of(memory, host, 2), host.unit(2), after)
    assert other.copier.held(WAIT)
    start = time.perf_counter()
    event = other.cancel(2)
    assert time.perf_counter() - start < 0.1, "the cancel waited for the device"
    assert event is not None and not event.query()
    torch.cuda.current_stream().wait_event(event)
    kv_of(memory, 2).fill_(9)
    other.copier.go()
    assert other.wait_idle(WAIT) and other.poll() == []
    torch.cuda.synchronize()
    assert bool((kv_of(memory, 2) == 9).all()), "a chunk was copied over the new owner's bytes"
    assert 0 < other.copied_bytes <= 4 * 4 * MIB
    other.submit(2, target_of(memory, host, 2), host.unit(2), torch.cuda.current_stream().record_event())
    assert other.wait_idle(WAIT) and other.poll() == [2] and host.verify(memory.home_bytes_tensor()) == 3
    other.close(WAIT)


def test_steps_never_see_a_refill(loaded):
    """Units are lent, given back and lent again in the middle of their copies; the host waits for nothing, the device sees every byte in order."""
    memory, host, worker = loaded
    worker.copier.disturb(1, delay_share=0.2, most_us=500)
    rng, stream, expected = random.Random(0), torch.cuda.current_stream(), memory.home_bytes_tensor().clone()
    lent, restoring, num_cancels, num_done = set(), set(), 0, 0
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in range(800):
        unit, value = rng.randrange(NUM_UNITS), turn % 251
        if unit in lent and rng.random() < 0.6:
            lent.discard(unit)
            restoring.add(unit)
            worker.submit(unit, target_of(memory, host, unit), host.unit(unit), stream.record_event())
        elif unit not in lent:
            if unit in restoring:
                restoring.discard(unit)
                if (event := worker.cancel(unit)) is not None:
                    stream.wait_event(event)
                    num_cancels += 1
            lent.add(unit)
            kv_of(memory, unit).fill_(value)
            wrong += (kv_of(memory, unit) != value).sum()
        if turn % 25 == 24:
            assert worker.wait_idle(WAIT)
        for done in worker.poll():
            restoring.discard(done)
            num_done += 1
            target = target_of(memory, host, done)
            wrong += (target != expected[done * UNIT : done * UNIT + target.numel()]).sum()
        if rng.random() < 0.3:
            time.sleep(rng.random() * 0.002)
    assert worker.wait_idle(WAIT)
    assert wrong.item() == 0 and min(num_cancels, num_done) > 3, (num_cancels, num_done)


def test_a_captured_graph_reads_what_was_restored(loaded):
    memory, host, worker = loaded
    target, out = target_of(memory, host, 0), torch.zeros((), dtype=torch.int64, device="cuda")
    torch.sum(target[:BLOCK], dim=0, out=out)
    expected = out.item()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.sum(target[:BLOCK], dim=0, out=out)
    kv_of(memory, 0).fill_(1)
    graph.replay()
    assert out.item() == BLOCK
    worker.submit(0, target, host.unit(0), torch.cuda.current_stream().record_event())
    assert worker.wait_idle(WAIT) and worker.poll() == [0]
    graph.replay()
    assert out.item() == expected
    del graph
    gc.collect()


def test_close_under_load_and_without_hanging(loaded):
    memory, host, _ = loaded
    worker = RestoreWorker("cuda")
    after = slow_event()
    for unit in range(NUM_UNITS):
        worker.submit(unit, target_of(memory, host, unit), host.unit(unit), after)
    time.sleep(0.02)
    with pytest.raises(errors.RestoreError, match=r"did not end within 0\.01 s"):
        worker.close(0.01)
    worker.close(WAIT)
    assert worker.copied_bytes < USED
    with pytest.raises(errors.MemoryStateError, match="closed"):
        worker.submit(0, target_of(memory, host, 0), host.unit(0), None)


def test_pinning_and_its_failure(loaded):
    memory, host, worker = loaded
    assert host.pinned and host.unit(0).is_pinned() and host.unit(NUM_UNITS - 1).is_pinned()
    with pytest.raises(errors.HostMemoryError, match="cannot pin"):
        backup._pin(host._content())  # a second time
    assert torch.ones(8, device="cuda").sum().item() == 8, "the failure was blamed on a kernel"
    with pytest.raises(errors.MemoryRequestError, match="pin=True"):
        worker.submit(0, target_of(memory, host, 0), host.unit(0).clone(), None)
    view = host.unit(0)
    host.close()
    assert not view.is_pinned()


@pytest.mark.alone
def test_memory_returns_to_the_device():
    build().close()  # what the driver keeps for later is taken before the count
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    with build() as one, build() as two:
        taken = before - torch.cuda.mem_get_info()[0]
        one.home_bytes_tensor().fill_(1)
        two.home_bytes_tensor().fill_(2)
        assert int(kv_of(one, 3).max()) == 1 and int(kv_of(two, 3).min()) == 2
        physical = one.physical_bytes + two.physical_bytes
        torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert taken >= physical
    assert before - torch.cuda.mem_get_info()[0] < 8 * MIB


@pytest.mark.alone
def test_a_create_that_fails_half_way_gives_all_back():
    torch.cuda.empty_cache()
    before, total = torch.cuda.mem_get_info()
    eighth = total // 8 // BLOCK * BLOCK
    with pytest.raises(errors.OutOfPhysicalMemoryError, match="cuMemCreate"):
        build(num_units=9, unit=eighth)
    gc.collect()
    assert before - torch.cuda.mem_get_info()[0] < 8 * MIB
    assert torch.ones(4, device="cuda").sum().item() == 4
