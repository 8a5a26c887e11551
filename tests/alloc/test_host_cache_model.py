"""Manager and host cache against an independent model of both, over random plans that overlap, land and fail."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

import pytest

from depthfx.alloc.host_cache import HostCache
from depthfx.alloc.manager import MemoryManager

NUM_BLOCKS, MAX_MOVES, BLOCK, ROWS, COLUMNS = 5, 3, 2, 3, 4
Content = tuple[bytes, tuple[int, ...]]  # salt and all tokens up to the end of a block


@dataclass
class Flight:
    computed: dict[str, int]  # request -> its tokens that have KV after the step
    saved: dict[int, Content | None]  # slot -> content
    loaded: dict[int, Content | None]  # block -> content
    stale: bool = False


class Walk:
    """The model keeps the bytes of device and host as contents, and moves and writes them as the plans say.

    It knows what can be found on the host from the saves of plans that landed, so it can say how many tokens an admission must reload.
    """

    def __init__(self, seed: int, num_slots: int) -> None:
        self.rng = random.Random(seed)
        self.manager = MemoryManager(NUM_BLOCKS, BLOCK, ROWS, COLUMNS, host=HostCache(num_slots, NUM_BLOCKS, MAX_MOVES))
        self.table: dict[tuple[int, int], int] = {}
        self.device: dict[int, Content | None] = {}
        self.host: dict[int, Content | None] = {}
        self.findable: dict[int, Content] = {}
        self.tokens: dict[str, list[int]] = {}
        self.salt: dict[str, bytes] = {}
        self.row: dict[str, int] = {}
        self.planned: dict[str, int] = {}  # tokens that have KV after all plans
        self.num_held: dict[str, int] = {}
        self.new: dict[str, int] = {}  # admitted since the last plan -> blocks that need not be computed
        self.ended: set[str] = set()  # failed, and still named by a plan
        self.flights: deque[Flight] = deque()
        self.next_id = self.num_moved = 0

    def blocks(self, name: str) -> list[int]:
        return [self.table[self.row[name], column] for column in range(self.num_held[name])]

    def held(self) -> set[int]:
        return {block for name in self.tokens for block in self.blocks(name)}

    def apply_writes(self) -> None:
        for row, column, block in self.manager.take_table_writes():
            self.table[row, column] = block

    def content(self, name: str, column: int) -> Content:
        return self.salt[name], tuple(self.tokens[name][: (column + 1) * BLOCK])

    def named(self, name: str) -> bool:
        return any(name in flight.computed for flight in self.flights)

    def admit(self) -> None:
        # few tokens and few salts, so that prefixes often agree
        prompt = [int(self.rng.random() < 0.15) for _ in range(self.rng.randint(1, BLOCK * COLUMNS))]
        salt, headroom = self.rng.choice([b"", b"", b"fast"]), self.rng.choice([0, 0, 1])
        name = f"r{self.next_id}"
        self.next_id += 1
        before, held = self.manager.usage(), self.held()
        place = self.manager.admit(name, prompt, salt, headroom)
        if place is None:
            assert self.manager.usage() == before
            if not self.new:  # then nothing but room can be the reason
                needed = -(-len(prompt) // BLOCK) + headroom
                assert len(self.tokens) == ROWS or needed > NUM_BLOCKS - len(held)
            return
        self.apply_writes()
        self.tokens[name], self.salt[name], self.row[name] = list(prompt), salt, place.table_row
        self.num_held[name] = -(-len(prompt) // BLOCK)
        first = column = place.reused_tokens // BLOCK
        for i, block in enumerate(self.blocks(name)):
            assert i < first or block not in held, "a block was given to two owners"
        while (column + 1) * BLOCK < len(prompt) and self.content(name, column) in self.findable.values():
            column += 1
        assert place.reloaded_tokens == (column - first) * BLOCK
        self.planned[name] = column * BLOCK
        self.new[name] = column

    def grow(self) -> None:
        name, token = self.rng.choice(sorted(self.tokens)), int(self.rng.random() < 0.15)
        num_tokens = len(self.tokens[name]) + 1
        if num_tokens > COLUMNS * BLOCK or name in self.ended:
            return
        num_new = -(-num_tokens // BLOCK) - self.num_held[name]
        assert self.manager.grow(name, num_tokens) == (num_new <= NUM_BLOCKS - len(self.held()))
        if num_new <= NUM_BLOCKS - len(self.held()):
            self.apply_writes()
            self.tokens[name].append(token)
            self.num_held[name] += num_new

    def plan(self) -> None:
        """A step is planned and launched: all saves, all loads, then new KV."""
        saves, loads = self.manager.take_moves()
        flight = Flight({}, {}, {})
        for block, slot in saves:
            content = self.device.get(block)
            assert content is not None, "what is saved is no whole block"
            assert content not in [*self.findable.values(), *flight.saved.values()], "content is saved twice"
            flight.saved[slot] = self.host[slot] = content
            self.findable.pop(slot, None)
        for slot, block in loads:
            assert slot not in flight.saved and block not in flight.loaded
            flight.loaded[block] = self.device[block] = self.host[slot]
        self.num_moved += len(loads)
        for name in sorted(self.tokens):
            if name in self.ended:
                continue
            for column in range(self.new.get(name, 0)):
                assert self.device[self.blocks(name)[column]] == self.content(name, column), "a reused or reloaded block holds other KV"
            upto = min(len(self.tokens[name]), self.planned[name] + self.rng.randint(0, 4))
            for start in range(self.planned[name], upto):
                column, last = divmod(start, BLOCK)
                self.device[self.blocks(name)[column]] = self.content(name, column) if last == BLOCK - 1 else None
            if upto > self.planned[name] or name in self.new:
                flight.computed[name] = self.planned[name] = upto
        self.new.clear()
        self.flights.append(flight)

    def land(self) -> None:
        flight = self.flights.popleft()
        self.manager.moves_done()
        for slot, content in flight.saved.items():
            if not flight.stale and content is not None:
                self.findable[slot] = content
        for name, computed in flight.computed.items():
            if name in self.ended:
                self.release_if_unnamed(name)
                continue
            old = self.blocks(name)
            self.manager.register(name, self.tokens[name], computed)
            self.apply_writes()
            for a, b in zip(old, self.blocks(name)):
                assert a == b or self.device[a] == self.device[b], "moved to a block with other KV"

    def fail(self) -> None:
        """The step failed; its moves took place or not."""
        executed = self.rng.random() < 0.5
        flight = self.flights.popleft()
        for name in flight.computed:
            self.ended.add(name)
            self.release_if_unnamed(name)
        self.manager.moves_failed()
        self.manager.resend_tables()
        self.apply_writes()
        if not executed:
            for bytes_, moved in ((self.host, flight.saved), (self.device, flight.loaded)):
                for place, content in moved.items():
                    if bytes_[place] is content:  # not written since
                        bytes_[place] = None

    def release_if_unnamed(self, name: str, reuse: bool = True) -> None:
        if self.named(name):
            return
        self.manager.release(name, reuse)
        self.ended.discard(name)
        for state in (self.tokens, self.salt, self.row, self.planned, self.num_held):
            del state[name]
        self.new.pop(name, None)
        if not reuse:
            self.nothing_is_findable()

    def nothing_is_findable(self) -> None:
        self.findable.clear()
        for flight in self.flights:
            flight.stale = True

    def release(self) -> None:
        name, reuse = self.rng.choice(sorted(self.tokens)), self.rng.random() < 0.97
        if name not in self.ended:
            self.release_if_unnamed(name, reuse)

    def forget_content(self) -> None:
        self.manager.forget_content()
        self.nothing_is_findable()

    def adds_up(self) -> None:
        self.manager.check()
        assert self.manager.host is not None and self.manager.host.num_findable == len(self.findable)
        for slot, content in self.findable.items():
            assert self.host[slot] == content, "a findable slot was overwritten"
        assert self.manager.usage().num_held == len(self.held())

    def step(self) -> None:
        """One call that is allowed now."""
        weights = {
            self.admit: 4, self.grow: 3 * bool(self.tokens), self.release: 2 * bool(self.tokens), self.plan: 6 * (len(self.flights) < 2),
            self.land: 6 * bool(self.flights), self.fail: 0.3 * bool(self.flights), self.forget_content: 0.03,
        }  # fmt: skip
        self.rng.choices(list(weights), list(weights.values()))[0]()


@pytest.mark.parametrize(("seed", "num_slots"), [(0, 6), (1, 6), (2, 1)])
def test_manager_and_host_cache_agree_with_the_model(seed, num_slots):
    walk = Walk(seed, num_slots)
    for _ in range(15_000):
        walk.step()
        walk.adds_up()
    host = walk.manager.host
    assert host is not None
    print(f"{walk.next_id} requests, {host.num_saved} saves, {host.num_reloaded} reloads, {host.num_dropped} dropped")
    assert host.num_saved > 500 and host.num_reloaded > (80 if num_slots > 1 else 0)
    assert (host.num_dropped > 100) == (num_slots == 1)
