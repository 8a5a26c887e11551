"""The weight-streaming product for Hopper: nested weights and at most 256 rows of x, ``W x^T`` with weights joined in registers.

``y[t, n] = sum_k x[t, k] w[n, k]``; x [T, K], out [T, N], or [T, F] when gated. Time is the time to read the weights once: N K
bytes in fast mode, 2 N K in full mode. A program has 64 or 128 weight rows and a range of K. Its ring in shared memory is filled by
the tensor copy engine; a thread reads 16 stored bytes of a row (see ``fragment_order``) and joins four weights at a time into
the registers of the matrix unit. In fast mode the residual bytes are neither copied nor read.

Several programs share a multiprocessor, so one joins while others wait for memory. The program that arrives last for a tile
adds the ranges of K in order, so results repeat bit for bit. Example: N = 4096, 4 ranges: 256 programs of 8 steps of 128 at K = 4096.

A gated tile holds 8 gate rows, the 8 up rows that belong to them, and so on: rows r and r + 8 of the matrix unit's result lie
in one thread, so the activation needs no exchange.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from depthfx.lowering.kernel_spec import bound_kind, device_sms, pdl_options
from depthfx.lowering.kernels._hopper_tiles import finish_tile, load_weights
from depthfx.lowering.kernels._scratch import scratch_of
from depthfx.lowering.kernels._small_linear import check_bound
from depthfx.lowering.kernels._stream_config import StreamConfig, block_rows, stream_config


@gluon.jit
def _expect(bar, needed, READ_LOWER: gl.constexpr, ROWS: gl.constexpr, BLOCK_T: gl.constexpr, BLOCK_K: gl.constexpr):
    mbarrier.expect(bar, ROWS * BLOCK_K * (2 if READ_LOWER else 1) + BLOCK_T * BLOCK_K * 2, pred=needed)


@gluon.jit
def _copy_weights(
    u_desc, l_desc, u_pieces, l_pieces, loaded, stage, tile, step, needed,
    READ_LOWER: gl.constexpr, GATED: gl.constexpr, ROWS: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """Ask for one step of weights where ``needed``."""
    bar = loaded.index(stage)
    k = step * BLOCK_K
    if GATED:
        tma.async_copy_global_to_shared(u_desc, [tile * (ROWS // 16), 0, 0, k], bar, u_pieces.index(stage), pred=needed)
        if READ_LOWER:
            tma.async_copy_global_to_shared(l_desc, [tile * (ROWS // 16), 0, 0, k], bar, l_pieces.index(stage), pred=needed)
    else:
        tma.async_copy_global_to_shared(u_desc, [tile * ROWS, k], bar, u_pieces.index(stage), pred=needed)
        if READ_LOWER:
            tma.async_copy_global_to_shared(l_desc, [tile * ROWS, k], bar, l_pieces.index(stage), pred=needed)


@gluon.jit
def _copy_rows(x_desc, x_pieces, loaded, stage, step, needed, BLOCK_K: gl.constexpr):
    """Ask for one step of x where ``needed``."""
    for c in gl.static_range(BLOCK_K // 64):
        piece = x_pieces.index(stage * (BLOCK_K // 64) + c)
        tma.async_copy_global_to_shared(x_desc, [0, step * BLOCK_K + c * 64], loaded.index(stage), piece, pred=needed)


@gluon.jit
def _refill(
    u_desc, l_desc, x_desc, u_pieces, l_pieces, x_pieces, loaded, tile, first, end, turn,
    FULL: gl.constexpr, GATED: gl.constexpr, ROWS: gl.constexpr, BLOCK_T: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The place of turn ``turn``, which has been read, gets the step ``STAGES`` further on, if there is one."""
    step = first + turn + STAGES
    stage = (turn + STAGES) % STAGES
    more = (turn >= 0) & (step < end)
    _expect(loaded.index(stage), more, FULL, ROWS, BLOCK_T, BLOCK_K)
    _copy_weights(u_desc, l_desc, u_pieces, l_pieces, loaded, stage, tile, step, more, FULL, GATED, ROWS, BLOCK_K)
    _copy_rows(x_desc, x_pieces, loaded, stage, step, more, BLOCK_K)


