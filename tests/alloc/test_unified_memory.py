"""Unified memory over every backend: what the two ranges show, residuals destroyed by KV and restored, rollback, close."""

from __future__ import annotations

import gc
import random
import time

import pytest
import torch

from depthfx import errors
from depthfx.alloc.backup import HostBackup
from depthfx.alloc.physical_backend import PHYSICAL
from depthfx.alloc.restore_worker import RestoreWorker
from depthfx.alloc.unified_memory import POISON, UnifiedMemory
from depthfx.alloc.units import UnitLayout
from tests.alloc.physical_cases import backends, footprint
from tests.alloc.restore_cases import WAIT

CASES = backends()
BLOCKS_PER_UNIT, BASE_BLOCKS = 4, 5


def layout_for(granule: int) -> UnitLayout:
    """Four units of two granules; three entries, the last unit part empty, entry 1 in the middle of units 1 and 2."""
    unit = 2 * granule
    return UnitLayout(
        unit, BLOCKS_PER_UNIT, BASE_BLOCKS, ((0, unit + 1152), (unit + 1152, 2 * unit + 128), (2 * unit + 128, 4 * unit - 1000))
    )


def spans_for(layout: UnitLayout) -> list[tuple[int, int]]:
    """Two residual tensors in each entry."""
    return [span for first, end in layout.spans for span in ((first, first + 640), (first + 640, end))]


def build(backend) -> UnifiedMemory:
    layout = layout_for(backend.granularity())
    return UnifiedMemory.build(backend, layout, BASE_BLOCKS * layout.block_bytes)


def blocks_of(memory: UnifiedMemory) -> torch.Tensor:
    return memory.kv_tensor([memory.layout.num_blocks, memory.layout.block_bytes], torch.uint8)


def slot_of(memory: UnifiedMemory, unit: int) -> slice:
    blocks = memory.layout.blocks_of(unit)
    return slice(blocks.start, blocks.stop)


@pytest.fixture(params=sorted(CASES))
def memory(request):
    with build(CASES[request.param]()) as made:
        yield made


