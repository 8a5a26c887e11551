"""A bound nested weight: the tensors that a program reads and the modules of the model that read the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from depthfx.errors import InternalError
from depthfx.lowering.nested_format import NestedWeight
from depthfx.lowering.nested_linear import NestedLinear


def joined_view(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """``parts`` along dim 0 as a view, where each is contiguous and begins where the one before ends; else None."""
    first, at = parts[0], parts[0].data_ptr()
    if len(parts) == 1:
        return first
    storage = first.untyped_storage().data_ptr()
    for p in parts:
        if p.untyped_storage().data_ptr() != storage or p.data_ptr() != at or not p.is_contiguous() or p.shape[1:] != first.shape[1:]:
            return None
        at += p.nbytes
    shape = (sum(p.shape[0] for p in parts), *first.shape[1:])
    return first.as_strided(shape, first.stride())


def joined_bytes(parts: Sequence[NestedWeight]) -> NestedWeight | None:
    """``parts`` of one format as a view, where they are neighbours in memory; else None."""
    if len({p.format for p in parts}) != 1:
        return None
    joined: dict[str, torch.Tensor | None] = {}
    for name in ("upper", "lower", "shift"):
        tensors = [getattr(p, name) for p in parts]
        joined[name] = None if tensors[0] is None else joined_view(tensors)
        if (joined[name] is None) != (tensors[0] is None):
            return None
    assert joined["upper"] is not None
    return NestedWeight(parts[0].format, joined["upper"], joined["lower"], joined["shift"])


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

    def follow(self) -> None:
        """Read the bytes where the modules have them now: another program over the same modules has moved them."""
        joined = joined_bytes([m.nested for m in self.modules])
        if joined is None or joined.lower is None:
            raise InternalError(f"{self.name}: its parts are no longer neighbours in memory, so two programs cannot share them")
        setattr(self.holder, f"{self.name}_upper", joined.upper)
        setattr(self.holder, f"{self.name}_lower", joined.lower)
