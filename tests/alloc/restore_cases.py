"""What the suites of the restore worker share: contents, workers on the host and over a fake device, all closed at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from depthfx.alloc.restore_worker import RestoreWorker
from tests.alloc.fake_stream import FakeDevice

CHUNK = 256
UNIT = 4 * CHUNK + 100  # five chunks, the last one short
WAIT = 20.0
KINDS = ["host", "stream"]
POINTS = [("before chunk", 1), ("before chunk", 2), ("after chunk", 1), ("after chunk", 2), ("before done", 1)]


def pattern(unit: int, count: int = UNIT) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(unit))


@contextmanager
def workers() -> Iterator[Callable]:
    """``make(kind, max_in_flight)`` -> a worker, and its fake device or None."""
    made = []

    def make(kind: str, max_in_flight: int = 4):
        device = FakeDevice() if kind == "stream" else None
        worker = RestoreWorker("cpu", CHUNK, max_in_flight, None if device is None else device.path)
        made.append((worker, device))
        return worker, device

    yield make
    for worker, device in made:
        worker.copier.go()
        if device is not None:
            device.open_gate()
        worker.close(WAIT)
        assert device is None or (device.left, device.violations) == (0, 0)
