"""The weight-streaming product of ``dual_linear`` and ``dual_gated_linear`` for at most 64 rows, on any device that Triton knows.

As in `_small_linear`, the weight is the first operand: W x^T on tensor cores, or for one or two rows multiply-adds in registers.
A program reads the layer's flag once and takes one of two loops: full reads both bytes of a weight and joins them in registers, fast
reads and widens the upper byte alone. A row's power of two multiplies its finished fp32 sum.
Example: N = 4096, K = 4096, one row, 132 multiprocessors: 1,024 programs of 4 weight rows, 16 stored bytes of a row in each load.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from depthfx.lowering.fragment_order import is_fragment_order
from depthfx.lowering.kernel_spec import INTERPRETED, bound_kind, device_sms, pdl_options
from depthfx.lowering.kernels._device import activate, dot, is_empty, pdl_release, pdl_wait, prefetch_l2
from depthfx.lowering.kernels._dual_weight import check_stored, coding_of
from depthfx.lowering.kernels._join_bytes import join_bytes, power_of_two, stored_order, true_order, widen_bytes
from depthfx.lowering.kernels._scratch import scratch_of
from depthfx.lowering.kernels._small_linear import MAX_SMALL_ROWS, PREFETCH_BYTES, LinearConfig, _halves, check_bound


def dual_config(num_rows: int, num_outputs: int, num_inputs: int, num_sms: int) -> LinearConfig:
    """Config of a product of ``num_outputs`` weight rows (2F when gated) by a rule that no device has tuned yet.

    One or two rows: 16 or 32 bytes of each plane for each thread. More: one program for each multiprocessor, five tiles on their way.
    """
    if num_rows == 1 or (num_rows == 2 and num_outputs * num_inputs < 1 << 20):
        block_n = 2 if num_inputs >= 2048 and num_outputs < 2048 else 4
        block_k = min(1024, max(64, triton.next_power_of_2(num_inputs)))
        return LinearConfig(block_n, block_k, split_k=1, num_warps=4, num_stages=1, use_dot=False)
    block_n, block_k = (128, 64) if num_outputs >= 16384 else (64, 128)
    tiles, steps = triton.cdiv(num_outputs, block_n), triton.cdiv(num_inputs, block_k)
    split_k = 1 if num_outputs >= 16384 else max(1, min((num_sms + tiles // 2) // tiles, steps // 4, 16))
    return LinearConfig(block_n, block_k, split_k, num_warps=4, num_stages=5, use_dot=True)


@triton.jit
def _load(u_tile, l_tile, at, end, row_mask, FULL: tl.constexpr, EVEN: tl.constexpr):
    """Upper and lower bytes [BLOCK_N, BLOCK_K] of the places ``at``, 0 from ``end`` on; in fast mode the upper ones stand for both."""
    if EVEN:
        u = tl.load(u_tile + at[None, :], eviction_policy="evict_first")
    else:
        mask = row_mask[:, None] & (at < end)[None, :]
        u = tl.load(u_tile + at[None, :], mask=mask, other=0, eviction_policy="evict_first")
    lower = u
    if FULL:
        if EVEN:
            lower = tl.load(l_tile + at[None, :], eviction_policy="evict_first")
        else:
            lower = tl.load(l_tile + at[None, :], mask=mask, other=0, eviction_policy="evict_first")
    return u, lower


@triton.jit
def _number(u, lower, CODING: tl.constexpr, FULL: tl.constexpr, WIDEN: tl.constexpr):
    """The float16 weights of loaded bytes."""
    if FULL:
        return join_bytes(u, lower, CODING, not WIDEN)
    else:
        return widen_bytes(u, CODING, not WIDEN)


@triton.jit
def _sum_by_dot(
    x_ptr, u_tile, l_tile, num_rows, num_inputs, stride_x, row_mask, first_k, end_k, CODING: tl.constexpr, FULL: tl.constexpr,
    ORDERED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_T] partial sums over ``[first_k, end_k)`` by the tensor cores."""
    t = tl.arange(0, BLOCK_T)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for start in tl.range(first_k, end_k, BLOCK_K, num_stages=STAGES):
        at = start + k
        u, lower = _load(u_tile, l_tile, at, num_inputs, row_mask, FULL, EVEN)
        x_mask = (t < num_rows)[None, :]
        if not EVEN:
            x_mask = x_mask & (at < num_inputs)[:, None]
        x = tl.load(x_ptr + t[None, :] * stride_x + at[:, None], mask=x_mask, other=0.0)
        w = _number(u, lower, CODING, FULL, WIDEN)
        if not WIDEN:
            w = w.to(x.dtype)
        if ORDERED:
            w = true_order(w, BLOCK_N, BLOCK_K)
        acc = dot(w, x, acc, WIDEN)
    return acc


