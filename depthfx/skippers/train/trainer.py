"""The training loop: stages of optimiser steps, each over one batch of sequences that processes and micro-batches share.

Everything a step does follows from the state and the step's number: the order of the sequences from the seed, the learning rate from the
schedule. So a run that is stopped anywhere and started again goes on from its last state as if nothing had happened.
"""

from __future__ import annotations

import copy
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from depthfx.contracts import Skipper
from depthfx.errors import SkipperError
from depthfx.skippers.base_identity import base_identity
from depthfx.skippers.flexidepth_checkpoint import check_flexidepth, save_flexidepth
from depthfx.skippers.model_shape import move_to, shape_of
from depthfx.skippers.train.evaluate import Evaluation, as_record, evaluate
from depthfx.skippers.train.loss import sum_losses
from depthfx.skippers.train.metrics import Metrics
from depthfx.skippers.train.routing import Routing, routed_training
from depthfx.skippers.train.sequences import IGNORED, Sequences, check_sequences
from depthfx.skippers.train.settings import Controller, Stage, TrainSettings, learning_rate, offset_of, start_controller, target_share
from depthfx.skippers.train.settle import Settled, settle
from depthfx.skippers.train.state_file import load_state, save_state
from depthfx.skippers.train.whole_folder import write_folder
from depthfx.skippers.train.workers import Workers

log = logging.getLogger("depthfx.train")

STATE, METRICS, RESULT = "state.pt", "metrics.jsonl", "skipper"
# Settings that may differ where a run goes on: the numbers do not follow from them, but for the order of sums.
_FREE = ("micro_batch", "recompute", "log_every", "evaluate_every", "checkpoint_every")

OnStep = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class TrainResult:
    """What training gave: ``folder`` is for ``load_skipper``; ``evaluation`` is None without held-out sequences."""

    skipper: Skipper
    folder: Path
    steps: int
    evaluation: Evaluation | None


def train_skipper(
    model: nn.Module, skipper: Skipper, data: Sequences | Mapping[str, Sequences], folder: str | Path,
    settings: TrainSettings | None = None, held_out: Sequences | None = None, resume: bool = True, progress: bool = True,
    on_step: OnStep | None = None,
) -> TrainResult:  # fmt: skip
    """Train ``skipper`` (policy flexidepth, projector adapter) in place on the frozen Hugging Face ``model``; see :class:`TrainSettings`.

    ``data`` serve all stages, or are given by the names of stages. ``folder`` gets state.pt, metrics.jsonl and the result, the folder
    skipper (of stages before the last, skipper-NAME); where it holds a state of the same run and ``resume`` is on, training goes on from
    there. ``on_step`` sees the record of each step. Raises :class:`SkipperError` for parts that do not fit, data without anything to predict,
    a folder that cannot be written or holds another run, and a loss that is not finite (the last state is kept), and
    :class:`~depthfx.errors.SettingError`.
    """
    settings = TrainSettings() if settings is None else settings
    check_flexidepth(skipper)
    by_stage = _by_stage(data, settings, model)
    if held_out is not None:
        check_sequences("held_out", held_out, model)
    workers, folder = Workers(), Path(folder)
    workers.place(model)
    shape = shape_of(model)
    skipper.to(shape.device, torch.float32)
    with routed_training(model, skipper, settings.decision, settings.recompute) as routing:
        routing.apart = settings.balance
        run = _Run(model, routing, by_stage, held_out, settings, folder, workers, resume)
        try:
            run.work(progress, on_step)
        finally:
            move_to(skipper, shape)
        if workers.is_main:
            _save_result(skipper, folder, model, run)
        workers.wait()
    return TrainResult(skipper, folder / RESULT, run.done, run.evaluation)


def _by_stage(data: Any, settings: TrainSettings, model: nn.Module) -> dict[str, Sequences]:
    """What each stage learns from."""
    if not isinstance(data, (Sequences, Mapping)):
        raise SkipperError(f"data is a {type(data).__name__}; give Sequences (make_sequences makes them), or a dict of them by stage")
    found = {}
    for name in (s.name for s in settings.stages):
        given = data if isinstance(data, Sequences) else data.get(name)
        if given is None:
            raise SkipperError(f"stage {name!r} has no data; give Sequences (make_sequences makes them), or a dict of them by stage")
        found[name] = check_sequences(f"data of stage {name!r}", given, model)
    return found


