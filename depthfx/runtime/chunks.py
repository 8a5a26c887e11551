"""What one request contributes to a step: a token of its answer, or the next tokens of its prompt."""

from __future__ import annotations

from collections.abc import Collection

from depthfx.records import Chunk
from depthfx.runtime.request import Request


def state_of(precision: bytes, routed: bool, reads: Collection[str] = (), number: int = 0, is_prompt: bool = True) -> bytes:
    """What decides the KV of a row beside its token: precision and depth, and what policies read of the row itself: ``reads`` may name
    ``request_ids`` and ``is_prompt``. KV is shared under equal states only (invariant 7)."""
    if not routed:
        return precision
    request = number.to_bytes(4, "little") if "request_ids" in reads else b""
    return precision + b"routed" + request + (b"" if is_prompt or "is_prompt" not in reads else b"answer")


def room_for_prompts(num_decodes: int, max_batch_tokens: int, chunk_tokens: int, places: Collection[int] = ()) -> int:
    """Rows that prompts may take in a step of ``num_decodes`` decodes: without any all of ``max_batch_tokens``, else what they leave of ``chunk_tokens``.

    Decode rows count too: a step of exactly ``chunk_tokens`` rows fills the tiles of its matrix products. Where captured steps hold prompts,
    decodes count as the ``places`` that they are padded to, so that the padded step has no more rows than that.
    """
    if not num_decodes:
        return max_batch_tokens
    taken = next((n for n in sorted(places) if num_decodes <= n <= max_batch_tokens // 2), num_decodes)
    return min(max_batch_tokens - taken, max(chunk_tokens - taken, chunk_tokens // 4, 1))


def decode_chunk(request: Request, row: int, step: int) -> Chunk:
    """The next token of ``request``, sampled as row ``row`` of step ``step``; booked as planned."""
    start, pending = request.num_planned, request.num_pending
    chunk = Chunk(
        request.request_id,
        request.table_row,
        start,
        () if pending else (request.token_ids[start],),
        request.sample_row if pending else -1,
        True,
        len(request.output_ids) + pending,
        request.sampling,
        None,
        request.routed[1],
        request.number,
        False,
    )
    request.num_planned = start + 1
    request.num_pending = pending + 1
    request.sample_row = row
    request.last_step = step
    return chunk


def prefill_chunk(request: Request, budget: int, row: int, step: int) -> Chunk:
    """Up to ``budget`` tokens of the prompt; the last of them, if it ends the prompt, is sampled as row ``row`` of step ``step``.

    After a preemption the tokens of the answer are computed anew likewise, in the depth that they had; where the skipper is asked, in
    chunks of their own.
    """
    start = request.num_planned
    is_prompt = start < request.num_prompt
    if is_prompt and any(request.routed):
        budget = min(budget, request.num_prompt - start)
    routed = request.routed[0 if is_prompt else 1]
    if not is_prompt and start < request.promoted_at:
        budget, routed = min(budget, request.promoted_at - start), False
    token_ids = tuple(request.token_ids[start : start + budget])
    samples = start + len(token_ids) == len(request.token_ids)
    wants_history = request.fresh and request.sampling.repetition_penalty != 1.0
    request.num_planned = start + len(token_ids)
    request.fresh = False
    request.last_step = step
    if samples:
        request.prefilling = False
        request.num_pending += 1
        request.sample_row = row
    history = tuple(request.token_ids) if wants_history else None
    return Chunk(
        request.request_id, request.table_row, start, token_ids, -1, samples, len(request.output_ids), request.sampling, history,
        routed, request.number, is_prompt,
    )  # fmt: skip
