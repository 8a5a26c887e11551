"""What the engine counts: a frozen record for users, the counts behind it, and the clock that tells hidden host time from exposed one."""

from __future__ import annotations

import time
from dataclasses import dataclass

from depthfx.alloc.usage import BlockUsage
from depthfx.records import StepPlan
from depthfx.runtime.depth_control import DepthStats
from depthfx.runtime.precision import summary
from depthfx.runtime.scheduler import Scheduler

# A wait shorter than this did not block: the device was done before the host came back.
_NO_WAIT_SECONDS = 50e-6


@dataclass(frozen=True)
class EngineStats:
    """Counts since the engine was made; times are means over all steps, in seconds."""

    num_steps: int
    num_tokens: int  # tokens produced
    num_prefill_tokens: int  # prompt rows computed, recomputed ones included
    num_preemptions: int
    num_reused_tokens: int  # tokens whose KV was found on the device when their request was admitted
    num_reloaded_tokens: int  # likewise, found on the host (KV offload)
    num_reloaded_blocks: int
    num_saved_blocks: int  # evicted blocks that were copied to the host
    steps_by_precision: dict[str, int]  # "full" (also weights of one precision), "fast", "mixed"
    num_running: int
    num_waiting: int
    kv: BlockUsage
    host_seconds_per_step: float  # planning, launching and booking
    exposed_seconds_per_step: float  # the part of it during which the device had nothing to do
    depth: DepthStats | None  # None unless compiled with a skipper and depth="auto"


class StepClock:
    """Adds up host time. Host work is hidden if a step was in flight all the time, so that the next wait still blocked."""

    def __init__(self) -> None:
        self.host_seconds = 0.0
        self.exposed_seconds = 0.0
        self._since = 0.0
        self._in_flight = False
        self._unsettled = 0.0  # host time beside a step in flight: the next wait tells whether it was hidden

    def start(self, in_flight: bool) -> None:
        """Host work begins; ``in_flight``: a step is on the device."""
        self._since = time.perf_counter()
        self._in_flight = in_flight

    def stop(self) -> None:
        """Host work ends."""
        seconds = time.perf_counter() - self._since
        self.host_seconds += seconds
        if self._in_flight:
            self._unsettled += seconds
        else:
            self.exposed_seconds += seconds

    def waited(self, seconds: float) -> None:
        """The host waited so long for a step."""
        if seconds < _NO_WAIT_SECONDS:
            self.exposed_seconds += self._unsettled
        self._unsettled = 0.0


class StepCounts:
    """Adds up what booked steps did."""

    def __init__(self) -> None:
        self.num_steps = self.num_tokens = self.num_prefill_tokens = 0
        self.by_precision = {"full": 0, "fast": 0, "mixed": 0}

    def add(self, plan: StepPlan) -> None:
        """A step was booked; its tokens are counted where they are handed out."""
        self.num_steps += 1
        self.by_precision[summary(plan.precision)] += 1
        self.num_prefill_tokens += plan.num_tokens - len(plan.decodes)

    def stats(self, scheduler: Scheduler, clock: StepClock) -> EngineStats:
        """The record for users."""
        steps, host = max(1, self.num_steps), scheduler.manager.host
        return EngineStats(
            num_steps=self.num_steps,
            num_tokens=self.num_tokens,
            num_prefill_tokens=self.num_prefill_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_reused_tokens=scheduler.num_reused_tokens,
            num_reloaded_tokens=0 if host is None else host.num_reloaded * scheduler.manager.block_tokens,
            num_reloaded_blocks=0 if host is None else host.num_reloaded,
            num_saved_blocks=0 if host is None else host.num_saved,
            steps_by_precision=dict(self.by_precision),
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv=scheduler.manager.usage(),
            host_seconds_per_step=clock.host_seconds / steps,
            exposed_seconds_per_step=clock.exposed_seconds / steps,
            depth=None if scheduler.depth is None else scheduler.depth.stats(),
        )
