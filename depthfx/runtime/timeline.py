"""Who owned memory when: a bounded ring of samples, taken as steps are booked.

A sample is a tuple of counters that are kept anyway (a few microseconds, whatever the number of blocks); bytes are worked out when
somebody reads. Nothing here touches the device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from depthfx.runtime.scheduler import Scheduler

INTERVAL_S = 0.005  # at least this long between samples
MOST = 16384  # samples kept: 82 seconds of short steps, about 8 MiB

_Counts = tuple[float, int, int, int, int, int, int, int, int, int, int, int]


@dataclass(frozen=True)
class MemorySample:
    """One moment. The five ``*_bytes`` are the memory that KV and residuals share, base blocks included: each byte has one owner."""

    time_s: float  # since the engine was made
    kv_held_bytes: int
    kv_cached_bytes: int  # held by nobody, still findable
    kv_free_bytes: int
    restoring_bytes: int  # closed to KV, residual bytes on their way back
    residual_bytes: int  # residual bytes in place
    num_held_blocks: int
    num_open_blocks: int
    num_full_entries: int  # layers (and head) in full precision in the step just booked
    num_running: int
    num_waiting: int
    num_lends: int  # this and what follows: so far
    num_restores: int
    num_preemptions: int


class Timeline:
    """Samples of one engine, whose lock the caller holds. ``block_bytes``: of one KV block."""

    def __init__(
        self, block_bytes: int, interval_s: float = INTERVAL_S, most: int = MOST, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.block_bytes, self.interval_s = block_bytes, interval_s
        self._ring: deque[_Counts] = deque(maxlen=most)  # the oldest go first
        self._clock = clock
        self._start = clock()
        self._due = self._start

    def record(self, scheduler: Scheduler, precision: bytes) -> None:
        """A step of ``precision`` was booked: keep a sample, unless the last one is younger than ``interval_s``."""
        now = self._clock()
        if now >= self._due:
            self._due = now + self.interval_s
            self._ring.append(self._count(now, scheduler, precision))

    def samples(self, scheduler: Scheduler) -> list[MemorySample]:
        """What is kept, oldest first, and the present moment."""
        return [self._sample(c) for c in (*self._ring, self._count(self._clock(), scheduler, scheduler.precision))]

    def _count(self, now: float, scheduler: Scheduler, precision: bytes) -> _Counts:
        manager = scheduler.manager
        region = manager.region
        if region is None:
            restoring = backed = lends = restores = 0
        else:
            restoring, lends, restores = region.num_restoring, region.num_lends, region.num_restores
            backed = region.layout.num_units - region.num_open_units - restoring
            restoring, backed = restoring * region.layout.blocks_per_unit, backed * region.layout.blocks_per_unit
        return (
            now - self._start, manager.held_blocks, manager.cached_blocks, manager.open_blocks, restoring, backed, sum(precision),
            scheduler.num_running, scheduler.num_waiting, lends, restores, scheduler.num_preemptions,
        )  # fmt: skip

    def _sample(self, counts: _Counts) -> MemorySample:
        at, held, cached, opened, restoring, backed, full, running, waiting, lends, restores, preemptions = counts
        kv_held, kv_cached, kv_free, coming, residual = (
            blocks * self.block_bytes for blocks in (held, cached, opened - held - cached, restoring, backed)
        )
        return MemorySample(
            at, kv_held, kv_cached, kv_free, coming, residual, held, opened, full, running, waiting, lends, restores, preemptions
        )
