"""The weight-streaming product behind ``linear``, ``linear_add`` and ``gated_linear`` for at most 64 rows of 16-bit numbers.

``y[t, n] = sum_k x[t, k] w[n, k]``; x [T, K], w [N, K]. Time is the time to read w once, so the tile of w is the large operand:
either W x^T on tensor cores (T padded to 16, 32 or 64 columns), or for one or two rows multiply-adds in registers.
Example: N = 4096, BLOCK_N = 64, split_k = 4: 256 programs, each reading 64 rows of a quarter of K.

A gated product reads gate and up rows in one tile of 2F rows: tile row i is weight row ``n + i % half + (i // half) * F``.
With split_k > 1 the program that arrives last for a tile of outputs adds the parts in order, so results repeat bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from depthfx.lowering import native
from depthfx.lowering.kernel_spec import INTERPRETED, bound_kind, device_sms, pdl_options
from depthfx.lowering.kernels._device import activate, dot, is_empty, pdl_release, pdl_wait, prefetch_l2
from depthfx.lowering.kernels._scratch import scratch_of

MAX_SMALL_ROWS = 64


@dataclass(frozen=True)
class LinearConfig:
    """How one product is cut. ``block_n`` counts weight rows of a tile (gate and up together when gated)."""

    block_n: int
    block_k: int
    split_k: int
    num_warps: int
    num_stages: int
    use_dot: bool
    prefetch: bool = False  # ask for weights ahead of the loads; products by `dot` do so under dependent launch in any case


# Programs of a bounded product for one or two rows, for each multiprocessor, above which a program takes several tiles.
BOUNDED_PROGRAMS = 24

# What the programs on the device at one time may ask into L2 before they wait for the kernel before.
PREFETCH_BYTES = 8 << 20

_LONG_ROWS = LinearConfig(block_n=8, block_k=1024, split_k=1, num_warps=4, num_stages=1, use_dot=False, prefetch=True)
_SHORT_STEPS = LinearConfig(block_n=64, block_k=64, split_k=1, num_warps=4, num_stages=6, use_dot=True)

# Where another config beats the rule of `linear_config` by 2 % on an H200 (benchmarks/kernels.py --sweep):
# (rows rounded up to 1, 2, 16, 32 or 64; N; K; gated) -> config.
TUNED: dict[tuple[int, int, int, bool], LinearConfig] = {
    (1, 6144, 4096, False): LinearConfig(block_n=8, block_k=512, split_k=1, num_warps=4, num_stages=1, use_dot=False),
    (1, 4096, 14336, False): _LONG_ROWS,
    (1, 4096, 12288, False): _LONG_ROWS,
    (2, 24576, 4096, True): _SHORT_STEPS,
    (16, 24576, 4096, True): _SHORT_STEPS,
    (32, 24576, 4096, True): _SHORT_STEPS,
    (64, 24576, 4096, True): LinearConfig(block_n=64, block_k=128, split_k=1, num_warps=4, num_stages=5, use_dot=True),
}


def linear_config(num_rows: int, num_outputs: int, num_inputs: int, gated: bool, num_sms: int) -> LinearConfig:
    """Config of a product of ``num_outputs`` weight rows (2F when gated): table first, then the rule.

    In each regime the rule names the fastest of about twenty configs on an H200, or one within 2 % of it.
    """
    rows = num_rows if num_rows <= 2 else max(16, triton.next_power_of_2(num_rows))
    tuned = TUNED.get((rows, num_outputs, num_inputs, gated))
    if tuned is not None:
        return tuned
    large, short = num_outputs >= 16384, num_inputs < 1024
    if (rows == 1 and not (large and short)) or (rows == 2 and num_outputs * num_inputs < 1 << 20):
        # registers hold the loads in flight, 4 or 8 KiB in each program; the more programs, the more even the end
        block_n = 4 if num_inputs < 2048 <= num_outputs else 2
        block_k = min(2048 if large and num_inputs >= 2048 else 1024, triton.next_power_of_2(num_inputs))
        return LinearConfig(block_n, block_k, split_k=1, num_warps=4, num_stages=1, use_dot=False)
    if short and rows <= 16:
        return _SHORT_STEPS
    if large:
        block_n, block_k, stages = (64, 128, 4) if rows == 2 else (128, 64, 5)
        return LinearConfig(block_n, block_k, split_k=1, num_warps=4, num_stages=stages, use_dot=True)
    # one program for each multiprocessor with five tiles on their way; a split shorter than 4 steps never fills that
    block_n, block_k = 64, 128
    tiles, steps = triton.cdiv(num_outputs, block_n), triton.cdiv(num_inputs, block_k)
    split_k = max(1, min((num_sms + tiles // 2) // tiles, steps // 4, 16))
    return LinearConfig(block_n, block_k, split_k, num_warps=4, num_stages=5, use_dot=True)


@triton.jit
def _accumulate_dot(
    x_ptr, w_tile, num_rows, num_inputs, stride_x, row_mask, first_k, end_k, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_T] partial sums over ``[first_k, end_k)``: weights are the first operand of the product."""
    t = tl.arange(0, BLOCK_T)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for start in tl.range(first_k, end_k, BLOCK_K, num_stages=STAGES):
        at = start + k
        if EVEN:
            w = tl.load(w_tile + at[None, :], eviction_policy="evict_first")
            x = tl.load(x_ptr + t[None, :] * stride_x + at[:, None], mask=(t < num_rows)[None, :], other=0.0)
        else:
            inside = at < num_inputs
            w = tl.load(w_tile + at[None, :], mask=row_mask[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptr + t[None, :] * stride_x + at[:, None], mask=(t < num_rows)[None, :] & inside[:, None], other=0.0)
        acc = dot(w, x, acc, WIDEN)
    return acc


@triton.jit
def _accumulate_fma(
    x_ptr, w_tile, num_inputs, stride_x, row_mask, first_k, end_k, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same for one or two rows: multiply-adds in registers, one sum over the tile at the end.

    The weights of the first step are loaded before the wait: nothing on the device writes them.
    """
    k = tl.arange(0, BLOCK_K)
    acc0 = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    acc1 = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    at = first_k + k
    if EVEN:
        w = tl.load(w_tile + at[None, :], eviction_policy="evict_first")
    else:
        w = tl.load(w_tile + at[None, :], mask=row_mask[:, None] & (at < num_inputs)[None, :], other=0.0)
    pdl_wait(PDL)
    for start in tl.range(first_k, end_k, BLOCK_K):
        wide = w.to(tl.float32)
        x0 = tl.load(x_ptr + start + k, mask=start + k < num_inputs, other=0.0).to(tl.float32)
        acc0 += wide * x0[None, :]
        if BLOCK_T == 2:
            x1 = tl.load(x_ptr + stride_x + start + k, mask=start + k < num_inputs, other=0.0).to(tl.float32)
            acc1 += wide * x1[None, :]
        at = start + BLOCK_K + k
        w = tl.load(
            w_tile + at[None, :], mask=row_mask[:, None] & (at < tl.minimum(end_k, num_inputs))[None, :], other=0.0,
            eviction_policy="evict_first",
        )  # fmt: skip
    sum0 = tl.sum(acc0, axis=1)[:, None]
    if BLOCK_T == 2:
        return tl.where(tl.arange(0, 2)[None, :] == 0, sum0, tl.sum(acc1, axis=1)[:, None])
    else:
        return sum0


@triton.jit
def _halves(acc, HALF: tl.constexpr, BLOCK_T: tl.constexpr):
    """Gate and up parts [HALF, BLOCK_T] of a gated tile."""
    return tl.split(tl.permute(tl.reshape(acc, (2, HALF, BLOCK_T)), (1, 2, 0)))


@triton.jit
def _store_tile(
    acc, tile, bias_ptr, residual_ptr, out_ptr, num_rows, num_outputs, stride_residual, BLOCK_T: tl.constexpr, HALF: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """The epilogue of a tile of outputs."""
    t = tl.arange(0, BLOCK_T)
    dtype = out_ptr.dtype.element_ty
    n = tile * HALF + tl.arange(0, HALF)
    if ACTIVATION > 0:
        gate, up = _halves(acc, HALF, BLOCK_T)
        gate = activate(gate.to(dtype).to(tl.float32), ACTIVATION).to(dtype).to(tl.float32)
        result = gate * up.to(dtype).to(tl.float32)
    else:
        result = acc
    mask = (n < num_outputs)[:, None] & (t < num_rows)[None, :]
    if HAS_BIAS:
        result += tl.load(bias_ptr + n, mask=n < num_outputs, other=0.0).to(tl.float32)[:, None]
    if HAS_RESIDUAL:
        result = result.to(dtype).to(tl.float32)  # as an addition behind the product would have it
        result += tl.load(residual_ptr + t[None, :] * stride_residual + n[:, None], mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + t[None, :] * num_outputs + n[:, None], result.to(dtype), mask=mask)


@triton.jit
def _weight_rows(tile, num_outputs, BLOCK_N: tl.constexpr, HALF: tl.constexpr):
    """The rows of the weight that make ``tile``, and which of them are there."""
    i = tl.arange(0, BLOCK_N)
    columns = tile * HALF + i % HALF
    return (columns + i // HALF * num_outputs).to(tl.int64), columns < num_outputs


@triton.jit
def _many_tiles(
    x_ptr, w_ptr, bias_ptr, residual_ptr, out_ptr, num_rows, num_outputs, num_inputs, stride_x, stride_w, stride_residual,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `_accumulate_fma`, for TILES tiles one after another: the next tile's weights are on their way while this one's are added up."""
    HALF: tl.constexpr = BLOCK_N // 2 if ACTIVATION > 0 else BLOCK_N
    k = tl.arange(0, BLOCK_K)
    first = tl.program_id(0) * TILES
    end = tl.minimum(first + TILES, tl.cdiv(num_outputs, HALF))
    rows, present = _weight_rows(first, num_outputs, BLOCK_N, HALF)
    inside = present[:, None] & (k < num_inputs)[None, :]
    w = tl.load(w_ptr + rows[:, None] * stride_w + k[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
    pdl_wait(PDL)
    for tile in tl.range(first, end):
        next_rows, next_present = _weight_rows(tile + 1, num_outputs, BLOCK_N, HALF)
        next_present = next_present & (tile + 1 < end)
        acc0 = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        acc1 = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        for start in tl.range(0, num_inputs, BLOCK_K):
            wide = w.to(tl.float32)
            x0 = tl.load(x_ptr + start + k, mask=start + k < num_inputs, other=0.0).to(tl.float32)
            acc0 += wide * x0[None, :]
            if BLOCK_T == 2:
                x1 = tl.load(x_ptr + stride_x + start + k, mask=start + k < num_inputs, other=0.0).to(tl.float32)
                acc1 += wide * x1[None, :]
            ends = start + BLOCK_K >= num_inputs
            at = tl.where(ends, 0, start + BLOCK_K) + k
            inside = tl.where(ends, next_present, present)[:, None] & (at < num_inputs)[None, :]
            source = tl.where(ends, next_rows, rows)[:, None] * stride_w + at[None, :]
            w = tl.load(w_ptr + source, mask=inside, other=0.0, eviction_policy="evict_first")
        acc = tl.sum(acc0, axis=1)[:, None]
        if BLOCK_T == 2:
            acc = tl.where(tl.arange(0, 2)[None, :] == 0, acc, tl.sum(acc1, axis=1)[:, None])
        _store_tile(
            acc,
            tile,
            bias_ptr,
            residual_ptr,
            out_ptr,
            num_rows,
            num_outputs,
            stride_residual,
            BLOCK_T,
            HALF,
            HAS_BIAS,
            HAS_RESIDUAL,
            ACTIVATION,
        )
        rows, present = next_rows, next_present


@triton.jit(do_not_specialize_on_alignment=["bound_ptr"])
def _small_linear_kernel(
    x_ptr, w_ptr, bias_ptr, residual_ptr, out_ptr, partial_ptr, counter_ptr, bound_ptr,
    num_rows, num_outputs, num_inputs, stride_x, stride_w, stride_residual, split_inputs,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, USE_DOT: tl.constexpr,
    EVEN: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    PIECE_BYTES: tl.constexpr, PIECES: tl.constexpr, STAGES: tl.constexpr, BOUND: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One program for one (tile of outputs, range of K), or for TILES of them. ``num_outputs`` counts output columns (F when gated)."""
    pdl_release(PDL)
    if BOUND:  # before any weight is asked for: a skipped product must not read them
        if is_empty(bound_ptr, BOUND, PDL):
            return
    if TILES > 1:
        _many_tiles(
            x_ptr, w_ptr, bias_ptr, residual_ptr, out_ptr, num_rows, num_outputs, num_inputs, stride_x, stride_w, stride_residual,
            BLOCK_T, BLOCK_N, BLOCK_K, HAS_BIAS, HAS_RESIDUAL, ACTIVATION, TILES, PDL,
        )  # fmt: skip
        return
    tile = tl.program_id(0)
    split = tl.program_id(1)
    GATED: tl.constexpr = ACTIVATION > 0
    HALF: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N  # output columns of a tile
    i = tl.arange(0, BLOCK_N)
    w_rows, row_mask = _weight_rows(tile, num_outputs, BLOCK_N, HALF)
    w_tile = w_ptr + w_rows[:, None] * stride_w
    first_k = split * split_inputs
    end_k = tl.minimum(first_k + split_inputs, num_inputs)
    if PIECE_BYTES > 0:  # weights are written by nothing on the device, so they may be asked for before the wait
        pieces = first_k + tl.arange(0, PIECES) * (PIECE_BYTES // 2)
        prefetch_l2(w_ptr + tl.where(row_mask, w_rows, 0)[:, None] * stride_w + pieces[None, :], PIECE_BYTES)
    if USE_DOT:
        pdl_wait(PDL)
        acc = _accumulate_dot(
            x_ptr, w_tile, num_rows, num_inputs, stride_x, row_mask, first_k, end_k, BLOCK_T, BLOCK_N, BLOCK_K, EVEN, STAGES, WIDEN
        )
    else:
        acc = _accumulate_fma(x_ptr, w_tile, num_inputs, stride_x, row_mask, first_k, end_k, BLOCK_T, BLOCK_N, BLOCK_K, EVEN, PDL)

    t = tl.arange(0, BLOCK_T)
    last = True
    if SPLIT_K > 1:
        part = partial_ptr + (tile * SPLIT_K).to(tl.int64) * (BLOCK_N * BLOCK_T) + i[:, None] * BLOCK_T + t[None, :]
        tl.store(part + split * (BLOCK_N * BLOCK_T), acc)
        tl.debug_barrier()  # every thread's stores come before the one thread's release
        arrived = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel", scope="gpu")
        last = arrived == SPLIT_K - 1
        if last:
            tl.debug_barrier()
            tl.store(counter_ptr + tile, 0)
            acc = tl.load(part, cache_modifier=".cg")
            for other in tl.static_range(1, SPLIT_K):
                acc += tl.load(part + other * (BLOCK_N * BLOCK_T), cache_modifier=".cg")
    if last:
        _store_tile(
            acc,
            tile,
            bias_ptr,
            residual_ptr,
            out_ptr,
            num_rows,
            num_outputs,
            stride_residual,
            BLOCK_T,
            HALF,
            HAS_BIAS,
            HAS_RESIDUAL,
            ACTIVATION,
        )


def is_small(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the streaming kernel serves this product; else cuBLAS does."""
    return 0 < x.shape[0] <= MAX_SMALL_ROWS and x.element_size() == 2 and weight.stride(1) == 1 and weight.dtype == x.dtype


def is_native(x: torch.Tensor, weight: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether the native CPU kernel serves this product: fp32, few rows, the library built; else PyTorch does."""
    return x.shape[0] <= native.MAX_ROWS and weight.is_contiguous() and native.usable(x, weight, *others)


def check_bound(bound: torch.Tensor | None) -> None:
    """``ValueError`` unless ``bound`` is None or one int32, the number of rows that count."""
    if bound is not None and (bound.dtype is not torch.int32 or bound.numel() != 1):
        raise ValueError(f"bound is {bound.dtype} {list(bound.shape)}; it must be one int32 on the device, as counts[:1] of partition_rows")


def _prefetch(config: LinearConfig, tiles: int, split_inputs: int, num_inputs: int, num_sms: int) -> tuple[int, int]:
    """Bytes and number of the pieces that a program asks into L2 of each of its weight rows, one piece for each thread."""
    pieces = 32 * config.num_warps // config.block_n
    if pieces == 0 or split_inputs * config.split_k != num_inputs:
        return 0, 1
    present = min(tiles * config.split_k, num_sms * (2 if config.use_dot else 24 // config.num_warps))
    row_bytes = min(2 * split_inputs, PREFETCH_BYTES // (present * config.block_n))
    return row_bytes // (16 * pieces) * 16, pieces


def launch_small(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None,
    activation: int = 0, bound: torch.Tensor | None = None, config: LinearConfig | None = None,
) -> torch.Tensor:  # fmt: skip
    """``x W^T`` with the given epilogue; nothing is read or written where ``bound`` is 0.

    ``config`` replaces :func:`linear_config` in a benchmark.
    """
    check_bound(bound)
    num_rows, num_inputs = x.shape
    num_outputs = weight.shape[0] // 2 if activation else weight.shape[0]
    config = config or linear_config(num_rows, weight.shape[0], num_inputs, activation > 0, device_sms(x.device))
    block_t = max(16, triton.next_power_of_2(num_rows)) if config.use_dot else num_rows
    block_out = config.block_n // 2 if activation else config.block_n
    tiles = triton.cdiv(num_outputs, block_out)
    steps = triton.cdiv(num_inputs, config.block_k)
    split_inputs = triton.cdiv(steps, config.split_k) * config.block_k
    config = replace(config, split_k=triton.cdiv(num_inputs, split_inputs))  # no program without work
    partial = counters = None
    if config.split_k > 1:
        scratch = scratch_of(x.device, tiles * config.split_k * config.block_n * block_t, tiles)
        partial, counters = scratch.values, scratch.counters
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    pdl = pdl_options()
    piece_bytes, pieces = 0, 1
    early = pdl["PDL"] and config.use_dot and bound_kind(bound) != 1  # without `dot` the first step's loads precede the wait
    if (config.prefetch or early) and not INTERPRETED:
        piece_bytes, pieces = _prefetch(config, tiles, split_inputs, num_inputs, device_sms(x.device))
    tiles_each = 1  # of a product that may turn out empty: what that costs is the start of its programs
    if bound is not None and not config.use_dot and config.split_k == 1:
        tiles_each = max(1, tiles // (BOUNDED_PROGRAMS * device_sms(x.device)))
    _small_linear_kernel[(triton.cdiv(tiles, tiles_each), config.split_k)](
        x, weight, bias, residual, out, partial, counters, bound,
        num_rows, num_outputs, num_inputs, x.stride(0), weight.stride(0), residual.stride(0) if residual is not None else 0,
        split_inputs,
        BLOCK_T=block_t, BLOCK_N=config.block_n, BLOCK_K=config.block_k, SPLIT_K=config.split_k, USE_DOT=config.use_dot,
        EVEN=num_inputs % config.block_k == 0 and num_outputs % block_out == 0,
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, ACTIVATION=activation,
        PIECE_BYTES=piece_bytes, PIECES=pieces,
        STAGES=config.num_stages, BOUND=bound_kind(bound), TILES=tiles_each, WIDEN=INTERPRETED, num_warps=config.num_warps, **pdl,
    )  # fmt: skip
    return out
