"""Stored bytes to float16 inside kernels: four weights at a time in 32-bit registers, or plain integers under the interpreter.

Full, E4M3: with b the first bit of ``lower``, ``h = (s << 15) | ((upper7 - b) >> 1) << 8 | lower``; E5M2: ``h = (upper - b) << 8 | lower``.
Fast, E4M3: the float16 number 2^-8 times the byte has the byte's bits one place to the right below the sign; E5M2: it is ``upper << 8``.
The subtraction runs over four bytes at once. No borrow leaves a byte: b = 1 means that ``upper7`` (E4M3) or ``upper`` (E5M2) is
not 0 for every weight that `formats` lets in. E4M3's NaN byte and infinity do not occur in stored weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Each takes upper (and lower) bytes of four weights and gives two registers of two float16 numbers.
JOIN_E4M3 = tl.constexpr("""
{
.reg .b32 v;
shr.u32 v, $3, 7;
and.b32 v, v, 0x01010101;
sub.u32 v, $2, v;
shr.u32 v, v, 1;
and.b32 v, v, 0x3F3F3F3F;
lop3.b32 v, $2, 0x80808080, v, 0xEA;
prmt.b32 $0, $3, v, 0x5140;
prmt.b32 $1, $3, v, 0x7362;
}
""")
JOIN_E5M2 = tl.constexpr("""
{
.reg .b32 v;
shr.u32 v, $3, 7;
and.b32 v, v, 0x01010101;
sub.u32 v, $2, v;
prmt.b32 $0, $3, v, 0x5140;
prmt.b32 $1, $3, v, 0x7362;
}
""")
WIDEN_E4M3 = tl.constexpr("""
{
.reg .b32 a, b;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.u32 $0, a, 1;
shr.u32 $1, b, 1;
and.b32 $0, $0, 0x3F803F80;
and.b32 $1, $1, 0x3F803F80;
lop3.b32 $0, a, 0x80008000, $0, 0xEA;
lop3.b32 $1, b, 0x80008000, $1, 0xEA;
}
""")
WIDEN_E5M2 = tl.constexpr("""
{
prmt.b32 $0, $2, 0, 0x1404;
prmt.b32 $1, $2, 0, 0x3424;
}
""")


@triton.jit
def join_bytes(upper, lower, CODING: tl.constexpr, PACKED: tl.constexpr):
    """The float16 weights of two uint8 tensors; CODING 1: E4M3, 2: E5M2; not PACKED: integer tensors, for the interpreter."""
    if PACKED:
        ASM: tl.constexpr = JOIN_E4M3 if CODING == 1 else JOIN_E5M2
        bits = tl.inline_asm_elementwise(ASM, "=&r,=&r,r,r", [upper, lower], dtype=tl.uint16, is_pure=True, pack=4)
    else:
        high, low = upper.to(tl.int32), lower.to(tl.int32)
        if CODING == 1:
            bits = ((high & 0x80) << 8) | ((((high & 0x7F) - (low >> 7)) >> 1) << 8) | low
        else:
            bits = ((high << 8) + low - ((low >> 7) << 8)) & 0xFFFF
        bits = bits.to(tl.uint16)
    return bits.to(tl.float16, bitcast=True)


@triton.jit
def widen_bytes(upper, CODING: tl.constexpr, PACKED: tl.constexpr):
    """The float16 numbers of fast mode, scale included, of a uint8 tensor."""
    if PACKED:
        ASM: tl.constexpr = WIDEN_E4M3 if CODING == 1 else WIDEN_E5M2
        bits = tl.inline_asm_elementwise(ASM, "=&r,=&r,r", [upper], dtype=tl.uint16, is_pure=True, pack=4)
    else:
        high = upper.to(tl.int32)
        bits = (((high & 0x80) << 8) | ((high & 0x7F) << 7) if CODING == 1 else high << 8).to(tl.uint16)
    return bits.to(tl.float16, bitcast=True)


@triton.jit
def true_order(w, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """``w`` [ROWS, COLUMNS] in fragment order with its columns in true order."""
    groups = tl.reshape(w, (ROWS, COLUMNS // 64, 4, 4, 2, 2))
    return tl.reshape(tl.permute(groups, (0, 1, 3, 4, 2, 5)), (ROWS, COLUMNS))


@triton.jit
def stored_order(x, COLUMNS: tl.constexpr):
    """``x`` [COLUMNS] in true order, brought into fragment order."""
    return tl.reshape(tl.permute(tl.reshape(x, (COLUMNS // 64, 4, 2, 4, 2)), (0, 3, 1, 2, 4)), (COLUMNS,))


@triton.jit
def power_of_two(shift):
    """``2^shift`` in fp32, exact; shift from -126 to 127."""
    return ((shift.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
