"""Bit patterns of FP16 weights as integers, shared by the formats."""

from __future__ import annotations

import torch


def codes_of(weight: torch.Tensor) -> torch.Tensor:
    """The 16 bits of each float16 element as int32 in [0, 65535]."""
    return weight.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF


def weight_of(codes: torch.Tensor) -> torch.Tensor:
    """float16 elements from int32 codes; the inverse of :func:`codes_of`."""
    return torch.where(codes >= 0x8000, codes - 0x10000, codes).to(torch.int16).view(torch.float16)


def bytes_of(codes: torch.Tensor) -> torch.Tensor:
    """The low eight bits of int32 codes as uint8."""
    return (codes & 0xFF).to(torch.uint8)
