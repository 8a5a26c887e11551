"""Residual add and RMS norm in one pass over the row, returning both.

``sum = round(x + residual)``; ``normed = rms_norm(sum, weight, eps)``; x, residual [T, H], weight [H].
Example: x = [1, 1], residual = [2, 3], weight = [1, 2], eps = 0: sum = [3, 4], normed = [0.8485, 2.2627].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from depthfx.lowering import native
from depthfx.lowering.kernel_spec import Case, KernelSpec, inner_contiguous, pdl_options, register_kernel
from depthfx.lowering.kernels import rms_norm
from depthfx.lowering.kernels._cases import NORM_REASON, NORM_TOLERANCE, randn
from depthfx.lowering.kernels._device import pdl_release, pdl_wait


@triton.jit
def _add_rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, num_features, stride_x, stride_residual, eps,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for one row of BLOCK >= H features."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < num_features
    dtype = out_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    pdl_release(PDL)
    pdl_wait(PDL)
    x = tl.load(x_ptr + row * stride_x + offsets, mask=mask, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + row * stride_residual + offsets, mask=mask, other=0.0).to(tl.float32)
    total = (x + residual).to(dtype)
    tl.store(sum_ptr + row * num_features + offsets, total, mask=mask)
    total = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, axis=0) / num_features + eps)
    normed = (total * scale).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * num_features + offsets, (normed * weight).to(dtype), mask=mask)


def reference(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain PyTorch."""
    total = x + residual
    return rms_norm.reference(total, weight, eps), total


def cpu(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The native kernel for fp32, else the reference with the CPU's fused norm."""
    if native.usable(x, residual, weight):
        return native.add_rms_norm(inner_contiguous(x), inner_contiguous(residual), weight, eps)
    total = x + residual
    return rms_norm.cpu(total, weight, eps), total


def launch(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    rows = inner_contiguous(x.reshape(-1, x.shape[-1]))
    residual_rows = inner_contiguous(residual.reshape(-1, x.shape[-1]))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows, num_features = rows.shape
    if num_rows:
        _add_rms_norm_kernel[(num_rows,)](
            rows, residual_rows, weight, out, total, num_features, rows.stride(0), residual_rows.stride(0), eps,
            BLOCK=triton.next_power_of_2(num_features), num_warps=rms_norm.norm_warps(num_features), **pdl_options(),
        )  # fmt: skip
    return out, total


def fake(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _case(rows: int, features: int, row_stride: int | None = None) -> Case:
    def make(g: torch.Generator, dtype: torch.dtype) -> tuple:
        x = randn(g, dtype, rows, row_stride or features)[:, :features]
        return x, randn(g, dtype, rows, features), 1 + 0.1 * randn(g, dtype, features), 1e-5

    return Case(f"{rows}x{features}-stride{row_stride or features}", make, NORM_TOLERANCE, NORM_REASON)


register_kernel(
    KernelSpec(
        name="add_rms_norm",
        schema="(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor normed, Tensor sum)",
        reference=reference,
        cpu=cpu,
        launch=launch,
        fake=fake,
        cases=(_case(3, 576), _case(1, 64), _case(17, 80, 96), _case(2, 4096)),
    )
)
