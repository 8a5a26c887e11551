"""The memory manager against an independent model of it, over random sequences of calls."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from depthfx.alloc.manager import MemoryManager

NUM_BLOCKS, BLOCK, ROWS, COLUMNS = 7, 2, 3, 5

# Few tokens and few salts, so that prefixes often agree.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=BLOCK * COLUMNS)
SALTS = st.sampled_from([b"", b"fast"])


class Machine(RuleBasedStateMachine):
    """The model knows contents, not mechanisms: what is written in each block, by which requests each is held.

    It replays the table writes into its own table, so all it learns about blocks is what a device would learn.
    """

    def __init__(self) -> None:
        super().__init__()
        self.manager = MemoryManager(NUM_BLOCKS, BLOCK, ROWS, COLUMNS)
        self.table: dict[tuple[int, int], int] = {}
        self.content: dict[int, tuple[bytes, tuple[int, ...]]] = {}  # block -> salt and all tokens up to its end
        self.tokens: dict[str, list[int]] = {}
        self.salt: dict[str, bytes] = {}
        self.row: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.num_held: dict[str, int] = {}
        self.next_id = 0

    def blocks(self, name: str) -> list[int]:
        return [self.table[self.row[name], column] for column in range(self.num_held[name])]

    def held(self) -> set[int]:
        return {block for name in self.tokens for block in self.blocks(name)}

    def apply_writes(self) -> None:
        for row, column, block in self.manager.take_table_writes():
            self.table[row, column] = block

    def compute(self, name: str, upto: int) -> None:
        """What a step does: writes the KV of tokens [computed, upto) through the table."""
        for end in range(BLOCK, upto + 1, BLOCK):
            if end > self.computed[name]:
                self.content[self.blocks(name)[end // BLOCK - 1]] = (self.salt[name], tuple(self.tokens[name][:end]))
        for start in range(self.computed[name], upto):
            if start // BLOCK >= upto // BLOCK:
                self.content.pop(self.blocks(name)[start // BLOCK], None)  # partly written: no whole content
        self.computed[name] = upto

    @rule(prompt=PROMPTS, salt=SALTS, headroom=st.integers(0, 2))
    def admit(self, prompt: list[int], salt: bytes, headroom: int) -> None:
        name = f"r{self.next_id}"
        self.next_id += 1
        before = self.manager.usage()
        place = self.manager.admit(name, prompt, salt, headroom)
        if place is None:
            assert self.manager.usage() == before
            if not any(s == salt and _is_prefix(t, prompt) for s, t in self.content.values()):  # nothing to share: exact
                needed = -(-len(prompt) // BLOCK) + headroom
                assert len(self.tokens) == ROWS or needed > NUM_BLOCKS - len(self.held())
            return
        assert self.manager.num_available >= headroom
        assert len(prompt) > place.reused_tokens
        assert place.reused_tokens % BLOCK == 0
        assert place.table_row not in self.row.values()
        held = self.held()
        self.apply_writes()
        self.tokens[name], self.salt[name], self.row[name] = list(prompt), salt, place.table_row
        self.computed[name], self.num_held[name] = place.reused_tokens, -(-len(prompt) // BLOCK)
        for i, block in enumerate(self.blocks(name)):
            if (i + 1) * BLOCK <= place.reused_tokens:
                assert self.content[block] == (salt, tuple(prompt[: (i + 1) * BLOCK])), "a reused block holds other KV"
            else:
                assert block not in held, "a block was given to two owners"
                self.content.pop(block, None)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), more=st.integers(0, 4))
    def compute_and_register(self, data: st.DataObject, more: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        upto = min(len(self.tokens[name]), self.computed[name] + more)
        self.compute(name, upto)
        old = self.blocks(name)
        self.manager.register(name, self.tokens[name], upto)
        self.apply_writes()
        for i, block in enumerate(self.blocks(name)):
            if block != old[i]:
                assert self.content[block] == self.content[old[i]], "moved to a block with other KV"

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data: st.DataObject, token: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        num_tokens = len(self.tokens[name]) + 1
        if num_tokens > COLUMNS * BLOCK:
            return
        held = self.held()
        num_new = -(-num_tokens // BLOCK) - self.num_held[name]
        grown = self.manager.grow(name, num_tokens)
        assert grown == (num_new <= NUM_BLOCKS - len(held))
        if grown:
            self.apply_writes()
            self.tokens[name].append(token)
            self.num_held[name] += num_new
            if num_new:
                assert self.blocks(name)[-1] not in held
                self.content.pop(self.blocks(name)[-1], None)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), reuse=st.booleans())
    def release(self, data: st.DataObject, reuse: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        before, mine = self.held(), self.blocks(name)
        freed = self.manager.release(name, reuse)
        for state in (self.tokens, self.salt, self.row, self.computed, self.num_held):
            del state[name]
        assert set(freed) == before - self.held()
        if not reuse:
            for block in mine:
                if block not in self.held():
                    self.content.pop(block, None)

    @invariant()
    def adds_up(self) -> None:
        self.manager.check()
        usage = self.manager.usage()
        assert usage.num_held == len(self.held())
        assert usage.num_free + usage.num_cached == NUM_BLOCKS - len(self.held()) == self.manager.num_available
        assert usage.by_request == self.num_held


def _is_prefix(short: tuple[int, ...], tokens: list[int]) -> bool:
    return tuple(tokens[: len(short)]) == short


def test_manager_agrees_with_the_model():
    """The machine asserts in each of its rules and in its invariant; derandomized, so a failure repeats."""
    limits = settings(max_examples=100, stateful_step_count=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    assert run_state_machine_as_test(Machine, settings=limits) is None
