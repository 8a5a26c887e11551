"""The restore worker on a CPU and over a fake device: order, bounds, cancels at every point."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from depthfx import errors
from depthfx.alloc.restore_worker import RestoreWorker
from tests.alloc.restore_cases import CHUNK, KINDS, POINTS, UNIT, WAIT, pattern, workers


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
    worker, device = make("stream", max_in_flight=8)
    worker.copier.hold("before chunk")
    device.close_gate()
    for unit in range(40):
        worker.submit(unit, torch.zeros(CHUNK, dtype=torch.uint8), pattern(unit, CHUNK), None)
    worker.copier.go()
    time.sleep(0.1)  # long enough for a worker without a bound
    assert device.most == 8 * CHUNK
    device.open_gate()
    assert worker.wait_idle(WAIT) and worker.poll() == list(range(40))
    assert device.most == 8 * CHUNK
    assert device.calls("cuEventRecord") == 10 and device.calls("cuEventCreate") == 8


@pytest.mark.parametrize("most", [1, 2, 3, 6])
def test_a_long_unit_is_bounded_too_and_keeps_its_chunks(make, most):
    worker, device = make("stream", max_in_flight=most)
    target = torch.zeros(50 * CHUNK, dtype=torch.uint8)
    worker.submit(0, target, pattern(0, 50 * CHUNK), None)
    assert worker.wait_idle(WAIT) and worker.poll() == [0] and torch.equal(target, pattern(0, 50 * CHUNK))
    assert 0 < device.most <= most * CHUNK
    assert [size for kind, size in device.log() if kind == "copy"] == [CHUNK] * 50


def test_the_first_chunk_waits_for_the_event(make):
    worker, device = make("stream")
    target, step = torch.zeros(UNIT, dtype=torch.uint8), device.stream()
    step.block()
    step.check(target, 0)
    worker.submit(3, target, pattern(3), step.record_event())
    time.sleep(0.05)
    assert not target.any() and not worker.idle() and worker.poll() == []
    step.unblock()
    assert worker.wait_idle(WAIT) and worker.poll() == [3] and torch.equal(target, pattern(3))
    assert [kind for kind, _ in device.log()][:2] == ["wait", "copy"]
    assert device.calls("cuStreamWaitEvent") == 1


def test_nothing_waits_on_a_host(make):
    worker, _ = make("host")
    event = make("stream")[1].stream().record_event()
    target = torch.zeros(UNIT, dtype=torch.uint8)
    for call in (lambda: worker.submit(3, target, pattern(3), event), lambda: worker.copy_all([target], [pattern(3)], event)):
        with pytest.raises(errors.MemoryRequestError, match="None on a CPU"):
            call()
    worker.submit(3, target, pattern(3), None)
    assert worker.wait_idle(WAIT) and worker.poll() == [3]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where,number", POINTS)
def test_cancelled_at_every_point(make, kind, where, number):
    """A cancelled unit is never reported, writes nothing after its end, and can be submitted again at once."""
    worker, device = make(kind)
    worker.copier.hold(where, number)
    target = torch.zeros(UNIT, dtype=torch.uint8)
    if device is not None and number == 1 and where != "before done":
        device.close_gate()  # all that is issued stays under way
    worker.submit(5, target, pattern(5), None)
    assert worker.copier.held(WAIT)
    event = worker.cancel(5)
    if kind == "host" or (where, number) == ("before chunk", 1):
        assert event is None and (where == "before done" or number == 2 or where == "after chunk" or not target.any())
        target.fill_(7)  # the new owner
    else:
        assert event is not None
        owner = device.stream(is_default=number == 2)
        owner.wait_event(event)
        owner.fill(target, 7)
        device.open_gate()
        owner.synchronize()
    worker.copier.go()
    assert worker.wait_idle(WAIT) and (event is None or event.query())
    assert bool((target == 7).all()), "bytes were copied over the new owner's"
    assert worker.poll() == []
    if device is not None:
        device.open_gate()
    worker.submit(5, target, pattern(6), event)
    assert worker.wait_idle(WAIT) and worker.poll() == [5]
    assert torch.equal(target, pattern(6))


@pytest.mark.parametrize("kind", KINDS)
def test_cancelled_after_the_end_and_while_waiting(make, kind):
    worker, _ = make(kind)
    worker.submit(0, torch.zeros(UNIT, dtype=torch.uint8), pattern(0), None)
    assert worker.wait_idle(WAIT)
    assert worker.cancel(0) is None and worker.poll() == []
    with pytest.raises(errors.MemoryStateError, match="unit 0 is not being restored"):
        worker.cancel(0)
    worker, _ = make(kind)
    worker.copier.hold("before chunk")
    targets = [torch.zeros(UNIT, dtype=torch.uint8) for _ in range(3)]
    for unit, target in enumerate(targets):
        worker.submit(unit, target, pattern(unit), None)
    assert worker.copier.held(WAIT)
    assert worker.cancel(1) is None
    worker.copier.go()
    assert worker.wait_idle(WAIT) and worker.poll() == [0, 2]
    assert not targets[1].any()


def test_submitted_again_behind_chunks_that_are_still_queued(make):
    """Submit, cancel, submit: the old copy's chunks lie before the new copy in the stream, and only the new one is reported."""
    worker, device = make("stream")
    device.close_gate()
    worker.copier.hold("after chunk")
    target = torch.zeros(UNIT, dtype=torch.uint8)
    worker.submit(1, target, pattern(1), None)
    assert worker.copier.held(WAIT)
    event = worker.cancel(1)
    assert not event.query()
    worker.submit(1, target, pattern(2), event)
    worker.copier.go()
    assert worker.poll() == []
    device.open_gate()
    assert worker.wait_idle(WAIT) and worker.poll() == [1]
    assert event.query() and torch.equal(target, pattern(2))


