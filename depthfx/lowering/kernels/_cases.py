"""Inputs that several kernels' test cases share: seeded tensors and small paged KV pools full of poison."""

from __future__ import annotations

import torch

from depthfx.lowering.kernels._e4m3 import FP8

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32

NORM_TOLERANCE = {F32: 1e-5, F16: 2e-3, BF16: 2.4e-2}
NORM_REASON = "up to three roundings to the model dtype on the way; the interpreter truncates instead of rounding bf16"
DOT_TOLERANCE = {F32: 2e-5, F16: 4e-3, BF16: 3e-2}
DOT_REASON = "sums in another order, rounded to the model dtype at the end; the interpreter truncates bf16"
COPY_TOLERANCE = {F32: 0.0, F16: 0.0, BF16: 0.0}
COPY_REASON = "a pure move must keep every bit"
STORE_FP8_REASON = "one rounding of the same numbers, to the nearest E4M3"
STEP_FP8 = {FP8: 0.125, **NORM_TOLERANCE}
STEP_FP8_REASON = "numbers that differ by a rounding of the model dtype may lie on two sides of a tie: one step of E4M3 (1/8) in the pool"


def randn(g: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Unit normal numbers drawn in fp32, then rounded."""
    return torch.randn(*shape, generator=g).to(dtype)


def counted(number: int) -> torch.Tensor:
    """``number`` as a view [1] behind another count: on the device its address is a multiple of 4 bytes and no more."""
    return torch.tensor([0, number], dtype=torch.int32)[1:]


def paged_tables(g: torch.Generator, num_requests: int, max_blocks: int, spare: int = 3) -> tuple[torch.Tensor, int]:
    """``(block_tables [S, M], number of blocks)`` with all ids different and in random order."""
    num_blocks = num_requests * max_blocks + spare
    ids = torch.randperm(num_blocks, generator=g)[: num_requests * max_blocks]
    return ids.view(num_requests, max_blocks).to(torch.int32), num_blocks


def wide_randn(g: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Normal numbers with deviations from 1e-4 to 1e4: subnormal, normal and beyond the range of E4M3; one infinity and one NaN."""
    numbers = torch.randn(*shape, generator=g) * 10.0 ** torch.randint(-4, 5, shape, generator=g)
    numbers.view(-1)[torch.randperm(numbers.numel(), generator=g)[:2]] = torch.tensor([float("-inf"), float("nan")])
    return numbers.to(dtype)


def poisoned_pool(
    g: torch.Generator, dtype: torch.dtype, shape: tuple[int, ...], tables: torch.Tensor, lengths: list[int], layer: int
) -> torch.Tensor:
    """A KV pool of NaN in which only layer ``layer`` holds numbers, for the first ``lengths[s]`` tokens of request s."""
    num_blocks, num_layers, _, num_kv_heads, block_tokens, head_dim = shape
    pool = torch.full((num_blocks, num_layers, 2, num_kv_heads, block_tokens, head_dim), float("nan"), dtype=dtype)
    for request, length in enumerate(lengths):
        for position in range(length):
            block = int(tables[request, position // block_tokens])
            pool[block, layer, :, :, position % block_tokens] = randn(g, dtype, 2, num_kv_heads, head_dim)
    return pool
