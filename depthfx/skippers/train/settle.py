"""Moving a skipper to a share of skipped rows: one offset for the biases of all its routers' heads, by quantiles of their logits.

What skips is a row whose logit is not above zero, so the offset is the logit below which the wanted share of all routed rows lies. Later
layers read what earlier ones let pass, so it is found in a few rounds. Two things keep the share where it was put in 16 bits. Under the gate
`hard`, where a weight only decides, heads are multiplied by a power of two until their logits differ by about 1: near a weight of one
half, FP16 cannot tell logits apart that differ by less than 0.002. And biases are rounded to the dtype that is kept with the error of each
handed to the next, as the spacing of one dtype's numbers may be a large part of what logits differ by.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from depthfx.contracts import Skipper
from depthfx.errors import SkipperError
from depthfx.skippers.flexidepth_checkpoint import check_flexidepth, save_flexidepth, stored_training
from depthfx.skippers.make import load_skipper
from depthfx.skippers.options import check_share
from depthfx.skippers.train.evaluate import Evaluation, as_record, evaluate_skipper
from depthfx.skippers.train.routing import Routing, routed_training
from depthfx.skippers.train.sequences import Sequences, check_sequences
from depthfx.skippers.train.whole_folder import write_folder
from depthfx.skippers.train.workers import Workers

log = logging.getLogger("depthfx.train")

TOLERANCE = 0.01  # of the share, absolute
_ENOUGH = 0.005  # no further round
_ROUNDS = 8
_SPREAD = 1.0  # of logits, at least, where heads may be scaled
_LARGEST = 4096.0  # number in a scaled head


@dataclass(frozen=True)
class Settled:
    """Where a skipper was put: shares are of routed rows, on the sequences that it was settled by."""

    target: float
    share: float
    began: float  # the share before
    offset: float  # taken from all biases, in logits as they were before scaling
    scale: float  # heads are multiplied by it
    rounds: int
    tokens: int

    @property
    def met(self) -> bool:
        """Whether the share is what was wanted."""
        return abs(self.share - self.target) <= TOLERANCE


def settle_skipper(
    model: nn.Module, skipper: Skipper, sequences: Sequences, share: float, micro_batch: int = 4, dtype: torch.dtype | None = None
) -> Settled:
    """Shift the routers of ``skipper`` in place until ``share`` of the routed rows of ``sequences`` skips in the frozen ``model``.

    ``dtype`` is what the biases are rounded to (None: the model's). Raises :class:`SkipperError` for a share that is not between 0 and 1,
    heads without a bias, and a share that is not met within 0.01; the skipper is then where it came closest.
    """
    if not 0 < check_share("share", share) < 1:
        raise SkipperError(f"share={share} is not allowed; give a number above 0 and below 1")
    check_flexidepth(skipper)
    check_sequences("sequences", sequences, model, targets=False)
    decision: Any = "hard" if skipper.gate == "mlp" else "straight_through"
    with routed_training(model, skipper, decision) as routing:
        found = settle(model, routing, sequences, share, micro_batch, Workers(), dtype or next(model.parameters()).dtype)
    if not found.met:
        raise SkipperError(
            f"{found.share:.1%} of the routed rows skip where {share:.1%} were wanted, and no offset comes closer: too many rows have the same "
            "logit; train the routers for longer, or give more text"
        )
    return found


def settle(
    model: nn.Module, routing: Routing, sequences: Sequences, share: float, micro_batch: int, workers: Workers, dtype: torch.dtype
) -> Settled:
    """As :func:`settle_skipper`, inside an open :func:`routed_training` and without the errors; all processes take part."""
    heads = heads_of(routing.skipper)
    logits, now = _measure(model, routing, sequences, micro_batch, workers)
    scale, began, offset = _scale(logits, heads, workers) if routing.skipper.gate == "hard" else 1.0, now, 0.0
    with torch.no_grad():
        for head in heads:
            head.weight.mul_(scale)
            head.bias.mul_(scale)
    logits *= scale
    exact = [float(head.bias.detach()) for head in heads]
    if scale != 1.0:  # what 16 bits could not tell apart may now decide another way
        logits, now = _measure(model, routing, sequences, micro_batch, workers)
    best, rounds = (now, exact, 0.0), 0
    while abs(best[0] - share) > _ENOUGH and rounds < _ROUNDS:
        offset += _mean(_quantile(logits, share), logits, workers)
        _set_biases(heads, wanted := [b - offset for b in exact], dtype)
        logits, now = _measure(model, routing, sequences, micro_batch, workers)
        rounds += 1
        log.info("round %d: %.2f %% of routed rows skip", rounds, 100 * now)
        if abs(now - share) < abs(best[0] - share):
            best = now, wanted, offset
    _set_biases(heads, best[1], dtype)
    return Settled(share, best[0], began, best[2] / scale, scale, rounds, int(sequences.lengths.sum()))


def settle_checkpoint(
    path: str | Path, out: str | Path, model: nn.Module, sequences: Sequences, share: float, held_out: Sequences | None = None
) -> tuple[Settled, Evaluation | None]:
    """Write the skipper of ``path`` to the new folder ``out`` with ``share`` of its routed rows skipping; weights keep their dtype.

    Its record of training stays and gains ``settled``: share, offset, tokens, a hash of ``sequences``, and the evaluation on ``held_out``
    where there are any. Raises :class:`SkipperError` for what :func:`load_skipper` and :func:`settle_skipper` refuse, and for an ``out``
    that exists or cannot be written.
    """
    path, out = Path(path), Path(out)
    if held_out is not None:
        check_sequences("held_out", held_out, model)
    if out.exists():
        raise SkipperError(f"{out} exists; name a new folder")
    skipper = load_skipper(path, model)
    training, dtype = stored_training(path)
    found = settle_skipper(model, skipper, sequences, share, dtype=dtype)
    evaluation = None if held_out is None else evaluate_skipper(model, skipper, held_out)
    record = {**asdict(found), "data": sequences.digest(), "evaluation": None if evaluation is None else as_record(evaluation)}
    write_folder(out, lambda new: save_flexidepth(skipper.to(dtype=dtype), new, model, {**training, "settled": record}))
    return found, evaluation


def heads_of(skipper: Skipper) -> list[Any]:
    """The heads of all routers; raises :class:`SkipperError` where one has no bias."""
    heads = [getattr(policy, "router_head", None) for policy in skipper.policies]
    without = [i for i, head in zip(skipper.layers, heads, strict=True) if getattr(head, "bias", None) is None]
    if without:
        raise SkipperError(
            f"the routers of layers {without} have no bias in their heads, so they cannot be shifted; make them with head_bias=1.0"
        )
    return heads


@torch.no_grad()
def _measure(model: nn.Module, routing: Routing, sequences: Sequences, micro_batch: int, workers: Workers) -> tuple[torch.Tensor, float]:
    """Logits of this process's routed rows, as one list, and the share of all processes' that skips."""
    device, mine = next(model.parameters()).device, workers.share(list(range(len(sequences))))
    logits, totals = [], torch.zeros(2, dtype=torch.float64)
    with routing.served(), _logits_of(routing.skipper) as seen:
        for start in range(0, len(mine), micro_batch):
            ids, _, real = sequences.take(mine[start : start + micro_batch], device)
            seen.clear()
            model(input_ids=ids, use_cache=False)
            logits += [x.float().view(ids.shape)[real] for x in seen]
            skipped = sum(int((~a & real).sum()) for a in routing.actions)
            totals += torch.tensor([skipped, int(real.sum()) * len(routing.actions)])
    skipped, rows = workers.sum(totals.to(device, torch.float64)).tolist()
    return torch.cat(logits) if logits else torch.empty(0, device=device), skipped / max(1, rows)


@contextmanager
def _logits_of(skipper: Skipper) -> Iterator[list[torch.Tensor]]:
    """What the heads give, before the sigmoid rounds it."""
    seen: list[torch.Tensor] = []
    handles = [head.register_forward_hook(lambda module, args, output: seen.append(output)) for head in heads_of(skipper)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _quantile(logits: torch.Tensor, share: float) -> float:
    """Halfway between the two logits at which ``share`` of all lies below."""
    if not logits.numel():
        return 0.0
    ordered = logits.sort().values
    ordered = torch.cat([ordered[:1] - 1, ordered, ordered[-1:] + 1])
    place = round(share * logits.numel())
    return float(ordered[place : place + 2].double().mean())


def _scale(logits: torch.Tensor, heads: list[Any], workers: Workers) -> float:
    """The power of two, at least 1, that brings the median distance of logits from their median to ``_SPREAD``."""
    spread = _mean(float((logits - logits.median()).abs().median()) if logits.numel() else 0.0, logits, workers)
    largest = max(float(p.detach().abs().max()) for head in heads for p in (head.weight, head.bias))
    if not spread or not largest:
        return 1.0
    return float(2.0 ** max(0, min(math.ceil(math.log2(_SPREAD / spread)), math.floor(math.log2(_LARGEST / largest)))))


def _mean(value: float, logits: torch.Tensor, workers: Workers) -> float:
    """Over all processes, by the logits that each has."""
    count = logits.numel()
    total, rows = workers.sum(torch.tensor([value * count, count], dtype=torch.float64, device=logits.device)).tolist()
    return total / max(1.0, rows)


@torch.no_grad()
def _set_biases(heads: list[Any], wanted: list[float], dtype: torch.dtype) -> None:
    """Each head's bias, rounded to ``dtype``; what rounding changes is made good in the next."""
    error = 0.0
    for head, value in zip(heads, wanted, strict=True):
        rounded = float(torch.tensor(value + error, dtype=torch.float64).to(dtype))
        error = value + error - rounded
        head.bias.fill_(rounded)
