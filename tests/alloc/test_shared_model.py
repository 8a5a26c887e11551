"""The memory manager with a shared region against an independent model of it, over random sequences of calls.

About 10,000 operations by default; ``OPERATIONS=100000`` in the environment walks further.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from depthfx.alloc.manager import MemoryManager
from depthfx.alloc.units import SharedRegion, UnitLayout
from depthfx.errors import InternalError

BASE, UNITS, PER_UNIT, BLOCK, ROWS, COLUMNS = 3, 4, 2, 2, 4, 6
UNIT_BYTES = 64
NUM_BLOCKS = BASE + UNITS * PER_UNIT
# Unit 0 holds bytes of entries 1 and 3, unit 2 of 0 and 3; entry 2 has none; the last unit is part empty.
SPANS = ((140, 230), (0, 50), (0, 0), (50, 140))
STEPS = 50
OPERATIONS = int(os.environ.get("OPERATIONS", "10000"))
RESIDUAL, LOST = "residual", "lost"

# Zeros, then ones: prefixes often agree.
PROMPTS = st.builds(lambda zeros, ones: [0] * zeros + [1] * ones, st.integers(1, 8), st.integers(0, 4))
PICK = st.integers(0, 1 << 16)


class Machine(RuleBasedStateMachine):
    """The model is the memory itself: what the bytes of each block are, and which blocks each request reads through its table.

    A block's bytes are :data:`RESIDUAL`, :data:`LOST` or KV (all tokens up to its end). It knows two rules of the manager: how many units an
    allocation must lend (those that blocks nobody holds do not cover, and no more), and that units come and go at one boundary.
    """

    num_operations = 0
    num_seen: dict[str, int] = {}

    def __init__(self) -> None:
        super().__init__()
        self.region = SharedRegion(UnitLayout(UNIT_BYTES, PER_UNIT, BASE, SPANS))
        self.manager = MemoryManager(NUM_BLOCKS, BLOCK, ROWS, COLUMNS, region=self.region)
        self.memory: list = [LOST] * BASE + [RESIDUAL] * (NUM_BLOCKS - BASE)
        self.num_open = 0
        self.restoring: set[int] = set()
        self.cancelled: list[int] = []
        self.table: dict[tuple[int, int], int] = {}
        self.tokens: dict[str, list[int]] = {}
        self.row: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.num_held: dict[str, int] = {}
        self.next_id = 0

    def saw(self, what: str) -> None:
        type(self).num_seen[what] = self.num_seen.get(what, 0) + 1

    def blocks(self, name: str) -> list[int]:
        return [self.table[self.row[name], column] for column in range(self.num_held[name])]

    def held(self) -> set[int]:
        return {block for name in self.tokens for block in self.blocks(name)}

    def inside(self, unit: int) -> set[int]:
        return set(range(BASE + unit * PER_UNIT, BASE + (unit + 1) * PER_UNIT))

    def pick(self, number: int) -> str:
        names = sorted(self.tokens)
        return names[number % len(names)]

    def apply_writes(self) -> None:
        for row, column, block in self.manager.take_table_writes():
            self.table[row, column] = block

    def refused(self, call, *args: object) -> None:
        """The call raises and changes nothing that can be seen."""
        before = (self.manager.usage(), self.manager.resident())
        with pytest.raises(InternalError):
            call(*args)
        assert (self.manager.usage(), self.manager.resident()) == before
        self.manager.check()

    def lend(self, num_new: int, held: set[int]) -> None:
        """What an allocation of ``num_new`` blocks beside those ``held`` before it must have lent."""
        missing = num_new - (BASE + self.num_open * PER_UNIT - len(held))
        for _ in range(-(-max(0, missing) // PER_UNIT)):
            unit = self.num_open
            self.num_open += 1
            self.saw("lend")
            for block in self.inside(unit):
                self.memory[block] = LOST
            if unit in self.restoring:
                self.restoring.remove(unit)
                self.cancelled.append(unit)
                self.saw("cancel")

    @initialize(prompts=st.lists(PROMPTS, min_size=2, max_size=ROWS))
    def start_under_load(self, prompts: list[list[int]]) -> None:
        for prompt in prompts:
            self.admit(prompt, 0, True)

    @rule(prompt=PROMPTS, headroom=st.sampled_from([0, 0, 0, 1, 3]), compute=st.booleans())
    def admit(self, prompt: list[int], headroom: int, compute: bool) -> None:
        name = f"r{self.next_id}"
        self.next_id += 1
        before, held = self.manager.usage(), self.held()
        place = self.manager.admit(name, prompt, b"", headroom)
        num_blocks = -(-len(prompt) // BLOCK)
        if place is None:
            assert self.manager.usage() == before
            assert len(self.tokens) == ROWS or num_blocks + headroom > NUM_BLOCKS - len(held)
            self.saw("no room")
            return
        self.apply_writes()
        self.tokens[name], self.row[name] = list(prompt), place.table_row
        self.computed[name], self.num_held[name] = place.reused_tokens, num_blocks
        num_reused = place.reused_tokens // BLOCK
        mine = self.blocks(name)
        for i, block in enumerate(mine[:num_reused]):
            assert self.memory[block] == tuple(prompt[: (i + 1) * BLOCK]), "a reused block holds other bytes"
            self.saw("reuse")
        assert not held & set(mine[num_reused:]), "a block was given to two owners"
        self.lend(num_blocks - num_reused, held | set(mine[:num_reused]))
        assert self.manager.num_available >= headroom
        if compute:
            self.compute(name, len(prompt))

    @precondition(lambda self: self.tokens)
    @rule(number=PICK, token=st.integers(0, 1), more=st.integers(1, 3))
    def grow(self, number: int, token: int, more: int) -> None:
        name = self.pick(number)
        num_tokens = len(self.tokens[name]) + more
        if num_tokens > COLUMNS * BLOCK:
            return
        held, before = self.held(), self.manager.usage()
        num_new = -(-num_tokens // BLOCK) - self.num_held[name]
        grown = self.manager.grow(name, num_tokens)
        assert grown == (num_new <= NUM_BLOCKS - len(held))
        if not grown:
            assert self.manager.usage() == before
            return
        self.apply_writes()
        self.tokens[name] += [token] * more
        self.num_held[name] += num_new
        assert not held & set(self.blocks(name)[self.num_held[name] - num_new :])
        self.lend(num_new, held)

    @precondition(lambda self: self.tokens)
    @rule(number=PICK, more=st.integers(1, 6))
    def compute_and_register(self, number: int, more: int) -> None:
        name = self.pick(number)
        self.compute(name, min(len(self.tokens[name]), self.computed[name] + more))

    def compute(self, name: str, upto: int) -> None:
        """What a step does: writes the KV of tokens [computed, upto) through the table; then full blocks become findable."""
        old = self.blocks(name)
        for end in range(self.computed[name] + 1, upto + 1):
            self.memory[old[(end - 1) // BLOCK]] = tuple(self.tokens[name][:end])
        self.computed[name] = upto
        self.manager.register(name, self.tokens[name], upto)
        self.apply_writes()
        for i, block in enumerate(self.blocks(name)):
            if block != old[i]:
                assert self.memory[block] == self.memory[old[i]], "moved to a block with other KV"
                self.saw("join")

    @precondition(lambda self: self.tokens)
    @rule(number=PICK, reuse=st.sampled_from([True, True, False]))
    def end(self, number: int, reuse: bool) -> None:
        self.release(self.pick(number), reuse)

    def release(self, name: str, reuse: bool) -> None:
        before = self.held()
        freed = self.manager.release(name, reuse)
        for state in (self.tokens, self.row, self.computed, self.num_held):
            del state[name]
        assert set(freed) == before - self.held()

    def drain(self) -> None:
        """Everyone who holds the top unit ends, so that it can be restored."""
        for name in sorted(self.tokens):
            if self.num_open and self.inside(self.num_open - 1) & set(self.blocks(name)):
                self.release(name, True)

    @rule(unit=st.integers(0, UNITS - 1), take_first=st.booleans(), drain_first=st.booleans())
    def begin_restore(self, unit: int, take_first: bool, drain_first: bool) -> None:
        if drain_first:
            self.drain()
        top = self.num_open - 1
        free = top >= 0 and not self.inside(top) & self.held()
        assert self.region.next_to_restore() == (top if free else None)
        if unit != top or not free:
            self.refused(self.manager.begin_restore, unit)
        if not free:
            return
        if top in self.cancelled:
            if not take_first:
                self.refused(self.manager.begin_restore, top)
                return
            self.take_cancelled()
        num_cached = self.manager.usage().num_cached
        self.manager.begin_restore(top)
        self.saw("begin")
        if self.manager.usage().num_cached < num_cached:
            self.saw("forget")
        self.num_open -= 1
        self.restoring.add(top)
        for block in self.inside(top):
            self.memory[block] = LOST

    @rule(number=PICK, unit=st.integers(0, UNITS - 1))
    def finish_restore(self, number: int, unit: int) -> None:
        if unit not in self.restoring:
            self.refused(self.manager.finish_restore, unit)
        if self.restoring:
            unit = sorted(self.restoring)[number % len(self.restoring)]
            self.manager.finish_restore(unit)
            self.saw("finish")
            self.restoring.remove(unit)
            for block in self.inside(unit):
                self.memory[block] = RESIDUAL

    @rule()
    def take_cancelled(self) -> None:
        assert list(self.manager.take_cancelled()) == self.cancelled
        self.cancelled.clear()

    @rule(number=PICK, limit=st.sampled_from([1, PER_UNIT, PER_UNIT]))
    def compact(self, number: int, limit: int) -> None:
        unit = self.num_open - 1 - number % 2 if self.num_open > 1 else 0
        held = self.held()
        sources = sorted(self.inside(unit) & held)
        lower = set(range(BASE + unit * PER_UNIT)) - held
        before = {name: [self.memory[block] for block in self.blocks(name)] for name in self.tokens}
        moves = self.manager.compact(unit, limit)
        if not sources or len(sources) > limit or len(sources) > len(lower):
            assert moves == []
            return
        self.saw("compact")
        assert [source for source, _ in moves] == sources
        assert len({target for _, target in moves} & lower) == len(moves)
        for source, target in moves:
            self.memory[target] = self.memory[source]
            self.memory[source] = LOST
        self.apply_writes()
        assert before == {name: [self.memory[block] for block in self.blocks(name)] for name in self.tokens}
        assert not self.inside(unit) & self.held()

    @rule()
    def forget_content(self) -> None:
        if self.next_id % 8 == 0:  # rarely
            self.manager.forget_content()
            assert self.manager.usage().num_cached == 0

    @invariant()
    def adds_up(self) -> None:
        type(self).num_operations += 1
        self.manager.check()
        held, manager, usage = self.held(), self.manager, self.manager.usage()
        num_open = BASE + self.num_open * PER_UNIT
        assert (manager.open_blocks, manager.held_blocks, manager.num_available) == (num_open, len(held), NUM_BLOCKS - len(held))
        assert (usage.num_open, usage.num_held, usage.num_free + usage.num_cached) == (num_open, len(held), num_open - len(held))
        assert usage.by_request == self.num_held
        in_base = len(held & set(range(BASE)))
        size = UNIT_BYTES // PER_UNIT
        assert (usage.bytes.base_held, usage.bytes.lent_held) == (in_base * size, (len(held) - in_base) * size)
        assert usage.bytes.base_free + usage.bytes.base_cached == (BASE - in_base) * size
        assert (usage.bytes.lent, usage.bytes.restoring) == (self.num_open * UNIT_BYTES, len(self.restoring) * UNIT_BYTES)
        assert usage.bytes.backed == (UNITS - self.num_open - len(self.restoring)) * UNIT_BYTES
        for unit in range(UNITS):
            count = len(self.inside(unit) & held)
            kv = "FREE" if not count else "FULL" if count == PER_UNIT else "AVAIL"
            assert self.region.state(unit) == ("RESTORING" if unit in self.restoring else kv if unit < self.num_open else "BACKED")
        for entry, (first, end) in enumerate(SPANS):
            touched = {BASE + byte * PER_UNIT // UNIT_BYTES for byte in range(first, end)}
            whole = {block for block in touched for unit in range(UNITS) if block in self.inside(unit)}
            if manager.resident()[entry]:
                assert all(self.memory[block] == RESIDUAL for block in whole), "a residual is read that was overwritten"
            else:
                assert {(block - BASE) // PER_UNIT for block in whole} & (set(range(self.num_open)) | self.restoring)


@pytest.mark.timeout(120 + OPERATIONS // 100)
def test_manager_agrees_with_the_model():
    """The machine asserts in each of its rules and in its invariant; derandomized, so a failure repeats."""
    Machine.num_operations, Machine.num_seen = 0, {}
    limits = settings(
        max_examples=OPERATIONS * 7 // STEPS // 5,
        stateful_step_count=STEPS,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Machine, settings=limits)
    print(f"{Machine.num_operations} operations: {Machine.num_seen}")
    assert Machine.num_operations >= OPERATIONS
    for what in ("lend", "cancel", "no room", "reuse", "join", "begin", "forget", "finish", "compact"):
        assert Machine.num_seen.get(what, 0) > OPERATIONS // 400, f"the walk hardly ever reaches: {what}"
