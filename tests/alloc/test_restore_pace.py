"""How much the restore worker keeps under way: over a fake device whose events tell how long copies took."""

from __future__ import annotations

import time

import pytest
import torch

from depthfx.alloc.physical_backend import PHYSICAL
from depthfx.alloc.unified_memory import UnifiedMemory
from depthfx.alloc.units import UnitLayout
from tests.alloc.restore_cases import CHUNK, WAIT, pattern, workers


@pytest.fixture
def make():
    with workers() as build:
        yield build


def test_less_is_in_flight_while_somebody_else_uses_the_link(make):
    """Halved while chunks take longer than the link needs, one more otherwise; what takes a tenth longer is not somebody else."""
    worker, device = make("stream", max_in_flight=8)
    device.delay(1, 200)  # so that batches are queued behind each other
    size, found, backend = 120 * CHUNK, [], PHYSICAL.get("memfd")()
    with UnifiedMemory.build(backend, UnitLayout(8 * backend.granularity(), 8, 0, ((0, size),)), 0) as memory:
        for pace in (1.0, 1.1, 2.0, 1.0):
            device.pace(pace)
            memory.poison(0)
            worker.submit(0, memory.home_bytes_tensor()[:size], pattern(0, size), None)
            assert worker.wait_idle(WAIT) and worker.poll() == [0]
            assert torch.equal(memory.kv_tensor([size], torch.uint8), pattern(0, size))
            found.append(worker.in_flight)
    assert found[:2] == [(8, 0), (8, 0)]
    assert found[2][0] < 8 and found[2][1] >= 2  # 1 to 3 of 8 on an idle host; on a busy one some chunks look as fast as before
    assert found[3] == (8, found[2][1])
    assert device.calls("cuEventElapsedTime") > 40


def test_what_waits_for_a_step_is_not_timed(make):
    worker, device = make("stream", max_in_flight=8)
    device.delay(1, 200)
    step = device.stream()
    for unit in range(20):
        device.pace(1.0 + unit)
        worker.submit(unit, torch.zeros(CHUNK, dtype=torch.uint8), pattern(unit, CHUNK), step.record_event())
    assert worker.wait_idle(WAIT) and worker.in_flight == (8, 0) and device.calls("cuEventElapsedTime") == 0


@pytest.mark.parametrize("batch,landed", [(32, 30), (33, 32), (34, 32), (35, 33), (64, 62), (65, 64)])
def test_the_queue_runs_empty_after_32_batches(make, batch, landed):
    """Before any other batch is issued the one before is still under way."""
    worker, device = make("stream", max_in_flight=4)  # two chunks in each batch
    device.delay(1, 20)
    worker.copier.hold("before chunk", batch)
    worker.submit(0, torch.zeros(150 * CHUNK, dtype=torch.uint8), pattern(0, 150 * CHUNK), None)
    assert worker.copier.held(WAIT) and worker.copied_bytes == landed * 2 * CHUNK
    worker.copier.go()
    assert worker.wait_idle(WAIT) and worker.poll() == [0]


def test_cancelled_half_way_while_little_is_in_flight(make):
    worker, device = make("stream", max_in_flight=8)
    device.delay(1, 200)
    worker.submit(9, torch.zeros(60 * CHUNK, dtype=torch.uint8), pattern(9, 60 * CHUNK), None)  # the link by itself
    assert worker.wait_idle(WAIT) and worker.poll() == [9]
    device.pace(3.0)
    target = torch.zeros(60 * CHUNK, dtype=torch.uint8)
    worker.submit(0, target, pattern(0, 60 * CHUNK), None)
    end = time.monotonic() + WAIT
    while worker.in_flight[1] < 2 and time.monotonic() < end:
        time.sleep(0.0005)
    event = worker.cancel(0)
    owner = device.stream()
    if event is not None:
        owner.wait_event(event)
    owner.fill(target, 7)
    owner.synchronize()
    assert worker.wait_idle(WAIT) and bool((target == 7).all()) and worker.in_flight[0] < 8
    device.pace(1.0)
    worker.submit(0, target, pattern(1, 60 * CHUNK), event)
    assert worker.wait_idle(WAIT) and worker.poll() == [0] and torch.equal(target, pattern(1, 60 * CHUNK))
