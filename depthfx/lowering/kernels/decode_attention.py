"""Attention of decode rows: one query token against its paged context, split over key ranges, joined by the last program.

For row t and head h: ``s_j = cap(scale * q[t, h] . k[j, h // G])`` over keys j in ``(position - window, position]``;
``out = sum_j exp(s_j) v[j] / (sum_j exp(s_j) + exp(sink[h]))``. q [T, Hq, D], pool [blocks, L, 2, Hkv, B, D] of the dtype of q or of E4M3,
G = Hq / Hkv.
Example: D = 1, q = 1, keys [0, 0], values [1, 3], scale 1, no sink: weights 1/2 and 1/2, out = 2.

The grid depends on host numbers alone (rows, heads, width of the block table), so a captured graph fits every context;
each program finds its own key range on the device. Partial results carry (maximum, sum, weighted values); the program
that arrives last for a (row, KV head) joins them and sets the counter back to 0, ready for the next replay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from depthfx.lowering.kernel_spec import INTERPRETED, device_sms, pdl_options
from depthfx.lowering.kernels._device import dot, pdl_release, pdl_wait, tanh
from depthfx.lowering.kernels._e4m3 import decode, stored_form
from depthfx.lowering.kernels._scratch import scratch_of
from depthfx.lowering.kernels.kv_append import pool_strides

MAX_SPLITS = 64


@dataclass(frozen=True)
class DecodeConfig:
    """Tile of keys, warps, pipeline stages, most key ranges of a row and fewest keys of a range."""

    block_keys: int
    num_warps: int
    num_stages: int
    num_splits: int
    range_keys: int = 64


def decode_config(num_rows: int, num_kv_heads: int, max_keys: int, head_dim: int, num_sms: int) -> DecodeConfig:
    """Config from host numbers alone: about 2 programs for each multiprocessor, more only for rows with long contexts.

    More ranges load sooner but must be joined: at one row of 4096 keys, 16 ranges take 17 us and 32 take 21 us on an H200. Where
    the rows alone fill the device a range has many keys, since the join costs more than it brings: 128 rows of 576 keys take
    76 us in one range each and 92 us in two.
    """
    block_keys = 64
    wanted = triton.cdiv(2 * num_sms, max(1, num_rows * num_kv_heads))
    for_long_contexts = 1 + max_keys // 8192  # one long request in a large batch must not run alone at the end
    splits = max(min(wanted, 16 if max_keys <= 8192 else 32), min(for_long_contexts, 8))
    splits = max(1, min(splits, triton.cdiv(max_keys, block_keys), MAX_SPLITS))
    range_keys = 4096 if wanted == 1 else 1024 if wanted == 2 else block_keys
    num_warps = 8 if num_rows * num_kv_heads * splits <= 2 * num_sms else 4
    return DecodeConfig(block_keys, num_warps, num_stages=3 if head_dim <= 128 else 2, num_splits=splits, range_keys=range_keys)


@triton.jit
def _join_splits(
    partial_ptr, stats_ptr, out_ptr, sinks_ptr, first_head, active,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Join the ``active`` partial results of one (row, KV head); columns are the flat (head of the group, feature)."""
    columns = tl.arange(0, BLOCK_G * BLOCK_D)
    head = columns // BLOCK_D
    feature = columns % BLOCK_D
    in_group = head < GROUP
    top = tl.full((BLOCK_G * BLOCK_D,), float("-inf"), tl.float32)
    if HAS_SINKS:
        top = tl.load(sinks_ptr + first_head + head, mask=in_group, other=0.0).to(tl.float32) * 1.4426950408889634
    total = tl.where(top == float("-inf"), 0.0, 1.0)
    acc = tl.zeros((BLOCK_G * BLOCK_D,), tl.float32)
    for start in tl.range(0, active, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)[:, None]
        mask = (split < active) & in_group[None, :]
        part = tl.load(partial_ptr + split * (GROUP * BLOCK_D) + columns[None, :], mask=mask, other=0.0, cache_modifier=".cg")
        at = stats_ptr + split * (2 * GROUP) + head[None, :]
        part_top = tl.load(at, mask=mask, other=float("-inf"), cache_modifier=".cg")
        part_total = tl.load(at + GROUP, mask=mask, other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(part_top, axis=0))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(part_top - safe[None, :])
        old = tl.exp2(top - safe)
        total = total * old + tl.sum(part_total * weight, axis=0)
        acc = acc * old + tl.sum(part * weight, axis=0)
        top = new_top
    result = acc / tl.where(total == 0.0, 1.0, total)
    target = out_ptr + (first_head + head) * HEAD_DIM + feature
    tl.store(target, result.to(out_ptr.dtype.element_ty), mask=in_group & (feature < HEAD_DIM))


