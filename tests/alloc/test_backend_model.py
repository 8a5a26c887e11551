"""Every physical backend against an independent model of it, over random sequences of right and wrong calls."""

from __future__ import annotations

import functools
import gc

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from depthfx.errors import MemoryRequestError, MemoryStateError, OutOfPhysicalMemoryError
from tests.alloc.physical_cases import backends

CASES = backends()
GRANULES, CAPACITY = 5, 9
PLACE, SIZE, PICK = st.integers(0, GRANULES), st.integers(1, 3), st.integers(0, 1 << 16)


@functools.cache
def granularity_of(make) -> int:
    with make() as backend:
        return backend.granularity()


class Machine(RuleBasedStateMachine):
    """The model is granule by granule: for each range a list of what is behind each granule, for each handle a list of bytes.

    A cell of a range is None or (number of the mapping, handle, granule of the handle); dead ranges and handles stay on offer.
    """

    def __init__(self, make) -> None:
        super().__init__()
        self.backend = make(capacity=CAPACITY * granularity_of(make))
        self.step = self.backend.granularity()
        self.ranges: list = []  # all ever made
        self.cells: dict = {}  # live ranges
        self.handles: list = []
        self.released: set = set()
        self.bytes: dict = {}  # handle -> the first byte of each granule, None for unknown
        self.access: dict[int, str] = {}  # by mapping
        self.tensors: list = []  # (range, granules, tensor)
        self.next_mapping = 0

    def expect(self, good: bool, call, *wrong):
        if good:
            return call()
        with pytest.raises(wrong or (MemoryRequestError, MemoryStateError)):
            call()
        return None

    @staticmethod
    def pick(made: list, live, number: int):
        """Seven times of eight a live one, else any."""
        few = [x for x in made if x in live][-3:]
        return few[number // 8 % len(few)] if few and number % 8 else made[number // 8 % len(made)]

    def aim(self, at, place: int, size: int, exact: bool) -> tuple[int, int]:
        """With ``exact``, place and size of a mapping in the range instead, if it has one."""
        cells = self.cells.get(at, [])
        starts = [g for g, c in enumerate(cells) if c and (g == 0 or not cells[g - 1] or cells[g - 1][0] != c[0])]
        if not exact or not starts:
            return place, size
        start = starts[place % len(starts)]
        return start, sum(c is not None and c[0] == cells[start][0] for c in cells)

    def alive(self, handle) -> bool:
        """Whether the handle's memory exists."""
        return handle not in self.released or any(c and c[1] is handle for cells in self.cells.values() for c in cells)

    def seen(self, at, granules) -> bool:
        return any(r is at and set(granules) & set(g) for r, g, _ in self.tensors)

    def whole(self, at, granules) -> bool:
        """Whether the granules are mapped, and no mapping among them goes on outside."""
        cells = self.cells[at]
        if any(g >= len(cells) or cells[g] is None for g in granules):
            return False
        inside = {cells[g][0] for g in granules}
        return not any(c and c[0] in inside for g, c in enumerate(cells) if g not in granules)

    @initialize()
    def begin(self) -> None:
        for size in (3, 2):
            self.reserve(size)
        for size in (1, 1, 2):
            self.create(size)

    @precondition(lambda self: len(self.cells) < 3)
    @rule(size=SIZE)
    def reserve(self, size: int) -> None:
        at = self.backend.reserve((size + 2) * self.step)
        self.ranges.append(at)
        self.cells[at] = [None] * (size + 2)

    @precondition(lambda self: len(self.handles) - len(self.released) < 5)
    @rule(size=SIZE)
    def create(self, size: int) -> None:
        used = sum(len(self.bytes[h]) for h in self.handles if self.alive(h))
        handle = self.expect(used + size <= CAPACITY, lambda: self.backend.create(size * self.step), OutOfPhysicalMemoryError)
        if handle:
            self.handles.append(handle)
            self.bytes[handle] = [None] * size

    @precondition(lambda self: self.ranges and self.handles)
    @rule(r=PICK, h=PICK, place=PLACE, start=st.sampled_from([0, 0, 1]), access=st.sampled_from([None, "read", "read_write", "read_write"]))
    def map(self, r: int, h: int, place: int, start: int, access: str | None) -> None:
        at, handle = self.pick(self.ranges, self.cells, r), self.pick(self.handles, set(self.handles) - self.released, h)
        cells = self.cells.get(at, [])
        size = len(self.bytes[handle]) - start
        good = at in self.cells and handle not in self.released and size > 0 and place + size <= len(cells)
        good = good and not any(cells[place : place + size]) and (start == 0 or self.backend.maps_from_offset)
        self.expect(good, lambda: self.backend.map(at, place * self.step, handle, start * self.step))
        if good:
            cells[place : place + size] = [(self.next_mapping, handle, start + i) for i in range(size)]
            self.access[self.next_mapping] = "none"
            if access:
                self.backend.set_access(at, place * self.step, size * self.step, access)
                self.access[self.next_mapping] = access
            self.next_mapping += 1

    @precondition(lambda self: self.ranges)
    @rule(
        r=PICK,
        place=PLACE,
        size=SIZE,
        exact=st.booleans(),
        access=st.sampled_from(["none", "read", "read_write", "read_write", "read_write"]),
    )
    def set_access(self, r: int, place: int, size: int, exact: bool, access: str) -> None:
        at = self.pick(self.ranges, self.cells, r)
        place, size = self.aim(at, place, size, exact)
        granules = range(place, place + size)
        good = at in self.cells and self.whole(at, granules) and (access == "read_write" or not self.seen(at, granules))
        self.expect(good, lambda: self.backend.set_access(at, place * self.step, size * self.step, access))
        if good:
            self.access.update({self.cells[at][g][0]: access for g in granules})

    @precondition(lambda self: self.ranges)
    @rule(r=PICK, place=PLACE, size=SIZE, exact=st.booleans())
    def unmap(self, r: int, place: int, size: int, exact: bool) -> None:
        at = self.pick(self.ranges, self.cells, r)
        cells = self.cells.get(at, [])
        place, size = self.aim(at, place, size, exact)
        granules = range(place, place + size)
        good = at in self.cells and self.whole(at, granules) and not self.seen(at, granules)
        good = good and len({cells[g][0] for g in granules}) == 1
        self.expect(good, lambda: self.backend.unmap(at, place * self.step, size * self.step))
        if good:
            cells[place : place + size] = [None] * size

    @precondition(lambda self: len(self.handles) - len(self.released) > 3)
    @rule(h=PICK)
    def release(self, h: int) -> None:
        handle = self.pick(self.handles, set(self.handles) - self.released, h)
        self.expect(handle not in self.released, lambda: self.backend.release(handle))
        self.released.add(handle)

    @precondition(lambda self: len(self.cells) > 1)
    @rule(r=PICK)
    def free(self, r: int) -> None:
        at = self.pick(self.ranges, self.cells, r)
        good = at in self.cells and not any(self.cells[at])
        self.expect(good, lambda: self.backend.free(at))
        if good:
            del self.cells[at]

    @precondition(lambda self: self.ranges)
    @rule(r=PICK, place=PLACE, size=SIZE, exact=st.booleans(), keep=st.booleans(), value=st.integers(0, 255))
    def tensor(self, r: int, place: int, size: int, exact: bool, keep: bool, value: int) -> None:
        at = self.pick(self.ranges, self.cells, r)
        place, size = self.aim(at, place, size, exact)
        granules = range(place, place + size)
        cells = self.cells.get(at, [])
        good = place + size <= len(cells) and all(cells[g] and self.access[cells[g][0]] == "read_write" for g in granules)
        tensor = self.expect(good, lambda: self.backend.tensor(at, place * self.step, [size * self.step], torch.uint8))
        if not good:
            return
        if self.backend.holds_bytes:
            tensor[:: self.step] = value
            for g in granules:
                self.bytes[cells[g][1]][cells[g][2]] = value
        if keep and len(self.tensors) < 3:
            self.tensors.append((at, granules, tensor))

    @precondition(lambda self: self.tensors)
    @rule(t=PICK)
    def drop_tensor(self, t: int) -> None:
        del self.tensors[t % len(self.tensors)]

    @invariant()
    def agrees(self) -> None:
        snapshot = self.backend.snapshot()
        assert set(snapshot.ranges) == set(self.cells)
        assert set(snapshot.handles) == {h for h in self.handles if self.alive(h)}
        assert snapshot.num_tensors == len(self.tensors)
        told: dict = {at: [None] * len(cells) for at, cells in self.cells.items()}
        for m in snapshot.mappings:
            for i in range(m.size // self.step):
                assert told[m.at][m.offset // self.step + i] is None
                told[m.at][m.offset // self.step + i] = (m.handle, m.handle_offset // self.step + i, m.access)
        assert told == {at: [c and (c[1], c[2], self.access[c[0]]) for c in cells] for at, cells in self.cells.items()}

    @invariant()
    def every_view_shows_the_bytes(self) -> None:
        if self.backend.holds_bytes:
            for at, granules, tensor in self.tensors:
                expected = [self.bytes[self.cells[at][g][1]][self.cells[at][g][2]] for g in granules]
                assert tensor[:: self.step].tolist() == expected

    def teardown(self) -> None:
        self.tensors.clear()
        gc.collect(0)
        self.backend.close()
        assert self.backend.snapshot().is_empty


@pytest.mark.parametrize("name", [n for n in sorted(CASES) if n != "memfd-2MiB"])
def test_backend_agrees_with_the_model(name):
    """The machine asserts in each of its rules and in its invariants; derandomized, so a failure repeats."""
    limits = settings(
        max_examples=100,
        stateful_step_count=60,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    assert run_state_machine_as_test(functools.partial(Machine, CASES[name]), settings=limits) is None
