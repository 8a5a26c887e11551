"""FP8 KV exhaustively: every 16-bit number through a store, every byte through a read; for the CPU tests and for those on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from depthfx.lowering.kernels.paged_attention import step_inputs

FP8 = torch.float8_e4m3fn


def same_numbers(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal numbers, zeros with their signs, and NaN in the same places."""
    a, b = a.cpu().float(), b.cpu().float()
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num().view(torch.int32), b.nan_to_num().view(torch.int32))


def check_every_number_is_stored(append: Callable[..., Any], device: str, dtype: torch.dtype) -> None:
    """All 65,536 numbers of ``dtype`` (float16 or bfloat16) as keys, and backwards as values: rounded to the nearest, saturated."""
    numbers = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype).view(64, 8, 128)
    k, v = numbers.to(device), numbers.flip(0, 1, 2).contiguous().to(device)
    pool = torch.full((4, 1, 2, 8, 16, 128), float("nan")).to(FP8).to(device)
    positions, rows = torch.arange(64, dtype=torch.int32, device=device), torch.zeros(64, dtype=torch.int32, device=device)
    append(k, v, pool, 0, positions, rows, torch.tensor([[2, 0, 3, 1]], dtype=torch.int32, device=device))
    stored = pool.cpu().float()[[2, 0, 3, 1], 0].permute(1, 0, 3, 2, 4).reshape(2, 64, 8, 128)  # [2, tokens, heads, D]
    limited = numbers.float().clamp(-448, 448)
    assert same_numbers(stored[0], limited.to(FP8))
    assert same_numbers(stored[1], limited.flip(0, 1, 2).to(FP8))
    assert torch.equal(stored[0].isnan(), numbers.isnan()), "only NaN becomes NaN"
    assert float(stored[0].nan_to_num(0).abs().max()) == 448


def check_every_byte_is_read(attend: Callable[..., Any], device: str, dtype: torch.dtype) -> None:
    """All 256 bytes as values of single keys: softmax over one key gives the value itself, in a decode row and in a chunk."""
    values = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(FP8).view(2, 128)
    pool = torch.full((2, 1, 2, 2, 16, 128), float("nan")).to(FP8)
    pool[:, 0, 0, :, 0].copy_(torch.ones(128))
    pool[:, 0, 1, :, 0].copy_(values)
    positions, rows, *tiles = (t.to(device) for t in step_inputs([0], [(0, 1)]))
    tables = torch.tensor([[1], [0]], dtype=torch.int32, device=device)
    q = torch.ones(2, 4, 128, dtype=dtype, device=device)
    out = attend(q, pool.to(device), 0, positions, rows, tables, *tiles, 1, 128**-0.5, 0, 0.0, None)
    expected = values.float().repeat_interleave(2, dim=0)
    for row in range(2):
        assert out.dtype is dtype and same_numbers(out[row].abs(), expected.abs())
        assert same_numbers(out[row] + 0.0, expected + 0.0)  # a sum from 0 on loses the sign of a zero
