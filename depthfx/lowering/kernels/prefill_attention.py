"""Attention of prefill rows: tiles of queries, in the order of their positions, against the paged context of their request.

Row t with position p of head h: softmax over keys j in ``(p - window, p]`` of ``cap(scale * q[t, h] . k[j, h // G])``, times v;
a sink adds one logit to the denominator. q [T, Hq, D], pool [blocks, L, 2, Hkv, B, D] of the dtype of q or of E4M3.
Example: a chunk of 200 rows from position 300 on has two tiles, rows 0 to 127 and 128 to 199; the first visits keys 0 to
300 without any mask and keys 301 to 427 with the causal mask.
Positions of a chunk rise, none is -1; where rows were left out they have gaps, and a tile visits more keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from depthfx.lowering.kernel_spec import INTERPRETED, device_sms, is_hopper, pdl_options
from depthfx.lowering.kernels._device import dot, pdl_release, pdl_wait, tanh
from depthfx.lowering.kernels._e4m3 import decode, stored_form
from depthfx.lowering.kernels.kv_append import pool_strides
from depthfx.records import PREFILL_TILE_ROWS


@dataclass(frozen=True)
class PrefillConfig:
    """Tile of keys, warps and pipeline stages."""

    block_keys: int
    num_warps: int
    num_stages: int


def prefill_config(head_dim: int, element_bytes: int) -> PrefillConfig:
    """Keys and values of the pipeline must fit 227 KiB of shared memory beside the query tile."""
    if element_bytes > 2:
        return PrefillConfig(block_keys=32, num_warps=8, num_stages=2)
    if head_dim <= 64:
        return PrefillConfig(block_keys=128, num_warps=8, num_stages=3)
    if head_dim <= 128:
        return PrefillConfig(block_keys=64, num_warps=4, num_stages=3)  # 302 TFLOP/s at 4 x 2048 on an H200; 8 warps: 229
    return PrefillConfig(block_keys=64, num_warps=8, num_stages=2)


@triton.jit
def _attend(
    acc, top, total, q, base, table, rows, first_key, end_key, lowest_key, num_keys, scale, softcap, window,
    stride_block, VALUE_OFFSET: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_KEYS: tl.constexpr, MASKED: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr, CODING: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Visit the keys ``[first_key, end_key)``; only MASKED ranges compare positions. ``rows``: positions of the queries."""
    d = tl.arange(0, BLOCK_D)
    offsets = tl.arange(0, BLOCK_KEYS)
    if HAS_SOFTCAP:
        factor = scale / softcap
    else:
        factor = scale * 1.4426950408889634
    for first in tl.range(first_key, end_key, BLOCK_KEYS, num_stages=STAGES):
        keys = first + offsets
        if MASKED:
            block = tl.load(table + keys // BLOCK_TOKENS, mask=keys < num_keys, other=0).to(tl.int64)
        else:
            block = tl.load(table + keys // BLOCK_TOKENS).to(tl.int64)
        at = base + (block * stride_block + (keys % BLOCK_TOKENS) * HEAD_DIM)[:, None] + d[None, :]
        if MASKED:
            inside = ((keys < num_keys) & (keys >= lowest_key))[:, None] & (d < HEAD_DIM)[None, :]
            k = tl.load(at, mask=inside, other=0.0)
            v = tl.load(at + VALUE_OFFSET, mask=inside, other=0.0)
        elif HEAD_DIM == BLOCK_D:
            k = tl.load(at)
            v = tl.load(at + VALUE_OFFSET)
        else:
            k = tl.load(at, mask=(d < HEAD_DIM)[None, :], other=0.0)
            v = tl.load(at + VALUE_OFFSET, mask=(d < HEAD_DIM)[None, :], other=0.0)
        k = decode(k, q.dtype, CODING)
        v = decode(v, q.dtype, CODING)
        scores = dot(q, tl.trans(k), tl.zeros((q.shape[0], BLOCK_KEYS), tl.float32), WIDEN)
        if HAS_SOFTCAP:
            scores = softcap * 1.4426950408889634 * tanh(scores * factor)
        elif MASKED:
            scores = scores * factor
        if MASKED:
            distance = rows[:, None] - keys[None, :]
            seen = (distance >= 0) & ((window <= 0) | (distance < window))
            scores = tl.where(seen, scores, float("-inf"))
        if HAS_SOFTCAP or MASKED:
            new_top = tl.maximum(top, tl.max(scores, axis=1))
            safe = tl.where(new_top == float("-inf"), 0.0, new_top)
            weight = tl.exp2(scores - safe[:, None])
        else:  # the scale joins the subtraction in one multiply-add; `factor` is positive
            new_top = tl.maximum(top, tl.max(scores, axis=1) * factor)
            safe = new_top
            weight = tl.exp2(scores * factor - safe[:, None])
        old = tl.exp2(top - safe)
        total = total * old + tl.sum(weight, axis=1)
        acc = dot(weight.to(v.dtype), v, acc * old[:, None], WIDEN)
        top = new_top
    return acc, top, total


@triton.jit
def _zero_rows(out_ptr, first, end, head, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
               BLOCK_D: tl.constexpr):  # fmt: skip
    """Zeros for head ``head`` of the rows ``[first, end)``, which belong to no chunk."""
    d = tl.arange(0, BLOCK_D)
    for start in range(first, end, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        target = out_ptr + (rows.to(tl.int64)[:, None] * HEADS + head) * HEAD_DIM + d[None, :]
        mask = (rows < end)[:, None] & (d < HEAD_DIM)[None, :]
        tl.store(target, tl.zeros((BLOCK_M, BLOCK_D), out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["layer", "window", "num_tiles", "num_chunks", "num_decode_rows", "num_rows"])
def _prefill_attention_kernel(
    q_ptr, pool_ptr, out_ptr, sinks_ptr, positions_ptr, table_rows_ptr, block_tables_ptr,
    chunk_starts_ptr, tile_chunks_ptr, tile_starts_ptr,
    layer, num_tiles, num_chunks, num_decode_rows, num_rows, scale, softcap, window,
    stride_qt, stride_qh, stride_table, stride_block, stride_layer,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, CODING: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """One program for one (tile of BLOCK_M rows, head); heads of a tile are neighbours and share keys in L2."""
    head = tl.program_id(0) % HEADS
    tile = tl.program_id(0) // HEADS
    pdl_release(PDL)
    pdl_wait(PDL)
    chunk = -1
    if tile == num_tiles:
        end_of_chunks = tl.maximum(tl.load(chunk_starts_ptr + num_chunks), num_decode_rows)
        _zero_rows(out_ptr, end_of_chunks, num_rows, head, HEADS, HEAD_DIM, BLOCK_M, BLOCK_D)
    else:
        chunk = tl.load(tile_chunks_ptr + tile)
    if chunk >= 0:
        first_row = tl.load(chunk_starts_ptr + chunk) + tl.load(tile_starts_ptr + tile)
        count = tl.minimum(tl.load(chunk_starts_ptr + chunk + 1) - first_row, BLOCK_M)
        if count > 0:
            m = tl.arange(0, BLOCK_M)
            d = tl.arange(0, BLOCK_D)
            tile_rows = (first_row + m).to(tl.int64)
            tile_mask = (m < count)[:, None] & (d < HEAD_DIM)[None, :]
            q = tl.load(q_ptr + tile_rows[:, None] * stride_qt + head * stride_qh + d[None, :], mask=tile_mask, other=0.0)
            position = tl.load(positions_ptr + first_row)
            num_keys = tl.load(positions_ptr + first_row + count - 1) + 1  # positions rise, but rows between may be absent
            rows = tl.load(positions_ptr + first_row + tl.minimum(m, count - 1))
            table = block_tables_ptr + tl.load(table_rows_ptr + first_row).to(tl.int64) * stride_table
            base = pool_ptr + layer.to(tl.int64) * stride_layer + (head // (HEADS // KV_HEADS)) * (BLOCK_TOKENS * HEAD_DIM)
            VALUE_OFFSET: tl.constexpr = KV_HEADS * BLOCK_TOKENS * HEAD_DIM

            # keys: [begin, left) masked by the window, [left, right) seen by all rows, [right, num_keys) masked by causality
            lowest = 0
            begin = 0
            left = 0
            if window > 0:
                lowest = tl.maximum(position - window + 1, 0)
                begin = lowest // BLOCK_KEYS * BLOCK_KEYS
                left = tl.cdiv(tl.maximum(num_keys - window, 0), BLOCK_KEYS) * BLOCK_KEYS
            right = (position + 1) // BLOCK_KEYS * BLOCK_KEYS
            left = tl.minimum(left, tl.maximum(right, begin))
            right = tl.maximum(right, left)

            top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            total = tl.zeros((BLOCK_M,), tl.float32)
            acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            if window > 0:
                acc, top, total = _attend(
                    acc, top, total, q, base, table, rows, begin, left, lowest, num_keys, scale, softcap, window,
                    stride_block, VALUE_OFFSET, HEAD_DIM, BLOCK_TOKENS, BLOCK_D, BLOCK_KEYS, True, HAS_SOFTCAP, 1, CODING, WIDEN,
                )  # fmt: skip
            acc, top, total = _attend(
                acc, top, total, q, base, table, rows, left, right, lowest, num_keys, scale, softcap, window,
                stride_block, VALUE_OFFSET, HEAD_DIM, BLOCK_TOKENS, BLOCK_D, BLOCK_KEYS, False, HAS_SOFTCAP, STAGES, CODING, WIDEN,
            )  # fmt: skip
            acc, top, total = _attend(
                acc, top, total, q, base, table, rows, right, num_keys, lowest, num_keys, scale, softcap, window,
                stride_block, VALUE_OFFSET, HEAD_DIM, BLOCK_TOKENS, BLOCK_D, BLOCK_KEYS, True, HAS_SOFTCAP, 1, CODING, WIDEN,
            )  # fmt: skip
            if HAS_SINKS:
                total += tl.exp2(tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634 - top)
            result = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + (tile_rows[:, None] * HEADS + head) * HEAD_DIM + d[None, :], result, mask=tile_mask)


def uses_hopper_kernel(q: torch.Tensor, kv_pool: torch.Tensor, window: int, softcap: float, sinks: torch.Tensor | None) -> bool:
    """Whether ``_hopper_prefill`` serves a call: plain causal attention of 16-bit numbers, head dimension 64 or 128, on Hopper.

    The pool has the dtype of q (FP8 goes to the kernel in this file), its blocks hold 16, 32 or 64 tokens, and rows start at addresses
    that the tensor copy engine takes (multiples of 16 bytes).
    At 4 x 2048 tokens it reaches twice the speed of the kernel in this file, which serves everything else.
    """
    head_dim = q.shape[2]
    return (
        q.device.type == "cuda"
        and is_hopper(q.device.index)
        and window <= 0 and softcap <= 0 and sinks is None
        and q.element_size() == 2 and kv_pool.dtype == q.dtype and head_dim in (64, 128) and kv_pool.shape[4] in (16, 32, 64)
        and (q.stride(0) | q.stride(1)) % 8 == 0 and q.data_ptr() % 16 == 0
        and (kv_pool.stride(0) | kv_pool.stride(1)) % head_dim == 0 and kv_pool.data_ptr() % 16 == 0
    )  # fmt: skip


def launch_prefill(
    q: torch.Tensor, kv_pool: torch.Tensor, layer: int, positions: torch.Tensor, table_rows: torch.Tensor,
    block_tables: torch.Tensor, chunk_starts: torch.Tensor, tile_chunks: torch.Tensor, tile_starts: torch.Tensor,
    out: torch.Tensor, num_decode_rows: int, scale: float, window: int, softcap: float, sinks: torch.Tensor | None,
    config: PrefillConfig | None = None,
) -> None:  # fmt: skip
    """Fill ``out`` [T, Hq, D] for all rows from ``chunk_starts[0]`` on.

    :func:`uses_hopper_kernel` says which of the two kernels serves the call; with a ``config`` always this file's.
    """
    if config is None and uses_hopper_kernel(q, kv_pool, window, softcap, sinks):
        from depthfx.lowering.kernels._hopper_prefill import launch_hopper

        launch_hopper(
            q, kv_pool, layer, positions, table_rows, block_tables, chunk_starts, tile_chunks, tile_starts, out,
            num_decode_rows, scale, device_sms(q.device),
        )  # fmt: skip
        return
    num_rows, num_heads, head_dim = q.shape
    num_tiles, num_chunks = tile_chunks.shape[0], chunk_starts.shape[0] - 1
    config = config or prefill_config(head_dim, q.element_size())
    stride_block, stride_layer = pool_strides(kv_pool)
    pool, coding = stored_form(kv_pool)
    _prefill_attention_kernel[((num_tiles + 1) * num_heads,)](
        q, pool, out, sinks, positions, table_rows, block_tables, chunk_starts, tile_chunks, tile_starts,
        layer, num_tiles, num_chunks, num_decode_rows, num_rows, scale, softcap, window,
        q.stride(0), q.stride(1), block_tables.stride(0), stride_block, stride_layer,
        HEADS=num_heads, KV_HEADS=kv_pool.shape[3], HEAD_DIM=head_dim, BLOCK_TOKENS=kv_pool.shape[4],
        BLOCK_M=PREFILL_TILE_ROWS, BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_KEYS=config.block_keys,
        HAS_SOFTCAP=softcap > 0, HAS_SINKS=sinks is not None, CODING=coding,
        STAGES=config.num_stages, WIDEN=INTERPRETED, num_warps=config.num_warps, **pdl_options(),
    )  # fmt: skip
