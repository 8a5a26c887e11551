"""Every row runs, or no row does: to measure and to check. The weights make the gate `mlp` give the plain layer and the plain projector."""

from __future__ import annotations

import torch

from depthfx.contracts import PROJECT_ONLY, RUN, Decision, Policy, Rows
from depthfx.skippers.model_shape import ModelShape
from depthfx.skippers.plugins import PolicySpec, register_policy


class Force(Policy):
    """``action`` for every row, with weight 1 for RUN and 0 for PROJECT_ONLY (a skipped row's update is multiplied by 1 - w)."""

    scope = "static"

    def __init__(self, action: int) -> None:
        super().__init__()
        self.action = action

    def forward(self, rows: Rows) -> Decision:
        """The same for all rows."""
        weight = rows.hidden.new_full((rows.hidden.shape[0],), float(self.action))
        return Decision(torch.full_like(rows.is_prompt, self.action == RUN), weight)


def make_run(shape: ModelShape, layers: tuple[int, ...]) -> Policy:
    """One for all layers: RUN."""
    return Force(RUN)


def make_project(shape: ModelShape, layers: tuple[int, ...]) -> Policy:
    """One for all layers: PROJECT_ONLY."""
    return Force(PROJECT_ONLY)


register_policy(PolicySpec("force_run", "every row runs every layer", make_run, gates=("hard", "mlp")))
register_policy(PolicySpec("force_project", "every row skips every routed layer", make_project, gates=("hard", "mlp")))
