"""The two ways of running a routed layer's bodies, on steps made by hand: what each body is given, and where its rows go."""

from __future__ import annotations

import random

import pytest
import torch

from depthfx.lowering import ops
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
        return layer(self.hidden, *partition, captured, self.num_decode_rows, self.chunk_starts, *given)

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
