"""Captured CUDA graphs of steps: one for each bucket of decodes, and, where asked for, one for each form of a short step with prompts."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from depthfx.lowering import ops
from depthfx.lowering.announce import MAX_ROWS_IN_PLACE
from depthfx.lowering.graph_switch import GraphSwitch, switching, unavailable
from depthfx.records import StepPlan
from depthfx.runtime.step_form import StepForm, decode_form

if TYPE_CHECKING:
    from depthfx.runtime.runner import Runner


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """First largest logit of each row ``[R, V]`` as ``[R]`` int64; -1 where the row holds NaN (which counts as largest)."""
    best = logits.argmax(-1)
    return torch.where(logits.gather(1, best[:, None])[:, 0].isnan(), -1, best)


@dataclass(frozen=True)
class StepGraph:
    """A captured step of ``form``; its inputs are the runner's staging buffer and last tokens."""

    form: StepForm
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor  # [logits of the form, V], overwritten by each replay; forms with prompts share one
    tokens: torch.Tensor  # [logits of the form] int64, greedy choice, -1 where the logits hold NaN

    def replay(self) -> None:
        """Queue the step on the current stream."""
        self.graph.replay()


@contextmanager
def dependent_launch(form: StepForm, nested: bool, device: torch.device) -> Iterator[None]:
    """Kernels launched or captured inside may start while the one before drains, in decode steps that gain from it.

    On an H200 a step of one row takes 4.03 instead of 4.26 ms, of 64 rows 5.67 instead of 5.80; of 8 rows 4.93 instead of 4.69
    (not understood; the 16-bit kernels for a few rows then ask for weights early). Nested weights are asked for by the tensor copy
    engine, and gain at every size.
    """
    gains = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0) and (nested or not 2 < form.rows < 48)
    ops.enable_pdl(gains and not form.max_chunks)
    try:
        yield
    finally:
        ops.enable_pdl(False)


def decode_buckets(max_batch_size: int) -> tuple[int, ...]:
    """Batch sizes to capture: close together where padding would cost most, up to ``max_batch_size``."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 1025, 32)]
    return (*(s for s in sizes if s < max_batch_size), max_batch_size)


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection inside: destroying an earlier runner's graphs while a capture is going on would break it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _drop_workspaces() -> None:
    """cuBLAS keeps a workspace (32 MiB on Hopper) for each stream that it ran on, for good. Dropped in front of a capture, it is made anew in
    the graph's memory and goes with the graph; dropped behind, nobody else is handed it. Other streams get theirs from the cache again.
    """
    torch._C._cuda_clearCublasWorkspaces()


def captured_steps(forms: Sequence[StepForm], nested: bool, device: torch.device, routed: bool = False) -> list[tuple[StepForm, int, bool]]:
    """(form, precision on the host, routed) of each graph, largest first.

    One graph serves every mixture of precisions (-1: the flags on the device decide). Of nested weights, large forms have a
    second one for steps that are fast in all layers (0): FP8 activations make them a fifth faster, and that choice of kernel
    cannot wait for the device. Routed steps with prompts are not captured.
    """
    second = nested and ops.has_fp8_rows(device)
    return [
        (form, hint, depth)
        for form in sorted(forms, key=lambda form: (form.rows, form.decode_rows), reverse=True)
        for hint in ((-1, 0) if second and form.rows >= ops.MIN_FP8_ROWS else (-1,))
        for depth in ((False, True) if routed and not form.max_chunks else (False,))
    ]


class StepGraphs:
    """The graphs of one runner; they share one memory pool, captured from the largest form down."""

    def __init__(self, runner: Runner, buckets: tuple[int, ...], prompts: tuple[StepForm, ...] = ()) -> None:
        """``buckets`` of decodes; ``prompts``: forms with prompts."""
        self._graphs: dict[tuple[StepForm, int, bool], StepGraph] = {}  # see `captured_steps`
        self.buckets, self.prompts = tuple(sorted(buckets)), prompts
        self._runner = runner
        self.switch = GraphSwitch(runner.device) if self._switches() else None

    @property
    def steps(self) -> list[tuple[StepForm, int, bool]]:
        """What is captured; see :func:`captured_steps`."""
        runner, forms = self._runner, (*map(decode_form, self.buckets), *self.prompts)
        return captured_steps(forms, runner.shape.nested, runner.device, runner.routed is not None)

    def _switches(self) -> bool:
        """Whether cohorts of many rows get the size that fits them."""
        routed = self._runner.routed is not None and max(self.buckets, default=0) > MAX_ROWS_IN_PLACE
        return routed and self._runner.device.type == "cuda" and unavailable() is None

    def cohorts(self) -> str:
        """How routed layers of captured steps run, for the report."""
        if self.switch is not None:
            return f"in place in captured graphs of up to {MAX_ROWS_IN_PLACE} rows, of a size chosen on the device in larger ones"
        why = unavailable() if max(self.buckets) > MAX_ROWS_IN_PLACE else None
        return "in place in captured graphs" + (f" (no sizes for larger ones: {why})" if why else "")

    def find(self, plan: StepPlan, precision: int = -1, routed: bool = False) -> StepGraph | None:
        """The smallest graph that holds ``plan`` in ``precision`` (1 full, 0 fast, -1 mixed); None if no captured form does."""
        if plan.prefills:
            form = next((f for f in self.prompts if f.holds(plan)), None)
        else:
            needed = max(len(plan.decodes), len(plan.table_writes))
            bucket = next((b for b in self.buckets if b >= needed), None)
            form = None if bucket is None else decode_form(bucket)
        return None if form is None else self._graphs.get((form, precision, routed)) or self._graphs.get((form, -1, routed))

    @torch.inference_mode()
    def capture(self) -> None:
        """Warm up and capture every form; call once, when kernels may still be compiled and nothing runs."""
        runner = self._runner
        stream = torch.cuda.Stream(runner.device)
        pool = torch.cuda.graph_pool_handle()
        shared: torch.Tensor | None = None
        for form, precision, routed in self.steps:
            uploaded = runner.staging.upload(StepPlan(-1, (), (), ()), form, routed)
            stream.wait_stream(torch.cuda.current_stream())
            overlapped = dependent_launch(form, runner.shape.nested, runner.device)
            with torch.cuda.stream(stream), overlapped, switching(self.switch):
                logits = runner.forward(uploaded, precision, routed, captured=True)  # compiles what this form needs, outside the capture
            torch.cuda.current_stream().wait_stream(stream)
            if form.max_chunks and shared is None:
                shared = logits.new_empty((max(f.num_logits for f in self.prompts), logits.shape[1]))
            del logits
            _drop_workspaces()
            graph = torch.cuda.CUDAGraph()
            overlapped = dependent_launch(form, runner.shape.nested, runner.device)
            captured = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
            with _no_collection(), overlapped, switching(self.switch), captured:
                logits = runner.forward(uploaded, precision, routed, captured=True)
                if form.max_chunks and shared is not None:
                    logits = shared[: form.num_logits].copy_(logits)
                tokens = greedy(logits)
                kept = runner.last_tokens[: form.num_logits]  # no more requests have a place there
                kept.copy_(tokens[: kept.shape[0]])
            _drop_workspaces()
            self._graphs[form, precision, routed] = StepGraph(form, graph, logits, tokens)
        torch.cuda.current_stream().synchronize()
