"""The restore worker on a CPU and over a fake device stream: order, bounds, cancels at every point."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from depthfx import errors
from depthfx.alloc.copy_stream import HostCopies
from depthfx.alloc.restore_worker import RestoreWorker
from tests.alloc.fake_stream import FakeEvent
from tests.alloc.restore_cases import CHUNK, KINDS, POINTS, UNIT, WAIT, Gate, pattern, workers


@pytest.fixture
def make():
    with workers() as build:
        yield build


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, CHUNK - 1, CHUNK, CHUNK + 1, UNIT, 33 * CHUNK])
def test_units_come_back_in_order(make, kind, size):
    worker, _ = make(kind)
    targets = [torch.zeros(size, dtype=torch.uint8) for _ in range(7)]
    for unit, target in enumerate(targets):
        worker.submit(unit, target, pattern(unit, size), None)
    assert worker.wait_idle(WAIT)
    assert worker.poll() == list(range(7)) and worker.poll() == []
    assert all(torch.equal(t, pattern(u, size)) for u, t in enumerate(targets))
    assert worker.copied_bytes == 7 * size and 0 < worker.seconds_busy < WAIT
    before = worker.seconds_busy
    time.sleep(0.02)
    assert worker.seconds_busy == before


def test_the_queue_is_bounded_and_one_event_serves_many_units(make):
    gate = Gate("before chunk")
    worker, stream = make("stream", gate, max_in_flight=8)
    stream.gate.clear()
    for unit in range(40):
        worker.submit(unit, torch.zeros(CHUNK, dtype=torch.uint8), pattern(unit, CHUNK), None)
    gate.go.set()
    time.sleep(0.1)  # long enough for a worker without a bound
    assert stream.most == 8 * CHUNK
    stream.gate.set()
    assert worker.wait_idle(WAIT) and worker.poll() == list(range(40))
    assert stream.most == 8 * CHUNK
    assert sum(entry[0] == "record" for entry in stream.log) == 10


def test_a_long_unit_is_bounded_too_and_keeps_its_chunks(make):
    worker, stream = make("stream", max_in_flight=6)
    worker.submit(0, torch.zeros(50 * CHUNK, dtype=torch.uint8), pattern(0, 50 * CHUNK), None)
    assert worker.wait_idle(WAIT) and worker.poll() == [0]
    assert stream.most <= 6 * CHUNK
    assert {entry[2] for entry in stream.log if entry[0] == "copy"} == {CHUNK}
    assert max(entry[1] for entry in stream.log if entry[0] == "copy") == 3 * CHUNK


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_chunk_waits_for_the_event(make, kind):
    worker, stream = make(kind)
    target, after = torch.zeros(UNIT, dtype=torch.uint8), FakeEvent()
    worker.submit(3, target, pattern(3), after)
    time.sleep(0.05)
    assert not target.any() and not worker.idle() and worker.poll() == []
    after.end()
    assert worker.wait_idle(WAIT) and worker.poll() == [3] and torch.equal(target, pattern(3))
    if stream is not None:
        assert [entry[0] for entry in stream.log[:2]] == ["wait", "copy"]
        assert sum(entry[0] == "wait" for entry in stream.log) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where,number", POINTS)
def test_cancelled_at_every_point(make, kind, where, number):
    """A cancelled unit is never reported, writes nothing after its event, and can be submitted again at once."""
    gate = Gate(where, number)
    worker, _ = make(kind, gate)
    target = torch.zeros(UNIT, dtype=torch.uint8)
    worker.submit(5, target, pattern(5), None)
    assert gate.reached.wait(WAIT)
    event = worker.cancel(5)
    if (where, number) == ("before chunk", 1) or kind == "host":
        assert event is None
    else:
        event.synchronize()
    if where == "before chunk" and number == 1:
        assert not target.any()
    target.fill_(7)  # the new owner
    gate.go.set()
    assert worker.wait_idle(WAIT)
    assert bool((target == 7).all()), "bytes were copied over the new owner's"
    assert worker.poll() == []
    worker.submit(5, target, pattern(6), None)
    assert worker.wait_idle(WAIT) and worker.poll() == [5]
    assert torch.equal(target, pattern(6))


@pytest.mark.parametrize("kind", KINDS)
def test_cancelled_after_the_end_and_while_waiting(make, kind):
    gate = Gate("before chunk")
    worker, _ = make(kind)
    worker.submit(0, torch.zeros(UNIT, dtype=torch.uint8), pattern(0), None)
    assert worker.wait_idle(WAIT)
    event = worker.cancel(0)
    assert (event is None) if kind == "host" else event.query()
    assert worker.poll() == []
    with pytest.raises(errors.MemoryStateError, match="unit 0 is not being restored"):
        worker.cancel(0)
    worker, _ = make(kind, gate)
    targets = [torch.zeros(UNIT, dtype=torch.uint8) for _ in range(3)]
    for unit, target in enumerate(targets):
        worker.submit(unit, target, pattern(unit), None)
    assert gate.reached.wait(WAIT)
    assert worker.cancel(1) is None
    gate.go.set()
    assert worker.wait_idle(WAIT) and worker.poll() == [0, 2]
    assert not targets[1].any()


def test_submitted_again_behind_chunks_that_are_still_queued(make):
    """Submit, cancel, submit: the old copy's chunks lie before the new copy in the stream, and only the new one is reported."""
    gate = Gate("after chunk")
    worker, stream = make("stream", gate)
    stream.gate.clear()
    target = torch.zeros(UNIT, dtype=torch.uint8)
    worker.submit(1, target, pattern(1), None)
    assert gate.reached.wait(WAIT)
    event = worker.cancel(1)
    assert not event.query()
    worker.submit(1, target, pattern(2), event)
    gate.go.set()
    assert worker.poll() == []
    stream.gate.set()
    assert worker.wait_idle(WAIT) and worker.poll() == [1]
    assert event.query() and torch.equal(target, pattern(2))


