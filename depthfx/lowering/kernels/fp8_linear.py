"""A linear layer with a static FP8 weight: the reference arm that dual precision is compared with; it loses bits for good.

``out[t, n] = s_x[t] * s_w[n] * sum_p q[t, p] w[n, p] + bias[n]``; x [T, K] is quantised by `quantize_rows` (one scale for each row), weight
[N, K] uint8 holds E4M3 bytes in stored order, scale [N] fp32, out [T, N] in the dtype of x. N and K are multiples of 16.
Example: weight bytes 0x38 (1.0) and scale 0.5 stand for 0.5.
"""

from __future__ import annotations

import torch

from depthfx.lowering.fp8_weight import quantize_weight
from depthfx.lowering.kernel_spec import Case, KernelSpec, register_kernel
from depthfx.lowering.kernels import quantize_rows
from depthfx.lowering.kernels._cases import DOT_REASON, DOT_TOLERANCE, randn
from depthfx.lowering.kernels._fp8_linear import ROW_STEP, has_fp8_rows


def _product(q: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In fp32, one rounding at the end."""
    sums = q.float() @ weight.view(torch.float8_e4m3fn).float().t()
    return (sums * scale[:, None] * weight_scale).to(dtype)


def reference(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Plain PyTorch."""
    out = _product(*quantize_rows.reference(x), weight, scale, x.dtype)
    return out if bias is None else out + bias


def launch(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    quantized, row_scale = quantize_rows.launch(x, -x.shape[0] % ROW_STEP if x.is_cuda else 0)
    if not x.is_cuda:  # under the interpreter
        out = _product(quantized, row_scale, weight, scale, x.dtype)
    elif x.dtype is torch.bfloat16 or has_fp8_rows(x.device):
        out = torch._scaled_mm(
            quantized, weight.view(torch.float8_e4m3fn).t(), scale_a=row_scale[:, None], scale_b=scale[None], out_dtype=x.dtype,
            use_fast_accum=True,
        )  # fmt: skip
    else:
        one = torch.ones((), dtype=torch.float32, device=x.device)
        sums = torch._scaled_mm(quantized, weight.view(torch.float8_e4m3fn).t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
        out = (sums * row_scale[:, None] * scale).to(x.dtype)
    out = out[: x.shape[0]]
    return out if bias is None else out.add_(bias)


def fake(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


def _case(rows: int, outputs: int, inputs: int, bias: bool = False) -> Case:
    def make(g: torch.Generator, dtype: torch.dtype) -> tuple:
        weight = torch.randn(outputs, inputs, generator=g) * inputs**-0.5
        return randn(g, dtype, rows, inputs), *quantize_weight(weight), randn(g, dtype, outputs) if bias else None

    return Case(f"{rows}x{outputs}x{inputs}-bias{bias:d}", make, DOT_TOLERANCE, DOT_REASON)


register_kernel(
    KernelSpec(
        name="fp8_linear",
        schema="(Tensor x, Tensor weight, Tensor scale, Tensor? bias) -> Tensor",
        reference=reference,
        launch=launch,
        fake=fake,
        cases=(_case(1, 48, 576, bias=True), _case(3, 64, 208), _case(33, 80, 64, bias=True), _case(65, 32, 1024)),
    )
)
