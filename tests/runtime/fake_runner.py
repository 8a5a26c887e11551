"""A runner without a model: it keeps KV as (request, position, token) triples in slots, as a device would, and checks every read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch

from depthfx.records import Chunk, StepPlan, StepResult


def next_token(tokens: Sequence[int], vocab_size: int) -> int:
    """The fake model: the next token is a hash of all tokens before it."""
    text = ",".join(map(str, tokens)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") % vocab_size


def continuation(prompt: Sequence[int], num_tokens: int, vocab_size: int, eos: Sequence[int] = ()) -> list[int]:
    """What the fake model produces after ``prompt``: at most ``num_tokens`` tokens, up to the first of ``eos``."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, vocab_size))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]


class FakeRunner:
    """Runs steps at `wait` if ``delayed`` (as a device does, after the next one was queued), else at `launch`.

    A slot of the simulated KV holds (position, token); `truth` maps a request id to its true tokens as the test knows
    them: a prompt to start with, then whatever this runner sampled. Every sampled row reads its whole context through
    the block table and must find exactly these tokens.
    """

    def __init__(self, num_blocks: int, block_tokens: int, num_rows: int, num_columns: int, vocab_size: int, delayed: bool = False) -> None:
        self.block_tokens = block_tokens
        self.vocab_size = vocab_size
        self.delayed = delayed
        self.tables = [[-1] * num_columns for _ in range(num_rows)]
        self.kv: dict[int, tuple[int, int]] = {}
        self.host: dict[int, list[tuple[int, int] | None]] = {}  # slot -> what the slots of a block held
        self.num_blocks = num_blocks
        self.prompts: dict[str, list[int]] = {}
        self.previous: StepPlan | None = None
        self.previous_tokens: tuple[int, ...] = ()
        self.plans: list[StepPlan] = []
        self.nan: Callable[[Chunk], bool] = lambda chunk: False
        self.fail_launch: dict[int, BaseException] = {}
        self.fail_wait: dict[int, BaseException] = {}
        self.num_waits = 0

    def launch(self, plan: StepPlan) -> StepPlan | StepResult:
        if plan.step_id in self.fail_launch:
            raise self.fail_launch[plan.step_id]
        self.plans.append(plan)
        return plan if self.delayed else self._run(plan)

    def wait(self, handle: StepPlan | StepResult) -> StepResult:
        result = handle if isinstance(handle, StepResult) else self._run(handle)
        if result.step_id in self.fail_wait:
            raise self.fail_wait[result.step_id]
        self.num_waits += 1
        return result

    def release(self) -> None:
        """There is no memory to give back."""

    def _run(self, plan: StepPlan) -> StepResult:
        self._check_shape(plan)
        self._move(plan)
        for row, column, block in plan.table_writes:
            assert 0 <= block < self.num_blocks
            self.tables[row][column] = block
        inputs = [(chunk, self._tokens(chunk)) for chunk in plan.decodes + plan.prefills]
        written: set[int] = set()
        for chunk, tokens in inputs:  # all rows write before any row reads, as in one layer of a step
            for offset, token in enumerate(tokens):
                slot = self._slot(chunk.table_row, chunk.start + offset)
                assert slot not in written, f"two rows of step {plan.step_id} write slot {slot}"
                written.add(slot)
                self.kv[slot] = (chunk.start + offset, token)
        token_ids: list[int] = []
        finite: list[bool] = []
        logits: dict[str, torch.Tensor] = {}
        for chunk, tokens in inputs:
            context = self._read(chunk, chunk.start + len(tokens))
            if not chunk.samples:
                continue
            finite.append(not self.nan(chunk))
            token = next_token(context, self.vocab_size) if finite[-1] else -1
            if chunk.sampling.external and finite[-1]:
                logits[chunk.request_id] = torch.nn.functional.one_hot(torch.tensor(token), self.vocab_size).float()
                token = -1
            token_ids.append(token)
        self.previous, self.previous_tokens = plan, tuple(token_ids)
        return StepResult(plan.step_id, tuple(token_ids), tuple(finite), logits)

    def _move(self, plan: StepPlan) -> None:
        """All saves, then all loads, each kind in the opposite order, since copies of one kind may be reordered."""
        assert not {slot for _, slot in plan.saves} & {slot for slot, _ in plan.loads}, "a slot is saved to before it was loaded from"
        assert len({slot for _, slot in plan.saves}) == len(plan.saves) and len({block for _, block in plan.loads}) == len(plan.loads)
        size = self.block_tokens
        for block, slot in reversed(plan.saves):
            self.host[slot] = [self.kv.get(block * size + i) for i in range(size)]
        for slot, block in reversed(plan.loads):
            for i, content in enumerate(self.host[slot]):
                assert content is not None
                self.kv[block * size + i] = content

    def _check_shape(self, plan: StepPlan) -> None:
        names = [chunk.request_id for chunk in plan.decodes + plan.prefills]
        assert names, "an empty step"
        assert len(names) == len(set(names)), f"step {plan.step_id} names a request twice"
        assert len({(row, column) for row, column, _ in plan.table_writes}) == len(plan.table_writes)
        assert all(chunk.samples and chunk.num_tokens == 1 for chunk in plan.decodes)
        assert all(chunk.token_ids and chunk.source == -1 for chunk in plan.prefills)

    def _tokens(self, chunk: Chunk) -> tuple[int, ...]:
        if chunk.source < 0:
            assert chunk.token_ids
            return chunk.token_ids
        assert not chunk.token_ids
        assert self.previous is not None
        assert self.previous.sampled[chunk.source].request_id == chunk.request_id, "the source row belongs to another request"
        return (self.previous_tokens[chunk.source],)

    def _slot(self, table_row: int, position: int) -> int:
        block = self.tables[table_row][position // self.block_tokens]
        assert block >= 0, f"position {position} of table row {table_row} has no block"
        return block * self.block_tokens + position % self.block_tokens

    def _read(self, chunk: Chunk, num_tokens: int) -> list[int]:
        context = []
        for position in range(num_tokens):
            at, token = self.kv[self._slot(chunk.table_row, position)]
            assert at == position, f"{chunk.request_id}: position {position} holds KV of position {at}"
            context.append(token)
        self._check_context(chunk, context)
        return context

    def _check_context(self, chunk: Chunk, context: list[int]) -> None:
        prompt = self.prompts.get(chunk.request_id)
        if prompt is None or self._follows_nan(chunk, context):
            return
        known = prompt[: len(context)]
        assert context[: len(known)] == known, f"{chunk.request_id}: KV of the prompt belongs to other tokens"
        if not chunk.sampling.external:
            for i in range(len(prompt), len(context)):
                assert context[i] == next_token(context[:i], self.vocab_size), f"{chunk.request_id}: wrong KV at {i}"
            assert chunk.sample_index == max(0, len(context) - len(prompt)) or not chunk.samples

    def _follows_nan(self, chunk: Chunk, context: list[int]) -> bool:
        return chunk.source >= 0 and context[-1] < 0
