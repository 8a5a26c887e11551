"""Sampler: from logits to tokens, with Hugging Face's processors, on the device and without a host sync.

Letters in shapes: R sampled rows, V vocabulary, S block table rows, E end-of-sequence ids of one request at most.

The draw is Gumbel-max: argmax of (score + noise), with noise that is a hash of (seed, index of the token in its request,
vocabulary id). So a request's tokens depend on nothing but its own logits and seed, whatever shares its step. All
operations have fixed shapes and can be captured in a graph; the Python flags of :class:`SamplingTensors` choose what is
computed, and a row for which a processor is off passes through it unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from depthfx.errors import InternalError
from depthfx.records import Chunk

_MINUS_INF = float("-inf")
# Columns of SamplingTensors.ints, then E columns of end-of-sequence ids (-1: none).
_TABLE_ROW, _TOP_K, _SEED, _INDEX, _FIRST_EOS = range(5)
# Columns of SamplingTensors.floats, and the values that switch everything off.
_TEMPERATURE, _TOP_P, _MIN_P, _PENALTY = range(4)
_NEUTRAL_FLOATS = (0.0, 1.0, 0.0, 1.0)


@dataclass(frozen=True)
class SamplingTensors:
    """Sampling parameters of R rows in two tensors (sent to the device together), and what they need at all."""

    ints: torch.Tensor  # [R, 4 + E] int64: table row (-1: none), top_k, seed, token index, end-of-sequence ids that are forbidden
    floats: torch.Tensor  # [R, 4] float32: temperature, top_p, min_p, repetition penalty
    draws: bool  # some row is not greedy
    sorts: bool  # some row uses top_k or top_p
    penalises: bool  # some row has a repetition penalty: `seen` is needed
    forbids: bool  # some row must not end yet

    @property
    def greedy_only(self) -> bool:
        """Whether the tokens are the argmax of the raw logits."""
        return not (self.draws or self.penalises or self.forbids)

    @classmethod
    def build(cls, chunks: Sequence[Chunk], vocab_size: int, send: Callable[[torch.Tensor], torch.Tensor]) -> SamplingTensors:
        """Parameters of the chunks that sample, in order. ``send`` brings int32 words ``[n]`` to the device, as `HostRing.to_device` does."""
        rows_i: list[list[int]] = []
        rows_f: list[tuple[float, ...]] = []
        forbidden: list[tuple[int, ...]] = []
        for chunk in chunks:
            s = chunk.sampling
            draws = s.temperature > 0.0 and not s.external
            rows_i.append([chunk.table_row, min(s.top_k, vocab_size) if draws else 0, s.seed, chunk.sample_index])
            rows_f.append(_NEUTRAL_FLOATS if s.external else (s.temperature, s.top_p, s.min_p, s.repetition_penalty))
            early = chunk.sample_index < s.min_new_tokens and not s.external
            forbidden.append(tuple(t for t in s.eos_token_ids if 0 <= t < vocab_size) if early else ())
        width = max(map(len, forbidden), default=0)
        for row, ids in zip(rows_i, forbidden):
            row.extend(ids + (-1,) * (width - len(ids)))
        ints = torch.tensor(rows_i, dtype=torch.int64, device="cpu").reshape(len(rows_i), _FIRST_EOS + width)
        floats = torch.tensor(rows_f, dtype=torch.float32, device="cpu").reshape(len(rows_f), len(_NEUTRAL_FLOATS))
        words = send(torch.cat((ints.view(torch.int32).flatten(), floats.view(torch.int32).flatten())))
        num_ints = 2 * ints.numel()
        drawn = [(i, f) for i, f in zip(rows_i, rows_f) if f[_TEMPERATURE] > 0.0]
        return cls(
            words[:num_ints].view(torch.int64).view(ints.shape),
            words[num_ints:].view(torch.float32).view(floats.shape),
            draws=bool(drawn),
            sorts=any(i[_TOP_K] > 0 or f[_TOP_P] < 1.0 for i, f in drawn),
            penalises=any(f[_PENALTY] != 1.0 for f in rows_f),
            forbids=width > 0,
        )

    @classmethod
    def static(cls, num_rows: int, device: torch.device | str, max_eos: int = 8, like: SamplingTensors | None = None) -> SamplingTensors:
        """Buffers for a captured graph, all rows neutral. It computes all that ``like`` needs, or everything possible."""
        ints = torch.zeros(num_rows, _FIRST_EOS + max_eos, dtype=torch.int64, device=device)
        ints[:, _TABLE_ROW] = -1
        ints[:, _FIRST_EOS:] = -1
        floats = torch.tensor(_NEUTRAL_FLOATS, device=device).repeat(num_rows, 1)
        if like is None:
            return cls(ints, floats, draws=True, sorts=True, penalises=True, forbids=True)
        return cls(ints, floats, like.draws, like.sorts, like.penalises, like.forbids)

    def covers(self, other: SamplingTensors) -> bool:
        """Whether what is computed for these parameters is enough for ``other``, in shape and in kind."""
        fits = other.ints.shape[0] <= self.ints.shape[0] and other.ints.shape[1] <= self.ints.shape[1]
        kinds = ("draws", "sorts", "penalises", "forbids")
        return fits and all(getattr(self, kind) or not getattr(other, kind) for kind in kinds)

    def copy_from(self, other: SamplingTensors) -> None:
        """Overwrites the first rows with ``other`` and makes the rest neutral. Raises :class:`InternalError` if it does not cover it."""
        if not self.covers(other):
            shapes = f"{tuple(self.ints.shape)} do not cover a step of {tuple(other.ints.shape)}"
            raise InternalError(f"sampling buffers {shapes} or not its kinds of sampling; choose another graph")
        num_rows, width = other.ints.shape
        self.ints[:, :_FIRST_EOS] = 0
        self.ints[:, _FIRST_EOS:] = -1
        self.ints[:, _TABLE_ROW] = -1
        self.ints[:num_rows, :width].copy_(other.ints, non_blocking=True)
        self.floats.zero_()
        self.floats[:, _TOP_P] = 1.0
        self.floats[:, _PENALTY] = 1.0
        self.floats[:num_rows].copy_(other.floats, non_blocking=True)


def new_seen(num_table_rows: int, vocab_size: int, device: torch.device | str) -> torch.Tensor:
    """Table [S + 1, V] bool of the tokens each table row has seen; row -1 takes the marks of padding rows."""
    return torch.zeros(num_table_rows + 1, vocab_size, dtype=torch.bool, device=device)


def reset_seen(seen: torch.Tensor, chunks: Sequence[Chunk], send: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Starts the rows of the chunks that bring their history (the first ones after admission) with exactly that history; ``send`` as above."""
    histories = [(chunk.table_row, chunk.history) for chunk in chunks if chunk.history is not None]
    words = torch.tensor([token for _, history in histories for token in history], dtype=torch.int32, device="cpu")
    for (row, _), ids in zip(histories, send(words).long().split([len(history) for _, history in histories]), strict=True):
        seen[row] = False
        seen[row, ids] = True


