"""Run the two groups of a routed layer on the rows that were chosen for them: a cohort is a smaller step.

Three ways. Where the host may read the counts (a CPU; CUDA outside of captured graphs), rows are gathered, each body runs on exactly its
rows, or not at all, and results go back to their places. In a captured graph of few rows, whose time is the time to read weights, both bodies
run on all rows in place: attention of a row that does not RUN sees position -1 and reads no key, a linear does nothing where its cohort
is empty (`bound`), and a select merges. In a captured graph of many rows a body is there in several sizes; the device picks one
that holds its cohort (`graph_switch`), and rows behind the count are computed in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from depthfx.lowering import ops
from depthfx.lowering.announce import PROJECT, RUN, PendingCounts, Switched, sizes_of
from depthfx.lowering.graph_switch import Choice, active_switch
from depthfx.lowering.kernel_spec import settled_bounds

# How an input of a body follows from the cohort: as it is, rows along `dim`, the number of rows, or one of the inputs of attention.
# Rows are contiguous, gathered or not.
Kind = Literal["whole", "rows", "count", "positions", "num_decode_rows", "chunk_starts", "bound"]


@dataclass(frozen=True)
class BodyInput:
    """One input of a body; ``dim`` counts for rows alone."""

    kind: Kind
    dim: int = 0


@dataclass(frozen=True)
class _Rows:
    """The rows of one cohort: all of the step in place, or those of ``index``."""

    index: torch.Tensor | None  # [n] int32; None: every row of the step
    count: int
    positions: torch.Tensor | None  # [count] int32, for attention; None: as the step's
    num_decode_rows: int
    chunk_starts: torch.Tensor
    bound: torch.Tensor | None  # [1] int32, 0: the cohort is empty

    def take(self, value: Any, given: BodyInput) -> Any:
        """``value`` as the body reads it."""
        match given.kind:
            case "whole":
                return value
            case "rows":
                return value.contiguous() if self.index is None else value.index_select(given.dim, self.index)
            case "positions":
                if self.positions is not None:
                    return self.positions
                return value if self.index is None else value.index_select(0, self.index)
            case "count":
                return self.count
        return getattr(self, given.kind)


class RoutedLayer(nn.Module):
    """The merge of one routed layer with both bodies; see the module's text. ``run`` and ``project`` map their inputs to ``[n, H]``."""

    def __init__(
        self, run: Callable[..., Any], run_inputs: Sequence[BodyInput], project: Callable[..., Any] | None,
        project_inputs: Sequence[BodyInput], row: int = 0, early: bool = False,
    ) -> None:  # fmt: skip
        """``project`` None: nothing is added to skipped rows. ``row``: this layer's in what was announced.

        ``early``: decided in front of the embedding, which PyTorch launches without dependent launch.
        """
        super().__init__()
        self.run, self.project, self.row, self.early = run, project, row, early
        self._run_inputs, self._project_inputs = tuple(run_inputs), tuple(project_inputs)

    def forward(
        self, hidden: torch.Tensor, order: torch.Tensor, counts: torch.Tensor, run_positions: torch.Tensor, choice: torch.Tensor,
        announced: PendingCounts | Switched | None, captured: bool, num_decode_rows: int, chunk_starts: torch.Tensor, *inputs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """The layer's output ``[T, H]``; ``inputs`` are those of `run`, then those of `project`."""
        split = len(self._run_inputs)
        given = inputs[:split], inputs[split:]
        if isinstance(announced, list):
            return self._switched(announced[self.row], hidden, order, counts, run_positions, chunk_starts, *given)
        if captured:
            with settled_bounds(self.early):
                return self._in_place(hidden, counts, run_positions, choice, num_decode_rows, chunk_starts, *given)
        return self._gathered(hidden, order, counts, announced, num_decode_rows, chunk_starts, *given)

    def _in_place(
        self, hidden: torch.Tensor, counts: torch.Tensor, run_positions: torch.Tensor, choice: torch.Tensor, num_decode_rows: int,
        chunk_starts: torch.Tensor, run_given: Sequence[Any], project_given: Sequence[Any],
    ) -> torch.Tensor:  # fmt: skip
        num_rows = hidden.shape[0]
        cohort = _Rows(None, num_rows, run_positions, num_decode_rows, chunk_starts, counts[:1])
        out = self._call(self.run, self._run_inputs, run_given, cohort)
        spare = hidden
        if self.project is not None:
            cohort = _Rows(None, num_rows, None, num_decode_rows, chunk_starts, counts[1:])
            spare = self._call(self.project, self._project_inputs, project_given, cohort)
        return ops.select_rows(out, spare, hidden, choice)

    def _switched(
        self, choices: tuple[Choice, Choice | None], hidden: torch.Tensor, order: torch.Tensor, counts: torch.Tensor,
        run_positions: torch.Tensor, chunk_starts: torch.Tensor, run_given: Sequence[Any], project_given: Sequence[Any],
    ) -> torch.Tensor:  # fmt: skip
        """For steps of decodes alone."""
        num_rows, out, switch = hidden.shape[0], torch.empty_like(hidden), active_switch()
        _, sizes = sizes_of(num_rows)
        run_choice, project_choice = choices
        assert switch is not None

        def run_none() -> None:
            out.copy_(hidden)

        def run_some(size: int) -> None:
            out.copy_(hidden)
            index = order[:size]
            cohort = _Rows(index, size, run_positions.index_select(0, index), size, chunk_starts, None)
            ops.scatter_rows(out, self._call(self.run, self._run_inputs, run_given, cohort), order, counts, RUN)

        def run_all() -> None:
            out.copy_(self._call(self.run, self._run_inputs, run_given, _Rows(None, num_rows, None, num_rows, chunk_starts, None)))

        def project_some(size: int) -> None:
            at = torch.arange(size, dtype=torch.int32, device=hidden.device).add_(counts[:1]).clamp_(max=num_rows - 1)
            cohort = _Rows(order.index_select(0, at), size, None, 0, chunk_starts, None)
            assert self.project is not None
            ops.scatter_rows(out, self._call(self.project, self._project_inputs, project_given, cohort), order, counts, PROJECT)

        switch.run(run_choice, [run_none, *(partial(run_some, size) for size in sizes), run_all])
        if project_choice is not None:
            switch.run(project_choice, [None, *(partial(project_some, size) for size in sizes)])
        return out

    def _gathered(
        self, hidden: torch.Tensor, order: torch.Tensor, counts: torch.Tensor, pending: PendingCounts | None, num_decode_rows: int,
        chunk_starts: torch.Tensor, run_given: Sequence[Any], project_given: Sequence[Any],
    ) -> torch.Tensor:  # fmt: skip
        num_rows = hidden.shape[0]
        if pending is None:  # no kernel runs and no value is known: as if all rows were in both cohorts
            order = torch.arange(num_rows, dtype=torch.int32, device=hidden.device)
            num_run = num_project = num_rows
            first, num_decodes = 0, num_decode_rows
        else:
            num_run, num_project, num_decodes = pending.get(self.row)
            first = num_run
            if num_run == num_rows:
                whole = _Rows(None, num_rows, None, num_decode_rows, chunk_starts, None)
                return self._call(self.run, self._run_inputs, run_given, whole)
        out = hidden.clone()
        if num_run:
            index = order[:num_run]
            starts = torch.searchsorted(index, chunk_starts, out_int32=True) if chunk_starts.numel() else chunk_starts
            cohort = _Rows(index, num_run, None, num_decodes, starts, None)
            ops.scatter_rows(out, self._call(self.run, self._run_inputs, run_given, cohort), order, counts, RUN)
        if num_project and self.project is not None:
            cohort = _Rows(order[first : first + num_project], num_project, None, 0, chunk_starts, None)
            ops.scatter_rows(out, self._call(self.project, self._project_inputs, project_given, cohort), order, counts, PROJECT)
        return out

    @staticmethod
    def _call(body: Callable[..., Any], specs: Sequence[BodyInput], given: Sequence[Any], cohort: _Rows) -> torch.Tensor:
        result: torch.Tensor = body(*(cohort.take(value, spec) for value, spec in zip(given, specs, strict=True)))
        return result
