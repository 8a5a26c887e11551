"""The two ways of running a routed layer's bodies, on steps made by hand: what each body is given, and where its rows go."""

from __future__ import annotations

import random

import pytest
import torch

from depthfx.lowering import ops
from depthfx.lowering.announce import MAX_ROWS_IN_PLACE, MAX_SIZES, RUN, Announce, sizes_of
from depthfx.lowering.graph_switch import Choice, HostSwitch, active_switch, switching
from depthfx.lowering.routed_layer import BodyInput, RoutedLayer

RUN_INPUTS = [
    BodyInput("rows"), BodyInput("rows", 1), BodyInput("whole"), BodyInput("count"), BodyInput("positions"), BodyInput("num_decode_rows"),
    BodyInput("chunk_starts"), BodyInput("bound"),
]  # fmt: skip
PROJECT_INPUTS = [BodyInput("rows"), BodyInput("count"), BodyInput("bound")]


class Step:
    """Random rows: decodes, then chunks; padding behind decodes where there are no chunks."""

    def __init__(self, seed: int, share: float) -> None:
        draw = random.Random(seed)
        chunks = [draw.randrange(1, 6) for _ in range(draw.randrange(0, 4))]
        self.decodes = draw.randrange(0 if chunks else 1, 5)
        padding = 0 if chunks else draw.randrange(0, 3)
        self.chunk_of = [-1] * (self.decodes + padding) + [i for i, n in enumerate(chunks) for _ in range(n)]
        self.num_decode_rows, self.num_chunks = self.decodes + padding, len(chunks)
        starts = [self.num_decode_rows + sum(chunks[:i]) for i in range(len(chunks) + 1)] if chunks else []
        self.chunk_starts = torch.tensor(starts, dtype=torch.int32)
        self.count = len(self.chunk_of)
        self.positions = torch.tensor([draw.randrange(100) for _ in self.chunk_of], dtype=torch.int32)
        self.positions[self.decodes : self.num_decode_rows] = -1
        self.choice = [-1 if p < 0 else int(draw.random() < share) for p in self.positions.tolist()]
        self.hidden = torch.arange(self.count * 2.0).view(-1, 2)
        self.wide = torch.arange(self.count * 3.0).view(3, -1)
        self.seen: list[tuple] = []

    def run(self, rows, wide, whole, count, positions, num_decode_rows, chunk_starts, bound):
        """The run body."""
        assert whole == "whole" and len(rows) == count
        self.seen.append((rows, wide, positions, num_decode_rows, chunk_starts, bound))
        return rows * 2 + 1

    def project(self, rows, count, bound):
        """The projector."""
        assert len(rows) == count
        self.seen.append((rows, bound))
        return -rows

    def result(self, captured: bool, projects: bool) -> torch.Tensor:
        """Of the layer, whose calls of bodies are in ``seen``."""
        actions = torch.tensor([c == 1 for c in self.choice])
        tape = torch.zeros(1, self.count, dtype=torch.int8)
        partition = ops.PARTITION_ROWS(actions, torch.zeros(self.count, dtype=torch.int32), self.positions, tape, 0)
        assert partition[3].tolist() == tape[0].tolist() == self.choice
        layer = RoutedLayer(self.run, RUN_INPUTS, self.project if projects else None, PROJECT_INPUTS if projects else [])
        given = [self.hidden, self.wide, "whole", None, self.positions, None, None, None]
        given += [self.hidden, None, None] if projects else []
        announce = Announce()
        announce.projects.append(projects)
        announced = announce(partition[1], partition[3], captured, self.num_decode_rows)
        return layer(self.hidden, *partition, announced, captured, self.num_decode_rows, self.chunk_starts, *given)

    def expected(self, projects: bool) -> torch.Tensor:
        """Row by row."""
        rows = [h * 2 + 1 if c == 1 else -h if c == 0 and projects else h for h, c in zip(self.hidden, self.choice, strict=True)]
        return torch.stack(rows)


steps = pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])


@steps
@pytest.mark.parametrize("projects", [True, False])
def test_gathered(share, projects):
    """A cohort is a smaller step: its own decodes and chunks, and no call where it is empty."""
    for seed in range(40):
        step = Step(seed, share)
        assert torch.equal(step.result(False, projects), step.expected(projects))
        run = [i for i, c in enumerate(step.choice) if c == 1]
        project = [i for i, c in enumerate(step.choice) if c == 0]
        assert len(step.seen) == bool(run) + bool(project and projects)
        if run:
            rows, wide, positions, num_decode_rows, chunk_starts, bound = step.seen[0]
            assert torch.equal(rows, step.hidden[run]) and torch.equal(wide, step.wide[:, run]) and bound is None
            assert torch.equal(positions, step.positions[run])
            assert num_decode_rows == sum(step.chunk_of[i] < 0 for i in run)
            sizes = [sum(step.chunk_of[i] == c for i in run) for c in range(step.num_chunks)]
            assert chunk_starts.diff().tolist() == sizes and (not sizes or chunk_starts[0] == num_decode_rows)
        if project and projects:
            assert torch.equal(step.seen[-1][0], step.hidden[project])


