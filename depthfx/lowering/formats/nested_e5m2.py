"""FP16 nested in E5M2: exact for every code, FP8 byte rounded to nearest with ties away from zero, scale 1.

``upper = (code + 0x80) >> 8`` and ``lower`` is the low byte; ``code = (upper << 8) + signed(lower)`` modulo 65,536. Ties to even
could not be exact in two bytes: an even upper byte would have 257 preimages. Magnitudes from 61,440 on read as infinity in FP8 and
still join exactly. Example: 0x3C80 (1.125) gives upper 0x3D (1.25 in E5M2) and lower 0x80, and 0x3D00 - 128 = 0x3C80.
"""

from __future__ import annotations

import torch

from depthfx.lowering.formats._bits import bytes_of, codes_of, weight_of
from depthfx.lowering.nested_format import FORMATS, NestedFormat, NestedWeight


class NestedE5M2(NestedFormat):
    """See the module's text."""

    name = "nested_e5m2"
    fp8 = torch.float8_e5m2
    preference = 2

    def covers(self, weight: torch.Tensor) -> bool:
        return bool((weight.abs() < 61440).all())  # beyond, fast mode would multiply with infinity

    def split(self, weight: torch.Tensor) -> NestedWeight:
        if not self.covers(weight):
            raise self.refuse(weight)
        return self.split_any(weight)

    def split_any(self, weight: torch.Tensor) -> NestedWeight:
        """The split without the range check of fast mode; :meth:`join` is exact for all 65,536 codes, NaN and infinity too."""
        codes = codes_of(weight)
        return NestedWeight(self.name, bytes_of((codes + 0x80) >> 8), bytes_of(codes))

    def join(self, nested: NestedWeight) -> torch.Tensor:
        assert nested.lower is not None
        low = nested.lower.to(torch.int32)
        return weight_of(((nested.upper.to(torch.int32) << 8) + torch.where(low >= 0x80, low - 0x100, low)) & 0xFFFF)

    def fast_values(self, nested: NestedWeight) -> torch.Tensor:
        return nested.upper.view(self.fp8).float()


FORMATS.add(NestedE5M2.name, NestedE5M2())