def test_a_cancel_waits_for_no_device(make):
    worker, stream = make("stream", max_in_flight=2)
    stream.gate.clear()
    worker.submit(0, torch.zeros(20 * CHUNK, dtype=torch.uint8), pattern(0, 20 * CHUNK), None)
    while stream.most < CHUNK:
        time.sleep(0.001)
    start = time.monotonic()
    event = worker.cancel(0)
    assert time.monotonic() - start < 1.0 and not event.query()
    stream.gate.set()
    event.synchronize()
    assert worker.wait_idle(WAIT) and stream.most <= 2 * CHUNK and worker.poll() == []


def test_a_cancel_waits_for_the_chunk_in_hand():
    reached, go = threading.Event(), threading.Event()

    class Slow(HostCopies):
        def copy(self, target, source, chunk_bytes):
            reached.set()
            assert go.wait(WAIT)
            super().copy(target, source, chunk_bytes)

    worker = RestoreWorker("cpu", CHUNK, stream=Slow())
    target = torch.zeros(UNIT, dtype=torch.uint8)
    worker.submit(0, target, pattern(0), None)
    assert reached.wait(WAIT)
    with ThreadPoolExecutor(1) as pool:
        cancelled = pool.submit(worker.cancel, 0)
        time.sleep(0.05)
        assert not cancelled.done() and not worker.idle()
        go.set()
        assert cancelled.result(WAIT) is None
    assert torch.equal(target[:CHUNK], pattern(0)[:CHUNK]) and not target[CHUNK:].any()
    worker.close(WAIT)
    assert worker.poll() == []


def test_a_cancel_from_the_hook(make):
    seen = []

    def delay(where: str) -> None:
        if where == "after chunk" and not seen:
            seen.append(worker.cancel(0))

    worker, _ = make("host", delay)
    worker.submit(0, torch.zeros(UNIT, dtype=torch.uint8), pattern(0), None)
    assert worker.wait_idle(WAIT) and seen == [None] and worker.poll() == [] and worker.copied_bytes == CHUNK


