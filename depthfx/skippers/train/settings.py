"""Every constant of training, with FlexiDepth's published recipe as default."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

import torch

from depthfx.errors import SettingError
from depthfx.skippers.train.routing import Kind


def _whole(name: str, value: object, least: int, or_none: bool = False) -> None:
    if or_none and value is None:
        return
    if type(value) is not int or value < least:
        raise SettingError(f"{name}={value!r} is not allowed; give an integer of at least {least}{' or None' if or_none else ''}")


def _within(name: str, value: object, low: float, high: float, above: bool = False) -> None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        if low <= value <= high and not (above and value == low):
            return
    bounds = f"{'above' if above else 'of at least'} {low:g}" + ("" if high == math.inf else f" and at most {high:g}")
    raise SettingError(f"{name}={value!r} is not allowed; give a finite number{'' if low == -math.inf else ' ' + bounds}")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One part of training with its own penalty and learning rate; the rate warms up and falls anew in each."""

    name: str = "alignment"
    epochs: float = 1.0  # passes over the stage's sequences, where `steps` is None
    steps: int | None = None  # optimiser steps
    penalty: float = 1e-4  # of the skip loss; where `target_skip` is set, the first stage's is where the controller begins
    learning_rate: float = 1e-4  # the highest
    warmup_share: float = 0.03  # share of the stage's steps in which the rate rises from 0
    final_share: float = 0.0  # of `learning_rate`, where the cosine ends
    routers: float = 1.0  # the policies' learning rate, as a share of what it would be; 0: they stay, but for shifts of their biases
    noise: float = 0.0  # of the logits by which rows are decided; see `routing`

    def __post_init__(self) -> None:
        if not self.name:
            raise SettingError("stage name='' is not allowed; name each stage, its data are found by that name")
        _whole("stage steps", self.steps, least=1, or_none=True)
        for name in ("epochs", "learning_rate"):
            _within(f"stage {name}", getattr(self, name), 0, math.inf, above=True)
        _within("stage penalty", self.penalty, -math.inf, math.inf)
        for name in ("warmup_share", "final_share"):
            _within(f"stage {name}", getattr(self, name), 0, 1)
        for name in ("routers", "noise"):
            _within(f"stage {name}", getattr(self, name), 0, math.inf)


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How a skipper is trained. The defaults are the published recipe, two stages under the gate `mlp`.

    The frozen model and both branches compute in the model's dtype; trained parameters, their gradients and the optimiser are FP32.
    """

    stages: tuple[Stage, ...] = (Stage(), Stage(name="annealing", penalty=1e-5))
    decision: Kind = "hard"  # what a forward computes and how its gradient reaches the router; see `routing`
    batch_size: int = 32  # sequences of one optimiser step, of all processes together
    micro_batch: int = 4  # sequences of one forward of one process; the rest is accumulated
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    router_rate: float = 1.0  # the policies' learning rate, as a share of the stage's
    clip: float = 1.0  # largest norm of all gradients together
    seed: int = 42  # of the order of the sequences
    recompute: bool = True  # activations of routed layers are computed anew in the backward pass: less memory, more time

    # beside the skip loss
    lm: float = 1.0  # weight of the loss of the language model
    distill: float = 0.0  # weight of the divergence from the frozen model's distribution; 0: the frozen model is not run
    distill_temperature: float = 1.0

    # a controller in place of a fixed penalty
    target_skip: float | None = None  # share of routed rows that are to skip; the penalty follows, below 0 where too many skip
    target_rise: float = 0.0  # share of the first stage's steps in which the target rises from 0
    max_penalty: float = 1.0  # bound of the controller's penalty in both directions
    controller_gain: float = 1.0  # penalty, as share of its bound, for a skip share that is 1 away from the target
    controller_rate: float = 0.005  # share of the bound that the penalty moves in each step, likewise
    controller_memory: float = 0.7  # of the running mean of the skip share
    # Share of the way that the biases of the routers' heads are moved, all by the same, to where this step would have met the target.
    controller_shift: float = 0.0
    controller_fade: bool = (
        True  # in the last stage that share falls with the learning rate, so that the end does not hang on its last batches
    )
    # The routers' gradients are centred in each micro-batch, so that they learn which rows skip and not how many; see `routing`. For runs
    # whose share `controller_shift` sets; needs recompute=False.
    balance: bool = False
    # Sequences of the last stage by which, after its last step, the biases are moved until the target is met; 0: they stay. Without a
    # `target_skip`, or with routers whose heads have no bias, nothing is moved either.
    settle_sequences: int = 64

    # the run
    log_every: int = 10  # steps
    evaluate_every: int = 500  # steps, and at the end of each stage; needs held-out sequences
    checkpoint_every: int = 500  # steps, and at the end of each stage

    def __post_init__(self) -> None:
        if not isinstance(self.stages, tuple) or not self.stages or any(not isinstance(s, Stage) for s in self.stages):
            raise SettingError(f"stages={self.stages!r} is not allowed; give a tuple of at least one Stage")
        names = [s.name for s in self.stages]
        if len(set(names)) != len(names):
            raise SettingError(f"stages are named {names}; each needs a name of its own")
        if self.decision not in get_args(Kind):
            raise SettingError(f"decision={self.decision!r} is not known; allowed: {', '.join(get_args(Kind))}")
        for name in ("batch_size", "micro_batch", "log_every", "evaluate_every", "checkpoint_every"):
            _whole(name, getattr(self, name), least=1)
        for name in ("seed", "settle_sequences"):
            _whole(name, getattr(self, name), least=0)
        for name in ("controller_fade", "balance"):
            if type(getattr(self, name)) is not bool:
                raise SettingError(f"{name}={getattr(self, name)!r} is not allowed; give True or False")
        if self.balance and (self.recompute or self.target_skip is None or not self.controller_shift):
            raise SettingError("balance=True needs a target_skip, a controller_shift above 0 and recompute=False")
        for name in ("eps", "clip", "distill_temperature", "max_penalty"):
            _within(name, getattr(self, name), 0, math.inf, above=True)
        for name in ("weight_decay", "router_rate", "lm", "distill", "controller_gain", "controller_rate"):
            _within(name, getattr(self, name), 0, math.inf)
        for name in ("target_rise", "controller_shift"):
            _within(name, getattr(self, name), 0, 1)
        if not self.lm and not self.distill:
            raise SettingError("lm=0.0 and distill=0.0 leave nothing to learn but the skip loss; set one of them above 0")
        if not isinstance(self.betas, tuple) or len(self.betas) != 2:
            raise SettingError(f"betas={self.betas!r} is not allowed; give a tuple of two numbers")
        for name, value in (("betas", self.betas[0]), ("betas", self.betas[1]), ("controller_memory", self.controller_memory)):
            _within(name, value, 0, 1)
        if self.target_skip is not None:
            _within("target_skip", self.target_skip, 0, 1)
            for stage in self.stages:
                _within("stage penalty", stage.penalty, -self.max_penalty, self.max_penalty)


# FlexiDepth as released (Llama-3-8B): make the skipper with gate="mlp".
RELEASED = TrainSettings()
# As the published Qwen3 skippers: make the skipper with gate="hard". The penalty ranged from 2.5e-6 to 2e-4 among them.
STE_HARD = TrainSettings(stages=(Stage(penalty=2.5e-5),), decision="straight_through")


def learning_rate(stage: Stage, step: int, steps: int) -> float:
    """The rate of optimiser step ``step`` (from 0) of ``steps``: a linear rise, then half a cosine.

    Example: with 10 steps, a warm-up share of 0.2 and a final share of 0 the rates are 1/2, 1 of the highest, then from 1 towards 0.
    """
    warm = math.ceil(stage.warmup_share * steps)
    if step < warm:
        return stage.learning_rate * (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    return stage.learning_rate * (stage.final_share + (1 - stage.final_share) * 0.5 * (1 + math.cos(math.pi * done)))


def target_share(settings: TrainSettings, stage: int, step: int, steps: int) -> float:
    """How much of the target holds in optimiser step ``step`` (from 0) of the stage's ``steps``: 1, or less while it rises.

    Example: with 10 steps and a rise of 0.4 the first stage's shares are 1/4, 2/4, 3/4, and 1 from then on.
    """
    rise = settings.target_rise * steps if stage == 0 else 0.0
    return min(1.0, (step + 1) / rise) if rise else 1.0


def offset_of(weights: list[torch.Tensor], real: torch.Tensor, share: float, noise: float = 0.0) -> torch.Tensor:
    """The logit [] up to which a ``share`` of all routed rows lies: less by so much, these rows and no others skip.

    ``weights`` [B, S] of each routed layer, ``real`` [B, S] bool. Example: of weights 0.5, 0.73 and 0.88 a third lies up to logit 0.
    With ``noise`` (of a :class:`Stage`) it is the logit less by which that share is expected to skip.
    """
    logits = torch.logit(torch.stack([w.detach().float()[real] for w in weights]).flatten(), eps=1e-6)
    if not noise:
        return logits.kthvalue(min(logits.numel(), max(1, round(share * logits.numel())))).values
    low, high = logits.min() - 20 * noise, logits.max() + 20 * noise
    for _ in range(24):
        middle = (low + high) / 2
        enough = torch.sigmoid((middle - logits) / noise).mean() >= share
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return (low + high) / 2


@dataclass
class Controller:
    """Keeps the share of skipped rows at a target by the penalty: proportional and integral, over a running mean of the share."""

    penalty: float  # of the next step
    total: float = 0.0  # integral, as a share of the largest penalty
    share: float | None = None  # running mean

    def update(self, skipped: float, settings: TrainSettings, risen: float = 1.0) -> None:
        """``skipped``: the share in the step just done; ``risen``: the target's present share of itself. Without one the penalty stays."""
        memory = settings.controller_memory
        self.share = skipped if self.share is None else memory * self.share + (1 - memory) * skipped
        if settings.target_skip is None:
            return
        error = settings.target_skip * risen - self.share
        self.total = min(1.0, max(-1.0, self.total + settings.controller_rate * error))
        self.penalty = settings.max_penalty * min(1.0, max(-1.0, self.total + settings.controller_gain * error))


def start_controller(stage: Stage, settings: TrainSettings) -> Controller:
    """At the stage's own penalty."""
    return Controller(stage.penalty, stage.penalty / settings.max_penalty)