def mark_seen(seen: torch.Tensor, table_rows: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Marks ``token_ids`` [R] int64 for ``table_rows`` [R] int64 (-1: padding); in place."""
    seen.index_put_((table_rows, token_ids), torch.ones((), dtype=torch.bool, device=seen.device))


def sample(logits: torch.Tensor, params: SamplingTensors, seen: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [R] int64 (always valid ids) and ``finite`` [R] bool (False: the row holds NaN) for logits [R, V].

    Greedy rows give the first largest logit after penalty and minimum length. With a penalty in ``params``, ``seen``
    is read and then marked with the tokens; without ``seen``, :class:`InternalError` is raised.
    """
    raw = logits.float()
    best = raw.argmax(-1)  # NaN counts as the largest
    finite = ~raw.gather(1, best[:, None])[:, 0].isnan()
    if params.greedy_only:
        return best, finite
    scores = process(raw, params, seen)
    tokens = scores.argmax(-1)
    if params.draws:
        drawn = (warp(scores, params) + gumbel(params, raw.shape[1])).argmax(-1)
        tokens = torch.where(params.floats[:, _TEMPERATURE] > 0.0, drawn, tokens)
    tokens = torch.where(finite, tokens, 0)
    if params.penalises and seen is not None:
        mark_seen(seen, params.ints[:, _TABLE_ROW], tokens)
    return tokens, finite


def process(scores: torch.Tensor, params: SamplingTensors, seen: torch.Tensor | None) -> torch.Tensor:
    """Repetition penalty, then no end of sequence before the minimum length: [R, V] float32 to the same."""
    if params.penalises:
        if seen is None:
            raise InternalError("a row has a repetition penalty, but no table of seen tokens was given")
        penalty = params.floats[:, _PENALTY, None]
        penalised = torch.where(scores < 0, scores * penalty, scores / penalty)
        scores = torch.where(seen[params.ints[:, _TABLE_ROW]] & (penalty != 1.0), penalised, scores)
    if params.forbids:
        ids = params.ints[:, _FIRST_EOS:]
        floor = torch.where(ids >= 0, _MINUS_INF, float("inf"))  # the minimum with +inf changes nothing
        scores = scores.scatter_reduce(1, ids.clamp(min=0), floor, "amin")
    return scores


def warp(scores: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """Temperature, top_k, top_p, min_p, in this order: [R, V] float32 to the same, -inf where a token is excluded."""
    temperature, top_p, min_p = (params.floats[:, i, None] for i in (_TEMPERATURE, _TOP_P, _MIN_P))
    scores = scores / torch.where(temperature > 0.0, temperature, 1.0)
    if params.sorts:
        num_tokens = scores.shape[1]
        ordered, order = scores.sort(-1)  # ascending
        top_k = params.ints[:, _TOP_K, None]
        threshold = ordered.gather(1, (num_tokens - torch.where(top_k > 0, top_k, num_tokens)).clamp(min=0))
        ordered = ordered.masked_fill(ordered < threshold, _MINUS_INF)
        drop = (ordered.softmax(-1).cumsum(-1) <= 1.0 - top_p) & (top_p < 1.0)
        drop[:, -1] = False
        drop |= ordered == _MINUS_INF
        scores = scores.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), _MINUS_INF)
    probs = scores.softmax(-1)
    return scores.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), _MINUS_INF)


