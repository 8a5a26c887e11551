"""A skipped row's hidden state is multiplied by a number s of its layer: ``update = hidden * (s - 1)``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from depthfx.contracts import Projector
from depthfx.errors import SkipperError
from depthfx.skippers.model_shape import ModelShape
from depthfx.skippers.plugins import ProjectorSpec, register_projector


class Scalar(Projector):
    """The number of one layer, in the buffer ``scale`` (no dimensions)."""

    scale: torch.Tensor

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(float(scale)))

    def forward(self, hidden: torch.Tensor, mlp_input: torch.Tensor) -> torch.Tensor:
        """``[T, H]`` of the same dtype."""
        return hidden * (self.scale - 1)


def make(shape: ModelShape, layers: tuple[int, ...], *, scale: float | Sequence[float] = 1.0) -> list[Projector]:
    """One for each layer; ``scale`` is one number for all of them or one for each."""
    scales = list(scale) if isinstance(scale, Sequence) else [scale] * len(layers)
    if len(scales) != len(layers):
        raise SkipperError(f"scale has {len(scales)} numbers for {len(layers)} routed layers; give one for each, or one for all")
    return [Scalar(s) for s in scales]


register_projector(ProjectorSpec("scalar", "the hidden state times a number of the layer", make, cases=({}, {"scale": 1.25})))
