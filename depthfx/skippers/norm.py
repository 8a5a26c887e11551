"""The RMS norm inside routers."""

from __future__ import annotations

import torch
from torch import nn


class RmsNorm(nn.Module):
    """``weight * round(x * rsqrt(mean(x^2) + eps))`` over the last dimension: statistics in FP32, rounded to x's dtype before the weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., width] to the same shape and dtype."""
        wide = x.float()
        variance = wide.pow(2).mean(-1, keepdim=True)
        return self.weight * (wide * torch.rsqrt(variance + self.eps)).to(x.dtype)
