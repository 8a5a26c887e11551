"""The restore worker when something fails: places, the driver, the thread itself, a fork, and the end under load."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch

from depthfx import errors
from depthfx.alloc.copier import copier_library
from depthfx.alloc.restore_worker import RestoreWorker
from tests.alloc.fake_stream import FakeDevice
from tests.alloc.restore_cases import CHUNK, KINDS, POINTS, UNIT, WAIT, pattern, workers


@pytest.fixture
def make():
    with workers() as build:
        yield build


def submitted(worker: RestoreWorker, count: int) -> list[torch.Tensor]:
    """Targets of the units 0 to ``count`` - 1, which are under way."""
    targets = [torch.zeros(UNIT, dtype=torch.uint8) for _ in range(count)]
    for unit, target in enumerate(targets):
        worker.submit(unit, target, pattern(unit), None)
    return targets


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where,number", POINTS)
def test_a_failing_place_fails_one_unit(make, kind, where, number):
    worker, _ = make(kind)
    worker.copier.hold("before chunk")
    targets = submitted(worker, 3)
    worker.copier.fail(where, number if kind == "host" else 1)
    worker.copier.go()
    assert worker.wait_idle(WAIT)
    with pytest.raises(errors.RestoreError, match=f"unit 0 was not copied back: injected {where}") as caught:
        worker.poll()
    assert caught.value.unit == 0
    assert worker.poll() == [1, 2]
    worker.submit(0, targets[0], pattern(0), None)
    assert worker.wait_idle(WAIT) and worker.poll() == [0]
    assert all(torch.equal(t, pattern(u)) for u, t in enumerate(targets))


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("call", ["cuMemcpyHtoDAsync_v2", "cuStreamWaitEvent", "cuEventRecord", "cuEventSynchronize"])
def test_a_failing_call_fails_its_unit_with_the_words_of_the_driver(make, call, number):
    worker, device = make("stream", max_in_flight=2)  # one chunk in each batch
    device.delay(1, 300)
    step = device.stream()
    targets = [torch.zeros(UNIT, dtype=torch.uint8) for _ in range(3)]
    device.fail(call, 1 if call == "cuStreamWaitEvent" else number)
    for unit, target in enumerate(targets):
        worker.submit(unit, target, pattern(unit), step.record_event())
    assert worker.wait_idle(WAIT)
    settled = targets[0].clone()
    words = rf"unit 0 was not copied back: {call.removesuffix('_v2')} failed with CUDA_ERROR_ILLEGAL_ADDRESS: an illegal .*\(700\)"
    with pytest.raises(errors.RestoreError, match=words) as caught:
        worker.poll()
    assert caught.value.unit == 0
    watched = weakref.ref(targets[0].untyped_storage())
    assert worker.poll() == [1, 2] and all(torch.equal(targets[u], pattern(u)) for u in (1, 2))
    assert number > 1 or worker.copied_bytes == 2 * UNIT
    if call == "cuStreamWaitEvent":
        assert not targets[0].any(), "copied without the event"
    time.sleep(0.01)
    assert torch.equal(settled, targets[0]), "a failure was told while chunks were under way"
    worker.cancel(0)
    with pytest.raises(errors.MemoryStateError):
        worker.cancel(0)
    del targets, target
    assert watched() is None, "the error keeps the target alive"


def test_chunks_without_an_event_end_before_anybody_hears_of_it(make):
    worker, device = make("stream")
    device.close_gate()
    device.fail("cuEventRecord")
    (target,) = submitted(worker, 1)
    while device.calls("cuEventRecord") < 1:
        time.sleep(0.001)
    time.sleep(0.05)
    assert not worker.idle() and worker.poll() == [], "chunks are under way"
    device.open_gate()
    assert worker.wait_idle(WAIT)
    assert torch.equal(target[: 2 * CHUNK], pattern(0)[: 2 * CHUNK])
    with pytest.raises(errors.RestoreError, match="cuEventRecord failed"):
        worker.poll()


def test_a_cancelled_failure_is_not_told(make):
    worker, _ = make("stream")
    worker.copier.fail("after chunk", 1)
    submitted(worker, 1)
    assert worker.wait_idle(WAIT)
    assert worker.cancel(0) is None and worker.poll() == []


def test_a_stream_that_cannot_wait_is_told(make):
    worker, device = make("stream")
    device.close_gate()
    worker.copier.hold("after chunk")
    submitted(worker, 1)
    assert worker.copier.held(WAIT)
    event = worker.cancel(0)
    device.fail("cuStreamWaitEvent")
    with pytest.raises(errors.RestoreError, match="cannot wait for copies under way: cuStreamWaitEvent failed"):
        event.wait(device.stream())
    event.wait(device.stream())


def test_copy_all_tells_its_failure(make):
    worker, device = make("stream")
    targets = [torch.zeros(UNIT, dtype=torch.uint8) for _ in range(3)]
    device.fail("cuMemcpyHtoDAsync_v2", 2)
    with pytest.raises(errors.RestoreError, match="not copied to the device: cuMemcpyHtoDAsync failed"):
        worker.copy_all(targets, [pattern(u) for u in range(3)])
    assert worker.poll() == [] and worker.idle()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["before chunk", "after chunk", "before done"])
def test_a_dead_thread_is_told(make, kind, where):
    worker, device = make(kind)
    worker.copier.hold("before chunk")
    targets = submitted(worker, 2)
    worker.copier.fail(where, 1, ends=True)
    worker.copier.go()
    assert worker.wait_idle(WAIT)
    told = []
    for _ in range(2):
        with pytest.raises(errors.RestoreError, match=f"unit [01] was not copied back: injected {where}") as caught:
            worker.poll()
        told.append(caught.value.unit)
    assert sorted(told) == [0, 1] and worker.poll() == []
    with pytest.raises(errors.RestoreError, match=f"the restore worker ended: injected {where}; make a new one"):
        worker.submit(2, targets[0], pattern(0), None)
    with pytest.raises(errors.RestoreError, match="the restore worker ended"):
        worker.copy_all(targets, [pattern(0), pattern(1)])
    place = torch.zeros(8, dtype=torch.uint8)
    assert worker.copier.submit(99, place.data_ptr(), place.data_ptr(), 8, 8) == copier_library.DIED
    assert worker.cancel(0) is None
    worker.close(WAIT)
    assert device is None or device.left == 0
    del targets[:]
    gc.collect()


def test_a_thread_that_cannot_start_is_told():
    device = FakeDevice()
    for call in ("cuInit", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuStreamCreate", "cuEventCreate"):
        device.fail(call)
        with pytest.raises(errors.BackendUnavailableError, match=f"cannot be started: {call.removesuffix('_v2')} failed with .*illegal"):
            RestoreWorker("cpu", driver=device.path)
        assert device.left == 0, call
    device.fail("cuCtxPushCurrent_v2", 2)  # that of the thread
    worker = RestoreWorker("cpu", CHUNK, driver=device.path)
    with pytest.raises(errors.RestoreError, match=r"cuCtxPushCurrent failed"):  # noqa: PT012
        for unit in range(100):
            worker.submit(unit, torch.zeros(UNIT, dtype=torch.uint8), pattern(0), None)
            time.sleep(0.01)
            worker.poll()
    worker.close(WAIT)
    with pytest.raises(errors.BackendUnavailableError, match=r"libmissing\.so cannot be loaded"):
        RestoreWorker("cpu", driver="libmissing.so")


def test_no_compiler_is_told(monkeypatch):
    copier_library._functions.cache_clear()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(errors.BackendUnavailableError, match="the copy thread of restores cannot be built: no cc or gcc on PATH"):
        RestoreWorker("cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_close_under_load(make, kind):
    worker, _ = make(kind)
    worker.copier.hold("after chunk")
    targets = submitted(worker, 20)
    watched = [weakref.ref(t.untyped_storage()) for t in targets]
    assert worker.copier.held(WAIT)
    threading.Timer(0.05, worker.copier.go).start()
    worker.close(WAIT)
    assert not targets[-1].any(), "queued units went on"
    assert 0 < worker.copied_bytes < 20 * UNIT and worker.poll() == [] and worker.idle()
    del targets
    gc.collect()
    assert not any(w() is not None for w in watched), "a closed worker keeps tensors alive"
    with pytest.raises(errors.MemoryStateError, match="closed"):
        worker.submit(0, torch.zeros(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8), None)
    worker.close(WAIT)


def test_close_does_not_hang(make):
    worker, device = make("stream")
    device.close_gate()
    target = torch.zeros(UNIT, dtype=torch.uint8)
    watched = weakref.ref(target.untyped_storage())
    worker.submit(0, target, pattern(0), None)
    del target
    start = time.monotonic()
    while device.most == 0:
        time.sleep(0.001)
    with pytest.raises(errors.RestoreError, match=r"did not end within 0.1 s"):
        worker.close(0.1)
    assert time.monotonic() - start < 5
    gc.collect()
    assert watched() is not None, "memory went below a copy"
    device.open_gate()
    worker.close(WAIT)
    assert watched() is None


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_live_until_their_copies_end(make, kind):
    """Those of units that are cancelled too; and no longer, without a poll."""
    worker, device = make(kind)
    worker.copier.hold("before done")
    if device is not None:
        device.close_gate()
    targets = submitted(worker, 2)
    watched = [weakref.ref(t.untyped_storage()) for t in targets]
    del targets
    if device is not None:
        while device.calls("cuEventRecord") < 2:
            time.sleep(0.001)
        worker.cancel(0)
        worker.poll()
        gc.collect()
        assert all(w() is not None for w in watched)
        device.open_gate()
    assert worker.copier.held(WAIT)
    worker.poll()
    assert watched[1]() is not None
    worker.copier.go()
    assert worker.wait_idle(WAIT)
    assert [w() for w in watched] == [None, None]
    assert worker.poll() == ([1] if kind == "stream" else [0, 1])


def test_a_forgotten_worker_keeps_its_memory(make):
    """The thread writes to it."""
    device = FakeDevice()
    device.close_gate()
    worker = RestoreWorker("cpu", CHUNK, driver=device.path)
    target = torch.zeros(UNIT, dtype=torch.uint8)
    watched, seen = weakref.ref(target.untyped_storage()), weakref.ref(worker)
    worker.submit(0, target, pattern(0), None)
    del worker, target
    gc.collect()
    assert watched() is not None
    device.open_gate()
    seen().close(WAIT)
    gc.collect()
    assert watched() is None and seen() is None and device.left == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_is_told(make):
    worker, _ = make("host")
    worker.copier.hold("before chunk")
    targets = submitted(worker, 1)
    assert worker.copier.held(WAIT)
    child = os.fork()
    if child == 0:
        told = 0
        try:
            worker.submit(1, targets[0], pattern(0), None)
        except errors.RestoreError as error:
            told = "forked" in str(error)
        worker.close(1.0)
        os._exit(42 if told and worker.poll() == [] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    worker.copier.go()
    assert worker.wait_idle(WAIT) and worker.poll() == [0]


SCRIPT = """
import sys, torch
from depthfx.alloc.restore_worker import RestoreWorker
worker = RestoreWorker("cpu", 64, driver=sys.argv[1] or None)
worker.copier.disturb(1, 1.0, 2000)
targets = [torch.zeros(1 << 16, dtype=torch.uint8) for _ in range(20)]
for unit, target in enumerate(targets):
    worker.submit(unit, target, torch.ones(1 << 16, dtype=torch.uint8), None)
print("ends")
if sys.argv[2]:
    raise SystemExit(3)
"""


@pytest.mark.parametrize("status", ["", "3"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_interpreter_ends_under_load(kind, status):
    path = FakeDevice().path if kind == "stream" else ""
    done = subprocess.run([sys.executable, "-c", SCRIPT, path, status], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (int(status or 0), "ends\n", "")
