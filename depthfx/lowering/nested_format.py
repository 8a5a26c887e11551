"""What a nested format must state: how an FP16 weight splits into a persistent byte and a residual byte, exactly."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from depthfx.errors import FormatError
from depthfx.registry import Registry


@dataclass(frozen=True)
class NestedWeight:
    """One weight ``[N, K]`` in a nested format.

    ``upper`` and ``lower`` are ``[N, K]`` uint8: the byte that stays, which is an FP8 number by itself, and the residual byte
    that may be lent. ``shift`` ``[N]`` int8 is the power of two that each output row was divided by, or None for none.
    For ``plain16`` there is no FP8 byte: ``upper`` holds the 16-bit weight itself and ``lower`` is None.
    """

    format: str
    upper: torch.Tensor
    lower: torch.Tensor | None
    shift: torch.Tensor | None = None

    @property
    def persistent_bytes(self) -> int:
        """Bytes that stay in memory in every mode."""
        shift = 0 if self.shift is None else self.shift.numel()
        return self.upper.numel() * self.upper.element_size() + shift

    @property
    def residual_bytes(self) -> int:
        """Bytes that may be lent."""
        return 0 if self.lower is None else self.lower.numel()


class NestedFormat(ABC):
    """One way to nest; a plug-in is one file in ``lowering/formats`` that registers an instance in :data:`FORMATS`."""

    name: str
    fp8: torch.dtype | None  # how the persistent byte reads as a number; None: there is no fast mode
    preference: int  # the covering format with the smallest number is chosen

    @abstractmethod
    def covers(self, weight: torch.Tensor) -> bool:
        """Whether every code of ``weight`` ``[N, K]`` float16 survives :meth:`split` and :meth:`join` bit for bit."""

    @abstractmethod
    def split(self, weight: torch.Tensor) -> NestedWeight:
        """The two bytes of ``weight`` ``[N, K]`` float16; raises :class:`FormatError` where :meth:`covers` is False."""

    @abstractmethod
    def join(self, nested: NestedWeight) -> torch.Tensor:
        """The original ``[N, K]`` float16 weight, every bit."""

    @abstractmethod
    def fast_values(self, nested: NestedWeight) -> torch.Tensor:
        """What fast mode multiplies with: ``[N, K]`` float32 from the persistent byte alone."""

    def refuse(self, weight: torch.Tensor) -> FormatError:
        """The error of :meth:`split` for a weight that is not covered."""
        largest = float(weight.abs().max()) if weight.numel() else 0.0
        return FormatError(
            f"{self.name} cannot hold a weight of shape {tuple(weight.shape)} whose largest magnitude is {largest:g} without losing bits; "
            "let choose_format pick the format"
        )


FORMATS: Registry[NestedFormat] = Registry("nested format", "depthfx.lowering.formats")


def choose_format(weight: torch.Tensor) -> NestedFormat:
    """The preferred format that covers ``weight`` ``[N, K]`` float16: the one with the most exact FP8 byte."""
    if weight.dtype is not torch.float16 or weight.dim() != 2:
        raise FormatError(f"a nested weight must be [N, K] float16; got {list(weight.shape)} {weight.dtype}: cast it with to_float16 first")
    ordered = sorted((f for _, f in FORMATS.items()), key=lambda f: f.preference)
    return next(f for f in ordered if f.covers(weight))


def to_float16(weight: torch.Tensor) -> tuple[torch.Tensor, int]:
    """``weight`` as float16 and how many of its elements changed value (BF16 below 2^-17 and beyond the range of FP16)."""
    cast = weight.to(torch.float16)
    changed = (cast.float() != weight.float()) & ~(weight.isnan() & cast.isnan())
    return cast, int(changed.sum())


def fast_error(weight: torch.Tensor, nested: NestedWeight) -> float:
    """Relative error of fast mode: the norm of what the persistent byte misses over the norm of ``weight``."""
    exact = weight.float()
    missed = FORMATS.get(nested.format).fast_values(nested) - exact
    scale = float(exact.norm())
    return float(missed.norm()) / scale if scale else 0.0
