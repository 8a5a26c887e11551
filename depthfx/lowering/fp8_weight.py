"""Static FP8 weights: one scale for each output row, the bytes in stored order, and the module that holds them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from depthfx.errors import UnsupportedOptionError
from depthfx.lowering.fragment_order import from_fragment_order, to_fragment_order

LARGEST = 448.0  # of E4M3
SMALLEST = 1e-12  # keeps the scale of a row of zeros a normal number


def fits_fp8(num_outputs: int, num_inputs: int) -> bool:
    """Whether FP8 products take a weight ``[num_outputs, num_inputs]``: both sides must be multiples of 16."""
    return num_outputs % 16 == 0 and num_inputs % 16 == 0


@torch.no_grad()
def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``weight`` ``[N, K]`` of any float dtype as E4M3 bytes ``[N, K]`` uint8 in stored order, and scales ``[N]`` float32."""
    scale = weight.abs().amax(dim=1).float().clamp(min=SMALLEST) / LARGEST
    values = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    step = max(1, (16 << 20) // max(1, weight.shape[1]))
    for start in range(0, weight.shape[0], step):  # a slice at a time: the fp32 copies stay small
        rows = slice(start, start + step)
        scaled = (weight[rows].float() / scale[rows, None]).clamp(-LARGEST, LARGEST)
        values[rows] = to_fragment_order(scaled.to(torch.float8_e4m3fn).view(torch.uint8))
    return values, scale


class Fp8Linear(nn.Linear):
    """``F.linear`` with the FP8 weight as numbers; the original weight is gone, so there is nothing to save."""

    values: torch.Tensor
    scale: torch.Tensor

    def __init__(self, values: torch.Tensor, scale: torch.Tensor, bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would make a weight
        self.out_features, self.in_features = values.shape
        self.weight_dtype = dtype
        self.register_parameter("bias", bias)
        self.register_buffer("values", values, persistent=False)
        self.register_buffer("scale", scale, persistent=False)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """What the bytes stand for, ``[out_features, in_features]``: a new tensor."""
        plain = from_fragment_order(self.values).view(torch.float8_e4m3fn).float()
        return (plain * self.scale[:, None]).to(self.weight_dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, self.weight, self.bias)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        raise UnsupportedOptionError(
            f"{prefix}weight was rounded to FP8 by weights='fp8' and cannot be saved; load the model again, or compile with weights='nested'"
        )

    def _load_from_state_dict(self, *args: Any) -> None:
        raise UnsupportedOptionError("a weight that was rounded to FP8 by weights='fp8' cannot be loaded into; load the model again")
