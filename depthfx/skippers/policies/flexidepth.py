"""FlexiDepth's router: ``w = sigmoid(head(dec(tanh(norm(enc(x))))))`` of the normed layer input x; RUN iff w > 0.5, strictly.

enc: H -> H/16, norm: RMS norm of that width, dec: H/16 -> H, head: H -> 1. Under the gate `mlp` (a checkpoint's mode `released`) a RUN
row's MLP is scaled by w and a skipped row's adapter by 1 - w; under `hard` (`ste_hard`) w only decides. Serving one with the arithmetic of
the other is silently wrong, so the mode goes with the checkpoint. The arithmetic is bit for bit that of the published model: one step
after another in the dtype of x, nothing folded.
"""

from __future__ import annotations

import torch
from torch import nn

from depthfx.contracts import Decision, Policy, Rows
from depthfx.errors import SkipperError
from depthfx.skippers.model_shape import ModelShape
from depthfx.skippers.norm import RmsNorm
from depthfx.skippers.options import check_count, check_number
from depthfx.skippers.plugins import PolicySpec, register_policy, seeded


class FlexiDepthRouter(Policy):
    """The router of one layer; its parameters have the names of the checkpoint."""

    scope = "token"

    def __init__(self, hidden_size: int, reduction: int, eps: float, bias: bool = False, head_bias: bool = False) -> None:
        super().__init__()
        width = max(1, hidden_size // check_count("reduction", reduction))
        self.reduction = reduction
        self.threshold = 0.5  # of the published model; lower ones let more rows run
        self.router_enc = nn.Linear(hidden_size, width, bias=bias)
        self.router_norm = RmsNorm(width, eps)
        self.router_dec = nn.Linear(width, hidden_size, bias=bias)
        self.router_head = nn.Linear(hidden_size, 1, bias=bias or head_bias)

    def forward(self, rows: Rows) -> Decision:
        """RUN where the weight is above the threshold."""
        latent = torch.tanh(self.router_norm(self.router_enc(rows.normed)))
        weight = torch.sigmoid(self.router_head(self.router_dec(latent))).squeeze(-1)
        return Decision(weight > self.threshold, weight)


def make(
    shape: ModelShape, layers: tuple[int, ...], *, reduction: int = 16, head_bias: float | None = None, head_std: float = 0.0, seed: int = 0
) -> list[Policy]:  # fmt: skip
    """A router for each layer, untrained (weights drawn from ``seed``); ``reduction`` divides H.

    ``head_bias``: where the head's bias starts, its weights then being zero (None: it has none): above 0 every row runs at first, in all
    layers alike, and what skips is found by training alone. ``head_std``: of those weights instead of zeros, so that logits differ by more
    than training changes them in a step; 0.1 makes them differ by about 0.5.
    """
    check_number("head_std", head_std)
    if head_std < 0 or (head_std and head_bias is None):
        raise SkipperError(f"head_std={head_std} is not allowed; give 0 or more, and above 0 only with head_bias")
    with seeded(seed):
        made = [FlexiDepthRouter(shape.hidden_size, reduction, shape.norm_eps, head_bias=head_bias is not None) for _ in layers]
        if head_bias is not None:
            for router in made:
                nn.init.constant_(router.router_head.bias, check_number("head_bias", head_bias))
                nn.init.normal_(router.router_head.weight, std=head_std)
    return list(made)


register_policy(
    PolicySpec(
        name="flexidepth",
        description="FlexiDepth's router: a sigmoid weight of the normed input above one half",
        make=make,
        cases=({}, {"reduction": 4, "seed": 5}, {"head_bias": 0.1}),
        gates=("hard", "mlp"),
    )
)
