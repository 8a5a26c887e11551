"""A 16-bit weight as it is: both modes read all of it, and nothing of it can be lent."""

from __future__ import annotations

import torch

from depthfx.lowering.nested_format import FORMATS, NestedFormat, NestedWeight


class Plain16(NestedFormat):
    """See the module's text."""

    name = "plain16"
    fp8 = None
    preference = 3

    def covers(self, weight: torch.Tensor) -> bool:
        return True

    def split(self, weight: torch.Tensor) -> NestedWeight:
        return NestedWeight(self.name, weight, None)

    def join(self, nested: NestedWeight) -> torch.Tensor:
        return nested.upper

    def fast_values(self, nested: NestedWeight) -> torch.Tensor:
        return nested.upper.float()


FORMATS.add(Plain16.name, Plain16())