def test_a_cancel_waits_for_no_device(make):
    worker, device = make("stream", max_in_flight=2)
    device.close_gate()
    worker.submit(0, torch.zeros(20 * CHUNK, dtype=torch.uint8), pattern(0, 20 * CHUNK), None)
    while device.calls("cuEventRecord") < 2:
        time.sleep(0.001)
    start = time.monotonic()
    event = worker.cancel(0)
    assert time.monotonic() - start < 1.0 and not event.query()
    device.open_gate()
    event.synchronize()
    assert worker.wait_idle(WAIT) and device.most == 2 * CHUNK and worker.poll() == []


def test_a_cancel_waits_for_the_chunk_in_hand_and_no_longer(make):
    """The driver takes its time for the third of 16 chunks that are issued together."""
    worker, device = make("stream", max_in_flight=32)
    device.catch(3)
    device.close_gate()
    target = torch.zeros(16 * CHUNK, dtype=torch.uint8)
    worker.submit(0, target, pattern(0, 16 * CHUNK), None)
    while not device.caught:
        time.sleep(0.001)
    with ThreadPoolExecutor(1) as pool:
        cancelled = pool.submit(worker.cancel, 0)
        time.sleep(0.05)
        assert not cancelled.done() and not worker.idle() and worker.poll() == []
        device.catch(0)
        event = cancelled.result(WAIT)
    assert not event.query()
    device.open_gate()
    event.synchronize()
    assert worker.wait_idle(WAIT) and device.calls("cuMemcpyHtoDAsync_v2") == 3 and worker.copied_bytes == 3 * CHUNK
    assert torch.equal(target[: 3 * CHUNK], pattern(0, 16 * CHUNK)[: 3 * CHUNK]) and not target[3 * CHUNK :].any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_unit_that_ends_while_it_is_being_cancelled_is_not_told(make, kind, monkeypatch):
    worker, _ = make(kind)
    worker.copier.hold("before chunk")
    target = torch.zeros(UNIT, dtype=torch.uint8)
    worker.submit(0, target, pattern(0), None)
    cancel = worker.copier.cancel

    def late(number: int) -> int:
        worker.copier.go()
        assert worker.copier.wait_idle(WAIT)
        return cancel(number)

    monkeypatch.setattr(worker.copier, "cancel", late)
    assert worker.cancel(0) is None and worker.poll() == []
    worker.submit(0, target, pattern(1), None)
    assert worker.wait_idle(WAIT) and worker.poll() == [0]


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
        "source on meta": (good, good.to("meta")),
    }
    for text, (target, source) in cases.items():
        with pytest.raises(errors.MemoryRequestError, match=text):
            worker.submit(0, target, source, None)
        with pytest.raises(errors.MemoryRequestError, match=text):
            worker.copy_all([target], [source])
    with pytest.raises(errors.MemoryRequestError, match="do not pair"):
        worker.copy_all([good], [])
    for numbers in ((0, 4), (CHUNK, 0), (CHUNK, 1 << 32)):
        with pytest.raises(errors.MemoryRequestError, match="at least 1"):
            RestoreWorker("cpu", *numbers)
    assert worker.idle() and worker.poll() == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_unit_has_one_job(make, kind):
    worker, _ = make(kind)
    worker.copier.hold("before chunk")
    target = torch.zeros(UNIT, dtype=torch.uint8)
    worker.submit(2, target, pattern(2), None)
    assert worker.copier.held(WAIT)
    with pytest.raises(errors.MemoryStateError, match="unit 2 is being restored already"):
        worker.submit(2, target, pattern(2), None)
    with pytest.raises(errors.MemoryStateError, match="wait until the worker is idle"):
        worker.copy_all([target], [pattern(2)])
    worker.copier.go()
    assert worker.wait_idle(WAIT)
    with pytest.raises(errors.MemoryStateError, match="until it is reported"):
        worker.submit(2, target, pattern(2), None)
    assert worker.poll() == [2]
    worker.submit(2, target, pattern(2), None)