def gumbel(params: SamplingTensors, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise [R, V] float32, a function of each row's (seed, token index) and the vocabulary id."""
    u = uniform(params.ints[:, _SEED], params.ints[:, _INDEX], vocab_size)
    # Large noise comes from small u, where float32 is finest.
    return -torch.log(-torch.log1p(-u))


def uniform(seeds: torch.Tensor, indices: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Numbers in (0, 1) [R, V] float32: a hash of (seed [R] int64, index [R] int64, vocabulary id) and nothing else."""
    low = _mix(_mix(_low32(seeds)) ^ _low32(indices))
    high = _mix(_mix(_low32(seeds >> 32) ^ 0x5BD1E995) ^ low)
    ids = torch.arange(vocab_size, dtype=torch.int32, device=seeds.device)
    bits = _mix(_mix(ids[None, :] ^ low[:, None]) ^ high[:, None])
    # Two halves, because float32 has 24 bits of precision and int32 is signed: small values keep all their bits.
    value = ((bits >> 16) & 0xFFFF).float() * 65536.0 + (bits & 0xFFFF).float() + 0.5
    return (value * 2.0**-32).clamp(max=1.0 - 2.0**-24)


def _low32(values: torch.Tensor) -> torch.Tensor:
    """The low 32 bits of int64 as int32."""
    low = values & 0xFFFFFFFF
    return torch.where(low >= 1 << 31, low - (1 << 32), low).to(torch.int32)


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """A bijection of 32 bits in which each input bit flips about half of the output bits; products wrap."""
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * 0x7FEB352D
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * -0x7B935975  # 0x846CA68B as a signed number
    return bits ^ ((bits >> 16) & 0xFFFF)