@pytest.fixture
def loaded():
    """Memory over a memfd with residual bytes in place, its host copy, and the bytes."""
    with build(CASES["memfd"]()) as made:
        used = max(end for _, end in made.layout.spans)
        made.home_bytes_tensor().copy_(
            torch.randint(0, 256, (made.home_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        )
        host = HostBackup.take(made.home_bytes_tensor(), used, made.layout.unit_bytes, pin=False, spans=spans_for(made.layout))
        yield made, host, made.home_bytes_tensor()[:used].clone()
        gc.collect()


def target_of(memory: UnifiedMemory, host: HostBackup, unit: int) -> torch.Tensor:
    return memory.unit_bytes_tensor(unit)[: host.unit(unit).numel()]


def test_both_ranges_show_the_units(memory):
    layout, granule = memory.layout, memory.backend.granularity()
    blocks = blocks_of(memory)
    assert memory.home_bytes == 8 * granule and memory.base_bytes == 5 * granule // 2
    assert memory.physical_bytes == 11 * granule == memory.backend.snapshot().bytes_created
    assert memory.kv_bytes == blocks.numel() == 8 * granule + memory.base_bytes
    if memory.backend.holds_bytes:
        blocks.copy_(torch.arange(layout.num_blocks, dtype=torch.uint8)[:, None])
        for unit in range(layout.num_units):
            seen = memory.unit_bytes_tensor(unit).view(BLOCKS_PER_UNIT, layout.block_bytes)
            assert [set(row.tolist()) for row in seen] == [{block} for block in layout.blocks_of(unit)]
        assert sorted(set(blocks[:BASE_BLOCKS].flatten().tolist())) == list(range(BASE_BLOCKS))
        halves = memory.home_tensor(layout.unit_bytes, [layout.unit_bytes // 2], torch.float16)
        halves.fill_(1.5)
        assert bool((blocks[list(layout.blocks_of(1))].flatten().view(torch.float16) == 1.5).all())
        assert blocks.data_ptr() % 256 == 0


def test_poison_marks_one_unit_at_both_addresses(memory):
    if not memory.backend.holds_bytes:
        assert memory.unit_bytes_tensor(0).is_meta
        return memory.poison(0)
    blocks = blocks_of(memory)
    blocks.zero_()
    memory.poison(2)
    for block in range(memory.layout.num_blocks):
        assert set(blocks[block].tolist()) == {POISON if block in memory.layout.blocks_of(2) else 0}
    assert bool(blocks[list(memory.layout.blocks_of(2))].view(torch.float16).isfinite().all())
    return None


def test_kv_destroys_a_residual_and_the_worker_restores_it(loaded):
    memory, host, original = loaded
    worker = RestoreWorker("cpu", chunk_bytes=1000)
    assert host.verify(memory.home_bytes_tensor()) == 6
    blocks = blocks_of(memory)
    for unit in range(memory.layout.num_units):
        blocks[memory.layout.blocks_of(unit)[-1]] = 0xAB
        with pytest.raises(errors.InternalError, match="overwritten, or not copied back"):
            host.verify(memory.home_bytes_tensor())
        worker.submit(unit, target_of(memory, host, unit), host.unit(unit), None)
        assert worker.wait_idle(WAIT) and worker.poll() == [unit]
        assert host.verify(memory.home_bytes_tensor()) == 6
    blocks[memory.layout.num_base_blocks :] = 0
    worker.copy_all([target_of(memory, host, u) for u in range(4)], [host.unit(u) for u in range(4)])
    assert worker.wait_idle(WAIT) and host.verify(memory.home_bytes_tensor()) == 6
    assert torch.equal(memory.home_bytes_tensor()[: original.numel()], original)
    worker.close(WAIT)


def test_verify_finds_every_kind_of_damage(loaded):
    memory, host, original = loaded
    home, unit = memory.home_bytes_tensor(), memory.layout.unit_bytes
    for damage in ("poison", "swapped units", "one bit", "one unit late"):
        if damage == "poison":
            memory.poison(1)
        elif damage == "swapped units":
            home[:unit], home[unit : 2 * unit] = original[unit : 2 * unit], original[:unit]
        elif damage == "one bit":
            home[1500] ^= 64
        else:
            home[unit : unit + 1000] = original[unit - 1000 : unit]
        with pytest.raises(errors.InternalError, match="was loaded with"):
            host.verify(home)
        home[: original.numel()] = original
        assert host.verify(home) == 6


@pytest.mark.parametrize("where,number", [("before chunk", 1), ("before chunk", 2), ("after chunk", 1), ("before done", 1)])
def test_kv_written_after_a_cancel_stays(loaded, where, number):
    memory, host, _ = loaded
    worker = RestoreWorker("cpu", chunk_bytes=1000)
    worker.copier.hold(where, number)
    own = blocks_of(memory)[slot_of(memory, 1)]
    own.fill_(1)
    worker.submit(1, target_of(memory, host, 1), host.unit(1), None)
    assert worker.copier.held(WAIT)
    worker.cancel(1)
    own.fill_(2)
    worker.copier.go()
    assert worker.wait_idle(WAIT) and worker.poll() == [] and bool((own == 2).all())
    worker.submit(1, target_of(memory, host, 1), host.unit(1), None)
    assert worker.wait_idle(WAIT) and worker.poll() == [1] and host.verify(memory.home_bytes_tensor()) == 6
    worker.close(WAIT)


@pytest.mark.parametrize("seed", range(3))
def test_lent_and_restored_at_random(loaded, seed):
    """KV keeps its bytes while a unit is lent, residuals theirs once a unit is reported, under delays at every point."""
    memory, host, _ = loaded
    rng = random.Random(seed)
    worker = RestoreWorker("cpu", chunk_bytes=1500)
    worker.copier.disturb(seed + 50, delay_share=1.0, most_us=500)
    blocks, lent, under_way, finished = blocks_of(memory), {}, set(), 0
    for turn in range(250):
        unit = rng.randrange(4)
        span = slot_of(memory, unit)
        if unit in lent:
            assert bool((blocks[span] == lent.pop(unit)).all()), "KV changed while it was lent"
            under_way.add(unit)
            worker.submit(unit, target_of(memory, host, unit), host.unit(unit), None)
        elif rng.random() < 0.4:
            if unit in under_way:
                worker.cancel(unit)
                under_way.discard(unit)
            blocks[span] = lent[unit] = turn % 251
        elif rng.random() < 0.5:
            time.sleep(0.003)
        for done in worker.poll():
            finished += 1
            under_way.remove(done)
            assert torch.equal(target_of(memory, host, done), host.unit(done))
    assert worker.wait_idle(WAIT)
    assert sorted(worker.poll()) == sorted(under_way) and finished > 10
    worker.close(WAIT)


RAW_CALLS = {"_reserve": 2, "_create": 5, "_map": 9, "_set_access": 2}


@pytest.mark.parametrize("name,number", [(name, n) for name, count in RAW_CALLS.items() for n in range(count + 1)])
@pytest.mark.parametrize("case", sorted(CASES))
def test_a_failed_build_gives_all_back(case, name, number, monkeypatch):
    """Any raw call may fail; one more call than there are shows that the list is complete."""
    with CASES[case]() as backend:
        real, calls = getattr(backend, name), []

        def raw(*arguments):
            calls.append(arguments)
            if len(calls) == number + 1:
                raise errors.OutOfPhysicalMemoryError("injected")
            return real(*arguments)

        monkeypatch.setattr(backend, name, raw)
        if number == RAW_CALLS[name]:
            build(backend)
            assert len(calls) == number
            return
        with pytest.raises(errors.OutOfPhysicalMemoryError, match="injected"):
            build(backend)
        assert backend.snapshot().is_empty
        build(backend)


def test_a_capacity_too_small(memory):
    granule = memory.backend.granularity()
    with PHYSICAL.get("dry")(granularity=granule, capacity=10 * granule) as small:
        with pytest.raises(errors.OutOfPhysicalMemoryError, match="capacity"):
            build(small)
        assert small.snapshot().is_empty
    with PHYSICAL.get("dry")(granularity=granule, capacity=11 * granule) as enough:
        assert build(enough).physical_bytes == 11 * granule


def test_close_refuses_while_tensors_live(memory):
    before = memory.backend.snapshot()
    kv = blocks_of(memory)[3]
    residual = memory.unit_bytes_tensor(1).view(torch.float8_e4m3fn)
    for _ in range(2):
        with pytest.raises(errors.MemoryStateError, match=r"still in use: [12] tensors still see"):
            memory.close()
        del kv
        kv = residual
    assert memory.backend.snapshot().mappings == before.mappings
    assert memory.unit_bytes_tensor(3).numel() == memory.layout.unit_bytes
    del kv, residual
    memory.close()
    memory.close()
    for call in (lambda: memory.home_bytes_tensor(), lambda: memory.poison(0), lambda: blocks_of(memory)):
        with pytest.raises(errors.MemoryStateError, match="closed"):
            call()


def test_close_refuses_while_a_copy_runs(loaded):
    memory, host, _ = loaded
    worker = RestoreWorker("cpu", chunk_bytes=1000)
    worker.copier.hold("before chunk", 2)
    worker.submit(0, target_of(memory, host, 0), host.unit(0), None)
    assert worker.copier.held(WAIT)
    with pytest.raises(errors.MemoryStateError, match="restore worker first"):
        memory.close()
    worker.copier.go()
    assert worker.wait_idle(WAIT)
    memory.close()
    assert worker.poll() == [0]
    worker.close(WAIT)


def test_two_in_one_process():
    with build(CASES["memfd"]()) as one, build(CASES["memfd"]()) as two:
        one.home_bytes_tensor().fill_(1)
        two.home_bytes_tensor().fill_(2)
        assert set(one.home_bytes_tensor().tolist()) == {1} and set(blocks_of(two)[BASE_BLOCKS:].flatten().tolist()) == {2}
        one.close()
        assert set(two.home_bytes_tensor().tolist()) == {2}


def test_nothing_leaks():
    def use() -> None:
        with build(CASES["memfd"]()) as made:
            made.poison(0)
            blocks_of(made).zero_()

    use()
    files, maps = footprint()
    for _ in range(8):
        use()
    now = footprint()
    assert now[0] == files and abs(now[1] - maps) < 5


def test_refused(memory):
    backend, layout = memory.backend, memory.layout
    granule, block = backend.granularity(), layout.block_bytes
    base = BASE_BLOCKS * block
    odd = UnitLayout(granule + 128, 1, 1, ((0, granule),))
    tiny = UnitLayout(granule, granule // 64, 1, ((0, granule),))
    cases = {
        "no unit": (UnitLayout(granule, 1, 1, ((0, 0),)), granule),
        "multiple of its granularity": (odd, granule + 128),
        f"does not fit 5 base blocks of {block} bytes; give {base}": (layout, base + block),
        "multiple of 256": (tiny, 64),
    }
    with CASES["dry"](granularity=granule) as empty:
        for text, (wrong, size) in cases.items():
            with pytest.raises(errors.MemoryRequestError, match=text):
                UnifiedMemory.build(empty, wrong, size)
        assert empty.snapshot().is_empty
    with pytest.raises(errors.MemoryStateError, match="holds memory already"):
        UnifiedMemory.build(backend, layout, base)
    for unit in (-1, 4):
        with pytest.raises(errors.MemoryRequestError, match="allowed: 0 to 3"):
            memory.unit_bytes_tensor(unit)
    with pytest.raises(errors.MemoryRequestError, match="do not fit"):
        memory.kv_tensor([memory.kv_bytes + 1], torch.uint8)
    with pytest.raises(errors.MemoryRequestError, match="do not fit"):
        memory.home_tensor(memory.home_bytes - 1, [1], torch.float16)


def test_without_base_blocks():
    backend = PHYSICAL.get("memfd")()
    unit = backend.granularity()
    with UnifiedMemory.build(backend, UnitLayout(unit, 1, 0, ((0, 2 * unit),)), 0) as made:
        made.kv_tensor([2, unit], torch.uint8)[1] = 9
        assert set(made.unit_bytes_tensor(1).tolist()) == {9} and made.physical_bytes == 2 * unit
