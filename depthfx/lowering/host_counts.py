"""Counts of cohorts on their way to the host, beside what the device does next.

A step outside of captured graphs runs each cohort on exactly its rows, so the host has to know how many they are. The copy starts as soon as the
rows are partitioned (`order_decisions` puts that early), and the host waits only where the cohort's first kernel is launched.
"""

from __future__ import annotations

import torch
from torch import nn

from depthfx.lowering.kernel_spec import is_collecting


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


class HostCounts(nn.Module):
    """Stands in the program behind a partition."""

    def forward(self, counts: torch.Tensor, choice: torch.Tensor, captured: bool, num_decode_rows: int) -> PendingCounts | None:
        """None in captured steps, whose cohorts the device sizes, and where no kernel runs."""
        return None if captured or is_collecting() else PendingCounts(counts, choice, num_decode_rows)
