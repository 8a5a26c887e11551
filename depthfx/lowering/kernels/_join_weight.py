"""A stored weight back to a plain 16-bit matrix, for products of so many rows that joining once costs less than joining in the product.

``w[n, k] = 2^shift[n] * number(upper[n, p], lower[n, p])``, where place p holds column k; full or fast by the flag on the device.
The matrix is made in chunks of rows. Few large chunks: narrow products leave many multiprocessors without a tile at their end.
Example: [28672, 4096] float16 is 224 MiB, one chunk; [128256, 4096] takes four of at most 32,768 rows, each joined and multiplied before the next.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from depthfx.lowering.fragment_order import is_fragment_order
from depthfx.lowering.kernel_spec import INTERPRETED, pdl_options
from depthfx.lowering.kernels._device import pdl_release, pdl_wait
from depthfx.lowering.kernels._dual_weight import check_stored, coding_of
from depthfx.lowering.kernels._join_bytes import join_bytes, power_of_two, true_order, widen_bytes

CHUNK_BYTES = 256 << 20


@triton.jit(do_not_specialize=["layer", "first_row", "end_row"])
def _join_weight_kernel(
    u_ptr, l_ptr, shift_ptr, flags_ptr, layer, out_ptr, first_row, end_row, num_inputs,
    CODING: tl.constexpr, ORDERED: tl.constexpr, HAS_SHIFT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PACKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for a tile of rows ``first_row + ...`` of the stored weight; the output begins with ``first_row``."""
    rows = first_row + tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    places = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (rows < end_row)[:, None] & (places < num_inputs)[None, :]
    offsets = rows.to(tl.int64)[:, None] * num_inputs + places[None, :]
    pdl_release(PDL)
    pdl_wait(PDL)  # the product before still reads the chunk that this one overwrites
    u = tl.load(u_ptr + offsets, mask=mask, other=0)
    full = tl.load(flags_ptr + layer) != 0
    if full:
        w = join_bytes(u, tl.load(l_ptr + offsets, mask=mask, other=0), CODING, PACKED)
    else:
        w = widen_bytes(u, CODING, PACKED)
    if HAS_SHIFT:
        scale = power_of_two(tl.load(shift_ptr + rows, mask=rows < end_row, other=0))
        w = (w.to(tl.float32) * scale[:, None]).to(out_ptr.dtype.element_ty)
    else:
        w = w.to(tl.float32).to(out_ptr.dtype.element_ty)
    if ORDERED:
        w = true_order(w, BLOCK_N, BLOCK_K)
    target = (rows - first_row).to(tl.int64)[:, None] * num_inputs + places[None, :]
    tl.store(out_ptr + target, w, mask=mask)


def join_weight(
    upper: torch.Tensor, lower: torch.Tensor, shift: torch.Tensor | None, layer_precision: torch.Tensor, layer: int, name: str,
    out: torch.Tensor, first_row: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Fill ``out`` [rows, K] (contiguous, 16 or 32 bits) with rows ``first_row ...`` of the weight, columns in plain order; gives ``out``."""
    check_stored(upper, lower)
    num_rows, num_inputs = out.shape
    block_n, block_k = 16, min(256, max(64, triton.next_power_of_2(num_inputs)))
    _join_weight_kernel[(triton.cdiv(num_rows, block_n), triton.cdiv(num_inputs, block_k))](
        upper, lower, shift, layer_precision, layer, out, first_row, first_row + num_rows, num_inputs,
        CODING=coding_of(name, shift), ORDERED=is_fragment_order(num_inputs), HAS_SHIFT=shift is not None,
        BLOCK_N=block_n, BLOCK_K=block_k, PACKED=not INTERPRETED, num_warps=4, **pdl_options(),
    )  # fmt: skip
    return out


def launch_joined(
    x: torch.Tensor, upper: torch.Tensor, lower: torch.Tensor, shift: torch.Tensor | None, layer_precision: torch.Tensor, layer: int,
    name: str, bias: torch.Tensor | None = None, chunk_bytes: int = CHUNK_BYTES,
) -> torch.Tensor:  # fmt: skip
    """``x W^T + bias`` [T, N] by cuBLAS, chunk after chunk of joined rows of at most ``chunk_bytes`` (at least one row)."""
    num_outputs, num_inputs = upper.shape
    chunk_rows = min(num_outputs, max(1, chunk_bytes // max(1, num_inputs * x.element_size())))
    chunk = torch.empty((chunk_rows, num_inputs), dtype=x.dtype, device=x.device)
    if chunk_rows == num_outputs:
        return torch.nn.functional.linear(x, join_weight(upper, lower, shift, layer_precision, layer, name, chunk), bias)
    out = torch.empty((x.shape[0], num_outputs), dtype=x.dtype, device=x.device)
    for first in range(0, num_outputs, chunk_rows):
        rows = min(chunk_rows, num_outputs - first)
        weight = join_weight(upper, lower, shift, layer_precision, layer, name, chunk[:rows], first)
        if bias is None:
            torch.mm(x, weight.t(), out=out[:, first : first + rows])
        else:
            torch.addmm(bias[first : first + rows], x, weight.t(), out=out[:, first : first + rows])
    return out
