"""E4M3 numbers inside kernels: rounding to bytes and widening, by the device's instruction or in integer arithmetic.

A KV pool of FP8 reaches a kernel as bytes with a coding: 0 for a pool of the model's dtype (loaded and stored as it is), 1 for E4M3
by instruction (compute capability 8.9 and later), 2 for E4M3 in integers (older devices, and the interpreter, whose own cast loses
carries). The scale is 1: magnitudes above 448, infinity too, become 448; NaN stays NaN. Widening is exact in float16, bfloat16 and float32.
Example: 1.06 is stored as 1.0 (byte 0x38), 1.07 as 1.125 (0x39), 1000 as 448 (0x7E).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from depthfx.lowering.kernel_spec import INTERPRETED

FP8 = torch.float8_e4m3fn
LARGEST = 448.0


@triton.jit
def _e4m3_bits(x):
    """The E4M3 bytes nearest to fp32 numbers of magnitude at most 448, ties to even, NaN kept."""
    code = x.to(tl.int32, bitcast=True)
    magnitude = code & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)  # exponent biases 127 and 7
    small = (tl.abs(x) * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xF  # below 2^-6, in steps of 2^-9
    byte = tl.where(magnitude < 0x3C800000, small, normal)
    return (tl.where(x == x, byte, 0x7F) | ((code >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def to_e4m3(x, SOFT: tl.constexpr):
    """The nearest E4M3 bytes of fp32 numbers, ties to even, saturating, NaN kept; SOFT: in integers."""
    if SOFT:
        return _e4m3_bits(tl.minimum(tl.maximum(x, -448.0, propagate_nan=tl.PropagateNan.ALL), 448.0, propagate_nan=tl.PropagateNan.ALL))
    else:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def encode(x, CODING: tl.constexpr):
    """Numbers of the model's dtype as the pool stores them."""
    if CODING == 0:
        return x
    else:
        return to_e4m3(x.to(tl.float32), CODING == 2)


@triton.jit
def decode(x, DTYPE: tl.constexpr, CODING: tl.constexpr):
    """What was loaded from the pool, as numbers of DTYPE."""
    if CODING == 0:
        return x
    elif CODING == 1:
        return x.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    else:
        byte = x.to(tl.int32)
        magnitude = byte & 0x7F
        number = (((byte & 0x80) << 8) | (magnitude << 7)).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where(magnitude == 0x7F, float("nan"), number).to(DTYPE)


def in_software(device: torch.device) -> bool:
    """Whether the device has no instructions for E4M3 (below compute capability 8.9, and the interpreter)."""
    return INTERPRETED or (device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9))


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """An FP8 tensor as its bytes, with the same shape and strides; others as they are. Not every PyTorch can index FP8 on a CPU."""
    return x.view(torch.uint8) if x.dtype is FP8 else x


def stored_form(kv_pool: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The pool as kernels take it (bytes of the same shape and strides if it is FP8) and its coding, 0, 1 or 2."""
    if kv_pool.dtype is not FP8:
        return kv_pool, 0
    return as_bytes(kv_pool), 2 if in_software(kv_pool.device) else 1


def round_to(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` in plain PyTorch as a pool of ``dtype`` stores it: saturating and NaN kept where that is FP8."""
    return x.clamp(-LARGEST, LARGEST).to(dtype) if dtype is FP8 else x.to(dtype)
