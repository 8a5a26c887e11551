"""Early exit by a confidence head, as CALM's classifier: a row that is confident enough leaves, and stays out of all later layers.

``confidence = sigmoid(Linear(hidden))``, one head for each routed layer; a row exits where it reaches the limit. With a decay the limit
falls with the position t as CALM's: ``clip(0.9 * threshold + 0.1 * exp(-decay * t / horizon), 0, 1)``; without, it is the threshold.
"""

from __future__ import annotations

import torch
from torch import nn

from depthfx.contracts import Decision, Policy, Rows
from depthfx.errors import SkipperError
from depthfx.skippers.model_shape import ModelShape
from depthfx.skippers.options import check_count, check_share
from depthfx.skippers.plugins import PolicySpec, register_policy, seeded


class ConfidenceExit(Policy):
    """The head of one layer; see the module's text."""

    scope = "token"
    monotone = True

    def __init__(self, hidden_size: int, threshold: float, decay: float | None, horizon: int) -> None:
        super().__init__()
        self.head = nn.Linear(hidden_size, 1)
        self.threshold, self.horizon = check_share("threshold", threshold), check_count("horizon", horizon)
        if decay is not None and not decay >= 0:
            raise SkipperError(f"decay={decay!r} is not allowed; give a number of at least 0, or None for a constant threshold")
        self.decay = decay

    def limit(self, positions: torch.Tensor) -> torch.Tensor | float:
        """The confidence at which a row exits: ``[T]`` float32, or one number."""
        if self.decay is None:
            return self.threshold
        falling = torch.exp(-self.decay * positions.float() / self.horizon)
        return (0.9 * self.threshold + 0.1 * falling).clamp(0.0, 1.0)

    def forward(self, rows: Rows) -> Decision:
        """RUN where the row ran before and is not confident."""
        confidence = torch.sigmoid(self.head(rows.hidden)).squeeze(-1).float()
        return Decision(rows.ran & (confidence < self.limit(rows.positions)))


def make(
    shape: ModelShape, layers: tuple[int, ...], *, threshold: float = 0.9, decay: float | None = None, horizon: int = 512, seed: int = 0
) -> list[Policy]:
    """A head for each layer, untrained (weights drawn from ``seed``); ``horizon`` is in tokens."""
    with seeded(seed):
        return [ConfidenceExit(shape.hidden_size, threshold, decay, horizon) for _ in layers]


register_policy(
    PolicySpec(
        name="confidence_exit",
        description="a row leaves at the first layer whose confidence head is sure (CALM)",
        make=make,
        cases=({}, {"threshold": 0.5}, {"threshold": 0.5, "decay": 4.0, "horizon": 64}),
    )
)
