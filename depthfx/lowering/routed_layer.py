"""Run the two groups of a routed layer on the rows that were chosen for them: a cohort is a smaller step.

Two ways. Where the host may read the counts (a CPU; CUDA outside of captured graphs), rows are gathered, each body runs on exactly its
rows, or not at all, and results go back to their places. In a captured graph both bodies run on all rows in place: attention of a row
that does not RUN sees position -1 and reads no key, a linear does nothing where its cohort is empty (`bound`), and a select merges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from depthfx.lowering import ops
from depthfx.lowering.kernel_spec import is_collecting

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

    index: torch.Tensor | None  # [n] int64; None: every row of the step
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
        project_inputs: Sequence[BodyInput],
    ) -> None:  # fmt: skip
        """``project`` None: nothing is added to skipped rows."""
        super().__init__()
        self.run, self.project = run, project
        self._run_inputs, self._project_inputs = tuple(run_inputs), tuple(project_inputs)

    def forward(
        self, hidden: torch.Tensor, order: torch.Tensor, counts: torch.Tensor, run_positions: torch.Tensor, choice: torch.Tensor,
        captured: bool, num_decode_rows: int, chunk_starts: torch.Tensor, *inputs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """The layer's output ``[T, H]``; ``inputs`` are those of `run`, then those of `project`."""
        split = len(self._run_inputs)
        given = inputs[:split], inputs[split:]
        if captured:
            return self._in_place(hidden, counts, run_positions, choice, num_decode_rows, chunk_starts, *given)
        return self._gathered(hidden, order, counts, choice, num_decode_rows, chunk_starts, *given)

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

    def _gathered(
        self, hidden: torch.Tensor, order: torch.Tensor, counts: torch.Tensor, choice: torch.Tensor, num_decode_rows: int,
        chunk_starts: torch.Tensor, run_given: Sequence[Any], project_given: Sequence[Any],
    ) -> torch.Tensor:  # fmt: skip
        num_rows = hidden.shape[0]
        if is_collecting():  # no kernel runs and no value is known: as if all rows were in both cohorts
            order = torch.arange(num_rows, dtype=torch.int32, device=hidden.device)
            num_run = num_project = num_rows
            first, num_decodes = 0, num_decode_rows
        else:
            decodes = (choice[:num_decode_rows] == 1).sum(dtype=torch.int32)
            num_run, num_project, num_decodes = torch.cat((counts, decodes[None])).tolist()
            first = num_run
            if num_run == num_rows:
                whole = _Rows(None, num_rows, None, num_decode_rows, chunk_starts, None)
                return self._call(self.run, self._run_inputs, run_given, whole)
        out = hidden.clone()
        if num_run:
            index = order[:num_run].long()
            starts = torch.searchsorted(index, chunk_starts.long()).to(torch.int32) if chunk_starts.numel() else chunk_starts
            cohort = _Rows(index, num_run, None, num_decodes, starts, None)
            out.index_copy_(0, index, self._call(self.run, self._run_inputs, run_given, cohort))
        if num_project and self.project is not None:
            index = order[first : first + num_project].long()
            cohort = _Rows(index, num_project, None, 0, chunk_starts, None)
            out.index_copy_(0, index, self._call(self.project, self._project_inputs, project_given, cohort))
        return out

    @staticmethod
    def _call(body: Callable[..., Any], specs: Sequence[BodyInput], given: Sequence[Any], cohort: _Rows) -> torch.Tensor:
        result: torch.Tensor = body(*(cohort.take(value, spec) for value, spec in zip(given, specs, strict=True)))
        return result
