"""A skipper against the frozen model on held-out sequences, with decisions as they are served."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from depthfx.contracts import Skipper
from depthfx.skippers.train.loss import sum_losses
from depthfx.skippers.train.routing import Routing, routed_training
from depthfx.skippers.train.sequences import IGNORED, Sequences, check_sequences
from depthfx.skippers.train.workers import Workers


@dataclass(frozen=True)
class Evaluation:
    """Cross-entropy in nats a token with and without skipping, and how much was skipped."""

    loss: float
    base_loss: float
    agreement: float  # share of targets where both models' likeliest token is the same
    skipped: tuple[float, ...]  # share of rows that skip, for each routed layer in order

    @property
    def skipped_share(self) -> float:
        """Of all rows and routed layers."""
        return sum(self.skipped) / len(self.skipped)


def evaluate_skipper(model: nn.Module, skipper: Skipper, sequences: Sequences, micro_batch: int = 4) -> Evaluation:
    """Run ``sequences`` through the frozen ``model`` with and without ``skipper``, ``micro_batch`` at a time.

    Raises :class:`~depthfx.errors.SkipperError` for a model or skipper that training cannot take hold of, and sequences without targets.
    """
    check_sequences("sequences", sequences, model)
    decision: Any = "hard" if skipper.gate == "mlp" else "straight_through"
    with routed_training(model, skipper, decision) as routing:
        return evaluate(model, routing, sequences, micro_batch, Workers())


def evaluate(model: nn.Module, routing: Routing, sequences: Sequences, micro_batch: int, workers: Workers) -> Evaluation:
    """As :func:`evaluate_skipper`, inside an open :func:`routed_training`; all processes take part and know the result."""
    device = next(model.parameters()).device
    mine = workers.share(list(range(len(sequences))))
    totals = torch.zeros(5 + len(routing.skipper.layers), dtype=torch.float64)
    with torch.no_grad(), routing.served():
        for start in range(0, len(mine), micro_batch):
            ids, labels, real = sequences.take(mine[start : start + micro_batch], device)
            with routing.off():
                base = model(input_ids=ids, use_cache=False).logits
            logits = model(input_ids=ids, use_cache=False).logits
            wanted = labels[:, 1:] != IGNORED
            same = (logits.argmax(-1) == base.argmax(-1))[:, :-1] & wanted
            losses = [sum_losses(x, labels, real, routing.weights, None, 1.0).lm for x in (logits, base)]
            skipped = [(~a & real).sum() for a in routing.actions]
            totals += torch.stack([x.double() for x in (*losses, same.sum(), wanted.sum(), real.sum(), *skipped)]).cpu()
    loss, base_loss, agreed, targets, rows, *skips = workers.sum(totals.to(device, torch.float64)).tolist()
    targets, rows = max(targets, 1), max(rows, 1)
    return Evaluation(loss / targets, base_loss / targets, agreed / targets, tuple(s / rows for s in skips))


def as_record(found: Evaluation) -> dict[str, Any]:
    """For a line of metrics."""
    return {**asdict(found), "skipped": list(found.skipped)}
