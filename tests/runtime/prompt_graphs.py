"""Stands for captured steps with prompts where there is no CUDA: each "replay" runs the padded step that was uploaded last."""

from __future__ import annotations

from typing import Any

from depthfx.runtime.graphs import StepGraphs, greedy
from depthfx.runtime.step_form import StepForm, decode_places


class HostGraphs(StepGraphs):
    """Replays on the host; ``used`` takes down the forms that held a step with prompts, ``eager`` the plans that none held."""

    def __init__(self, runner: Any, prompts: tuple[StepForm, ...]) -> None:
        super().__init__(runner, (), prompts)
        self.used: list[StepForm] = []
        self.eager: list[Any] = []

    def find(self, plan: Any, precision: int = -1, routed: bool = False) -> Any:
        form = None if routed else next((f for f in self.prompts if f.holds(plan)), None)
        if form is None:
            if plan.prefills:
                self.eager.append(plan)
            return None
        self.used.append(form)
        return _Replay(self._runner, form)


class _Replay:
    def __init__(self, runner: Any, form: StepForm) -> None:
        self.form, self._runner = form, runner
        self._uploaded: Any = None
        runner.staging.upload = self._upload

    def _upload(self, *args: Any) -> Any:
        self._uploaded = type(self._runner.staging).upload(self._runner.staging, *args)
        del self._runner.staging.upload
        return self._uploaded

    def replay(self) -> None:
        """As `StepGraphs.capture` records it."""
        self.logits = self._runner.forward(self._uploaded, -1, captured=True)
        assert self.logits.shape[0] == self.form.num_logits and self._uploaded.positions.shape[0] == self.form.rows
        self.tokens = greedy(self.logits)
        kept = self._runner.last_tokens[: self.form.num_logits]
        kept.copy_(self.tokens[: kept.shape[0]])


def capture_prompts(engine: Any, forms: tuple[StepForm, ...]) -> HostGraphs:
    """Gives ``engine`` captured steps of ``forms``, as `depthfx.compile` does, and returns them."""
    scheduler = engine._scheduler
    engine._runner.graphs = graphs = HostGraphs(engine._runner, forms)
    scheduler.decode_places, scheduler.max_chunks = decode_places(scheduler.max_batch_size), min(f.max_chunks for f in forms)
    return graphs


def small_forms() -> tuple[StepForm, ...]:
    """For engines of at most 8 requests and steps of 64 rows."""
    return tuple(StepForm(rows, places, 2) for rows in (16, 32, 64) for places in (0, 4, 8))
