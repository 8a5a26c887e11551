"""RMS norm of each row, in the form of Llama: statistics in fp32, rounded, then the weight.

``out[t, h] = round(x[t, h] * rsqrt(mean_h(x[t]^2) + eps)) * weight[h]``; x [T, H], weight [H].
Example: x = [3, 4], weight = [1, 2], eps = 0: mean square 12.5, out = [0.8485, 2.2627].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from depthfx.lowering import native
from depthfx.lowering.kernel_spec import Case, KernelSpec, inner_contiguous, pdl_options, register_kernel
from depthfx.lowering.kernels._cases import NORM_REASON, NORM_TOLERANCE, randn
from depthfx.lowering.kernels._device import pdl_release, pdl_wait


@triton.jit
def _rms_norm_kernel(x_ptr, weight_ptr, out_ptr, num_features, stride_x, eps, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program for one row of BLOCK >= H features."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < num_features
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    pdl_release(PDL)
    pdl_wait(PDL)
    x = tl.load(x_ptr + row * stride_x + offsets, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / num_features + eps)
    normed = (x * scale).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * num_features + offsets, (normed * weight).to(out_ptr.dtype.element_ty), mask=mask)


def norm_warps(num_features: int) -> int:
    """Warps of one row's program: 8 to 16 features a thread."""
    return max(1, min(16, triton.next_power_of_2(num_features) // 256))


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Plain PyTorch, as Llama spells it."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def cpu(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """fp32 takes the native kernel or PyTorch's fused norm (no rounding in between to keep); others take the reference."""
    if native.usable(x, weight):
        return native.rms_norm(inner_contiguous(x), weight, eps)
    if x.dtype == torch.float32:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)
    return reference(x, weight, eps)


def launch(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    rows = inner_contiguous(x.reshape(-1, x.shape[-1]))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows, num_features = rows.shape
    if num_rows:
        _rms_norm_kernel[(num_rows,)](
            rows, weight, out, num_features, rows.stride(0), eps,
            BLOCK=triton.next_power_of_2(num_features), num_warps=norm_warps(num_features), **pdl_options(),
        )  # fmt: skip
    return out


def fake(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape)


def _case(rows: int, features: int, row_stride: int | None = None) -> Case:
    def make(g: torch.Generator, dtype: torch.dtype) -> tuple:
        x = randn(g, dtype, rows, row_stride or features)[:, :features]
        return x, 1 + 0.1 * randn(g, dtype, features), 1e-5

    return Case(f"{rows}x{features}-stride{row_stride or features}", make, NORM_TOLERANCE, NORM_REASON)


register_kernel(
    KernelSpec(
        name="rms_norm",
        schema="(Tensor x, Tensor weight, float eps) -> Tensor",
        reference=reference,
        cpu=cpu,
        launch=launch,
        fake=fake,
        cases=(_case(3, 576), _case(1, 64), _case(17, 80, 96), _case(2, 4096)),
    )
)
