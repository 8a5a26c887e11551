"""The loss of one optimiser step, as sums that are divided by the counts of the whole step: cutting it differently changes nothing.

    loss = lm * sum of cross-entropies / targets + penalty * sum of (w_1 + ... + w_L)^2 / tokens + distill * sum of divergences / targets

The sums run over all micro-batches and processes of the step; w_l is a token's weight in routed layer l. The square makes a token that
runs everything dearer than two that run half, so that depths neither all fall nor all stay (FlexiDepth). Padding counts nowhere.

Logits of a vocabulary are most of the memory of a step, and passes over them much of its time where the model is small. So cross-entropy
and divergence are worked out some rows at a time in both directions, and nothing of rows by vocabulary is kept but the logits themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from depthfx.skippers.train.sequences import IGNORED

_CHUNK = 1 << 26  # logits that are worked on at once


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
    depth = torch.stack([w.float() for w in weights]).sum(0)
    skip = (depth.square() * real).sum()
    wanted = functional.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()  # the last row predicts nothing
    base = None if base_logits is None else base_logits.detach().flatten(0, 1)
    lm, distill = _Distances.apply(logits.flatten(0, 1), base, wanted, temperature)
    return Sums(lm, skip, distill)


class _Distances(torch.autograd.Function):
    """Sums of cross-entropies and of divergences over the rows of ``logits`` [N, V] that have a target, in FP32."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, base: torch.Tensor | None, wanted: torch.Tensor, temperature: float) -> Any:
        ctx.save_for_backward(logits, base, wanted)
        ctx.temperature = temperature
        lm, distill = logits.new_zeros(2, dtype=torch.float32)
        for rows in _chunks(logits):
            target, counts = wanted[rows], wanted[rows] != IGNORED
            mine = functional.log_softmax(logits[rows], -1, dtype=torch.float32)
            lm = lm + functional.nll_loss(mine, target, ignore_index=IGNORED, reduction="sum")
            if base is not None:
                if temperature != 1.0:
                    mine = _log_probabilities(logits[rows], temperature)
                exact = _log_probabilities(base[rows], temperature)
                divergence = (exact.exp() * exact.sub(mine)).sum(-1)
                distill = distill + torch.where(counts, divergence, 0.0).sum() * temperature**2
        return lm, distill

    @staticmethod
    def backward(ctx: Any, of_lm: torch.Tensor, of_distill: torch.Tensor) -> Any:  # type: ignore[override]
        logits, base, wanted = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for rows in _chunks(logits):
            target, counts = wanted[rows], (wanted[rows] != IGNORED).float()[:, None]
            found = functional.softmax(logits[rows], -1, dtype=torch.float32)
            if base is not None and ctx.temperature == 1.0:
                change = found.mul(of_lm + of_distill).sub_(_log_probabilities(base[rows], 1.0).exp_().mul_(of_distill))
            else:
                change = found.mul(of_lm)
                if base is not None:
                    ours = _log_probabilities(logits[rows], ctx.temperature).exp_()
                    exact = _log_probabilities(base[rows], ctx.temperature).exp_()
                    change += ours.sub_(exact).mul_(of_distill * ctx.temperature)
            change.scatter_add_(1, target.clamp(min=0)[:, None], -of_lm.expand(len(target), 1))
            gradient[rows] = change.mul_(counts)
        return gradient, None, None, None


def _log_probabilities(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    if temperature == 1.0:
        return functional.log_softmax(logits, -1, dtype=torch.float32)
    return functional.log_softmax(logits.float() / temperature, -1)


def _chunks(logits: torch.Tensor) -> Iterator[slice]:
    """Rows that are worked on at once."""
    step = max(1, _CHUNK // logits.shape[1])
    return (slice(start, start + step) for start in range(0, logits.shape[0], step))
