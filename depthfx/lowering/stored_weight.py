"""A bound nested weight: the tensors that a program reads and the modules of the model that read the same bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from depthfx.lowering.nested_format import NestedWeight
from depthfx.lowering.nested_linear import NestedLinear


@dataclass(frozen=True)
class StoredWeight:
    """The weight ``name`` ``[N, K]`` of precision entry ``entry``: buffers of ``holder``, and ``modules`` over its rows, one after another."""

    entry: int
    name: str
    holder: nn.Module
    modules: tuple[NestedLinear, ...]

    @property
    def upper(self) -> torch.Tensor:
        """Persistent bytes, uint8 ``[N, K]``."""
        return self.holder.get_buffer(f"{self.name}_upper")

    @property
    def lower(self) -> torch.Tensor:
        """Residual bytes, uint8 ``[N, K]``."""
        return self.holder.get_buffer(f"{self.name}_lower")

    def move(self, upper: torch.Tensor | None = None, lower: torch.Tensor | None = None) -> None:
        """Let program and modules read other tensors of the same shape, which the caller has filled; not once graphs were captured."""
        new = {part: t for part, t in (("upper", upper), ("lower", lower)) if t is not None}
        rows = [m.out_features for m in self.modules]
        for part, tensor in new.items():
            old = getattr(self, part)
            if tensor.shape != old.shape or tensor.dtype != old.dtype or tensor.device != old.device:
                raise ValueError(
                    f"{self.name}: {part} bytes {list(tensor.shape)} {tensor.dtype} cannot take the place of {list(old.shape)} {old.dtype}"
                )
            setattr(self.holder, f"{self.name}_{part}", tensor)
        for index, module in enumerate(self.modules):
            parts = {part: tensor.split(rows)[index] for part, tensor in new.items()}
            module.assign(NestedWeight(module.format, parts.get("upper", module.upper), parts.get("lower", module.lower), module.shift))
