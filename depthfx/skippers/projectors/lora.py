"""A product of two thin matrices on the hidden state: ``update = B(A(hidden))`` with A: H -> rank and B: rank -> H."""

from __future__ import annotations

import torch
from torch import nn

from depthfx.contracts import Projector
from depthfx.skippers.model_shape import ModelShape
from depthfx.skippers.options import check_count
from depthfx.skippers.plugins import ProjectorSpec, register_projector, seeded


class Lora(Projector):
    """The matrices of one layer. B starts at zero, so an untrained one adds nothing."""

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.a = nn.Linear(hidden_size, check_count("rank", rank), bias=False)
        self.b = nn.Linear(rank, hidden_size, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, hidden: torch.Tensor, mlp_input: torch.Tensor) -> torch.Tensor:
        """``[T, H]`` of the same dtype."""
        update: torch.Tensor = self.b(self.a(hidden))
        return update


def make(shape: ModelShape, layers: tuple[int, ...], *, rank: int = 8, seed: int = 0) -> list[Projector]:
    """One for each layer; A is drawn from ``seed``."""
    with seeded(seed):
        return [Lora(shape.hidden_size, rank) for _ in layers]


register_projector(ProjectorSpec("lora", "two thin matrices on the hidden state", make, cases=({}, {"rank": 3, "seed": 1})))
