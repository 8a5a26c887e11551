"""What is kept of the decisions of a skipper."""

from __future__ import annotations

import torch

from depthfx.records import Chunk, SamplingParams, StepPlan
from depthfx.runtime import routes
from depthfx.runtime.routes import RouteLog


def add(log: RouteLog, *request_ids: str) -> None:
    """One routed step of a decode of each request: RUN in the first place, Project-Only in the second."""
    chunks = tuple(Chunk(name, 0, 0, (5,), -1, True, 0, SamplingParams(), None, True) for name in request_ids)
    log.add(StepPlan(0, chunks, (), ()), torch.tensor([[1], [0]], dtype=torch.int8).expand(2, len(chunks)))


def test_a_request_that_goes_on_is_not_forgotten(monkeypatch):
    monkeypatch.setattr(routes, "_KEPT_REQUESTS", 3)
    log = RouteLog((4, 7), ("routed", "routed"))
    for number in range(6):
        add(log, "long", f"short {number}")
    assert log.counts("long").run == (6, 0) and log.counts("long").project == (0, 6)
    assert log.counts("short 5").run == (1, 0) and log.counts().run == (12, 0)
