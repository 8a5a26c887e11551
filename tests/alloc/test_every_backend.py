"""Every physical backend: aliasing, rules with state unchanged, rollback, order of freeing, leaks, threads."""

from __future__ import annotations

import gc
import itertools
import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from depthfx import errors
from depthfx.alloc.physical_backend import PHYSICAL
from tests.alloc.fake_cuda import CudaOverFake
from tests.alloc.physical_cases import backends, footprint, mapped, protection, values

CASES = backends()
DTYPES = [torch.uint8, torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.fixture(params=sorted(CASES))
def backend(request):
    made = CASES[request.param]()
    yield made
    gc.collect()
    made.close()


def test_the_folder_holds_the_backends():
    assert PHYSICAL.names() == ["cuda_vmm", "dry", "memfd"]
    with pytest.raises(errors.RegistryError, match="known: cuda_vmm, dry, memfd"):
        PHYSICAL.get("hip")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
def test_cuda_backend_says_why_it_cannot_be_used():
    with pytest.raises(errors.BackendUnavailableError, match="no CUDA device"):
        PHYSICAL.get("cuda_vmm")()


def test_two_addresses_show_the_same_bytes(backend):
    step = backend.granularity()
    at, (handle,) = mapped(backend, 1, spare=2)
    other = backend.reserve(step)
    backend.map(at, 2 * step, handle)
    backend.map(other, 0, handle)
    for place, offset in ((at, 2 * step), (other, 0)):
        backend.set_access(place, offset, step, "read_write")
    views = [backend.tensor(at, 0, [2, 4], torch.float16), backend.tensor(at, 2 * step, [8], torch.float16)]
    views.append(backend.tensor(other, 0, [8], torch.float16))
    assert [v.shape for v in views] == [(2, 4), (8,), (8,)]
    assert backend.snapshot().bytes_mapped == 3 * step and backend.snapshot().bytes_created == step
    if backend.holds_bytes:
        for number, view in enumerate(views, 1):
            view.fill_(number)
            assert [values(v) for v in views] == [[number] * 4] * 3
        assert [v.data_ptr() for v in views] == [at.address, at.address + 2 * step, other.address]


def test_unmapped_bytes_survive_and_move(backend):
    step = backend.granularity()
    at, (first, second) = mapped(backend, 2)
    if backend.holds_bytes:
        backend.tensor(at, 0, [8], torch.uint8).fill_(7)
        backend.tensor(at, step, [8], torch.uint8).fill_(9)
    gc.collect()
    for offset in (0, step):
        backend.unmap(at, offset, step)
    backend.map_many(at, 0, [second, first])
    assert [m.handle for m in backend.snapshot().mappings] == [second, first]
    if backend.holds_bytes:
        assert values(backend.tensor(at, 0, [2 * step], torch.uint8)[[0, 7, step, step + 7]]) == [9, 9, 7, 7]


def test_mapping_from_inside_a_handle(backend):
    step = backend.granularity()
    at, handle = backend.reserve(3 * step), backend.create(3 * step)
    if not backend.maps_from_offset:
        with pytest.raises(errors.MemoryRequestError, match="from its start only"):
            backend.map(at, 0, handle, step)
        return
    backend.map(at, 0, handle, step)
    backend.set_access(at, 0, 2 * step, "read_write")
    whole = backend.reserve(3 * step)
    backend.map(whole, 0, handle)
    backend.set_access(whole, 0, 3 * step, "read_write")
    if backend.holds_bytes:
        backend.tensor(at, 0, [2 * step], torch.uint8).fill_(5)
        seen = backend.tensor(whole, 0, [3 * step], torch.uint8)
        assert int(seen[:step].sum()) == 0 and bool((seen[step:] == 5).all())
    assert backend.snapshot().bytes_mapped == 5 * step


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_of_any_dtype(backend, dtype):
    at, _ = mapped(backend)
    tensor = backend.tensor(at, 64, [3, 5], dtype)
    assert tensor.dtype is dtype and tensor.shape == (3, 5) and tensor.is_contiguous() and tensor._base is None
    if backend.holds_bytes:
        tensor.copy_(torch.tensor([[1.0, 0.0, 1.0, 1.0, 0.0]] * 3))
        raw = backend.tensor(at, 64, [15 * dtype.itemsize], torch.uint8).view(dtype)
        assert raw.float().tolist() == [1.0, 0.0, 1.0, 1.0, 0.0] * 3
        assert tensor.data_ptr() == at.address + 64


def test_memory_stays_while_a_tensor_sees_it(backend):
    step = backend.granularity()
    at, _ = mapped(backend, 3)
    view = backend.tensor(at, step, [step + 1], torch.uint8)[2:]  # the second and one byte of the third
    before = backend.snapshot()
    assert before.num_tensors == 1
    for offset in (step, 2 * step):
        for call in (lambda o: backend.unmap(at, o, step), lambda o: backend.set_access(at, o, step, "read")):
            with pytest.raises(errors.MemoryStateError, match="1 tensors still see"):
                call(offset)
    with pytest.raises(errors.MemoryStateError, match="still see"):
        backend.close()
    assert backend.snapshot() == before
    backend.unmap(at, 0, step)
    del view
    gc.collect()
    backend.unmap(at, step, step)
    assert backend.snapshot().num_tensors == 0 and len(backend.snapshot().mappings) == 1


def rule_breaks(b, foreign):
    """Name -> (a call that breaks one rule, the error, what its text says). Mapped: granules 0 and 1 (one mapping), 2, 3, 5."""
    s = b.granularity()
    at, wide, single = b.reserve(6 * s), b.create(2 * s), b.create(s)
    b.map_many(at, 0, [wide, single])
    b.map_many(at, 5 * s, [single], "read")
    gone, gone_range = b.create(s), b.reserve(s)
    b.release(gone)
    b.free(gone_range)
    held = b.create(s)  # released while mapped
    b.map(at, 3 * s, held)
    b.release(held)
    request, state = errors.MemoryRequestError, errors.MemoryStateError
    return {
        "reserve nothing": (lambda: b.reserve(0), request, "positive"),
        "reserve half a granule": (lambda: b.reserve(s // 2), request, "multiple of the granularity"),
        "create less than nothing": (lambda: b.create(-s), request, "positive"),
        "create a fraction": (lambda: b.create(float(s)), request, "multiple of the granularity"),
        "create none": (lambda: b.create_many(0, s), request, "one or more"),
        "map none": (lambda: b.map_many(at, 4 * s, []), request, "one or more"),
        "map off the grid": (lambda: b.map(at, 4 * s + 1, single), request, "multiple of the granularity"),
        "map before the range": (lambda: b.map(at, -s, single), request, "outside"),
        "map past the range": (lambda: b.map(at, 5 * s, wide), request, "outside"),
        "map from behind the handle": (lambda: b.map(at, 4 * s, single, s), request, "handle"),
        "map over a mapping": (lambda: b.map(at, 2 * s, single), state, "overlaps"),
        "map into a mapping": (lambda: b.map(at, s, single), state, "overlaps"),
        "map a released handle": (lambda: b.map(at, 4 * s, gone), state, "released"),
        "map a released, mapped handle": (lambda: b.map(at, 4 * s, held), state, "released"),
        "map a foreign handle": (lambda: b.map(at, 4 * s, foreign[1]), state, "another backend"),
        "map into a freed range": (lambda: b.map(gone_range, 0, single), state, "freed"),
        "map into a foreign range": (lambda: b.map(foreign[0], 0, single), state, "another backend"),
        "unmap half": (lambda: b.unmap(at, 0, s), state, "not one whole mapping"),
        "unmap from the middle": (lambda: b.unmap(at, s, s), state, "not one whole mapping"),
        "unmap two": (lambda: b.unmap(at, 0, 3 * s), state, "not one whole mapping"),
        "unmap nothing": (lambda: b.unmap(at, 4 * s, s), state, "not one whole mapping"),
        "unmap in a freed range": (lambda: b.unmap(gone_range, 0, s), state, "freed"),
        "access of half": (lambda: b.set_access(at, 0, s, "read"), state, "ends inside"),
        "access from the middle": (lambda: b.set_access(at, s, 2 * s, "read"), state, "ends inside"),
        "access over a gap": (lambda: b.set_access(at, 3 * s, 2 * s, "read"), state, "nothing is mapped"),
        "access around a gap": (lambda: b.set_access(at, 2 * s, 4 * s, "read"), state, "nothing is mapped"),
        "tensor that may only be read": (lambda: b.tensor(at, 5 * s, [1], torch.uint8), state, "call set_access first"),
        "access of no kind": (lambda: b.set_access(at, 0, 2 * s, "write"), request, "allowed: none, read, read_write"),
        "release twice": (lambda: b.release(gone), state, "released already"),
        "release twice, mapped": (lambda: b.release(held), state, "released already"),
        "free while mapped": (lambda: b.free(at), state, "4 mappings"),
        "free twice": (lambda: b.free(gone_range), state, "freed"),
        "tensor past the range": (lambda: b.tensor(at, 5 * s, [s // 2 + 1], torch.float16), request, "do not fit"),
        "tensor before the range": (lambda: b.tensor(at, -2, [1], torch.float16), request, "do not fit"),
        "tensor off its alignment": (lambda: b.tensor(at, 1, [2], torch.float16), request, "multiple of 2"),
        "tensor of nothing": (lambda: b.tensor(at, 0, [0, 4], torch.float16), request, "positive"),
        "tensor over unmapped bytes": (lambda: b.tensor(at, 4 * s, [1], torch.uint8), state, "nothing is mapped"),
        "tensor without access": (lambda: b.tensor(at, 3 * s - 1, [2], torch.uint8), state, "call set_access first"),
    }


def test_a_broken_rule_raises_and_changes_nothing(backend):
    with CASES["dry"](granularity=backend.granularity()) as stranger:
        foreign = (stranger.reserve(backend.granularity()), stranger.create(backend.granularity()))
        breaks = rule_breaks(backend, foreign)
        before = backend.snapshot()
        raw = len(backend.log) if backend.name == "dry" else 0
        for what, (call, kind, text) in breaks.items():
            with pytest.raises(kind, match=text):
                pytest.fail(f"{what}: gave {call()}")
            assert backend.snapshot() == before, what
        assert len(backend.log if backend.name == "dry" else []) == raw, "a refused call reached the driver"
    assert len(breaks) == 38


def test_access_reaches_the_pages(backend):
    if backend.name == "dry" or (backend.name == "cuda_vmm" and not isinstance(backend, CudaOverFake)):
        return
    step = backend.granularity()
    at, handle = backend.reserve(step), backend.create(step)
    assert protection(at.address) == "---p"
    backend.map(at, 0, handle)
    seen = [protection(at.address)]
    for access in ("read", "read_write", "none"):
        backend.set_access(at, 0, step, access)
        seen.append(protection(at.address))
    backend.unmap(at, 0, step)
    assert [*seen, protection(at.address)] == ["---s", "r--s", "rw-s", "---s", "---p"]


@pytest.mark.parametrize("failing", range(4))
def test_a_failed_create_leaves_nothing_behind(backend, monkeypatch, failing):
    real, calls = backend._create, itertools.count()

    def create(size):
        if next(calls) == failing:
            raise errors.OutOfPhysicalMemoryError("injected")
        return real(size)

    monkeypatch.setattr(backend, "_create", create)
    with pytest.raises(errors.OutOfPhysicalMemoryError, match="injected"):
        backend.create_many(4, backend.granularity())
    assert backend.snapshot().is_empty
    assert len(backend.create_many(4, backend.granularity())) == 4


@pytest.mark.parametrize("call", ["_map", "_set_access"])
def test_a_failed_map_many_leaves_nothing_mapped(backend, monkeypatch, call):
    step = backend.granularity()
    at, handles = backend.reserve(3 * step), backend.create_many(3, step)
    before = backend.snapshot()
    real, calls = getattr(backend, call), itertools.count()

    def raw(*arguments):
        if next(calls) == (2 if call == "_map" else 0):
            raise errors.DriverError(call, "INJECTED", "no")
        return real(*arguments)

    monkeypatch.setattr(backend, call, raw)
    with pytest.raises(errors.DriverError, match="INJECTED"):
        backend.map_many(at, 0, handles)
    assert backend.snapshot() == before
    backend.map_many(at, 0, handles)
    assert len(backend.snapshot().mappings) == 3


def test_a_refused_release_can_be_repeated(backend, monkeypatch):
    at, (handle,) = mapped(backend)
    backend.release(handle)
    real = backend._release
    monkeypatch.setattr(backend, "_release", lambda raw, size: (_ for _ in ()).throw(errors.DriverError("release", "INJECTED", "no")))
    with pytest.raises(errors.DriverError):
        backend.unmap(at, 0, handle.size)
    assert backend.snapshot().handles == (handle,) and not backend.snapshot().mappings
    monkeypatch.setattr(backend, "_release", real)
    backend.release(handle)
    assert backend.snapshot().handles == ()


def test_capacity(backend):
    step = backend.granularity()
    with CASES["memfd" if backend.name == "memfd" else "dry"](granularity=step, capacity=3 * step) as small:
        held = small.create_many(2, step)
        with pytest.raises(errors.OutOfPhysicalMemoryError, match="exceed the"):
            small.create_many(2, step)
        assert small.snapshot().handles == tuple(held)
        small.release(held[0])
        assert len(small.create_many(2, step)) == 2
    for options in ({"capacity": 0}, {"granularity": 1000}, {"granularity": 0}):
        with pytest.raises(errors.MemoryRequestError, match="not allowed"):
            type(backend)(**options)


@pytest.mark.parametrize("order", list(itertools.permutations(["unmap here", "unmap there", "release"])), ids="-".join)
def test_given_back_in_any_order(backend, order):
    at, (handle,) = mapped(backend)
    other = backend.reserve(handle.size)
    backend.map(other, 0, handle)
    steps = {
        "unmap here": lambda: backend.unmap(at, 0, handle.size),
        "unmap there": lambda: backend.unmap(other, 0, handle.size),
        "release": lambda: backend.release(handle),
    }
    for done, what in enumerate(order, 1):
        assert backend.snapshot().handles == (handle,)
        steps[what]()
        assert len(backend.snapshot().handles) == (done < 3)
    backend.free(other)
    backend.free(at)
    assert backend.snapshot().is_empty


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize("closing", [True, False], ids=["close", "one by one"])
def test_nothing_leaks(name, closing):
    def use():
        made = CASES[name]()
        ranges = [mapped(made, 3, spare=1) for _ in range(3)]
        tensors = [made.tensor(at, 0, [64], torch.float16) for at, _ in ranges]
        made.map(ranges[0][0], 3 * made.granularity(), ranges[1][1][0])
        assert made.snapshot().num_tensors == len(tensors) == 3
        del tensors
        gc.collect()
        if not closing:
            for mapping in made.snapshot().mappings:
                made.unmap(mapping.at, mapping.offset, mapping.size)
            for at, handles in random.Random(0).sample(ranges, 3):
                made.free(at)
                for handle in handles:
                    made.release(handle)
            assert made.snapshot().is_empty
        made.close()
        made.close()
        assert made.snapshot().is_empty
        with pytest.raises(errors.MemoryStateError, match="closed"):
            made.create(made.granularity())

    use()  # what loads once
    files, maps = footprint()
    for _ in range(8):
        use()
    now = footprint()
    assert now[0] == files
    assert abs(now[1] - maps) < 5  # the interpreter's own arenas come and go; a leak would be 8 or more


def test_released_memory_is_given_back_to_the_system():
    with CASES["memfd"]() as made:
        handle = made.create(64 << 20)
        blocks = [os.fstat(made._file).st_blocks]
        made.release(handle)
        blocks.append(os.fstat(made._file).st_blocks)
        assert blocks[0] * 512 >= 64 << 20
        assert blocks[1] == 0


def test_threads(backend):
    """Each thread keeps a map of its own in a shared range; every value must stay its own."""
    step, threads, rounds = backend.granularity(), 8, 25
    at = backend.reserve(threads * step)

    def work(number):
        for turn in range(rounds):
            handle = backend.create(step)
            backend.map(at, number * step, handle)
            backend.set_access(at, number * step, step, "read_write")
            tensor = backend.tensor(at, number * step, [16], torch.int32)
            if backend.holds_bytes:
                tensor.fill_(number * rounds + turn)
                assert tensor.tolist() == [number * rounds + turn] * 16
            del tensor
            backend.unmap(at, number * step, step)
            backend.release(handle)
        return number

    with ThreadPoolExecutor(threads) as pool:
        assert sorted(pool.map(work, range(threads))) == list(range(threads))
    assert backend.snapshot().handles == () and backend.snapshot().mappings == ()
