"""Activations to FP8 with one scale for each row, in the order of stored weights.

``m = max(max_k |x[t, k]|, 1e-12)``, ``scale[t] = m / 448`` and ``out[t, p] = e4m3(x[t, k] * (448 / m))``, where place p holds column k
(fragment order when K is a multiple of 64, plain order else); x [T, K], out [T, K] float8_e4m3fn, scale [T] float32.
Example: x = [[1, -2, 0.5]]: scale = 2 / 448 and out = [[224, -448, 112]].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from depthfx.lowering.fragment_order import is_fragment_order, to_fragment_order
from depthfx.lowering.kernel_spec import Case, KernelSpec, inner_contiguous, pdl_options, register_kernel
from depthfx.lowering.kernels._cases import BF16, F16, F32, randn
from depthfx.lowering.kernels._device import pdl_release, pdl_wait
from depthfx.lowering.kernels._e4m3 import LARGEST, in_software, to_e4m3
from depthfx.lowering.kernels._join_bytes import stored_order

SMALLEST = 1e-12  # keeps the scale of a row of zeros a normal number
MAX_BLOCK = 16384  # columns of a row that a program holds in registers; longer rows are read twice


@triton.jit
def _quantize_rows_kernel(
    x_ptr, out_ptr, scale_ptr, num_inputs, stride_x, ORDERED: tl.constexpr, BLOCK_K: tl.constexpr, ONE_BLOCK: tl.constexpr,
    SOFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for one row: its largest magnitude first, then the numbers; a row of one block stays in registers meanwhile."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    pdl_release(PDL)
    pdl_wait(PDL)
    x = tl.load(x_ptr + row * stride_x + k, mask=k < num_inputs, other=0.0)
    largest = tl.abs(x.to(tl.float32))
    if not ONE_BLOCK:
        for start in range(BLOCK_K, num_inputs, BLOCK_K):
            more = tl.load(x_ptr + row * stride_x + start + k, mask=start + k < num_inputs, other=0.0)
            largest = tl.maximum(largest, tl.abs(more.to(tl.float32)))
    most = tl.maximum(tl.max(largest, axis=0), 1e-12)
    tl.store(scale_ptr + row, tl.div_rn(most, 448.0))
    factor = tl.div_rn(448.0, most)
    for start in range(0, BLOCK_K if ONE_BLOCK else num_inputs, BLOCK_K):
        if not ONE_BLOCK:
            x = tl.load(x_ptr + row * stride_x + start + k, mask=start + k < num_inputs, other=0.0)
        q = to_e4m3(x.to(tl.float32) * factor, SOFT)
        if ORDERED:
            q = stored_order(q, BLOCK_K)
        tl.store(out_ptr + row * num_inputs + start + k, q, mask=start + k < num_inputs)


def reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain PyTorch."""
    wide = to_fragment_order(x.float())
    most = wide.abs().amax(dim=1).clamp(min=SMALLEST)
    factor = torch.full_like(most, LARGEST) / most
    return (wide * factor[:, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).contiguous(), most / LARGEST


def launch(x: torch.Tensor, more_rows: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """``more_rows`` rows of unspecified content follow the T rows of both results."""
    x = inner_contiguous(x)
    num_rows, num_inputs = x.shape
    out = torch.empty((num_rows + more_rows, num_inputs), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((num_rows + more_rows,), dtype=torch.float32, device=x.device)
    block_k = min(MAX_BLOCK, max(64, triton.next_power_of_2(num_inputs)))
    _quantize_rows_kernel[(num_rows,)](
        x, out.view(torch.uint8), scale, num_inputs, x.stride(0), ORDERED=is_fragment_order(num_inputs), BLOCK_K=block_k,
        ONE_BLOCK=block_k >= num_inputs, SOFT=in_software(x.device), num_warps=min(16, max(4, block_k // 512)), **pdl_options(),
    )  # fmt: skip
    return out, scale


def fake(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty((x.shape[0],), dtype=torch.float32)


def _case(rows: int, inputs: int, extra: int = 0) -> Case:
    def make(g: torch.Generator, dtype: torch.dtype) -> tuple:
        x = randn(g, dtype, rows, inputs + extra)[:, :inputs] * 10.0 ** torch.randint(-3, 3, (rows, 1), generator=g)
        x[rows // 2] = 0
        return (x.to(dtype),)

    return Case(f"{rows}x{inputs}", make, {F32: 0.0, F16: 0.0, BF16: 0.0}, "the same correctly rounded fp32 steps")


register_kernel(
    KernelSpec(
        name="quantize_rows",
        schema="(Tensor x) -> (Tensor, Tensor)",
        reference=reference,
        launch=launch,
        fake=fake,
        cases=(_case(3, 576), _case(5, 200, extra=8), _case(2, 4160), _case(1, 64), _case(2, MAX_BLOCK + 64)),
    )
)
