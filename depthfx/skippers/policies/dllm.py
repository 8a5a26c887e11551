"""D-LLM's router: Linear H -> 512, RMS norm, SiLU, Linear -> 2; RUN where the second number is at least the first.

The router reads the layer's input as it is. The first two positions of a request always run. D-LLM's own model also hides a skipped
token's keys from later tokens; here every layer writes its own K and V and all are read.
"""

from __future__ import annotations

from torch import nn
from torch.nn import functional

from depthfx.contracts import Decision, Policy, Rows
from depthfx.skippers.model_shape import ModelShape
from depthfx.skippers.norm import RmsNorm
from depthfx.skippers.options import check_count
from depthfx.skippers.plugins import PolicySpec, register_policy, seeded


class DllmRouter(Policy):
    """The router of one layer; see the module's text."""

    scope = "token"

    def __init__(self, hidden_size: int, width: int, reserved: int, eps: float) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(hidden_size, check_count("width", width))
        self.norm = RmsNorm(width, eps)
        self.linear_2 = nn.Linear(width, 2)
        self.reserved = check_count("reserved", reserved, 0)

    def forward(self, rows: Rows) -> Decision:
        """RUN by the router, or because the position is reserved."""
        skip, run = self.linear_2(functional.silu(self.norm(self.linear_1(rows.hidden)))).unbind(-1)
        return Decision((run >= skip) | (rows.positions < self.reserved))


def default_layers(shape: ModelShape, **options: object) -> tuple[int, ...]:
    """All but the first two, as D-LLM."""
    return tuple(range(min(2, shape.num_layers - 1), shape.num_layers))


def make(shape: ModelShape, layers: tuple[int, ...], *, width: int = 512, reserved: int = 2, seed: int = 0) -> list[Policy]:
    """A router for each layer, untrained (weights drawn from ``seed``); the first ``reserved`` positions always run."""
    with seeded(seed):
        return [DllmRouter(shape.hidden_size, width, reserved, shape.norm_eps) for _ in layers]


register_policy(
    PolicySpec(
        name="dllm",
        description="a small router decides for each token and layer (D-LLM)",
        make=make,
        cases=({}, {"width": 64, "reserved": 0, "seed": 3}),
        default_layers=default_layers,
    )
)