@gluon.jit
def _take(u_tiles, l_tiles, loaded, turn, FULL: gl.constexpr, FORMAT: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
          DTYPE: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    """Wait for the step of ``turn`` and join its weights."""
    stage = turn % STAGES
    mbarrier.wait(loaded.index(stage), turn // STAGES & 1)
    return load_weights(u_tiles.index(stage), l_tiles.index(stage), FORMAT, FULL, BLOCK_K, DTYPE, MMA)


@gluon.jit
def _stream(
    u_desc, l_desc, x_desc, u_pieces, l_pieces, x_pieces, u_tiles, l_tiles, x_tiles, loaded, tile, first, end,
    FULL: gl.constexpr, FORMAT: gl.constexpr, GATED: gl.constexpr, ROWS: gl.constexpr, BLOCK_T: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """``[ROWS, BLOCK_T]`` sums of one tile over the steps ``[first, end)``.

    Under dependent launch the first weights are asked for before the wait: nothing on the device writes them while serving.
    Steps go in pairs, so that the next weights are joined into other registers than those the matrix unit still reads; naming
    them in the wait keeps the compiler from using them again too early.
    """
    for s in gl.static_range(STAGES):
        _expect(loaded.index(s), first + s < end, FULL, ROWS, BLOCK_T, BLOCK_K)
        _copy_weights(u_desc, l_desc, u_pieces, l_pieces, loaded, s, tile, first + s, first + s < end, FULL, GATED, ROWS, BLOCK_K)
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    for s in gl.static_range(STAGES):
        _copy_rows(x_desc, x_pieces, loaded, s, first + s, first + s < end, BLOCK_K)
    acc = warpgroup_mma_init(gl.zeros([ROWS, BLOCK_T], gl.float32, MMA))
    odd = gl.zeros([ROWS, BLOCK_K], x_tiles.dtype, gl.DotOperandLayout(0, MMA, 2))
    for pair in range((end - first) // 2):
        turn = 2 * pair
        even = _take(u_tiles, l_tiles, loaded, turn, FULL, FORMAT, BLOCK_K, STAGES, x_tiles.dtype, MMA)
        before, odd = warpgroup_mma_wait(0, deps=[acc, odd])
        _refill(u_desc, l_desc, x_desc, u_pieces, l_pieces, x_pieces, loaded, tile, first, end, turn - 1, FULL, GATED, ROWS, BLOCK_T,
                BLOCK_K, STAGES)  # fmt: skip
        acc = warpgroup_mma(even, x_tiles.index(turn % STAGES).permute((1, 0)), before, is_async=True)
        odd = _take(u_tiles, l_tiles, loaded, turn + 1, FULL, FORMAT, BLOCK_K, STAGES, x_tiles.dtype, MMA)
        before, even = warpgroup_mma_wait(0, deps=[acc, even])
        _refill(u_desc, l_desc, x_desc, u_pieces, l_pieces, x_pieces, loaded, tile, first, end, turn, FULL, GATED, ROWS, BLOCK_T,
                BLOCK_K, STAGES)  # fmt: skip
        acc = warpgroup_mma(odd, x_tiles.index((turn + 1) % STAGES).permute((1, 0)), before, is_async=True)
    total, odd = warpgroup_mma_wait(0, deps=[acc, odd])
    if (end - first) % 2 == 1:
        turn = end - first - 1
        last = _take(u_tiles, l_tiles, loaded, turn, FULL, FORMAT, BLOCK_K, STAGES, x_tiles.dtype, MMA)
        total = warpgroup_mma(last, x_tiles.index(turn % STAGES).permute((1, 0)), total)
    return total


@gluon.jit
def _sum_ranges(acc, partial_ptr, counter_ptr, tile, split, splits, ROWS: gl.constexpr, BLOCK_T: gl.constexpr, MMA: gl.constexpr):
    """Store this range of a tile; the last to arrive gets the sum of all and True."""
    SLOT: gl.constexpr = ROWS * BLOCK_T
    within = gl.arange(0, ROWS, gl.SliceLayout(1, MMA))[:, None] * BLOCK_T + gl.arange(0, BLOCK_T, gl.SliceLayout(0, MMA))[None, :]
    part = partial_ptr + (tile * splits).to(gl.int64) * SLOT + within
    gl.store(part + split * SLOT, acc)
    gl.thread_barrier()
    arrived = gl.atomic_add(counter_ptr + tile, 1, sem="acq_rel", scope="gpu")
    complete = arrived == splits - 1
    if complete:
        gl.thread_barrier()
        gl.store(counter_ptr + tile, 0)
        acc = gl.load(part, cache_modifier=".cg")
        for other in range(1, splits):
            acc += gl.load(part + other * SLOT, cache_modifier=".cg")
    return acc, complete


@gluon.jit(do_not_specialize=["num_rows", "steps", "splits", "layer"], do_not_specialize_on_alignment=["bound_ptr"])
def _hopper_stream_kernel(
    u_desc, l_desc, x_desc, out_ptr, shift_ptr, bias_ptr, partial_ptr, counter_ptr, precision_ptr, layer, bound_ptr,
    num_rows, num_outputs, steps, splits,
    FORMAT: gl.constexpr, HAS_SHIFT: gl.constexpr, HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_T: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    BOUND: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One program for one (tile, range of K), in the precision that ``precision_ptr[layer]`` says (not 0: full)."""
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    GATED: gl.constexpr = ACTIVATION > 0
    X_COLUMNS: gl.constexpr = BLOCK_K // 64
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, BLOCK_T, 16])
    W_TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=BLOCK_K, element_bitwidth=8, rank=2)
    X_TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    PIECE: gl.constexpr = [STAGES, ROWS // 16, 2, 8, BLOCK_K] if GATED else [STAGES, ROWS, BLOCK_K]
    u_pieces = gl.allocate_shared_memory(gl.uint8, PIECE, u_desc.layout)
    l_pieces = gl.allocate_shared_memory(gl.uint8, PIECE, u_desc.layout)
    x_pieces = gl.allocate_shared_memory(dtype, [STAGES * X_COLUMNS, BLOCK_T, 64], X_TILE)
    u_tiles = u_pieces._reinterpret(gl.uint8, [STAGES, ROWS, BLOCK_K], W_TILE)
    l_tiles = l_pieces._reinterpret(gl.uint8, [STAGES, ROWS, BLOCK_K], W_TILE)
    x_tiles = x_pieces._reinterpret(dtype, [STAGES, BLOCK_T, BLOCK_K], X_TILE)
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(loaded.index(s), count=1)
    fence_async_shared()
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    if BOUND:  # before any weight is asked for: a skipped product must not read them; see `is_empty`
        if PDL and BOUND == 1:
            gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        if gl.load(bound_ptr) == 0:
            if PDL and BOUND == 2:
                gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
            return
    tile = gl.program_id(0)
    split = gl.program_id(1)
    first = split * (steps // splits) + gl.minimum(split, steps % splits)
    end = (split + 1) * (steps // splits) + gl.minimum(split + 1, steps % splits)
    if gl.load(precision_ptr + layer) != 0:
        acc = _stream(u_desc, l_desc, x_desc, u_pieces, l_pieces, x_pieces, u_tiles, l_tiles, x_tiles, loaded, tile, first, end,
                      True, FORMAT, GATED, ROWS, BLOCK_T, BLOCK_K, STAGES, PDL, MMA)  # fmt: skip
    else:
        acc = _stream(u_desc, l_desc, x_desc, u_pieces, l_pieces, x_pieces, u_tiles, l_tiles, x_tiles, loaded, tile, first, end,
                      False, FORMAT, GATED, ROWS, BLOCK_T, BLOCK_K, STAGES, PDL, MMA)  # fmt: skip
    complete = True
    if splits > 1:
        acc, complete = _sum_ranges(acc, partial_ptr, counter_ptr, tile, split, splits, ROWS, BLOCK_T, MMA)
    if complete:
        finish_tile(acc, out_ptr, shift_ptr, bias_ptr, tile * (ROWS // 2 if GATED else ROWS), num_rows, num_outputs, HAS_SHIFT, HAS_BIAS,
                    ACTIVATION, BLOCK_T, MMA)  # fmt: skip


def launch_stream(
    x: torch.Tensor, upper: torch.Tensor, lower: torch.Tensor, shift: torch.Tensor | None, bias: torch.Tensor | None,
    activation: int, layer_precision: torch.Tensor, layer: int, coding: int, config: StreamConfig | None = None,
    bound: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """``x W^T`` with the given epilogue; ``coding`` is 1 for E4M3 and 2 for E5M2, ``config`` replaces :func:`stream_config` in a benchmark.

    Nothing is read or written where ``bound`` is 0.
    """
    check_bound(bound)
    num_rows, num_inputs = x.shape
    config = config or stream_config(num_rows, upper.shape[0], num_inputs, activation > 0, device_sms(x.device))
    num_outputs = upper.shape[0] // 2 if activation else upper.shape[0]
    block_t = block_rows(num_rows)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=config.block_k, element_bitwidth=8, rank=4 if activation else 2)

    def describe(w: torch.Tensor) -> TensorDescriptor:
        stride = w.stride(0)
        if activation:
            shape, strides = [num_outputs // 8, 2, 8, num_inputs], [8 * stride, num_outputs * stride, stride, 1]
            return TensorDescriptor(w, shape, strides, [config.rows // 16, 2, 8, config.block_k], layout)
        return TensorDescriptor(w, [num_outputs, num_inputs], [stride, 1], [config.rows, config.block_k], layout)

    x_layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    x_desc = TensorDescriptor(x, [num_rows, num_inputs], [x.stride(0), 1], [block_t, 64], x_layout)
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    tiles = -(-num_outputs // (config.rows // 2 if activation else config.rows))
    scratch = scratch_of(x.device, tiles * config.splits * config.rows * block_t, tiles)
    _hopper_stream_kernel[(tiles, config.splits)](
        describe(upper), describe(lower), x_desc, out, shift, bias, scratch.values, scratch.counters, layer_precision, layer, bound,
        num_rows, num_outputs, -(-num_inputs // config.block_k), config.splits,
        FORMAT=coding, HAS_SHIFT=shift is not None, HAS_BIAS=bias is not None, ACTIVATION=activation,
        ROWS=config.rows, BLOCK_T=block_t, BLOCK_K=config.block_k, STAGES=config.stages, BOUND=bound_kind(bound),
        num_warps=config.rows // 16, **pdl_options(),
    )  # fmt: skip
    return out
