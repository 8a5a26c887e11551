"""Device functions that several kernels share: dependent launch, activations, prefetch and dot under the interpreter."""

from __future__ import annotations

import triton
import triton.language as tl

ACTIVATIONS = {"silu": 1, "gelu_tanh": 2, "gelu": 3}


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Wait until the kernel before has finished and its writes are visible; every program must pass here once."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def pdl_release(PDL: tl.constexpr):
    """Let the next kernel start as soon as all programs have come this far; it still waits for this one's end."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def is_empty(bound_ptr, BOUND: tl.constexpr, PDL: tl.constexpr):
    """Whether the number of rows that ``bound_ptr`` names is 0. BOUND 1: a kernel before may write it, so wait first; 2: it is settled, wait last."""
    if BOUND == 1:
        pdl_wait(PDL)
        return tl.load(bound_ptr) == 0
    else:
        empty = tl.load(bound_ptr) == 0
        if empty:
            pdl_wait(PDL)
        return empty


@triton.jit
def prefetch_l2(pointers, BYTES: tl.constexpr):
    """Ask for ``BYTES`` (a multiple of 16) behind each pointer (aligned to 16 bytes), into L2."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [pointers, BYTES],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def dot(a, b, acc, WIDEN: tl.constexpr):
    """``a @ b + acc`` in fp32; WIDEN (interpreter only) casts first, since the interpreter multiplies raw bf16 bits."""
    if WIDEN:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def tanh(x):
    """tanh in fp32 from one exponential: 1 - 2 / (e^2x + 1); tanh(0) = 0, tanh(50) = 1."""
    return 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)


@triton.jit
def erf(x):
    """erf in fp32 by a five-term rational series, off by at most 2e-7; the interpreter has no erf of its own."""
    a = tl.abs(x)
    t = 1.0 / (1.0 + 0.3275911 * a)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    y = 1.0 - series * tl.exp2(-a * a * 1.4426950408889634)
    return tl.where(x < 0, -y, y)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """silu (1), gelu with tanh (2) or exact gelu (3) of an fp32 tensor."""
    if ACTIVATION == 1:
        return x / (1.0 + tl.exp2(-x * 1.4426950408889634))
    elif ACTIVATION == 2:
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    else:
        return 0.5 * x * (1.0 + erf(x * 0.7071067811865476))
