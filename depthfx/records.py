"""Frozen data that crosses folders: KV shape, step inputs of the graph, step plan and step result.

Letters in shapes: T rows (packed tokens of a step), R rows that are sampled, S rows of the block table,
M blocks of one request at most, L layers, places: routed layers, P entries of precision (L, and one more where the head is nested), Hq / Hkv query / KV
heads, D head dim, B tokens of a block.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class KvShape:
    """Shape of the block-major KV pool ``[blocks, L, 2, Hkv, B, D]``: one block holds K and V of all layers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int
    element_bytes: int

    @property
    def token_bytes(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.element_bytes

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_tokens

    def pool_shape(self, num_blocks: int) -> tuple[int, int, int, int, int, int]:
        return (num_blocks, self.num_layers, 2, self.num_kv_heads, self.block_tokens, self.head_dim)


@dataclass(frozen=True)
class StepInputs:
    """What one step hands to the graph, under fixed names; the same tensors are the static buffers of a captured graph.

    Rows are packed: first ``num_decode_rows`` decode rows (one token of one request each), then the rows of the
    prefill chunks, chunk after chunk. A row with position -1 is padding: it writes no KV and its output is unspecified
    but finite.
    """

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int32, position of the row in its request; -1 for padding
    table_rows: torch.Tensor  # [T] int32, row of `block_tables` of the row's request
    block_tables: torch.Tensor  # [S, M] int32, block ids
    logit_rows: torch.Tensor  # [R] int64, rows whose logits are wanted
    kv_pool: torch.Tensor  # [blocks, L, 2, Hkv, B, D]
    chunk_starts: torch.Tensor  # [C + 1] int32, first row of each prefill chunk (absolute), then the end
    tile_chunks: torch.Tensor  # [Q] int32, chunk of each query tile of the prefill kernel
    tile_starts: torch.Tensor  # [Q] int32, first row of the tile within its chunk
    num_decode_rows: int
    layer_precision: torch.Tensor  # [P] int32, 1: the residual bytes of the layer's weights may be read (full); 0: not (fast)
    precision: int  # what `layer_precision` holds, for steps that are not captured: 1 all full, 0 all fast, -1 mixed or unknown
    # Of routed steps alone:
    request_ids: torch.Tensor | None = None  # [T] int64, a number of the row's request that is the same in every step
    is_prompt: torch.Tensor | None = None  # [T] bool, the row is a token of a prompt; False for the tokens of an answer
    forced_run: torch.Tensor | None = None  # [T] int32, nonzero: the row runs every layer as it is
    # [places, capacity] int8, written by the step: 1 RUN, 0 Project-Only; 2 more where the row was forced; -1 padding
    route_tape: torch.Tensor | None = None
    captured: bool = False  # the step is (to be) a captured graph: the host may not read what was decided

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(f.name for f in fields(cls))


# How a request goes through the routed layers: dense is the base model, routed asks the skipper, auto is the one that takes less time.
Depth = Literal["auto", "dense", "routed"]
# Precision that a request asks for at least: full is every bit of the FP16 weights, fast is whatever the load allows.
MinPrecision = Literal["fast", "full"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request picks its tokens and when it ends; names and meanings follow Hugging Face's ``GenerationConfig``."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 0.0  # 0: greedy; otherwise logits are divided by it
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # 1: off; over prompt and output
    seed: int = 0  # draws depend on (seed, index of the token) alone, never on the batch
    eos_token_ids: tuple[int, ...] = ()
    depth: Depth | tuple[Depth, Depth] | None = None  # of prompt and answer, or of each; None: what the engine was compiled with
    min_precision: MinPrecision = "fast"  # "full": all of its steps run in full precision; it waits until they can
    external: bool = False  # the caller picks each token: the request parks with its logits until `Engine.push_token`


# Query rows in one tile of the prefill kernel; the runner builds `tile_chunks` / `tile_starts` with it.
PREFILL_TILE_ROWS = 128


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one request in one step."""

    request_id: str
    table_row: int
    start: int  # position of the first token; KV of [0, start) is present
    token_ids: tuple[int, ...]  # empty for a decode whose token is still on the device
    source: int  # >= 0: the one token is sampled row `source` of the previous step; -1: `token_ids` holds it
    samples: bool  # the last row of the chunk yields the next token
    sample_index: int  # how many tokens the request has produced before this one
    sampling: SamplingParams
    history: tuple[int, ...] | None = None  # all tokens so far; only on the first chunk after admission, only with a repetition penalty
    routed: bool = False  # the skipper is asked; else the rows run every layer as it is
    number: int = 0  # of the request, the same in every step and every run: a hash of its id; int32, not negative
    is_prompt: bool = True  # tokens of the prompt; False: of the answer, which is computed anew after a preemption

    @property
    def num_tokens(self) -> int:
        return max(1, len(self.token_ids))


@dataclass(frozen=True)
class StepPlan:
    """Everything the runner needs for one step; the whole contract between scheduler and runner."""

    step_id: int
    decodes: tuple[Chunk, ...]
    prefills: tuple[Chunk, ...]
    table_writes: tuple[tuple[int, int, int], ...]  # (table row, column, block id), applied before the step
    precision: bytes = b""  # [P], 1: full, 0: fast; empty: weights of one precision, or a step of the warm-up (full)
    saves: tuple[tuple[int, int], ...] = ()  # (block, host slot), carried out before the step, all of them before the loads
    loads: tuple[tuple[int, int], ...] = ()  # (host slot, block)
    probe: bool = False  # what the skipper says of dense rows is noted on the tape, though they run every layer

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(c.num_tokens for c in self.prefills)

    @property
    def routed(self) -> bool:
        """Whether the step asks the skipper."""
        return self.probe or any(c.routed for c in self.decodes) or any(c.routed for c in self.prefills)

    @property
    def sampled(self) -> tuple[Chunk, ...]:
        """Chunks that yield a token, in the order of the sampled rows: decodes first."""
        return tuple(c for c in self.decodes + self.prefills if c.samples)


@dataclass(frozen=True)
class StepResult:
    """Tokens of one finished step, aligned with ``StepPlan.sampled``."""

    step_id: int
    token_ids: tuple[int, ...]  # -1 where the logits were not finite or the request samples outside the engine
    finite: tuple[bool, ...]  # False where the row's logits held NaN
    logits: dict[str, torch.Tensor]  # request id -> [V] float32, for requests that asked for logits
    # [places, T] int8 on the host, of a routed step: 1 RUN, 0 Project-Only; 3 and 2 where the row had to run: what it would have been
    tape: torch.Tensor | None = None
