"""What the engine counts: a frozen record for users, and the clock that tells hidden host time from exposed host time."""

from __future__ import annotations

import time
from dataclasses import dataclass

from depthfx.alloc.usage import BlockUsage

# A wait shorter than this did not block: the device was done before the host came back.
_NO_WAIT_SECONDS = 50e-6


@dataclass(frozen=True)
class EngineStats:
    """Counts since the engine was made; times are means over all steps, in seconds."""

    num_steps: int
    num_tokens: int  # tokens produced
    num_prefill_tokens: int  # prompt rows computed, recomputed ones included
    num_preemptions: int
    num_reused_tokens: int  # prompt tokens whose KV was found
    steps_by_precision: dict[str, int]  # "full" (also weights of one precision), "fast", "mixed"
    num_running: int
    num_waiting: int
    kv: BlockUsage
    host_seconds_per_step: float  # planning, launching and booking
    exposed_seconds_per_step: float  # the part of it during which the device had nothing to do


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