@triton.jit
def _load_row(x_ptr, k, num_inputs, ORDERED: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns ``k`` of a row of x in fp32 and in stored order."""
    x = tl.load(x_ptr + k, mask=k < num_inputs, other=0.0)
    if ORDERED:
        x = stored_order(x, BLOCK_K)
    return x.to(tl.float32)


@triton.jit
def _sum_in_registers(
    x_ptr, u_tile, l_tile, num_inputs, stride_x, row_mask, first_k, end_k, CODING: tl.constexpr, FULL: tl.constexpr,
    ORDERED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """The same for one or two rows: multiply-adds in stored order."""
    k = tl.arange(0, BLOCK_K)
    acc0 = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    acc1 = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in tl.range(first_k, end_k, BLOCK_K):
        u, lower = _load(u_tile, l_tile, start + k, num_inputs, row_mask, FULL, EVEN)
        wide = _number(u, lower, CODING, FULL, WIDEN).to(tl.float32)
        acc0 += wide * _load_row(x_ptr, start + k, num_inputs, ORDERED, BLOCK_K)[None, :]
        if BLOCK_T == 2:
            acc1 += wide * _load_row(x_ptr + stride_x, start + k, num_inputs, ORDERED, BLOCK_K)[None, :]
    sum0 = tl.sum(acc0, axis=1)[:, None]
    if BLOCK_T == 2:
        return tl.where(tl.arange(0, 2)[None, :] == 0, sum0, tl.sum(acc1, axis=1)[:, None])
    else:
        return sum0


@triton.jit
def _finish(
    acc, bias_ptr, out_ptr, first_n, num_rows, num_outputs, HALF: tl.constexpr, BLOCK_T: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Bias or gate, rounding and store of complete sums."""
    dtype = out_ptr.dtype.element_ty
    n = first_n + tl.arange(0, HALF)
    t = tl.arange(0, BLOCK_T)
    if ACTIVATION > 0:
        gate, up = _halves(acc, HALF, BLOCK_T)
        gate = activate(gate.to(dtype).to(tl.float32), ACTIVATION).to(dtype).to(tl.float32)
        result = gate * up.to(dtype).to(tl.float32)
    else:
        result = acc
    if HAS_BIAS:
        result += tl.load(bias_ptr + n, mask=n < num_outputs, other=0.0).to(tl.float32)[:, None]
    mask = (n < num_outputs)[:, None] & (t < num_rows)[None, :]
    tl.store(out_ptr + t[None, :] * num_outputs + n[:, None], result.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["bound_ptr"])
def _dual_linear_kernel(
    x_ptr, u_ptr, l_ptr, shift_ptr, flags_ptr, layer, bias_ptr, out_ptr, partial_ptr, counter_ptr, bound_ptr,
    num_rows, num_outputs, num_inputs, stride_x, split_inputs,
    CODING: tl.constexpr, ORDERED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr, USE_DOT: tl.constexpr, EVEN: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, PIECE_BYTES: tl.constexpr, PIECES: tl.constexpr, STAGES: tl.constexpr,
    BOUND: tl.constexpr, PDL: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One program for one (tile of outputs, range of K). ``num_outputs`` counts output columns (F when gated)."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    HALF: tl.constexpr = BLOCK_N // 2 if ACTIVATION > 0 else BLOCK_N  # output columns of a tile
    i = tl.arange(0, BLOCK_N)
    columns = tile * HALF + i % HALF
    row_mask = columns < num_outputs
    w_rows = columns + i // HALF * num_outputs
    offsets = w_rows.to(tl.int64)[:, None] * num_inputs
    first_k = split * split_inputs
    end_k = tl.minimum(first_k + split_inputs, num_inputs)
    pdl_release(PDL)
    if BOUND:  # before any weight is asked for: a skipped product must not read them
        if is_empty(bound_ptr, BOUND, PDL):
            return
    full = tl.load(flags_ptr + layer) != 0  # changes only between steps, so it may be read before the wait
    if PIECE_BYTES > 0:
        pieces = first_k + tl.arange(0, PIECES) * PIECE_BYTES
        near = tl.where(row_mask, w_rows, 0).to(tl.int64)[:, None] * num_inputs + pieces[None, :]
        prefetch_l2(u_ptr + near, PIECE_BYTES)
        if full:
            prefetch_l2(l_ptr + near, PIECE_BYTES)
    pdl_wait(PDL)
    if USE_DOT:
        if full:
            acc = _sum_by_dot(
                x_ptr, u_ptr + offsets, l_ptr + offsets, num_rows, num_inputs, stride_x, row_mask, first_k, end_k,
                CODING, True, ORDERED, BLOCK_T, BLOCK_N, BLOCK_K, EVEN, STAGES, WIDEN,
            )  # fmt: skip
        else:
            acc = _sum_by_dot(
                x_ptr, u_ptr + offsets, l_ptr, num_rows, num_inputs, stride_x, row_mask, first_k, end_k,
                CODING, False, ORDERED, BLOCK_T, BLOCK_N, BLOCK_K, EVEN, STAGES, WIDEN,
            )  # fmt: skip
    elif full:
        acc = _sum_in_registers(
            x_ptr, u_ptr + offsets, l_ptr + offsets, num_inputs, stride_x, row_mask, first_k, end_k,
            CODING, True, ORDERED, BLOCK_T, BLOCK_N, BLOCK_K, EVEN, WIDEN,
        )  # fmt: skip
    else:
        acc = _sum_in_registers(
            x_ptr, u_ptr + offsets, l_ptr, num_inputs, stride_x, row_mask, first_k, end_k,
            CODING, False, ORDERED, BLOCK_T, BLOCK_N, BLOCK_K, EVEN, WIDEN,
        )  # fmt: skip
    if HAS_SHIFT:
        acc = acc * power_of_two(tl.load(shift_ptr + w_rows, mask=row_mask, other=0))[:, None]

    last = True
    if SPLIT_K > 1:
        within = i[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
        part = partial_ptr + (tile * SPLIT_K).to(tl.int64) * (BLOCK_N * BLOCK_T) + within
        tl.store(part + split * (BLOCK_N * BLOCK_T), acc)
        tl.debug_barrier()  # every thread's stores come before the one thread's release
        last = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel", scope="gpu") == SPLIT_K - 1
        if last:
            tl.debug_barrier()
            tl.store(counter_ptr + tile, 0)
            acc = tl.load(part, cache_modifier=".cg")
            for other in tl.static_range(1, SPLIT_K):
                acc += tl.load(part + other * (BLOCK_N * BLOCK_T), cache_modifier=".cg")
    if last:
        _finish(acc, bias_ptr, out_ptr, tile * HALF, num_rows, num_outputs, HALF, BLOCK_T, HAS_BIAS, ACTIVATION)


def is_small_dual(x: torch.Tensor) -> bool:
    """Whether the streaming kernel serves these rows; else the weight is joined first."""
    return 0 < x.shape[0] <= MAX_SMALL_ROWS and x.element_size() == 2


def _prefetch(config: LinearConfig, tiles: int, split_inputs: int, num_inputs: int, num_sms: int) -> tuple[int, int]:
    """Bytes and number of the pieces that a program asks into L2 of each of its rows in each plane, one piece for each thread."""
    pieces = 32 * config.num_warps // config.block_n
    if pieces == 0 or split_inputs * config.split_k != num_inputs or num_inputs % 16:
        return 0, 1
    present = min(tiles * config.split_k, num_sms * (2 if config.use_dot else 24 // config.num_warps))
    row_bytes = min(split_inputs, PREFETCH_BYTES // (2 * present * config.block_n))
    return row_bytes // (16 * pieces) * 16, pieces


def launch_small_dual(
    x: torch.Tensor, upper: torch.Tensor, lower: torch.Tensor, shift: torch.Tensor | None, layer_precision: torch.Tensor, layer: int,
    name: str, bias: torch.Tensor | None = None, activation: int = 0, bound: torch.Tensor | None = None, config: LinearConfig | None = None,
) -> torch.Tensor:  # fmt: skip
    """``x W^T`` with the given epilogue, in the precision of ``layer_precision[layer]``; nothing is read or written where ``bound`` is 0.

    ``config`` replaces :func:`dual_config`.
    """
    check_bound(bound)
    check_stored(upper, lower)
    num_rows, num_inputs = x.shape
    num_outputs = upper.shape[0] // 2 if activation else upper.shape[0]
    config = config or dual_config(num_rows, upper.shape[0], num_inputs, device_sms(x.device))
    block_t = max(16, triton.next_power_of_2(num_rows)) if config.use_dot else num_rows
    block_out = config.block_n // 2 if activation else config.block_n
    tiles = triton.cdiv(num_outputs, block_out)
    split_inputs = triton.cdiv(triton.cdiv(num_inputs, config.block_k), config.split_k) * config.block_k
    config = replace(config, split_k=triton.cdiv(num_inputs, split_inputs))  # no program without work
    partial = counters = None
    if config.split_k > 1:
        scratch = scratch_of(x.device, tiles * config.split_k * config.block_n * block_t, tiles)
        partial, counters = scratch.values, scratch.counters
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    pdl = pdl_options()
    piece_bytes, pieces = 0, 1
    if pdl["PDL"] and bound_kind(bound) != 1:
        piece_bytes, pieces = _prefetch(config, tiles, split_inputs, num_inputs, device_sms(x.device))
    _dual_linear_kernel[(tiles, config.split_k)](
        x, upper, lower, shift, layer_precision, layer, bias, out, partial, counters, bound,
        num_rows, num_outputs, num_inputs, x.stride(0), split_inputs,
        CODING=coding_of(name, shift), ORDERED=is_fragment_order(num_inputs),
        BLOCK_T=block_t, BLOCK_N=config.block_n, BLOCK_K=config.block_k, SPLIT_K=config.split_k, USE_DOT=config.use_dot,
        EVEN=num_inputs % config.block_k == 0 and num_outputs % block_out == 0,
        HAS_SHIFT=shift is not None, HAS_BIAS=bias is not None, ACTIVATION=activation,
        PIECE_BYTES=piece_bytes, PIECES=pieces, STAGES=config.num_stages, BOUND=bound_kind(bound), WIDEN=INTERPRETED,
        num_warps=config.num_warps, **pdl,
    )  # fmt: skip
    return out