class _Run:
    """The state of one run; ``stage`` and ``step`` are where the next step is, ``done`` how many there were."""

    def __init__(
        self, model: nn.Module, routing: Routing, data: dict[str, Sequences], held_out: Sequences | None, settings: TrainSettings,
        folder: Path, workers: Workers, resume: bool,
    ) -> None:  # fmt: skip
        self.model, self.routing, self.data, self.held_out = model, routing, data, held_out
        self.settings, self.folder, self.workers = settings, folder, workers
        self.device = next(model.parameters()).device
        self.parameters = list(routing.skipper.parameters())
        for parameter in self.parameters:
            parameter.requires_grad_()
        groups = [
            {"params": list(routing.skipper.policies.parameters()), "share": settings.router_rate},
            {"params": list(routing.skipper.projectors.parameters()), "share": 1.0},
        ]
        self.optimiser = torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay)
        self.biases: list[Any] = [getattr(p.router_head, "bias", None) for p in routing.skipper.policies]
        if settings.controller_shift and any(b is None for b in self.biases):
            raise SkipperError("controller_shift moves the biases of the routers' heads, but these have none; make them with head_bias=1.0")
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=next(model.parameters()).dtype is torch.float16)
        self.stage = self.step = self.done = self.tokens = 0
        self.controller = start_controller(settings.stages[0], settings)
        self.evaluation: Evaluation | None = None
        self.settled: Settled | None = None
        self.steps = [_steps_of(s, len(data[s.name]), settings.batch_size) for s in settings.stages]
        self._orders: dict[tuple[int, int], list[int]] = {}
        self._name = self._describe()
        self._begin(resume)

    def work(self, progress: bool, on_step: OnStep | None) -> None:
        """All steps that are left."""
        settings = self.settings
        metrics = Metrics(self.folder / METRICS, self.done, sum(self.steps), self.workers.is_main, progress)
        try:
            while self.stage < len(settings.stages):
                stage = settings.stages[self.stage]
                record = self._step(stage)
                last = self.step == self.steps[self.stage]
                metrics.advance(record["lm"], record["skipped_share"])
                if last or self.done % settings.log_every == 0:
                    metrics.add(record)
                if last and self.stage + 1 == len(settings.stages):
                    self._settle(metrics)
                if self.held_out is not None and (last or self.done % settings.evaluate_every == 0):
                    self.evaluation = evaluate(self.model, self.routing, self.held_out, settings.micro_batch, self.workers)
                    metrics.add({"kind": "evaluation", "step": self.done, "stage": stage.name, **as_record(self.evaluation)})
                if last:
                    self._keep_stage()
                    self._next_stage()
                if last or self.done % settings.checkpoint_every == 0:
                    self.save()
                if on_step is not None:
                    on_step(record)
        finally:
            metrics.close()

    def _settle(self, metrics: Metrics) -> None:
        """Put the share of skipped rows where it was to be: what the last step left is the noise of one batch."""
        settings, last = self.settings, self.settings.stages[-1].name
        if settings.target_skip is None or not settings.settle_sequences or any(b is None for b in self.biases):
            return
        given = self.data[last].spread(settings.settle_sequences)
        dtype = next(self.model.parameters()).dtype
        self.settled = settle(self.model, self.routing, given, settings.target_skip, settings.micro_batch, self.workers, dtype)
        metrics.add({"kind": "settled", "step": self.done, "stage": last, **asdict(self.settled)})
        if not self.settled.met:
            log.warning("%.1f %% of routed rows skip, not %.1f %%: too many have the same logit to put the share anywhere between",
                        100 * self.settled.share, 100 * settings.target_skip)  # fmt: skip

    def _step(self, stage: Stage) -> dict[str, Any]:
        """One optimiser step; returns its record."""
        settings, data, workers = self.settings, self.data[stage.name], self.workers
        chosen = [self._place(n) for n in range(self.step * settings.batch_size, (self.step + 1) * settings.batch_size)]
        _, labels, real = data.take(chosen, torch.device("cpu"))
        targets, tokens = max(1, int((labels[:, 1:] != IGNORED).sum())), int(real.sum())
        penalty, mine = self.controller.penalty, workers.share(chosen)
        totals = torch.zeros(4 + len(self.routing.skipper.layers), device=self.device)
        self.optimiser.zero_grad()
        self.routing.noise = stage.noise
        for start in range(0, len(mine), settings.micro_batch):
            totals += self._micro_batch(data, mine[start : start + settings.micro_batch], targets, tokens, penalty)
        lm, skip, distill, offset, *skips = workers.sum(totals).tolist()
        record: dict[str, Any] = {
            "kind": "step", "step": self.done + 1, "stage": stage.name, "lm": lm / targets, "skip_loss": skip / tokens,
            "distill": distill / targets, "penalty": penalty, "skipped_share": sum(skips) / tokens / len(skips),
            "skipped": [s / tokens for s in skips],
        }  # fmt: skip
        self._stop_if(not all(map(math.isfinite, (lm, skip, distill))), record, "the loss")
        record["gradient_norm"] = self._apply_gradients(stage, record)
        self._steer(record["skipped_share"], offset / tokens)
        self.step, self.done, self.tokens = self.step + 1, self.done + 1, self.tokens + tokens
        return record

    def _micro_batch(self, data: Sequences, chosen: list[int], targets: int, tokens: int, penalty: float) -> torch.Tensor:
        """Add the gradients of some sequences; returns the sums of losses, the offset times tokens, and the skipped rows by layer."""
        settings, routing = self.settings, self.routing
        ids, labels, real = data.take(chosen, self.device)
        base = None
        if settings.distill:
            with torch.no_grad(), routing.off():
                base = self.model(input_ids=ids, use_cache=False).logits
        logits = self.model(input_ids=ids, use_cache=False).logits
        sums = sum_losses(logits, labels, real, routing.weights, base, settings.distill_temperature)
        self.scaler.scale(sums.loss(targets, tokens, penalty, settings.distill, settings.lm)).backward()  # type: ignore[no-untyped-call]
        if settings.balance:
            routing.send_gradients(real)
        skipped = [(~a & real).sum() for a in routing.actions]
        offset = sums.lm.new_zeros(())
        if settings.target_skip is not None and settings.controller_shift:
            offset = offset_of(routing.weights, real, settings.target_skip * self._risen(), routing.noise) * real.sum()
        return torch.stack([x.detach().float() for x in (sums.lm, sums.skip, sums.distill, offset, *skipped)])

    def _apply_gradients(self, stage: Stage, record: dict[str, Any]) -> float:
        """Clip and step; returns the norm of the gradients."""
        rate = learning_rate(stage, self.step, self.steps[self.stage])
        for group, share in zip(self.optimiser.param_groups, (stage.routers, 1.0), strict=True):
            group["lr"] = rate * group["share"] * share
        self.workers.sum_gradients(self.parameters)
        self.scaler.unscale_(self.optimiser)
        norm = float(nn.utils.clip_grad_norm_(self.parameters, self.settings.clip))
        self._stop_if(not math.isfinite(norm) and not self.scaler.is_enabled(), record, "the gradient")  # FP16: the scaler leaves it out
        self.scaler.step(self.optimiser)
        self.scaler.update()
        record["learning_rate"] = rate
        return norm

    def _steer(self, skipped: float, offset: float) -> None:
        """Towards the target share: the penalty of the next step, and at once the biases of all routers."""
        self.controller.update(skipped, self.settings, self._risen())
        if self.settings.target_skip is not None and self.settings.controller_shift:
            shift, stage = self.settings.controller_shift, self.settings.stages[self.stage]
            if self.settings.controller_fade and self.stage + 1 == len(self.settings.stages):
                shift *= learning_rate(stage, self.step, self.steps[self.stage]) / stage.learning_rate
            with torch.no_grad():
                for bias in self.biases:
                    bias -= shift * offset

    def _risen(self) -> float:
        return target_share(self.settings, self.stage, self.step, self.steps[self.stage])

    def _stop_if(self, wrong: bool, record: dict[str, Any], what: str) -> None:
        if wrong:
            raise SkipperError(
                f"step {record['step']}: {what} is not finite (cross-entropy {record['lm']:g}, skip loss {record['skip_loss']:g}); stopped before "
                f"any weight changed, and {self.folder / STATE} is as it was: check the data, or lower learning_rate or clip"
            )

    def _place(self, number: int) -> int:
        """Which sequence is the stage's ``number``-th, counted through all its epochs; each epoch has an order of its own."""
        count = len(self.data[self.settings.stages[self.stage].name])
        key = self.stage, number // count
        if key not in self._orders:
            seed = (self.settings.seed * 1_000_003 + key[0]) * 1_000_003 + key[1]
            self._orders = {k: v for k, v in self._orders.items() if k[1] >= key[1] - 1 and k[0] == key[0]}
            self._orders[key] = torch.randperm(count, generator=torch.Generator().manual_seed(seed % 2**63)).tolist()
        return self._orders[key][number % count]

    def _keep_stage(self) -> None:
        """Beside the result of the whole run, that of each stage before the last: what the later ones are worth can then be measured."""
        if self.stage + 1 < len(self.settings.stages) and self.workers.is_main:
            skipper = move_to(copy.deepcopy(self.routing.skipper), shape_of(self.model))
            _save_result(skipper, self.folder, self.model, self, f"{RESULT}-{self.settings.stages[self.stage].name}")

    def _next_stage(self) -> None:
        self.stage, self.step = self.stage + 1, 0
        if self.stage < len(self.settings.stages):
            stage = self.settings.stages[self.stage]
            if self.settings.target_skip is None:
                self.controller = start_controller(stage, self.settings)

    def save(self) -> None:
        """Write the state; all processes wait for it."""
        if self.workers.is_main:
            cuda = torch.cuda.get_rng_state_all() if self.device.type == "cuda" else []
            save_state(self.folder / STATE, {
                "run": self._name, "skipper": self.routing.skipper.state_dict(), "optimiser": self.optimiser.state_dict(),
                "scaler": self.scaler.state_dict(), "controller": asdict(self.controller),
                "place": [self.stage, self.step, self.done, self.tokens], "random": [torch.get_rng_state(), *cuda],
                "evaluation": None if self.evaluation is None else as_record(self.evaluation),
                "settled": None if self.settled is None else asdict(self.settled),
            })  # fmt: skip
        self.workers.wait()

    def _begin(self, resume: bool) -> None:
        """Take the state in the folder, where there is one."""
        path = self.folder / STATE
        if not path.exists():
            try:
                os.makedirs(self.folder, exist_ok=True)
            except OSError as error:
                raise SkipperError(f"{self.folder} cannot be made ({error}); name a folder that can be written") from error
            return
        if not resume:
            raise SkipperError(f"{path} holds a run already; set resume=True to go on with it, or name another folder")
        state, mine = load_state(path), self._name
        try:
            other = [key for key, value in mine.items() if state["run"].get(key) != value]
            if not other:
                self._restore(state)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise SkipperError(
                f"{path} is damaged: {type(error).__name__}: {error}; delete it to begin anew, or put a whole one in its place"
            ) from error
        if other:
            raise SkipperError(
                f"{path} is of another run: {', '.join(other)} differ; name another folder, or start with what it was started with"
            )

    def _restore(self, state: dict[str, Any]) -> None:
        self.routing.skipper.load_state_dict(state["skipper"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.scaler.load_state_dict(state["scaler"])
        self.controller = Controller(**state["controller"])
        self.stage, self.step, self.done, self.tokens = state["place"]
        self.settled = Settled(**found) if (found := state.get("settled")) else None
        torch.set_rng_state(state["random"][0])
        if self.device.type == "cuda" and len(state["random"]) == 1 + torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["random"][1:])
        if (found := state["evaluation"]) is not None:
            self.evaluation = Evaluation(**{**found, "skipped": tuple(found["skipped"])})

    def _describe(self) -> dict[str, str]:
        """What has to be the same where a run goes on, as text by name."""
        skipper = self.routing.skipper
        settings = {k: repr(v) for k, v in vars(self.settings).items() if k not in _FREE or (self.settings.balance and k == "micro_batch")}
        return {
            **settings,
            "data": " ".join(self.data[s.name].digest() for s in self.settings.stages),
            "skipper": f"layers {skipper.layers}, gate {skipper.gate}, {[(n, tuple(p.shape)) for n, p in skipper.named_parameters()]}",
            "model": repr(base_identity(self.model)),
        }


def _steps_of(stage: Stage, count: int, batch_size: int) -> int:
    return stage.steps if stage.steps is not None else max(1, math.ceil(stage.epochs * count / batch_size))


def _save_result(skipper: Skipper, folder: Path, model: nn.Module, run: _Run, name: str = RESULT) -> None:
    """The trained skipper in the model's dtype, with a record of its training; written whole or not at all."""
    record = {
        "settings": asdict(run.settings), "steps": run.done, "tokens": run.tokens, "processes": run.workers.count,
        "data": {s.name: run.data[s.name].digest() for s in run.settings.stages}, "torch": torch.__version__,
        "evaluation": None if run.evaluation is None else as_record(run.evaluation),
        "settled": None if run.settled is None else asdict(run.settled),
    }  # fmt: skip
    write_folder(folder / name, lambda new: save_flexidepth(skipper, new, model, record))
