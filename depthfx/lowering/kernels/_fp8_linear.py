"""Fast precision for many rows: the stored upper bytes and FP8 activations straight into the FP8 tensor cores of Hopper.

``out[t, n] = scale[t] * 2^(shift[n] - 8) * sum_p q[t, p] fp8(upper[n, p])`` (2^0 for E5M2): q and the bytes lie in the same order, so
no weight is moved. Only for steps known to be fast on the host, since the choice of kernel cannot wait for the device.
"""

from __future__ import annotations

import functools

import torch

from depthfx.lowering.kernels import quantize_rows
from depthfx.lowering.kernels._dual_weight import E4M3, coding_of, powers_of_two

ROW_STEP = 64  # products have a multiple of so many rows: for each number that it has not met, cuBLAS searches for an algorithm
MIN_ROWS = 65  # below, `_hopper_stream` is faster, and keeps 16-bit activations


def has_fp8_rows(device: torch.device) -> bool:
    """Whether products with row-wise scales go to cuBLAS, which writes float16 too: compute capability 9.x and CUDA 12.9 or later.

    CUTLASS, elsewhere, writes bfloat16 alone.
    """
    version = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9 and version >= (12, 9)


def uses_fp8(x: torch.Tensor, upper: torch.Tensor, precision: int) -> bool:
    """Whether FP8 tensor cores serve this product: capability 9.x, all layers fast, many 16-bit rows, sides multiples of 16."""
    return (
        precision == 0
        and x.shape[0] >= MIN_ROWS
        and x.element_size() == 2
        and upper.shape[0] % 16 == 0
        and upper.shape[1] % 16 == 0
        and has_fp8_rows(x.device)
    )


def row_scales(num_outputs: int, shift: torch.Tensor | None, coding: int, device: torch.device) -> torch.Tensor:
    """``[1, N]`` fp32: what the sum over FP8 numbers of each weight row is multiplied with."""
    power = 8 if coding == E4M3 else 0
    return _equal_scales(num_outputs, power, device) if shift is None else powers_of_two(shift, power)[None]


@functools.lru_cache(maxsize=256)  # a few shapes in a model
def _equal_scales(num_outputs: int, power: int, device: torch.device) -> torch.Tensor:
    return torch.full((1, num_outputs), 2.0**-power, dtype=torch.float32, device=device)


def launch_fp8(
    x: torch.Tensor, upper: torch.Tensor, shift: torch.Tensor | None, name: str, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``x W^T + bias`` [T, N] in the dtype of x, with activations rounded to E4M3 by `quantize_rows`."""
    coding = coding_of(name, shift)
    quantized, scale = quantize_rows.launch(x, -x.shape[0] % ROW_STEP)
    weight = upper.view(torch.float8_e4m3fn if coding == E4M3 else torch.float8_e5m2)
    out = torch._scaled_mm(
        quantized, weight.t(), scale_a=scale[:, None], scale_b=row_scales(upper.shape[0], shift, coding, x.device),
        out_dtype=x.dtype, use_fast_accum=True,
    )  # fmt: skip
    out = out[: x.shape[0]]
    return out if bias is None else out.add_(bias)
