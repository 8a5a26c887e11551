"""FP16 nested in E4M3: exact for |w| < 1.875, FP8 byte rounded to nearest even, scale 2^-8 (NestedFP's encoding).

A code with sign s, exponent bits 0 e3 e2 e1 e0 and fraction m9..m0 becomes
``upper = s e3 e2 e1 e0 m9 m8 m7 (+ 1 if rounding m6..m0 goes up)`` and ``lower = m7 .. m0``. The bit m7 is in both, so the
increment can be read back: joining subtracts the first bit of ``lower`` from the seven low bits of ``upper`` and halves them.
Guard: 1.75 <= |w| < 1.875 is never rounded up, because the next byte is NaN in E4M3.
Example: 1.0 = 0x3C00 gives upper 0x78 (256.0 in E4M3) and lower 0x00; 0.1 = 0x2E66 gives upper 0x5D and lower 0x66.
"""

from __future__ import annotations

import torch

from depthfx.lowering.formats._bits import bytes_of, codes_of, weight_of
from depthfx.lowering.nested_format import FORMATS, NestedFormat, NestedWeight

# The FP8 byte read as E4M3 is the weight times 2^8: the exponent biases are 15 and 7.
SCALE = 2.0**-8
# First magnitude that does not fit: with the guard, 1.875 itself rounds into NaN's place.
LIMIT = 1.875


def split_codes(codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Upper and lower byte (uint8) of codes whose magnitude is below :data:`LIMIT`."""
    sign, rest, tail = (codes >> 8) & 0x80, (codes >> 7) & 0x7F, codes & 0x7F
    up = (tail > 0x40) | ((tail == 0x40) & ((rest & 1) == 1))
    up &= rest != 0x7E  # the guard
    return bytes_of(sign | (rest + up.to(torch.int32))), bytes_of(codes)


def join_codes(upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """The codes (int32) that :func:`split_codes` split."""
    high, low = upper.to(torch.int32), lower.to(torch.int32)
    return ((high & 0x80) << 8) | ((((high & 0x7F) - (low >> 7)) >> 1) << 8) | low


class NestedE4M3(NestedFormat):
    """See the module's text."""

    name = "nested_e4m3"
    fp8 = torch.float8_e4m3fn
    preference = 0

    def covers(self, weight: torch.Tensor) -> bool:
        return bool((weight.abs() < LIMIT).all())

    def split(self, weight: torch.Tensor) -> NestedWeight:
        if not self.covers(weight):
            raise self.refuse(weight)
        upper, lower = split_codes(codes_of(weight))
        return NestedWeight(self.name, upper, lower)

    def join(self, nested: NestedWeight) -> torch.Tensor:
        assert nested.lower is not None
        return weight_of(join_codes(nested.upper, nested.lower))

    def fast_values(self, nested: NestedWeight) -> torch.Tensor:
        return nested.upper.view(self.fp8).float() * SCALE


FORMATS.add(NestedE4M3.name, NestedE4M3())
