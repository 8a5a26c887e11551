"""A 64-bit hash of bytes with equal values on a CPU and on CUDA, so that a residual is verified where it lies.

Words of 4 bytes are summed with one random odd 64-bit factor for each place; sums of chunks are mixed one after another:

    chunk sum  s_c = sum over i of  word[c, i] * factor[i]    mod 2^64
    hash       h   = mix(h xor s_c) for each chunk, from h = mix(number of bytes) on

What it catches, and why. A *stale* byte: one wrong word changes its sum always, since an odd factor times a difference below 2^32
is never 0 mod 2^64. A *poisoned* stretch or KV bytes: for any two contents that differ within a chunk, sums agree for at most one in
2^32 choices of the factors, and one in 2^63 where some word differs by an odd number. *Swapped* words have other factors, swapped
chunks meet another h, and a cut or padded tensor begins from another number of bytes. The factors are fixed, so this is no
cryptographic hash: it finds defects, not attacks. Integer sums wrap and so do not depend on the order in which a device adds.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from depthfx.errors import MemoryRequestError

CHUNK_WORDS = 1 << 20  # 4 MiB of content; twice that for the factors and again for the products
_MASK = (1 << 64) - 1
_SEED = 0x5DEECE66D


def content_hash(data: torch.Tensor) -> int:
    """The hash of ``data`` (uint8 ``[bytes]``, contiguous), an integer in [0, 2^64).

    Runs on the current stream of the tensor's device and waits for the result, 8 bytes for each 4 MiB; needs 16 MiB of scratch there.
    Raises :class:`MemoryRequestError` for another dtype or layout, or for a tensor without bytes (a meta tensor).
    """
    if data.dtype is not torch.uint8 or data.dim() != 1 or not data.is_contiguous() or data.is_meta:
        raise MemoryRequestError(
            f"cannot hash a {data.dtype} tensor of shape {list(data.shape)} on {data.device}; give contiguous uint8 bytes in one dimension"
        )
    step = 4 * CHUNK_WORDS
    count = -(-data.numel() // step)
    sums = torch.zeros(count, dtype=torch.int64, device=data.device)
    factors = _factors(data.device)
    for index in range(count):
        words = _words(data[index * step : (index + 1) * step])
        torch.sum(words * factors[: words.numel()], dim=0, out=sums[index])
    state = _mix(data.numel())
    for part in sums.tolist():
        state = _mix(state ^ (part & _MASK))
    return state


def _words(chunk: torch.Tensor) -> torch.Tensor:
    """The bytes as int32 words; an odd end is filled with zeros, which the number of bytes in the hash tells apart."""
    rest = -chunk.numel() % 4
    if rest:
        chunk = torch.cat([chunk, chunk.new_zeros(rest)])
    elif chunk.storage_offset() % 4 or chunk.data_ptr() % 4:
        chunk = chunk.clone()
    return chunk.view(torch.int32)


def _mix(value: int) -> int:
    """The end of splitmix64: a bijection of 64 bits in which each bit reaches all others."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@lru_cache(maxsize=8)
def _factors(device: torch.device) -> torch.Tensor:
    """``[CHUNK_WORDS]`` int64, odd, from splitmix64 in the device's own integer arithmetic."""
    with torch.inference_mode(False):  # kept for all later callers
        value = torch.arange(1, CHUNK_WORDS + 1, dtype=torch.int64, device=device)
        value = value * _signed(0x9E3779B97F4A7C15) + _SEED
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            value = (value ^ _logical_shift(value, shift)) * _signed(factor)
        return (value ^ _logical_shift(value, 31)) | 1


def _logical_shift(value: torch.Tensor, by: int) -> torch.Tensor:
    """``>>`` of int64 keeps the sign; the copies of the sign bit are masked away."""
    return (value >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
