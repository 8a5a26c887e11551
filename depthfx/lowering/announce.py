"""The sizes of cohorts, made known as soon as rows are partitioned (`order_decisions` puts that early).

A step outside of captured graphs runs each cohort on exactly its rows, so the host has to know how many they are: the copy starts here, beside what
the device does next, and the host waits only where the cohort's first kernel is launched. A captured step of many rows has a body for each size
(`graph_switch`): which one runs is settled here, for all layers whose decisions are made at once in one kernel.
"""

from __future__ import annotations

import torch
from torch import nn

from depthfx.lowering.graph_switch import Choice, active_switch
from depthfx.lowering.kernel_spec import is_collecting

MAX_ROWS_IN_PLACE = 64  # the products of so few rows read weights and do little else
MAX_SIZES = 8  # of one cohort's body in one graph
RUN, PROJECT = 0, 1  # places in the counts


class PendingCounts:
    """Numbers of rows of one or several layers."""

    def __init__(self, counts: torch.Tensor, choice: torch.Tensor, num_decode_rows: int) -> None:
        """``counts`` [2] or [P, 2] and ``choice`` [T] or [P, T] as `partition_rows` yields them."""
        table = counts.view(-1, 2)
        if num_decode_rows:
            decodes = (choice.view(len(table), -1)[:, :num_decode_rows] == 1).sum(1, dtype=torch.int32)
            table = torch.cat((table, decodes[:, None]), dim=1)
        self._ready: torch.cuda.Event | None = None
        self._known: list[list[int]] | None = None
        if table.device.type == "cuda":
            self._table = torch.empty(table.shape, dtype=torch.int32, pin_memory=True).copy_(table, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(table.device))
        else:
            self._table = table

    def get(self, row: int) -> tuple[int, int, int]:
        """``(rows that RUN, rows that PROJECT, decode rows that RUN)`` of layer ``row``; waits for the copy."""
        if self._known is None:
            if self._ready is not None:
                self._ready.synchronize()
            self._known = self._table.tolist()
        num_run, num_project, *decodes = self._known[row]
        return num_run, num_project, decodes[0] if decodes else 0


Switched = list[tuple[Choice, Choice | None]]  # RUN and PROJECT cohort of each layer


class Announce(nn.Module):
    """Stands in the program behind a partition of the rows of one or several layers; ``projects``: which of them have a projector."""

    def __init__(self) -> None:
        super().__init__()
        self.projects: list[bool] = []

    def forward(self, counts: torch.Tensor, choice: torch.Tensor, captured: bool, num_decode_rows: int) -> PendingCounts | Switched | None:
        """``counts`` [2] or [P, 2] and ``choice`` [T] or [P, T] as `partition_rows` yields them.

        None where no kernel runs, and in captured steps whose cohorts run in place.
        """
        if not captured:
            return None if is_collecting() else PendingCounts(counts, choice, num_decode_rows)
        switch, num_rows = active_switch(), choice.shape[-1]
        if switch is None or num_rows <= MAX_ROWS_IN_PLACE:
            return None
        step, sizes = sizes_of(num_rows)
        choices = []
        for each, projects in zip(counts.view(-1, 2), self.projects, strict=True):
            choices.append(Choice(each, RUN, step, whole=len(sizes) + 1))
            choices += [Choice(each, PROJECT, step)] if projects else []
        made = iter(switch.choose(choices))
        return [(next(made), next(made) if projects else None) for projects in self.projects]


def sizes_of(num_rows: int) -> tuple[int, list[int]]:
    """``(step, sizes)`` in rows that the bodies of a switched cohort have: steps of 64 up to ``num_rows``, wider ones above 512."""
    step = MAX_ROWS_IN_PLACE * -(-num_rows // (MAX_ROWS_IN_PLACE * MAX_SIZES))
    return step, [*range(step, num_rows, step), num_rows]