@pytest.mark.parametrize("kind", KINDS)
def test_copy_all(make, kind):
    worker, device = make(kind)
    targets, after = [torch.zeros(UNIT, dtype=torch.uint8) for _ in range(5)], None
    if device is not None:
        step = device.stream()
        step.block()
        step.check(targets[0], 0)
        after = step.record_event()
        threading.Timer(0.05, step.unblock).start()
    worker.copy_all(targets, [pattern(u) for u in range(5)], after)
    assert all(torch.equal(t, pattern(u)) for u, t in enumerate(targets))
    if device is not None:
        assert [entry for entry in device.log() if entry[0] != "record"] == [("wait", 0)] + [("copy", UNIT)] * 5
    assert worker.idle() and worker.poll() == [] and worker.copied_bytes == 5 * UNIT
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
    rng = random.Random(seed)
    worker, device = make(kind, max_in_flight=rng.randint(1, 6))
    worker.copier.disturb(seed + 100, delay_share=0.3, most_us=1000)
    if device is not None:
        device.delay(seed + 200, 100)
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
        if turn % 25 == 24:
            assert worker.wait_idle(WAIT)
        restored += take(worker.poll())
    assert worker.wait_idle(WAIT)
    restored += take(worker.poll())
    assert not wanted and cancelled > 20 and restored > 10


@pytest.mark.parametrize("seed", range(4))
def test_steps_never_see_a_refill(make, seed):
    """The engine's order on a device: steps own a unit, give it back, lend it again in the middle of the copies; nobody waits on the host.

    A step writes a value of its own to the unit and reads it back at its end, all on one stream. It sees other bytes if a copy begins
    before the last step is through (``after``), or goes on once the next one has begun (the event of ``cancel``).
    """
    rng = random.Random(seed)
    worker, device = make("stream", max_in_flight=rng.randint(1, 6))
    worker.copier.disturb(seed + 1, delay_share=0.2, most_us=300)
    device.delay(seed + 2, 60)
    units = [torch.zeros(UNIT, dtype=torch.uint8) for _ in range(5)]
    steps, lent, restoring, counts = device.stream(is_default=seed % 2 == 0), set(range(5)), set(), [0, 0, 0]
    for turn in range(400):
        unit = rng.randrange(5)
        if unit in lent and rng.random() < 0.6:
            lent.discard(unit)
            restoring.add(unit)
            worker.submit(unit, units[unit], pattern(unit), steps.record_event())
        elif unit not in lent:
            if unit in restoring:
                restoring.discard(unit)
                event = worker.cancel(unit)
                counts[0] += event is not None
                if event is not None:
                    steps.wait_event(event)
            lent.add(unit)
            steps.fill(units[unit], turn % 251)
            steps.check(units[unit], turn % 251)
        if turn % 25 == 24:
            assert worker.wait_idle(WAIT)
        for done in worker.poll():
            restoring.discard(done)
            assert torch.equal(units[done], pattern(done))
            counts[1] += 1
        if rng.random() < 0.3:
            time.sleep(rng.random() * 0.004)
        counts[2] = max(counts[2], len(restoring))
    assert worker.wait_idle(WAIT)
    for done in worker.poll():
        assert torch.equal(units[done], pattern(done))
    steps.synchronize()
    assert device.violations == 0 and min(counts[:2]) > 3 and counts[2] > 1, counts
