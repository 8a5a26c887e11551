"""Stands for captured steps with prompts where there is no CUDA: each "replay" runs the padded step that was uploaded last."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from depthfx.runtime.graphs import StepGraphs, greedy
from depthfx.runtime.step_form import StepForm, decode_form, decode_places


class HostGraphs(StepGraphs):
    """Replays on the host; ``used`` takes down the forms that held a step with prompts, ``eager`` the plans that none held."""

    def __init__(self, runner: Any, prompts: tuple[StepForm, ...], buckets: tuple[int, ...] = ()) -> None:
        super().__init__(runner, buckets, prompts)
        self.used: list[StepForm] = []
        self.eager: list[Any] = []
        self.last: _Replay | None = None

    def find(self, plan: Any, precision: int = -1, routed: bool = False) -> Any:
        forms = tuple(map(decode_form, self.buckets)) if not plan.prefills else () if routed else self.prompts
        form = next((f for f in forms if f.holds(plan)), None)
        if form is None:
            if plan.prefills:
                self.eager.append(plan)
            return None
        self.used.append(form)
        return _Replay(self._runner, form, routed)


class _Replay:
    def __init__(self, runner: Any, form: StepForm, routed: bool) -> None:
        self.form, self._runner, self._routed = form, runner, routed
        self._uploaded: Any = None
        runner.staging.upload = self._upload

    def _upload(self, *args: Any) -> Any:
        self._uploaded = type(self._runner.staging).upload(self._runner.staging, *args)
        self._runner.staging.__dict__.pop("upload", None)
        return self._uploaded

    def replay(self) -> None:
        """As `StepGraphs.capture` records it. Graphs share memory: what the one before has left is gone."""
        graphs = self._runner.graphs
        if graphs.last is not None:
            graphs.last.logits.fill_(float("nan"))
            graphs.last.tokens.fill_(1 << 40)
        graphs.last = self
        self.logits = self._runner.forward(self._uploaded, -1, self._routed, captured=True)
        assert self.logits.shape[0] == self.form.num_logits and self._uploaded.positions.shape[0] == self.form.rows
        self.tokens = greedy(self.logits)
        kept = self._runner.last_tokens[: self.form.num_logits]
        kept.copy_(self.tokens[: kept.shape[0]])


def capture_prompts(engine: Any, forms: tuple[StepForm, ...], buckets: tuple[int, ...] = ()) -> HostGraphs:
    """Gives ``engine`` captured steps of ``forms`` and ``buckets``, as `depthfx.compile` does, and returns them."""
    scheduler, to_host = engine._scheduler, engine._runner._to_host
    # a device copies the tokens before the next replay
    engine._runner._to_host = lambda launched, num_taped: to_host(replace(launched, tokens=launched.tokens.clone()), num_taped)
    engine._runner.graphs = graphs = HostGraphs(engine._runner, forms, buckets)
    scheduler.decode_places, scheduler.max_chunks = decode_places(scheduler.max_batch_size), min(f.max_chunks for f in forms)
    return graphs


def small_forms() -> tuple[StepForm, ...]:
    """For engines of at most 8 requests and steps of 64 rows."""
    return tuple(StepForm(rows, places, 2) for rows in (16, 32, 64) for places in (0, 4, 8))
