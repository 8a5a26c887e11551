"""One run under load: adds each request when its arrival has come, drives the engine between, and keeps times and counters.

The engine has no thread of its own. While it has work, it is stepped, and what has arrived meanwhile is added before the next step; while
it has none, the driver sleeps until the next arrival. The time of a token is when ``step()`` returned it. Latencies count from the arrival
that the schedule names, so the wait for the step under way is in them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from load_metrics import RequestTimes, Slo
from load_workload import Job

import depthfx

SAMPLE_S = 0.05  # between samples, and the longest sleep
_COUNTS = ("num_steps", "num_prefill_tokens", "num_preemptions", "num_reused_tokens", "num_reloaded_blocks", "num_saved_blocks")
_MOVES = ("num_lends", "num_restores", "num_cancels", "num_failures", "restored_bytes", "restore_seconds")


@dataclass(frozen=True)
class Sample:
    """One moment of a run; blocks are KV blocks, ``open_blocks`` those that KV may use now, lent ones included."""

    time_s: float
    held_blocks: int
    open_blocks: int
    num_running: int
    num_waiting: int
    num_preemptions: int
    mode: str  # "full", "fast" or "mixed": what a step planned now would read
    run_rows: int  # pairs of row and routed layer so far, since the engine was made
    project_rows: int


@dataclass
class Run:
    """What came of one run."""

    requests: list[RequestTimes]
    stopped: str | None = None  # why it was cut short; None: every request was served to its end
    samples: list[Sample] = field(default_factory=list)
    mode_s: dict[str, float] = field(default_factory=dict)  # seconds in each mode
    transitions: int = 0  # changes of mode
    peak_held_blocks: int = 0  # at the end of a step, as the next one
    peak_open_blocks: int = 0
    counters: dict[str, Any] = field(default_factory=dict)  # what the engine counted during the run


@dataclass(frozen=True)
class Limits:
    """When a run is cut short: after ``seconds``, or once fewer than ``share`` of the requests from ``lead_in_s`` on can still attain ``slo``."""

    seconds: float | None = None
    slo: Slo | None = None
    share: float = 0.0
    lead_in_s: float = 0.0


NO_LIMITS = Limits()


class Watch:
    """Time in each mode at every step, and samples every :data:`SAMPLE_S`."""

    def __init__(self, engine: Any, run: Run) -> None:
        self._engine, self._run = engine, run
        self._scheduler = engine._scheduler
        self._mode, self._since, self._due = self.mode(), 0.0, 0.0

    def mode(self) -> str:
        """Of the next step; weights of one precision are full."""
        state = self._scheduler.precision
        return "full" if all(state) else "mixed" if any(state) else "fast"

    def look(self, now: float) -> None:
        """The time since the last look was spent in the mode seen then."""
        self._run.mode_s[self._mode] = self._run.mode_s.get(self._mode, 0.0) + now - self._since
        mode = self.mode()
        self._run.transitions += mode != self._mode
        self._mode, self._since = mode, now
        manager = self._scheduler.manager
        self._run.peak_held_blocks = max(self._run.peak_held_blocks, manager.held_blocks)
        self._run.peak_open_blocks = max(self._run.peak_open_blocks, manager.open_blocks)
        if now >= self._due:
            self._due = now + SAMPLE_S
            self._run.samples.append(self._sample(now))

    def _sample(self, now: float) -> Sample:
        s, m, routes = self._scheduler, self._scheduler.manager, self._engine.routes
        counts = None if routes is None else routes.counts()
        run, project = (0, 0) if counts is None else (sum(counts.run), sum(counts.project))
        return Sample(now, m.held_blocks, m.open_blocks, s.num_running, s.num_waiting, s.num_preemptions, self._mode, run, project)


class _Book:
    """Books outputs, and counts requests that can no longer attain the SLO."""

    def __init__(self, run: Run, limits: Limits) -> None:
        self._missed: set[int] = set()
        self._by_id: dict[str, RequestTimes] = {}
        self._silent: deque[RequestTimes] = deque()  # without a token yet, in the order of arrival (some have one by now)
        self._limits, self._slo = limits, limits.slo
        self._num_counted = sum(r.arrival_s >= limits.lead_in_s for r in run.requests)

    def add(self, request_id: str, times: RequestTimes) -> None:
        """The engine got a request."""
        self._by_id[request_id] = times
        self._silent.append(times)

    def book(self, output: Any, now: float) -> None:
        """News of a request. Raises ``RuntimeError`` for one that failed: the run is then no measurement."""
        if output.error is not None:
            raise RuntimeError(f"request {output.request_id} failed under load") from output.error
        times = self._by_id[output.request_id]
        if self._slo is not None and output.new_token_ids:
            wait, most = (now - times.token_s[-1], self._slo.gap_s) if times.token_s else (now - times.arrival_s, self._slo.ttft_s)
            if wait > most:
                self._miss(times)
        times.token_s += [now] * len(output.new_token_ids)
        times.finished = output.finished and output.finish_reason != "abort"

    def is_lost(self, now: float) -> bool:
        """Whether too many have missed the SLO, those included that have waited too long for their first token."""
        if self._slo is None:
            return False
        while self._silent and (self._silent[0].token_s or now - self._silent[0].arrival_s > self._slo.ttft_s):
            times = self._silent.popleft()
            if not times.token_s:
                self._miss(times)
        return self._num_counted - len(self._missed) < self._limits.share * self._num_counted

    def _miss(self, times: RequestTimes) -> None:
        if times.arrival_s >= self._limits.lead_in_s:
            self._missed.add(times.number)

    def unfinished(self) -> list[str]:
        return [request_id for request_id, times in self._by_id.items() if not times.finished]


def replay(
    engine: Any, jobs: Sequence[Job], eos: tuple[int, ...] = (), limits: Limits = NO_LIMITS, depth: Any = None,
    clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep,
) -> Run:  # fmt: skip
    """Serve ``jobs``, which are in the order of arrival, in real time.

    ``eos`` empty: matched work, every request must produce exactly the tokens it asks for (``RuntimeError`` otherwise); else it may
    end early. A run that ``limits`` cut short has requests that are not finished. ``depth``: of all requests, None for the engine's own.
    """
    run = Run([RequestTimes(j.number, j.arrival_s, j.ask.output_tokens) for j in jobs])
    book, waiting = _Book(run, limits), deque(zip(jobs, run.requests, strict=True))
    before = counters(engine)
    watch = Watch(engine, run)
    start = clock()
    while waiting or engine.has_unfinished():
        now = clock() - start
        while waiting and waiting[0][0].arrival_s <= now:
            job, times = waiting.popleft()
            sampling = depthfx.SamplingParams(max_new_tokens=job.ask.output_tokens, eos_token_ids=eos, depth=depth)
            times.added_s = clock() - start
            book.add(engine.add(job.ask.prompt, sampling), times)
        if engine.has_unfinished():
            outputs = engine.step()
            now = clock() - start
            for output in outputs:
                book.book(output, now)
        elif waiting:
            sleep(max(0.0, min(waiting[0][0].arrival_s - now, SAMPLE_S)))
            engine.precision()  # residuals that came back meanwhile count as there
            now = clock() - start
        watch.look(now)
        run.stopped = _reason(limits, book, now)
        if run.stopped is not None:
            _abort(engine, book)
            break
    run.counters = difference(before, counters(engine))
    if run.stopped is None and not eos:
        _check_work(run)
    return run


def _reason(limits: Limits, book: _Book, now: float) -> str | None:
    if limits.seconds is not None and now > limits.seconds:
        return f"after {limits.seconds:g} s"
    return f"fewer than {limits.share:.0%} can attain the SLO" if book.is_lost(now) else None


def _abort(engine: Any, book: _Book) -> None:
    for request_id in book.unfinished():
        engine.abort(request_id)
    while engine.has_unfinished():
        engine.step()


def _check_work(run: Run) -> None:
    for times in run.requests:
        if len(times.token_s) != times.asked_tokens:
            raise RuntimeError(f"matched work: request {times.number} produced {len(times.token_s)} tokens, not {times.asked_tokens}; "
                               "its prompt and answer must fit max_model_len")  # fmt: skip


def counters(engine: Any) -> dict[str, Any]:
    """What the engine has counted since it was made, flat."""
    stats = engine.stats()
    found = {name: getattr(stats, name) for name in _COUNTS}
    found |= {f"steps {mode}": number for mode, number in stats.steps_by_precision.items()}
    if hasattr(engine.control, "stats"):
        moved = engine.control.stats()
        found |= {name: getattr(moved, name) for name in _MOVES}
        found["lent_bytes"] = moved.num_lends * engine.control.shared.layout.unit_bytes
    if stats.depth is not None:
        found |= {name: getattr(stats.depth, name) for name in ("num_enters", "num_promotions", "num_probes")}
    if engine.routes is not None:
        counts = engine.routes.counts()
        found |= {"run rows": sum(counts.run), "project rows": sum(counts.project)}
    return found


def difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What was counted in between; ``skip share`` where rows were routed (0 to 1, of pairs of row and routed layer)."""
    found = {name: after[name] - before[name] for name in after}
    rows = found.get("run rows", 0) + found.get("project rows", 0)
    if rows:
        found["skip share"] = found["project rows"] / rows
    return found
