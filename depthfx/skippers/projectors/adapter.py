"""FlexiDepth's adapter, a narrow MLP in place of the layer's: ``update = up_proj(silu(gate_proj(x)) * down_proj(x))``, x the MLP's input.

Mind the names, which are the checkpoint's: ``down_proj`` is the factor beside the gate (H -> F/16) and ``up_proj`` is the output
(F/16 -> H), the reverse of what Llama's MLP calls them. F is the width of the layer's MLP.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from depthfx.contracts import Projector
from depthfx.errors import SkipperError
from depthfx.skippers.model_shape import ModelShape
from depthfx.skippers.options import check_count
from depthfx.skippers.plugins import ProjectorSpec, register_projector, seeded


class Adapter(Projector):
    """The adapter of one layer; its parameters have the names of the checkpoint."""

    def __init__(self, hidden_size: int, intermediate_size: int, reduction: int, bias: bool = False) -> None:
        super().__init__()
        width = max(1, intermediate_size // check_count("reduction", reduction))
        self.reduction = reduction
        self.gate_proj = nn.Linear(hidden_size, width, bias=bias)
        self.down_proj = nn.Linear(hidden_size, width, bias=bias)
        self.up_proj = nn.Linear(width, hidden_size, bias=bias)

    def forward(self, hidden: torch.Tensor, mlp_input: torch.Tensor) -> torch.Tensor:
        """``[T, H]`` of the same dtype."""
        update: torch.Tensor = self.up_proj(functional.silu(self.gate_proj(mlp_input)) * self.down_proj(mlp_input))
        return update


def make(shape: ModelShape, layers: tuple[int, ...], *, proj_reduction: int = 16, zero: bool = False, seed: int = 0) -> list[Projector]:
    """One for each layer, untrained (weights drawn from ``seed``); ``proj_reduction`` divides the MLP's width.

    ``zero``: the output projection starts at zero, so that at first a skipped row passes unchanged.
    Raises :class:`SkipperError` where the model's config names no width.
    """
    if shape.intermediate_size is None:
        raise SkipperError(f"the config of {shape.model_type or 'the model'} has no intermediate_size, which the adapter divides; use lora")
    with seeded(seed):
        made = [Adapter(shape.hidden_size, shape.intermediate_size, proj_reduction) for _ in layers]
    if zero:
        for adapter in made:
            nn.init.zeros_(adapter.up_proj.weight)
    return list(made)


register_projector(
    ProjectorSpec(
        "adapter", "FlexiDepth's narrow MLP on the MLP's input", make, cases=({}, {"proj_reduction": 4, "seed": 2}, {"zero": True})
    )
)
