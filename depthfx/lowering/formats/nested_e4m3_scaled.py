"""E4M3 nesting of rows that were divided by a power of two first, where that loses no bit.

``shift[n]`` is the smallest k >= 0 with ``|w[n]| / 2^k < 1.875`` for the whole output row n; the row is stored as
``w[n] * 2^-k`` in the encoding of `nested_e4m3`. Dividing moves small numbers towards FP16's subnormals, so a row is covered only if
multiplying back gives every bit. Example: a row with 9.25 gets k = 3 and is stored with 1.15625.
"""

from __future__ import annotations

import torch

from depthfx.lowering.formats._bits import codes_of, weight_of
from depthfx.lowering.formats.nested_e4m3 import LIMIT, SCALE, join_codes, split_codes
from depthfx.lowering.nested_format import FORMATS, NestedFormat, NestedWeight


def row_shifts(weight: torch.Tensor) -> torch.Tensor:
    """``[N]`` int8: how often each row of ``weight`` ``[N, K]`` has to be halved to lie below the limit."""
    largest = weight.abs().amax(dim=1).float() if weight.shape[1] else weight.new_zeros(weight.shape[0]).float()
    ratio = torch.frexp(largest / LIMIT)
    needed = torch.where(ratio.mantissa == 0, 0, ratio.exponent)  # largest = LIMIT * m * 2^e with 0.5 <= m < 1
    return needed.clamp(min=0).to(torch.int8)


def _scaled(weight: torch.Tensor, power: torch.Tensor) -> torch.Tensor:
    return torch.ldexp(weight.float(), power.to(torch.int32)[:, None]).to(torch.float16)


class NestedE4M3Scaled(NestedFormat):
    """See the module's text."""

    name = "nested_e4m3_scaled"
    fp8 = torch.float8_e4m3fn
    preference = 1

    def covers(self, weight: torch.Tensor) -> bool:
        if not bool(weight.isfinite().all()):
            return False
        shift = row_shifts(weight)
        return bool((codes_of(_scaled(_scaled(weight, -shift), shift)) == codes_of(weight)).all())

    def split(self, weight: torch.Tensor) -> NestedWeight:
        if not self.covers(weight):
            raise self.refuse(weight)
        shift = row_shifts(weight)
        upper, lower = split_codes(codes_of(_scaled(weight, -shift)))
        return NestedWeight(self.name, upper, lower, shift)

    def join(self, nested: NestedWeight) -> torch.Tensor:
        assert nested.lower is not None and nested.shift is not None
        return _scaled(weight_of(join_codes(nested.upper, nested.lower)), nested.shift)

    def fast_values(self, nested: NestedWeight) -> torch.Tensor:
        assert nested.shift is not None
        return torch.ldexp(nested.upper.view(self.fp8).float() * SCALE, nested.shift.to(torch.int32)[:, None])


FORMATS.add(NestedE4M3Scaled.name, NestedE4M3Scaled())
