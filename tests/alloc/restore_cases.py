"""What the suites of the restore worker share: contents, a hook that stops the thread, workers that are closed at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from depthfx.alloc.restore_worker import RestoreWorker
from tests.alloc.fake_stream import FakeStream

CHUNK = 256
UNIT = 4 * CHUNK + 100  # five chunks, the last one short
WAIT = 20.0
KINDS = ["host", "stream"]
POINTS = [("before chunk", 1), ("before chunk", 2), ("after chunk", 1), ("after chunk", 2), ("before done", 1)]


def pattern(unit: int, count: int = UNIT) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(unit))


class Gate:
    """A hook that stops the worker the ``number``-th time it comes to ``where``."""

    def __init__(self, where: str, number: int = 1) -> None:
        self.where, self.left = where, number
        self.reached, self.go = threading.Event(), threading.Event()

    def __call__(self, where: str) -> None:
        if where == self.where:
            self.left -= 1
            if self.left == 0:
                self.reached.set()
                assert self.go.wait(WAIT)


@contextmanager
def workers() -> Iterator[Callable]:
    """``make(kind, delay)`` -> a worker, and its fake stream or None."""
    made = []

    def make(kind: str, delay=None, max_in_flight: int = 4):
        stream = FakeStream() if kind == "stream" else None
        worker = RestoreWorker("cpu", CHUNK, max_in_flight, delay, stream)
        made.append((worker, stream))
        return worker, stream

    yield make
    for worker, stream in made:
        if stream is not None:
            stream.gate.set()
        worker.close(WAIT)
        if stream is not None:
            stream.stop()
