"""The loss of one optimiser step, as sums that are divided by the counts of the whole step: cutting it differently changes nothing.

    loss = lm * sum of cross-entropies / targets + penalty * sum of (w_1 + ... + w_L)^2 / tokens + distill * sum of divergences / targets

The sums run over all micro-batches and processes of the step; w_l is a token's weight in routed layer l. The square makes a token that
runs everything dearer than two that run half, so that depths neither all fall nor all stay (FlexiDepth). Padding counts nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from depthfx.skippers.train.sequences import IGNORED


@dataclass(frozen=True)
class Sums:
    """Over the tokens of a micro-batch: cross-entropy and divergence over its targets, the skip loss over all its tokens; each FP32 []."""

    lm: torch.Tensor
    skip: torch.Tensor
    distill: torch.Tensor

    def loss(self, targets: int, tokens: int, penalty: float, distill: float, lm: float = 1.0) -> torch.Tensor:
        """This micro-batch's part of the step's loss; the counts are those of the whole step."""
        return self.lm * (lm / targets) + self.distill * (distill / targets) + self.skip * (penalty / tokens)


def sum_losses(
    logits: torch.Tensor, labels: torch.Tensor, real: torch.Tensor, weights: list[torch.Tensor], base_logits: torch.Tensor | None,
    temperature: float,
) -> Sums:  # fmt: skip
    """``logits`` [B, S, V], ``labels`` [B, S] (the token itself, or IGNORED), ``real`` [B, S] bool, ``weights`` [B, S] of each routed layer.

    ``base_logits``: the frozen model's, for the divergence ``KL(base || routed)`` at ``temperature``, times its square.
    """
    wanted, predicted = labels[:, 1:].flatten(), logits[:, :-1].flatten(0, 1)
    mine = functional.log_softmax(predicted, -1, dtype=torch.float32)
    lm = functional.nll_loss(mine, wanted, ignore_index=IGNORED, reduction="sum")
    depth = torch.stack([w.float() for w in weights]).sum(0)
    skip = (depth.square() * real).sum()
    if base_logits is None:
        return Sums(lm, skip, lm.new_zeros(()))
    # Few tensors of rows by vocabulary: they are most of the memory of a step.
    base = functional.log_softmax(base_logits[:, :-1].flatten(0, 1).float() / temperature, -1)
    probabilities = base.exp()
    negative_entropy = base.mul_(probabilities).sum(-1)
    del base
    if temperature != 1.0:
        mine = functional.log_softmax(predicted.float() / temperature, -1)
    divergence = negative_entropy - (probabilities * mine).sum(-1)
    return Sums(lm, skip, (divergence * (wanted != IGNORED)).sum() * temperature**2)
