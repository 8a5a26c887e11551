"""Decisions of several layers in one partition: actions that lie apart, and results where no kernel runs."""

from __future__ import annotations

import pytest
import torch

from depthfx.lowering.kernel_spec import INTERPRETED, set_collecting
from depthfx.lowering.kernels import partition_rows

ROWS = 37


def given(layers: int = 3):
    """Actions of ``layers`` over rows of a wider tensor, and what else a partition reads."""
    draw = torch.Generator().manual_seed(5)
    wide = torch.rand(layers, ROWS + 11, generator=draw) < 0.5
    positions = torch.arange(ROWS, dtype=torch.int32)
    positions[-3:] = -1
    return wide[:, :ROWS], torch.zeros(ROWS, dtype=torch.int32), positions, torch.zeros(layers, 64, dtype=torch.int8), 0


@pytest.mark.skipif(not INTERPRETED, reason="tests/gpu runs the kernels on the device")
def test_actions_of_layers_may_lie_apart():
    found, expected = given(), given()
    for a, b in zip(partition_rows.launch(*found), partition_rows.reference(*expected), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(found[3], expected[3])


class Nothing:
    """A kernel that is named and not run."""

    def __getitem__(self, _grid):
        return lambda *_args, **_options: None


@pytest.mark.parametrize("layers", [None, 2])
def test_where_no_kernel_runs_results_can_be_read_as_indices(layers, monkeypatch):
    """The dry run of the warm-up: what memory held before must not become a row, a position or a count."""
    actions, forced, positions, tape, place = given(layers or 1)
    actions = actions if layers else actions[0]
    monkeypatch.setattr(partition_rows, "_partition_rows_kernel", Nothing())
    monkeypatch.setattr(torch, "empty", lambda shape, **options: torch.full(tuple(shape), 0x7F7F7F7F, **options))
    set_collecting(True)
    try:
        order, counts, run_positions, choice = partition_rows.launch(actions, forced, positions, tape, place)
    finally:
        set_collecting(False)
    assert [list(t.shape) for t in (order, counts, run_positions, choice)] == [
        [*actions.shape], [*actions.shape[:-1], 2], [*actions.shape], [*actions.shape],
    ]  # fmt: skip
    assert ((order >= 0) & (order < ROWS)).all() and ((choice >= -1) & (choice <= 1)).all()
    assert (counts >= 0).all() and (counts.sum(-1) <= ROWS).all()
    assert (run_positions == positions).all()
