"""Pieces of the Hopper products: stored bytes of a weight tile to the registers of the matrix unit, and the end of a tile."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from depthfx.lowering.kernels._join_bytes import JOIN_E4M3, JOIN_E5M2, WIDEN_E4M3, WIDEN_E5M2

E4M3 = gl.constexpr(1)


@gluon.jit
def load_weights(u_tile, l_tile, FORMAT: gl.constexpr, FULL: gl.constexpr, BLOCK_K: gl.constexpr, DTYPE: gl.constexpr, MMA: gl.constexpr):
    """``[ROWS, BLOCK_K]`` weights in the registers that the matrix unit reads, columns in their true order."""
    ROWS: gl.constexpr = u_tile.shape[0]
    REGISTERS: gl.constexpr = (
        [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]] if BLOCK_K == 64 else [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0], [0, 64]]
    )
    WARPS: gl.constexpr = (
        [[16, 0], [32, 0]] if ROWS == 64 else ([[16, 0], [32, 0], [64, 0]] if ROWS == 128 else [[16, 0], [32, 0], [64, 0], [128, 0]])
    )
    STORED: gl.constexpr = gl.DistributedLinearLayout(REGISTERS, [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]], WARPS, [], [ROWS, BLOCK_K])
    u = u_tile.load(STORED)
    if FULL:
        lower = l_tile.load(STORED)
        JOIN: gl.constexpr = JOIN_E4M3 if FORMAT == E4M3 else JOIN_E5M2
        bits = gl.inline_asm_elementwise(JOIN, "=&r,=&r,r,r", [u, lower], dtype=gl.uint16, is_pure=True, pack=4)
    else:
        WIDEN: gl.constexpr = WIDEN_E4M3 if FORMAT == E4M3 else WIDEN_E5M2
        bits = gl.inline_asm_elementwise(WIDEN, "=&r,=&r,r", [u], dtype=gl.uint16, is_pure=True, pack=4)
    w = bits.to(gl.float16, bitcast=True)
    if gl.float16 != DTYPE:
        w = w.to(gl.float32).to(DTYPE)
    w = w.reshape([ROWS, BLOCK_K // 64, 4, 4, 2, 2]).permute([0, 1, 3, 4, 2, 5]).reshape([ROWS, BLOCK_K])
    return gl.convert_layout(w, gl.DotOperandLayout(0, MMA, 2))


@gluon.jit
def _power_of_two(shift):
    """``2^shift`` in fp32, exact; shift from -126 to 127."""
    return ((shift.to(gl.int32) + 127) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _activate(x, ACTIVATION: gl.constexpr):
    """1: silu, 2: gelu by tanh, 3: gelu by erf; float32."""
    if ACTIVATION == 1:
        return x / (1.0 + gl.exp(-x))
    if ACTIVATION == 2:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1.0 + gl.exp(-2.0 * inner))
    return 0.5 * x * (1.0 + gl.erf(x * 0.7071067811865476))


@gluon.jit
def finish_tile(acc, out_ptr, shift_ptr, bias_ptr, first_n, num_rows, num_outputs, HAS_SHIFT: gl.constexpr, HAS_BIAS: gl.constexpr,
            ACTIVATION: gl.constexpr, BLOCK_T: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    """Scale, bias or activation, and the store of ``acc`` [ROWS, BLOCK_T]; ROWS / 2 outputs when gated."""
    ROWS: gl.constexpr = acc.shape[0]
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    i = gl.arange(0, ROWS, gl.SliceLayout(1, MMA))
    t = gl.arange(0, BLOCK_T, gl.SliceLayout(0, MMA))
    if ACTIVATION > 0:
        if HAS_SHIFT:
            row = first_n + i // 16 * 8 + i % 8
            shift = gl.load(shift_ptr + (i // 8 % 2) * num_outputs + row, mask=row < num_outputs, other=0)
            acc = acc * _power_of_two(shift)[:, None]
        pairs = acc.to(dtype).to(gl.float32).reshape([ROWS // 16, 2, 8, BLOCK_T]).permute([0, 2, 3, 1])
        gate, up = gl.split(pairs)
        columns = (first_n + i // 16 * 8 + i % 8)[:, None] + gl.zeros([ROWS, BLOCK_T], gl.int32, MMA)
        rows = t[None, :] + gl.zeros([ROWS, BLOCK_T], gl.int32, MMA)
        n, _same = gl.split(columns.reshape([ROWS // 16, 2, 8, BLOCK_T]).permute([0, 2, 3, 1]))
        at, _same = gl.split(rows.reshape([ROWS // 16, 2, 8, BLOCK_T]).permute([0, 2, 3, 1]))
        result = _activate(gate, ACTIVATION).to(dtype).to(gl.float32) * up
        gl.store(out_ptr + at.to(gl.int64) * num_outputs + n, result.to(dtype), mask=(n < num_outputs) & (at < num_rows))
    else:
        n = first_n + i
        if HAS_SHIFT:
            shift = gl.load(shift_ptr + n, mask=n < num_outputs, other=0)
            acc = acc * _power_of_two(shift)[:, None]
        if HAS_BIAS:
            acc += gl.load(bias_ptr + n, mask=n < num_outputs, other=0.0).to(gl.float32)[:, None]
        target = out_ptr + t.to(gl.int64)[None, :] * num_outputs + n[:, None]
        gl.store(target, acc.to(dtype), mask=(n < num_outputs)[:, None] & (t < num_rows)[None, :])
