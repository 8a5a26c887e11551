"""The restore worker when something fails: hooks, memory, the device, the thread itself, and the end under load."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch

from depthfx import errors
from tests.alloc.restore_cases import CHUNK, KINDS, POINTS, UNIT, WAIT, Gate, pattern, workers


@pytest.fixture
def make():
    with workers() as build:
        yield build


@pytest.mark.parametrize("where,number", POINTS)
def test_a_failing_hook_fails_one_unit(make, where, number):
    count = 0

    def delay(at: str) -> None:
        nonlocal count
        count += at == where
        if at == where and count == number:
            raise RuntimeError(f"injected {at}")

    worker, _ = make("host", delay)
    targets = [torch.zeros(UNIT, dtype=torch.uint8) for _ in range(3)]
    for unit, target in enumerate(targets):
        worker.submit(unit, target, pattern(unit), None)
    assert worker.wait_idle(WAIT)
    with pytest.raises(errors.RestoreError, match=f"unit 0 was not copied back: RuntimeError: injected {where}") as caught:
        worker.poll()
    assert caught.value.unit == 0
    assert worker.poll() == [1, 2]
    worker.submit(0, targets[0], pattern(0), None)
    assert worker.wait_idle(WAIT) and worker.poll() == [0]
    assert all(torch.equal(t, pattern(u)) for u, t in enumerate(targets))


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_is_gone_fails_one_unit(make, kind):
    gate = Gate("before chunk")
    worker, stream = make(kind, gate)
    if stream is not None:  # a queue would find it later, as the device would
        stream.copy = lambda target, source, chunk_bytes: target.copy_(source)
    targets = [torch.zeros(UNIT, dtype=torch.uint8) for _ in range(2)]
    for unit, target in enumerate(targets):
        worker.submit(unit, target, pattern(unit), None)
    assert gate.reached.wait(WAIT)
    targets[0].untyped_storage().resize_(0)
    gate.go.set()
    assert worker.wait_idle(WAIT)
    watched = weakref.ref(targets.pop(0).untyped_storage())
    with pytest.raises(errors.RestoreError, match="unit 0 was not copied back: RuntimeError") as caught:
        worker.poll()
    assert caught.value.__cause__ is not None and watched() is None, "the error keeps the target alive"
    assert worker.poll() == [1] and torch.equal(targets[0], pattern(1)) and worker.copied_bytes == UNIT
    worker.cancel(0)
    with pytest.raises(errors.MemoryStateError):
        worker.cancel(0)


def test_a_failing_event_fails_its_units(make):
    worker, stream = make("stream", max_in_flight=2)
    stream.gate.clear()
    worker.submit(0, torch.zeros(CHUNK, dtype=torch.uint8), pattern(0, CHUNK), None)
    while not any(entry[0] == "record" for entry in stream.log):
        time.sleep(0.001)
    next(entry[1] for entry in stream.log if entry[0] == "record").fail = RuntimeError("an illegal memory access")
    stream.gate.set()
    assert worker.wait_idle(WAIT)
    with pytest.raises(errors.RestoreError, match="illegal memory access"):
        worker.poll()
    worker.submit(1, torch.zeros(CHUNK, dtype=torch.uint8), pattern(1, CHUNK), None)
    assert worker.wait_idle(WAIT) and worker.poll() == [1] and worker.copied_bytes == CHUNK


def test_a_cancelled_failure_is_not_told(make):
    def delay(where: str) -> None:
        if where == "after chunk":
            raise ValueError("injected")

    worker, _ = make("stream", delay)
    worker.submit(0, torch.zeros(UNIT, dtype=torch.uint8), pattern(0), None)
    assert worker.wait_idle(WAIT)
    worker.cancel(0).synchronize()
    assert worker.poll() == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_thread_is_told(make):
    gate = Gate("before chunk")

    def delay(where: str) -> None:
        gate(where)
        if where == "after chunk":
            raise ZeroDivisionError("a defect")

    worker, _ = make("host", delay)
    for unit in range(2):
        worker.submit(unit, torch.zeros(UNIT, dtype=torch.uint8), pattern(unit), None)
    gate.go.set()
    worker.wait_idle(WAIT)
    for unit in range(2):
        with pytest.raises(errors.RestoreError, match=f"unit {unit} was not copied back: ZeroDivisionError: a defect"):
            worker.poll()
    with pytest.raises(errors.RestoreError, match="ended by ZeroDivisionError"):
        worker.submit(2, torch.zeros(UNIT, dtype=torch.uint8), pattern(2), None)
    assert worker.cancel(0) is None


@pytest.mark.parametrize("kind", KINDS)
def test_close_under_load(make, kind):
    gate = Gate("after chunk")
    worker, _ = make(kind, gate)
    targets = [torch.zeros(UNIT, dtype=torch.uint8) for _ in range(20)]
    watched = [weakref.ref(t.untyped_storage()) for t in targets]
    for unit, target in enumerate(targets):
        worker.submit(unit, target, pattern(unit), None)
    assert gate.reached.wait(WAIT)
    threading.Timer(0.05, gate.go.set).start()
    worker.close(WAIT)
    assert not targets[-1].any(), "queued units went on"
    del target, targets
    gc.collect()
    assert not any(w() is not None for w in watched), "a closed worker keeps tensors alive"
    with pytest.raises(errors.MemoryStateError, match="closed"):
        worker.submit(0, torch.zeros(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8), None)
    worker.close(WAIT)


def test_close_does_not_hang(make):
    worker, stream = make("stream")
    stream.gate.clear()
    worker.submit(0, torch.zeros(UNIT, dtype=torch.uint8), pattern(0), None)
    start = time.monotonic()
    while stream.most == 0:
        time.sleep(0.001)
    with pytest.raises(errors.RestoreError, match=r"did not end within 0.1 s"):
        worker.close(0.1)
    assert time.monotonic() - start < 5
    stream.gate.set()
    worker.close(WAIT)