@pytest.mark.parametrize("kind", KINDS)
def test_refused_at_once(make, kind):
    worker, _ = make(kind)
    good = torch.zeros(8, dtype=torch.uint8)
    cases = {
        "9 bytes does not fill a target of 8": (good, torch.zeros(9, dtype=torch.uint8)),
        "source of 7 bytes": (good, torch.zeros(7, dtype=torch.uint8)),
        "target of torch.float16": (torch.zeros(8, dtype=torch.float16), good),
        "source of torch.int8": (good, good.view(torch.int8)),
        r"shape \[2, 4\]": (good.view(2, 4), good),
        r"shape \[0\]": (good[:0], good[:0]),
        "target on meta": (good.to("meta"), good),
    }
    for text, (target, source) in cases.items():
        with pytest.raises(errors.MemoryRequestError, match=text):
            worker.submit(0, target, source, None)
        with pytest.raises(errors.MemoryRequestError, match=text):
            worker.copy_all([target], [source])
    with pytest.raises(errors.MemoryRequestError, match="do not pair"):
        worker.copy_all([good], [])
    with pytest.raises(errors.MemoryRequestError, match="at least 1"):
        RestoreWorker("cpu", 0)
    assert worker.idle() and worker.poll() == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_unit_has_one_job(make, kind):
    gate = Gate("before chunk")
    worker, _ = make(kind, gate)
    target = torch.zeros(UNIT, dtype=torch.uint8)
    worker.submit(2, target, pattern(2), None)
    assert gate.reached.wait(WAIT)
    with pytest.raises(errors.MemoryStateError, match="unit 2 is being restored already"):
        worker.submit(2, target, pattern(2), None)
    with pytest.raises(errors.MemoryStateError, match="wait until the worker is idle"):
        worker.copy_all([target], [pattern(2)])
    gate.go.set()
    assert worker.wait_idle(WAIT)
    with pytest.raises(errors.MemoryStateError, match="until it is reported"):
        worker.submit(2, target, pattern(2), None)
    assert worker.poll() == [2]
    worker.submit(2, target, pattern(2), None)


@pytest.mark.parametrize("kind", KINDS)
def test_copy_all(make, kind):
    worker, stream = make(kind)
    targets, after = [torch.zeros(UNIT, dtype=torch.uint8) for _ in range(5)], FakeEvent()
    after.end()
    event = worker.copy_all(targets, [pattern(u) for u in range(5)], after)
    if stream is None:
        assert event is None
    else:
        event.synchronize()
        assert [entry[0] for entry in stream.log] == ["wait"] + ["copy"] * 5 + ["record"]
        assert {entry[2] for entry in stream.log if entry[0] == "copy"} == {UNIT}
    assert all(torch.equal(t, pattern(u)) for u, t in enumerate(targets))
    assert worker.wait_idle(WAIT) and worker.poll() == [] and worker.copied_bytes == 5 * UNIT
    worker.submit(0, targets[0], pattern(9), None)
    assert worker.wait_idle(WAIT) and worker.poll() == [0]


def test_inference_tensors(make):
    worker, _ = make("host")
    with torch.inference_mode():
        target = torch.zeros(UNIT, dtype=torch.uint8)
        worker.submit(0, target, pattern(0), None)
    assert worker.wait_idle(WAIT) and worker.poll() == [0] and torch.equal(target, pattern(0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_calls(make, kind, seed):
    """Against a model: a unit is reported if and only if it was submitted and not cancelled since, and then has its bytes."""
    rng, delays = random.Random(seed), random.Random(seed + 100)

    def delay(where: str) -> None:
        if delays.random() < 0.3:
            time.sleep(delays.random() * 0.001)

    worker, _ = make(kind, delay, max_in_flight=rng.randint(1, 6))
    targets = [torch.zeros(UNIT, dtype=torch.uint8) for _ in range(6)]
    wanted: dict[int, int] = {}
    restored = cancelled = 0

    def take(units: list[int]) -> int:
        for unit in units:
            assert torch.equal(targets[unit], pattern(wanted.pop(unit)))
        return len(units)

    for turn in range(300):
        unit = rng.randrange(6)
        if unit not in wanted:
            wanted[unit] = turn
            worker.submit(unit, targets[unit], pattern(turn), None)
        elif rng.random() < 0.5:
            event = worker.cancel(unit)
            del wanted[unit]
            cancelled += 1
            if event is not None:
                event.synchronize()
            targets[unit].fill_(turn % 251)
            assert bool((targets[unit] == turn % 251).all())
        elif rng.random() < 0.3:
            time.sleep(rng.random() * 0.02)
        restored += take(worker.poll())
    assert worker.wait_idle(WAIT)
    restored += take(worker.poll())
    assert not wanted and cancelled > 20 and restored > 20