@steps
@pytest.mark.parametrize("projects", [True, False])
def test_in_place(share, projects):
    """All rows, and positions of -1 where attention has nothing to read."""
    for seed in range(40):
        step = Step(seed, share)
        assert torch.equal(step.result(True, projects), step.expected(projects))
        assert len(step.seen) == 1 + projects
        rows, wide, positions, num_decode_rows, chunk_starts, bound = step.seen[0]
        assert torch.equal(rows, step.hidden) and torch.equal(wide, step.wide)
        assert positions.tolist() == [p if c == 1 else -1 for p, c in zip(step.positions.tolist(), step.choice, strict=True)]
        assert num_decode_rows == step.num_decode_rows and torch.equal(chunk_starts, step.chunk_starts)
        assert bound.tolist() == [step.choice.count(1)]
        if projects:
            assert step.seen[1][1].tolist() == [step.choice.count(0)]


class Decodes(Step):
    """``rows`` decodes, of which ``num_run`` run, ``padding`` are nobody's, and the rest skip."""

    def __init__(self, rows: int, num_run: int, padding: int = 0) -> None:
        draw = random.Random(rows * 1000 + num_run)
        self.count = self.num_decode_rows = rows
        self.chunk_of, self.num_chunks, self.chunk_starts = [-1] * rows, 0, torch.empty(0, dtype=torch.int32)
        self.positions = torch.tensor([draw.randrange(100) for _ in range(rows)], dtype=torch.int32)
        self.positions[rows - padding :] = -1
        running = set(draw.sample(range(rows - padding), num_run))
        self.choice = [-1 if i >= rows - padding else int(i in running) for i in range(rows)]
        self.hidden = torch.arange(rows * 2.0).view(-1, 2)
        self.wide = torch.arange(rows * 3.0).view(3, -1)
        self.seen = []


@pytest.mark.parametrize("projects", [True, False])
@pytest.mark.parametrize(
    ("rows", "num_run", "padding", "run_size", "project_size"),
    [
        (65, 0, 0, None, 65), (65, 1, 0, 64, 64), (65, 64, 0, 64, 64), (65, 65, 0, 65, None), (130, 65, 0, 128, 128),
        (130, 128, 0, 128, 64), (130, 129, 0, 130, 64), (200, 40, 31, 64, 192), (200, 169, 31, 200, None), (80, 0, 80, None, None),
        (80, 5, 74, 64, 64), (1000, 120, 3, 128, 896), (1000, 999, 0, 1000, 128),
    ],
)  # fmt: skip
def test_switched(rows, num_run, padding, run_size, project_size, projects):
    """The smallest size that holds the cohort: its rows first, in order; what is computed behind them goes nowhere."""
    step = Decodes(rows, num_run, padding)
    with switching(HostSwitch()):
        found = step.result(True, projects)
    real = slice(0, rows - padding)
    assert torch.equal(found[real], step.expected(projects)[real])
    assert found.isfinite().all()
    run, skipped = ([i for i, c in enumerate(step.choice) if c == kind] for kind in (1, 0))
    if run_size is not None:
        taken, wide, positions, num_decode_rows, _, bound = step.seen.pop(0)
        assert len(taken) == num_decode_rows == run_size and bound is None
        if len(run) < rows - padding:
            assert torch.equal(taken[: len(run)], step.hidden[run]) and torch.equal(wide[:, : len(run)], step.wide[:, run])
            assert positions.tolist() == step.positions[run].tolist() + [-1] * (run_size - len(run))
        else:
            assert torch.equal(taken, step.hidden) and torch.equal(positions, step.positions)
    if project_size is not None and projects:
        assert torch.equal(step.seen[0][0][: len(skipped)], step.hidden[skipped]) and len(step.seen.pop(0)[0]) == project_size
    assert not step.seen
    assert active_switch() is None


def test_few_rows_stay_in_place():
    step = Decodes(MAX_ROWS_IN_PLACE, 3)
    with switching(HostSwitch()):
        assert torch.equal(step.result(True, True), step.expected(True))
    assert len(step.seen[0][0]) == MAX_ROWS_IN_PLACE and step.seen[0][5] is not None


@pytest.mark.parametrize("rows", [65, 80, 128, 129, 256, 512, 513, 1000, 1024, 4096])
def test_sizes(rows):
    """Few, rising, the last one all rows; the number that is picked for every count holds it, and no smaller one would."""
    step, sizes = sizes_of(rows)
    assert len(sizes) <= MAX_SIZES and sizes[-1] == rows and sizes == sorted(set(sizes))
    for count in range(rows + 1):
        number = Choice(torch.tensor([count, rows - count]), RUN, step, whole=len(sizes) + 1).now()
        assert (number == 0) == (count == 0) and (number == len(sizes) + 1) == (count == rows)
        if 0 < count < rows:
            assert sizes[number - 1] >= count and (number == 1 or sizes[number - 2] < count)
