"""Captured CUDA graphs of pure decode steps, one for each bucket of rows."""

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

if TYPE_CHECKING:
    from depthfx.runtime.runner import Runner


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """First largest logit of each row ``[R, V]`` as ``[R]`` int64; -1 where the row holds NaN (which counts as largest)."""
    best = logits.argmax(-1)
    return torch.where(logits.gather(1, best[:, None])[:, 0].isnan(), -1, best)


@dataclass(frozen=True)
class DecodeGraph:
    """A captured step of ``bucket`` decode rows; its inputs are the runner's staging buffer and last tokens."""

    bucket: int
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor  # [bucket, V], overwritten by each replay
    tokens: torch.Tensor  # [bucket] int64, greedy choice, -1 where the logits hold NaN

    def replay(self) -> None:
        """Queue the step on the current stream."""
        self.graph.replay()


@contextmanager
def dependent_launch(bucket: int, nested: bool, device: torch.device) -> Iterator[None]:
    """Kernels launched or captured inside may start while the one before drains, in steps of ``bucket`` rows that gain from it.

    On an H200 a step of one row takes 4.03 instead of 4.26 ms, of 64 rows 5.67 instead of 5.80; of 8 rows 4.93 instead of 4.69
    (not understood; the 16-bit kernels for a few rows then ask for weights early). Nested weights are asked for by the tensor copy
    engine, and gain at every size.
    """
    gains = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0) and (nested or not 2 < bucket < 48)
    ops.enable_pdl(gains)
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


def captured_steps(buckets: Sequence[int], nested: bool, device: torch.device, routed: bool = False) -> list[tuple[int, int, bool]]:
    """(bucket, precision on the host, routed) of each graph, largest first.

    One graph serves every mixture of precisions (-1: the flags on the device decide). Of nested weights, large buckets have a
    second one for steps that are fast in all layers (0): FP8 activations make them a fifth faster, and that choice of kernel
    cannot wait for the device.
    """
    second = nested and ops.has_fp8_rows(device)
    return [
        (b, hint, depth)
        for b in sorted(buckets, reverse=True)
        for hint in ((-1, 0) if second and b >= ops.MIN_FP8_ROWS else (-1,))
        for depth in ((False, True) if routed else (False,))
    ]


class DecodeGraphs:
    """The graphs of one runner; they share one memory pool, captured from the largest bucket down."""

    def __init__(self, runner: Runner, buckets: tuple[int, ...]) -> None:
        self._graphs: dict[tuple[int, int, bool], DecodeGraph] = {}  # see `captured_steps`
        self.buckets = tuple(sorted(buckets))
        self._runner = runner
        self.switch = GraphSwitch(runner.device) if self._switches() else None

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

    def find(self, plan: StepPlan, precision: int = -1, routed: bool = False) -> DecodeGraph | None:
        """The smallest graph that holds ``plan`` in ``precision`` (1 full, 0 fast, -1 mixed); None if it prefills or is too large."""
        if plan.prefills:
            return None
        needed = max(len(plan.decodes), len(plan.table_writes))
        bucket = next((b for b in self.buckets if b >= needed), None)
        return None if bucket is None else self._graphs.get((bucket, precision, routed)) or self._graphs.get((bucket, -1, routed))

    @torch.inference_mode()
    def capture(self) -> None:
        """Warm up and capture every bucket; call once, when kernels may still be compiled and nothing runs."""
        runner = self._runner
        stream = torch.cuda.Stream(runner.device)
        pool = torch.cuda.graph_pool_handle()
        for bucket, precision, routed in captured_steps(self.buckets, runner.shape.nested, runner.device, runner.routed is not None):
            uploaded = runner.staging.upload(StepPlan(-1, (), (), ()), bucket, routed)
            stream.wait_stream(torch.cuda.current_stream())
            overlapped = dependent_launch(bucket, runner.shape.nested, runner.device)
            with torch.cuda.stream(stream), overlapped, switching(self.switch):
                runner.forward(uploaded, precision, routed, captured=True)  # compiles what this bucket needs, outside the capture
            torch.cuda.current_stream().wait_stream(stream)
            _drop_workspaces()
            graph = torch.cuda.CUDAGraph()
            overlapped = dependent_launch(bucket, runner.shape.nested, runner.device)
            captured = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
            with _no_collection(), overlapped, switching(self.switch), captured:
                logits = runner.forward(uploaded, precision, routed, captured=True)
                tokens = greedy(logits)
                runner.last_tokens[:bucket].copy_(tokens)
            _drop_workspaces()
            self._graphs[bucket, precision, routed] = DecodeGraph(bucket, graph, logits, tokens)
        torch.cuda.current_stream().synchronize()