@triton.jit(do_not_specialize=["layer", "window"], do_not_specialize_on_alignment=["positions_ptr"])  # of any row of many
def _decode_attention_kernel(
    q_ptr, pool_ptr, out_ptr, sinks_ptr, partial_ptr, stats_ptr, counter_ptr, positions_ptr, table_rows_ptr, block_tables_ptr,
    layer, scale, softcap, window, stride_qt, stride_qh, stride_table, stride_block, stride_layer,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    SPLITS: tl.constexpr, RANGE_KEYS: tl.constexpr, BLOCK_S: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    CODING: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One program for one (KV head, row, key range); the G query heads of the KV head fill a tile of BLOCK_M rows."""
    kv_head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    pdl_release(PDL)
    pdl_wait(PDL)
    position = tl.load(positions_ptr + row)
    group = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    first_head = kv_head * GROUP
    head_mask = (group < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    out_row = out_ptr + row * (HEADS * HEAD_DIM)
    out_tile = out_row + (first_head + group)[:, None] * HEAD_DIM + d[None, :]
    num_keys = position + 1
    lowest = 0
    if window > 0:
        lowest = tl.maximum(num_keys - window, 0)
    begin = lowest // BLOCK_TOKENS * BLOCK_TOKENS
    range_keys = tl.maximum(tl.cdiv(tl.cdiv(num_keys - begin, SPLITS), BLOCK_KEYS) * BLOCK_KEYS, RANGE_KEYS)
    active = tl.cdiv(num_keys - begin, tl.maximum(range_keys, 1))
    if (position < 0) & (split == 0):
        tl.store(out_tile, tl.zeros((BLOCK_M, BLOCK_D), out_ptr.dtype.element_ty), mask=head_mask)
    if (position >= 0) & (split < active):
        q = tl.load(q_ptr + row * stride_qt + (first_head + group)[:, None] * stride_qh + d[None, :], mask=head_mask, other=0.0)
        table = block_tables_ptr + tl.load(table_rows_ptr + row).to(tl.int64) * stride_table
        k_base = pool_ptr + layer.to(tl.int64) * stride_layer + kv_head * (BLOCK_TOKENS * HEAD_DIM)
        start = begin + split * range_keys
        end = tl.minimum(start + range_keys, num_keys)
        top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for first in tl.range(start, end, BLOCK_KEYS, num_stages=STAGES):
            keys = first + tl.arange(0, BLOCK_KEYS)
            valid = (keys < end) & (keys >= lowest)
            block = tl.load(table + keys // BLOCK_TOKENS, mask=keys < end, other=0).to(tl.int64)
            at = block * stride_block + (keys % BLOCK_TOKENS) * HEAD_DIM
            tile_mask = valid[:, None] & (d < HEAD_DIM)[None, :]
            k = tl.load(k_base + at[:, None] + d[None, :], mask=tile_mask, other=0.0)
            v = tl.load(k_base + at[:, None] + (KV_HEADS * BLOCK_TOKENS * HEAD_DIM + d)[None, :], mask=tile_mask, other=0.0)
            k = decode(k, q.dtype, CODING)
            v = decode(v, q.dtype, CODING)
            scores = dot(q, tl.trans(k), tl.zeros((BLOCK_M, BLOCK_KEYS), tl.float32), WIDEN)
            if HAS_SOFTCAP:
                scores = softcap * 1.4426950408889634 * tanh(scores * (scale / softcap))
            else:
                scores = scores * (scale * 1.4426950408889634)
            scores = tl.where(valid[None, :], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, axis=1))
            safe = tl.where(new_top == float("-inf"), 0.0, new_top)
            weight = tl.exp2(scores - safe[:, None])
            old = tl.exp2(top - safe)
            total = total * old + tl.sum(weight, axis=1)
            acc = dot(weight.to(v.dtype), v, acc * old[:, None], WIDEN)
            top = new_top
        if active == 1:
            if HAS_SINKS:
                sink = tl.load(sinks_ptr + first_head + group, mask=group < GROUP, other=0.0).to(tl.float32)
                total += tl.exp2(sink * 1.4426950408889634 - top)
            tl.store(out_tile, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=head_mask)
        else:
            pair = row * KV_HEADS + kv_head
            partial = partial_ptr + pair * (SPLITS * GROUP * BLOCK_D)
            stats = stats_ptr + pair * (SPLITS * GROUP * 2)
            tl.store(partial + (split * GROUP + group)[:, None] * BLOCK_D + d[None, :], acc, mask=(group < GROUP)[:, None])
            tl.store(stats + split * (2 * GROUP) + group, top, mask=group < GROUP)
            tl.store(stats + split * (2 * GROUP) + GROUP + group, total, mask=group < GROUP)
            tl.debug_barrier()  # every thread's stores come before the one thread's release
            arrived = tl.atomic_add(counter_ptr + pair, 1, sem="acq_rel", scope="gpu")
            if arrived == active - 1:
                tl.debug_barrier()
                tl.store(counter_ptr + pair, 0)
                _join_splits(
                    partial, stats, out_row, sinks_ptr, first_head, active,
                    GROUP, HEAD_DIM, BLOCK_D, BLOCK_G, BLOCK_S, HAS_SINKS,
                )  # fmt: skip


def launch_decode(
    q: torch.Tensor, kv_pool: torch.Tensor, layer: int, positions: torch.Tensor, table_rows: torch.Tensor,
    block_tables: torch.Tensor, out: torch.Tensor, num_rows: int, scale: float, window: int, softcap: float,
    sinks: torch.Tensor | None, config: DecodeConfig | None = None,
) -> None:  # fmt: skip
    """Fill ``out[:num_rows]`` [T, Hq, D]; ``config`` replaces :func:`decode_config` in a benchmark."""
    num_heads, head_dim = q.shape[1], q.shape[2]
    num_kv_heads, block_tokens = kv_pool.shape[3], kv_pool.shape[4]
    group = num_heads // num_kv_heads
    block_d, block_g = triton.next_power_of_2(head_dim), triton.next_power_of_2(group)
    max_keys = block_tables.shape[1] * block_tokens
    config = config or decode_config(num_rows, num_kv_heads, max_keys, head_dim, device_sms(q.device))
    partials = config.num_splits * num_rows * num_heads if config.num_splits > 1 else 0
    scratch = scratch_of(q.device, max(1, partials * (block_d + 2)), num_rows * num_kv_heads)
    stride_block, stride_layer = pool_strides(kv_pool)
    pool, coding = stored_form(kv_pool)
    _decode_attention_kernel[(num_kv_heads, num_rows, config.num_splits)](
        q, pool, out, sinks, scratch.values, scratch.values[partials * block_d :], scratch.counters,
        positions, table_rows, block_tables,
        layer, scale, softcap, window, q.stride(0), q.stride(1), block_tables.stride(0), stride_block, stride_layer,
        HEADS=num_heads, KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_TOKENS=block_tokens,
        GROUP=group, BLOCK_M=max(16, block_g), BLOCK_G=block_g, BLOCK_D=block_d, BLOCK_KEYS=config.block_keys,
        SPLITS=config.num_splits, RANGE_KEYS=config.range_keys,
        BLOCK_S=min(triton.next_power_of_2(config.num_splits), max(1, 4096 // (block_g * block_d))),
        HAS_SOFTCAP=softcap > 0, HAS_SINKS=sinks is not None, CODING=coding,
        STAGES=config.num_stages, WIDEN=INTERPRETED, num_warps=config.num_warps, **pdl_options(),
    )  # fmt: skip
