"""A walk of the memory manager over unified memory, against an independent model of it: rules as methods, and a seeded driver.

The driver needs nothing but ``random``, so it also runs where hypothesis is not installed; `test_shared_model` has the same rules as a state
machine, which finds short sequences. A failure names the seed and the calls that led to it: ``Walk.replay`` makes them again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from depthfx.alloc.manager import MemoryManager
from depthfx.alloc.units import SharedRegion
from depthfx.errors import InternalError
from tests.alloc.walk_world import BASE, NUM_BLOCKS, PER_UNIT, UNITS, World

BLOCK, ROWS, COLUMNS = 2, 4, 6  # tokens of a block; rows and columns of the block table
STEPS = 50  # operations of one walk
RESIDUAL, LOST = "residual", "lost"
REACHED = ("lend", "cancel", "no room", "reuse", "join", "begin", "forget", "finish", "compact")
PICK, FLAG = range(1 << 16), (False, True)
Choices = dict[str, Sequence[Any]]


def step(loaded: bool = False, **choices: Sequence[Any]) -> Callable[[Any], Any]:
    """Marks a rule: what each argument is drawn from, and whether a request must be there (``loaded``)."""

    def mark(method: Any) -> Any:
        method.loaded, method.choices = loaded, choices
        return method

    return mark


class Walk:
    """The model is the memory itself: what the bytes of each block are, and which blocks each request reads through its table.

    A block's bytes are :data:`RESIDUAL`, :data:`LOST` or what its holder wrote: its name when it got the block, KV (all tokens up to its end)
    once it is computed. The model knows two rules of the manager: how many units an allocation must lend (those that blocks nobody holds do
    not cover, and no more), and that units come and go at one boundary. ``world`` has the bytes; ``seen`` counts what happened.
    """

    def __init__(self, world: World, seen: Counter[str]) -> None:
        self.world, self.seen = world, seen
        world.begin()
        self.region = SharedRegion(world.layout)
        self.manager = MemoryManager(NUM_BLOCKS, BLOCK, ROWS, COLUMNS, region=self.region)
        self.memory: list = ["nobody's"] * BASE + [RESIDUAL] * (NUM_BLOCKS - BASE)
        self.num_open = 0
        self.restoring: set[int] = set()
        self.cancelled: list[int] = []
        self.table: dict[tuple[int, int], int] = {}
        self.tokens: dict[str, list[int]] = {}
        self.row: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.num_held: dict[str, int] = {}
        self.next_id = 0

    @classmethod
    def rules(cls) -> Iterator[tuple[str, Choices, bool]]:
        """Name, choices and precondition of each rule."""
        for name, method in vars(cls).items():
            if hasattr(method, "choices"):
                yield name, method.choices, method.loaded

    @classmethod
    def replay(cls, world: World, calls: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Makes the calls of a failure again, in a walk of their own."""
        walk = cls(world, Counter())
        for name, arguments in calls:
            getattr(walk, name)(**arguments)
            walk.adds_up()
        walk.end_here()

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

    def write(self, block: int, content: object) -> None:
        self.memory[block] = content
        self.world.stamp([block], content)

    def intact(self, blocks: Sequence[int]) -> None:
        """The bytes of blocks are what the model says."""
        self.world.holds(blocks, [self.memory[block] for block in blocks])

    def refused(self, call: Callable[..., object], *args: object) -> None:
        """The call raises and changes nothing that can be seen."""
        before = (self.manager.usage(), self.manager.resident())
        with pytest.raises(InternalError):
            call(*args)
        assert (self.manager.usage(), self.manager.resident()) == before
        self.manager.check()

    def take(self, name: str, first: int, held: set[int]) -> None:
        """The request got its blocks from the ``first`` on, ``held`` were held before: what must have been lent, and the holder's stamps."""
        mine = self.blocks(name)[first:]
        assert not held & set(mine), "a block was given to two owners"
        missing = len(mine) - (BASE + self.num_open * PER_UNIT - len(held))
        for _ in range(-(-max(0, missing) // PER_UNIT)):
            unit = self.num_open
            self.num_open += 1
            self.seen["lend"] += 1
            self.world.lend(unit, unit in self.restoring)
            for block in self.inside(unit):
                self.memory[block] = LOST
            if unit in self.restoring:
                self.restoring.remove(unit)
                self.cancelled.append(unit)
                self.seen["cancel"] += 1
        for i, block in enumerate(mine, first):
            self.write(block, (name, i))

    @step(zeros=range(1, 9), ones=range(5), headroom=(0, 0, 0, 1, 3), compute=FLAG)
    def admit(self, zeros: int, ones: int, headroom: int, compute: bool) -> None:
        """Zeros, then ones: prefixes often agree."""
        name, prompt = f"r{self.next_id}", [0] * zeros + [1] * ones
        self.next_id += 1
        before, held = self.manager.usage(), self.held()
        place = self.manager.admit(name, prompt, b"", headroom)
        num_blocks = -(-len(prompt) // BLOCK)
        if place is None:
            assert self.manager.usage() == before
            assert len(self.tokens) == ROWS or num_blocks + headroom > NUM_BLOCKS - len(held)
            self.seen["no room"] += 1
            return
        self.apply_writes()
        self.tokens[name], self.row[name] = prompt, place.table_row
        self.computed[name], self.num_held[name] = place.reused_tokens, num_blocks
        num_reused = place.reused_tokens // BLOCK
        reused = self.blocks(name)[:num_reused]
        for i, block in enumerate(reused):
            assert self.memory[block] == tuple(prompt[: (i + 1) * BLOCK]), "a reused block holds other bytes"
            self.seen["reuse"] += 1
        self.intact(reused)
        self.take(name, num_reused, held | set(reused))
        assert self.manager.num_available >= headroom
        if compute:
            self.compute(name, len(prompt))

    @step(loaded=True, number=PICK, token=range(2), more=range(1, 4))
    def grow(self, number: int, token: int, more: int) -> None:
        name = self.pick(number)
        num_tokens = len(self.tokens[name]) + more
        if num_tokens > COLUMNS * BLOCK:
            return
        held, before, first = self.held(), self.manager.usage(), self.num_held[name]
        num_blocks = -(-num_tokens // BLOCK)
        grown = self.manager.grow(name, num_tokens)
        assert grown == (num_blocks - first <= NUM_BLOCKS - len(held))
        if not grown:
            assert self.manager.usage() == before
            return
        self.apply_writes()
        self.tokens[name] += [token] * more
        self.num_held[name] = num_blocks
        self.take(name, first, held)

    @step(loaded=True, number=PICK, more=range(1, 7))
    def compute_and_register(self, number: int, more: int) -> None:
        name = self.pick(number)
        self.compute(name, min(len(self.tokens[name]), self.computed[name] + more))

    def compute(self, name: str, upto: int) -> None:
        """What a step does: writes the KV of tokens [computed, upto) through the table; then full blocks become findable."""
        old, first = self.blocks(name), self.computed[name] // BLOCK
        for i in range(first, -(-upto // BLOCK)):
            if (end := min(upto, (i + 1) * BLOCK)) > self.computed[name]:
                self.write(old[i], tuple(self.tokens[name][:end]))
        self.computed[name] = upto
        self.manager.register(name, self.tokens[name], upto)
        self.apply_writes()
        for i, block in enumerate(self.blocks(name)):
            if block != old[i]:
                assert self.memory[block] == self.memory[old[i]], "moved to a block with other KV"
                self.intact([block])
                self.seen["join"] += 1

    @step(loaded=True, number=PICK, reuse=(True, True, False))
    def end(self, number: int, reuse: bool) -> None:
        self.release(self.pick(number), reuse)

    def release(self, name: str, reuse: bool) -> None:
        before = self.held()
        self.intact(self.blocks(name))
        freed = self.manager.release(name, reuse)
        for state in (self.tokens, self.row, self.computed, self.num_held):
            del state[name]
        assert set(freed) == before - self.held()

    def drain(self) -> None:
        """Everyone who holds the top unit ends, so that it can be restored."""
        for name in sorted(self.tokens):
            if self.num_open and self.inside(self.num_open - 1) & set(self.blocks(name)):
                self.release(name, True)

    @step(unit=range(UNITS), take_first=FLAG, drain_first=FLAG)
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
        self.world.restore(top)
        self.seen["begin"] += 1
        self.seen["forget"] += self.manager.usage().num_cached < num_cached
        self.num_open -= 1
        self.restoring.add(top)
        for block in self.inside(top):
            self.memory[block] = LOST

    @step(number=PICK, unit=range(UNITS))
    def finish_restore(self, number: int, unit: int) -> None:
        if unit not in self.restoring:
            self.refused(self.manager.finish_restore, unit)
        if self.restoring:
            unit = sorted(self.restoring)[number % len(self.restoring)]
            self.world.finish(unit)
            before = self.manager.resident()
            self.manager.finish_restore(unit)
            self.seen["finish"] += 1
            self.restoring.remove(unit)
            for block in self.inside(unit):
                self.memory[block] = RESIDUAL
            for entry, (was, now) in enumerate(zip(before, self.manager.resident())):
                if now and not was:
                    self.world.verify(entry)

    @step()
    def take_cancelled(self) -> None:
        assert list(self.manager.take_cancelled()) == self.cancelled
        self.cancelled.clear()

    @step(number=PICK, limit=(1, PER_UNIT, PER_UNIT))
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
        self.seen["compact"] += 1
        assert [source for source, _ in moves] == sources
        assert len({target for _, target in moves} & lower) == len(moves)
        self.world.copy(moves)
        for source, target in moves:
            self.memory[target] = self.memory[source]
            self.memory[source] = LOST
        self.apply_writes()
        assert before == {name: [self.memory[block] for block in self.blocks(name)] for name in self.tokens}
        self.intact([target for _, target in moves])
        assert not self.inside(unit) & self.held()

    @step()
    def forget_content(self) -> None:
        if self.next_id % 8 == 0:  # rarely
            self.manager.forget_content()
            assert self.manager.usage().num_cached == 0

    def adds_up(self) -> None:
        """After each operation: the manager proves itself, and agrees with the model."""
        self.seen["operations"] += 1
        self.manager.check()
        held, manager, usage = self.held(), self.manager, self.manager.usage()
        num_open = BASE + self.num_open * PER_UNIT
        assert (manager.open_blocks, manager.held_blocks, manager.num_available) == (num_open, len(held), NUM_BLOCKS - len(held))
        assert (usage.num_open, usage.num_held, usage.num_free + usage.num_cached) == (num_open, len(held), num_open - len(held))
        assert usage.by_request == self.num_held
        in_base = len(held & set(range(BASE)))
        size, unit_bytes = self.world.layout.block_bytes, self.world.layout.unit_bytes
        assert (usage.bytes.base_held, usage.bytes.lent_held) == (in_base * size, (len(held) - in_base) * size)
        assert usage.bytes.base_free + usage.bytes.base_cached == (BASE - in_base) * size
        assert (usage.bytes.lent, usage.bytes.restoring) == (self.num_open * unit_bytes, len(self.restoring) * unit_bytes)
        assert usage.bytes.backed == (UNITS - self.num_open - len(self.restoring)) * unit_bytes
        for unit in range(UNITS):
            count = len(self.inside(unit) & held)
            kv = "FREE" if not count else "FULL" if count == PER_UNIT else "AVAIL"
            assert self.region.state(unit) == ("RESTORING" if unit in self.restoring else kv if unit < self.num_open else "BACKED")
        for entry, (first, end) in enumerate(self.world.layout.spans):
            touched = range(first // unit_bytes, -(-end // unit_bytes))
            if manager.resident()[entry]:
                whole = all(self.memory[block] == RESIDUAL for unit in touched for block in self.inside(unit))
                assert whole, "a residual is read that was overwritten"
            else:
                assert set(touched) & (set(range(self.num_open)) | self.restoring)

    def end_here(self) -> None:
        """Every byte that has an owner is its owner's, and no mapping has changed."""
        self.intact(sorted(self.held()))
        for entry, resident in enumerate(self.manager.resident()):
            if resident:
                self.world.verify(entry)
        assert self.world.is_unchanged()


def drive(world: World, seed: int, enough: Callable[[int], bool]) -> Counter[str]:
    """Walks of :data:`STEPS` random operations until ``enough(operations)``; what they reached."""
    seen: Counter[str] = Counter()
    number, known = 0, list(Walk.rules())
    while not enough(seen["operations"]):
        draw, calls = random.Random(f"{seed} {number}"), []
        walk, num_first = Walk(world, seen), draw.randrange(2, ROWS + 1)  # it begins under load
        try:
            for turn in range(STEPS):
                rules = [(name, choices) for name, choices, loaded in known if walk.tokens or not loaded]
                name, choices = draw.choice(rules) if turn >= num_first else next(r for r in rules if r[0] == "admit")
                calls.append((name, {argument: draw.choice(values) for argument, values in choices.items()}))
                getattr(walk, name)(**calls[-1][1])
                walk.adds_up()
            walk.end_here()
        except BaseException as error:
            raise AssertionError(f"seed {seed}, walk {number}, after {calls}: {error!r}") from error
        number += 1
    return seen


def check_reached(seen: Counter[str]) -> None:
    """Asserts that a walk came everywhere."""
    for what in REACHED:
        assert seen[what] > seen["operations"] // 400, f"the walk hardly ever reaches: {what}, {dict(seen)}"
