"""Nothing is added: a skipped row's hidden state goes through the layer as it is."""

from __future__ import annotations

import torch

from depthfx.contracts import Projector
from depthfx.skippers.model_shape import ModelShape
from depthfx.skippers.plugins import ProjectorSpec, register_projector


class Identity(Projector):
    """See the module's text."""

    def forward(self, hidden: torch.Tensor, mlp_input: torch.Tensor) -> None:
        """Adds nothing."""
        return None


def make(shape: ModelShape, layers: tuple[int, ...]) -> Projector:
    """One for all layers."""
    return Identity()


register_projector(ProjectorSpec("identity", "nothing is added", make))
