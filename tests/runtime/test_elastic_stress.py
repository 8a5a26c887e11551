"""A thousand random requests over shared memory that is far too small, with delays everywhere: no byte is read after it changed its owner."""

from __future__ import annotations

import random
import time
from contextlib import nullcontext, suppress

import pytest

from depthfx.alloc.restore_worker import RestoreWorker
from depthfx.errors import InternalError, MemoryStateError
from depthfx.runtime.scheduler import Scheduler
from depthfx.settings import ElasticMemory
from tests.alloc.fake_stream import FakeDevice
from tests.runtime.byte_runner import BLOCK, VOCAB, byte_engine
from tests.runtime.test_stress import Case, book, random_case

NUM_REQUESTS = 1000
SIZES = {0: [300, 100], 1: [256], 2: [513, 7], 4: [200]}  # rows of 16 bytes; entry 3 has no residual, entry 4 is the head
MODES = ("full", "full", "full", "fast", {1: "fast"}, {0: "fast", "head": "full"})
VARIANTS = {
    "in turn": ({}, False),
    "lookahead": ({}, True),
    "ahead of need, whole model": ({"high": 0.6, "low": 0.4, "whole_model": True}, True),
    "other order, dwell": ({"order": (2, 0), "dwell_s": 0.001, "low": 0.9}, False),
    "one unit": ({"unit_mib": 4.0, "low": 1.0 - 1e-9}, True),
    "static fast": ({"policy": "static_fast"}, True),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.filterwarnings("ignore:a residual was not restored:UserWarning")
def test_no_byte_is_read_after_it_changed_its_owner(name, monkeypatch):
    options, lookahead = VARIANTS[name]
    seed = list(VARIANTS).index(name)
    rng = random.Random(seed)
    monkeypatch.setattr("depthfx.runtime.elastic.RETRY_SECONDS", 0.002)
    settings = ElasticMemory(**{"unit_mib": 4 / 1024, "dwell_s": 0.0, "verify": True, **options})
    engine = byte_engine(settings, SIZES, 5, 20 if settings.policy == "elastic" else 8, lookahead)
    runner, control = engine._runner, engine.control
    delay_us = most_delay_us(engine, rng)
    control.shared.worker.copier.disturb(seed + 100, delay_share=0.15, most_us=delay_us, fail_share=0.005)
    control.shared.worker.chunk_bytes = 1024
    preempt, num_preempted = Scheduler._preempt, 0

    def only_when_exhausted(scheduler, request):
        nonlocal num_preempted
        num_preempted += 1
        assert control.region.next_to_lend() is None or request.status.value == "parked", "preempted while a unit could be lent"
        preempt(scheduler, request)

    monkeypatch.setattr(Scheduler, "_preempt", only_when_exhausted)
    num_requests = NUM_REQUESTS if name in ("in turn", "lookahead") else 300
    cases = serve_randomly(engine, rng, num_requests)
    stats = control.stats()
    print(name, engine.stats().steps_by_precision, stats, f"{num_preempted} preemptions, {runner.num_reused} reuses")
    for request, case in cases.items():
        expected = case.expected()
        assert case.tokens == (expected[: len(case.tokens)] if case.end.finish_reason == "abort" else expected), request
    assert (num_preempted > 0 or num_requests < NUM_REQUESTS) and runner.num_reused > 30 and engine.stats().kv.num_held == 0
    if settings.policy == "static_fast":
        assert not any(any(p) for p in runner.precisions)
    else:
        assert stats.num_lends > 0 and (stats.num_restores > 5 or name == "one unit")
        assert num_requests < NUM_REQUESTS or min(stats.num_cancels, stats.num_failures) > 0
        counts = engine.stats().steps_by_precision
        assert counts["full"] and counts["fast"] and (counts["mixed"] > 20 or "whole" in name or name == "one unit")
    finish(engine)


@pytest.mark.parametrize("seed", range(2))
def test_copies_on_a_device_never_meet_a_step(seed, monkeypatch):
    """The worker's copies run on a fake device, late and byte after byte; steps run on the host and wait where the device's stream would."""
    monkeypatch.setattr("depthfx.runtime.elastic.RETRY_SECONDS", 0.002)
    device = FakeDevice()
    settings = ElasticMemory(unit_mib=4 / 1024, dwell_s=0.0, verify=True)
    engine = byte_engine(settings, SIZES, 5, 20, bool(seed))
    control, runner, steps = engine.control, engine._runner, device.stream(is_default=True)
    control.shared.worker.close()
    control.shared.resources.worker = worker = RestoreWorker("cpu", 256, 6, device.path)
    worker.copier.disturb(seed + 1, delay_share=0.15, most_us=most_delay_us(engine, random.Random(seed)))
    device.delay(seed + 2, 400)

    def on_stream():
        steps.synchronize()  # what the host does next follows all that the stream waits for
        return nullcontext()

    monkeypatch.setattr(control, "_stream", steps)
    monkeypatch.setattr(control, "_on_stream", on_stream)
    monkeypatch.setattr(control, "_after_launched", steps.record_event)
    stop_copy = control._stop_copy
    monkeypatch.setattr(control, "_stop_copy", lambda unit: (stop_copy(unit), on_stream()))
    cases = serve_randomly(engine, random.Random(seed), 300)
    for request, case in cases.items():
        expected = case.expected()
        assert case.tokens == (expected[: len(case.tokens)] if case.end.finish_reason == "abort" else expected), request
    stats = control.stats()
    assert min(stats.num_restores, stats.num_cancels) > 2 and stats.num_failures == 0 and runner.num_reused > 10
    finish(engine)
    assert (device.left, device.violations) == (0, 0)


def most_delay_us(engine, rng) -> int:
    """Of a chunk's copy, in microseconds: as long as several steps, however slow or busy the host is, so that some copies are called off."""
    begun, steps = time.perf_counter(), engine.stats().num_steps
    serve_randomly(engine, rng, 20)
    return max(1500, round(5e6 * (time.perf_counter() - begun) / (engine.stats().num_steps - steps)))


def serve_randomly(engine, rng, num_requests) -> dict[str, Case]:
    """Serves random requests, in waves, with aborts, parked requests, switches of precision and restores in between."""
    scheduler, runner = engine._scheduler, engine._runner
    prefixes = [[rng.randrange(VOCAB) for _ in range(16)] for _ in range(4)]
    cases: dict[str, Case] = {}
    parked: list[tuple[str, int]] = []
    aborts: list[tuple[int, str]] = []
    turn = 0
    while len(cases) < num_requests or engine.has_unfinished():
        turn += 1
        rate = 0.9 if turn % 50 < 8 else 0.02
        while len(cases) < num_requests and rng.random() < rate and scheduler.num_waiting < 8:
            case = random_case(rng, prefixes)
            check = None if case.stop_token is None else (lambda ids, stop=case.stop_token: ids[-1] == stop)
            request = engine.add(case.prompt, case.sampling, stop_check=check)
            cases[request], runner.prompts[request] = case, case.prompt
            if case.abort_after is not None:
                aborts.append((turn + case.abort_after, request))
        for due in [a for a in aborts if a[0] <= turn]:
            aborts.remove(due)
            engine.abort(due[1])
        disturb(engine, rng)
        rng.shuffle(parked)
        while parked and rng.random() < 0.4:
            request, token = parked.pop()
            if scheduler.knows(request):
                book(cases, engine.push_token(request, token))
        for output in engine.step():
            if output.logits is not None:
                parked.append((output.request_id, int(output.logits.argmax())))
            book(cases, output)
    return cases


def disturb(engine, rng) -> None:
    draw = rng.random()
    if draw < 0.03 and engine.control.settings.policy != "static_fast":
        engine.set_precision(rng.choice(MODES))
    elif draw < 0.06:
        time.sleep(rng.random() * 0.005)
    elif draw < 0.08:
        with suppress(MemoryStateError):  # requests are in the way
            engine.restore(timeout=5)


def finish(engine) -> None:
    """Everything comes back as it was, first into the units, then out of them."""
    control, runner = engine.control, engine._runner
    control.shared.worker.copier.disturb(0)
    engine.restore()
    engine._scheduler.check()
    assert control.shared.backup.verify(control._home) == sum(map(len, SIZES.values()))
    for entry in range(5):
        runner.check_residual(entry)
    weights, backend = list(control.shared.weights), control.shared.memory.backend
    engine.close()
    assert backend.snapshot().is_empty
    for entry, originals in runner.originals.items():
        assert [bytes(w.lower.reshape(-1).numpy()) for w, _ in weights if w.entry == entry] == originals


def test_the_runner_sees_bytes_of_others():
    settings = ElasticMemory(unit_mib=4 / 1024, dwell_s=0.0, verify=True)
    engine = byte_engine(settings, SIZES, 5, 8, False)
    runner, control = engine._runner, engine.control
    runner.kv[8 * BLOCK] = (0, 5)  # block 8 is the first of unit 0
    with pytest.raises(AssertionError, match="the residual of entry 0 is read"):
        runner.check_residual(0)
    control._home.fill_(1)
    with pytest.raises(InternalError, match="was overwritten, or not copied back"):
        control.shared.backup.verify(control._home)
    runner.kv[9 * BLOCK] = (3, 4)
    runner.kv.words[9 * BLOCK, 1] = 7
    with pytest.raises(AssertionError, match="written by somebody else"):
        runner.kv[9 * BLOCK]
