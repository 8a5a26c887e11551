"""When units are lent and when they come back: the engine asks before and after each plan, launch and commit.

Lending itself happens in `MemoryManager`, inside `admit` and `grow`, without any wait. What this file adds is order:

    before_plan    residuals that the worker has copied back count as there; the next plan may read them
    mask           what the plan may read, once all its blocks are taken
    after_plan     copies into units that were lent meanwhile stop, the step waits (on the device) for chunks under way, then
                   the lent bytes are cleared: garbage read as keys and values could be NaN (also after a plan that came to nothing)
    after_commit   units that nobody needs any more are closed and handed to the worker, behind an event after the last launched step; the
                   last blocks of such a unit are moved elsewhere first

Thresholds are shares of the KV blocks that are open (paper DPS, section IV.D: kappa_H and kappa_L), with a dwell time against flapping.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from depthfx.alloc.manager import MemoryManager
from depthfx.alloc.restore_worker import RestoreWorker
from depthfx.alloc.unified_memory import POISON
from depthfx.errors import DepthfxError, MemoryStateError, RestoreError, UnsupportedOptionError
from depthfx.runtime.backlog import Backlog
from depthfx.runtime.elastic_memory import SharedMemory
from depthfx.settings import ElasticMemory

MAX_RESTORING = 16  # units handed to the worker and not yet back; more would only be harder to cancel
RETRY_SECONDS = 1.0  # after a copy failed
_LAST_WORDS_SECONDS = 10.0  # of a worker that has ended
_FAILED_WAIT_SECONDS = 0.01
MAX_TRIES = 3  # in a row without any success, before `restore` and requests that wait for full precision give up


@dataclass(frozen=True)
class ElasticStats:
    """Counts since the engine was made. ``restored_bytes`` over ``restore_seconds`` is the rate of the link while it was used."""

    num_lends: int
    num_restores: int
    num_cancels: int
    num_failures: int
    restored_bytes: int
    restore_seconds: float
    chunks_in_flight: int  # that may be, now: fewer while somebody else uses the link
    num_slow: int  # how often that was halved


class ElasticControl:
    """Lends and restores for one engine; all methods are called by whoever drives it, under the engine's lock."""

    def __init__(
        self, shared: SharedMemory, manager: MemoryManager, settings: ElasticMemory, clock: Callable[[], float] = time.monotonic
    ) -> None:
        assert manager.region is not None
        self.shared, self.manager, self.settings = shared, manager, settings
        self.region = manager.region
        self.num_failures = 0
        self._clock = clock
        self._device = shared.worker.device
        self._counted = (shared.worker.copied_bytes, shared.worker.seconds_busy)  # the copies at start-up
        self._stream = torch.cuda.default_stream(self._device) if self._device.type == "cuda" else None
        self._home = shared.memory.home_bytes_tensor()
        self._blocks = shared.memory.kv_tensor((shared.layout.num_blocks, shared.layout.block_bytes), torch.uint8)
        pieces = (self._home[slice(*shared.layout.pieces_of(unit))] for unit in range(shared.layout.num_units))
        self._copies = [(piece, shared.backup.unit(unit)) for unit, piece in enumerate(pieces)]  # of each unit: where to, where from
        self._num_clean = 0  # units [0, _num_clean) are open to KV and were cleared
        self._calm_since: float | None = None
        self._backlog = Backlog(settings.patience_s, settings.dwell_s, clock)
        self._retry_at = 0.0
        self._pressed = False  # somebody waits for full precision: nothing is lent ahead of need
        self._to_retry: set[int] = set()  # units whose copy failed; they stay closed, and KV may still take them
        self._failure = ""  # the last one, as text: tracebacks keep tensors alive
        self.num_tries_failed = 0  # in a row; a try is all copies that are under way together, and fails if none of them succeeds
        self._has_failed = self._has_worked = False  # a copy of the present try
        self._hopeless = ""  # why who waits should not go on waiting; not yet told
        self._versions = self._count_changes()
        self._seen: bytes | None = None
        self._mask = b""
        self._bare = [index for index, span in enumerate(shared.layout.spans) if span == (0, 0)]
        if settings.policy == "static_fast":
            manager.lend(shared.layout.num_units)
        for weight, _ in shared.weights:
            for module in weight.modules:
                module.guard = self._guard(weight.entry)

    def mask(self) -> bytes:
        """``[entries]``: 1 where steps planned now may run in full precision."""
        resident = self.region.resident()
        if self.settings.policy == "static_fast" or (self._backlog.hurried and self.manager.may_lend):
            return bytes(len(resident))
        if resident is not self._seen:
            self._seen, mask = resident, bytearray(resident)
            moving = [flag for index, flag in enumerate(resident) if index not in self._bare]
            if not any(moving) or (self.settings.whole_model and not all(moving)):
                mask = bytearray(len(resident))  # entries without residual run alike in both modes; all fast is the quicker step
            self._mask = bytes(mask)
        return self._mask

    def check_wanted(self, state: bytes) -> None:
        """Raises :class:`UnsupportedOptionError` for full precision under a policy whose residuals are lent for good."""
        if self.settings.policy == "static_fast" and any(flag for index, flag in enumerate(state) if index not in self._bare):
            raise UnsupportedOptionError(
                "set_precision: memory policy 'static_fast' lent all residual bytes to the KV cache for good; compile with policy='elastic'"
            )

    def before_plan(self, waiting_since: float | None) -> None:
        """Books what the worker has copied back, lends ahead of need where ``high`` or the policy asks for it, and minds the backlog."""
        self.collect()
        self._backlog.look(waiting_since, idle=not self.manager.held_blocks)
        if self.settings.policy == "static_fast":
            self.manager.lend(self.shared.layout.num_units)  # what `restore` brought back for a while
        elif self.settings.high < 1.0 and not self._pressed and self.manager.held_blocks >= self.settings.high * self.manager.open_blocks:
            self.manager.lend()

    def after_plan(self) -> None:
        """Stops copies into units that were lent since the last call and clears these, in the order of the steps."""
        cancelled = self.manager.take_cancelled()
        first, end = self._num_clean, self.region.num_open_units
        if end <= first:
            return
        self._calm_since = None
        with self._on_stream(), torch.inference_mode():
            for unit in cancelled:
                self._stop_copy(unit)
            size = self.shared.layout.unit_bytes
            self._home[first * size : end * size].fill_(POISON if self.settings.verify else 0)
        self._num_clean = end

    def after_commit(self, waiting: bool, idle: bool) -> None:
        """Begins restores where load allows: nobody is ``waiting`` for room, and what is held fits well into what would be left.

        ``idle``: there is no request left, so nothing is waited for.
        """
        self.collect()
        now, self._pressed, self._hopeless = self._clock(), False, ""
        if idle:
            self._backlog.rest()
        if now >= self._retry_at:
            self._retry()
        if waiting or not self._fits() or self.settings.policy == "static_fast" or now < self._retry_at:
            self._calm_since = None
            return
        if self._calm_since is None:
            self._calm_since = now
        # what is under way limits what begins now; it says nothing of load, so the time of calm goes on
        if idle or (now - self._calm_since >= self.settings.dwell_s and self.region.num_restoring < MAX_RESTORING):
            self._empty_highest()
            self._restore(forced=idle)

    def press(self, spare: int) -> str:
        """Restores every unit without which held and ``spare`` blocks have room, whatever the thresholds: somebody waits for full precision.

        Returns why it is not worth waiting any longer, once for each try that failed from the :data:`MAX_TRIES`-th in a row on; else "".
        """
        self.collect()
        self._pressed = True
        self._backlog.rest()
        if self._clock() >= self._retry_at:
            self._retry()
            per_unit = self.shared.layout.blocks_per_unit
            closed: list[int] = []
            while self.region.num_open_units and self.manager.held_blocks + spare <= self.manager.open_blocks - per_unit:
                self._empty_highest()
                unit = self.region.next_to_restore()
                if unit is None:
                    break
                self._close(unit)
                closed.append(unit)
            event = self._after_launched() if closed else None  # behind all blocks that were moved, the last of them too
            for unit in closed:
                self._submit(unit, event)
        self._calm_since = None
        hopeless, self._hopeless = self._hopeless, ""
        return hopeless

    def wait(self, seconds: float) -> None:
        """Until the copies that are under way have ended, or for a while where they failed."""
        if not self.shared.worker.wait_idle(seconds) or self._to_retry:
            time.sleep(min(seconds, _FAILED_WAIT_SECONDS))

    def restore(self, timeout: float) -> None:
        """Bring every residual back now, whatever the thresholds.

        Raises :class:`MemoryStateError` while KV blocks are in the way, if copies fail again and again, or after ``timeout`` seconds.
        """
        end, num_tries, num_back = time.monotonic() + timeout, 0, self.region.num_restores
        while not all(self.region.resident()):
            self.collect()
            if self.region.num_restores > num_back:
                num_tries, num_back = 0, self.region.num_restores
            if self._to_retry:
                num_tries += 1
                if num_tries > MAX_TRIES:
                    raise MemoryStateError(f"residuals cannot be copied back; call engine.restore() again: {self._failure}")
                self._retry()
            self._restore(forced=True)
            if self.region.num_restoring == 0 and not all(self.region.resident()):
                raise MemoryStateError(
                    "residuals cannot be restored while requests hold KV blocks in their memory; finish or abort them first"
                )
            if time.monotonic() > end:
                raise MemoryStateError(f"residuals were not back within {timeout} s; {self.region.num_restoring} units are under way")
            self.shared.worker.wait_idle(0.05)

    def weights_changed(self) -> None:
        """Take the host's copy anew. While residuals are lent, they must not be what changed: :class:`MemoryStateError`."""
        versions = self._count_changes()
        if all(self.region.resident()):
            self.shared.back_up()
            self._versions = versions
        elif versions is None or versions != self._versions:
            raise MemoryStateError(
                "nested weights were changed while residuals are lent to the KV cache, so the change is lost; call engine.restore() first, "
                "then change them again"
            )

    def close(self) -> None:
        """Gives all shared memory back; the model's weights are whole again. The KV pool must be gone, and no step queued.

        Raises :class:`MemoryStateError` while somebody else sees the memory; may be called again.
        """
        self._home = self._blocks = torch.empty(0)
        self._copies.clear()
        self.shared.dissolve()

    def stats(self) -> ElasticStats:
        """Counts so far."""
        region, worker = self.region, self.shared.worker
        restored = worker.copied_bytes - self._counted[0], worker.seconds_busy - self._counted[1]
        return ElasticStats(region.num_lends, region.num_restores, region.num_cancels, self.num_failures, *restored, *worker.in_flight)

    def _count_changes(self) -> list[int] | None:
        """Of each residual tensor, what torch counts; None for tensors made in inference mode, where it counts nothing."""
        lowers = [weight.lower for weight, _ in self.shared.weights]
        return None if any(lower.is_inference() for lower in lowers) else [lower._version for lower in lowers]

    def _fits(self) -> bool:
        """Whether what is held would fit well without the highest lent unit."""
        if not self.region.num_open_units:
            return False
        left = self.manager.open_blocks - self.shared.layout.blocks_per_unit
        return self.manager.held_blocks <= self.settings.low * left

    def _empty_highest(self) -> None:
        """Moves the last held blocks of the highest lent unit to lower ones, so that a long request does not keep it.

        The copies follow every launched step and come before the next one, whose plan names the new places.
        """
        highest = self.region.num_open_units - 1
        if self.region.state(highest) == "FREE":
            return
        with self._on_stream(), torch.inference_mode():
            for source, target in self.manager.compact(highest, self.shared.layout.blocks_per_unit):
                self._blocks[target].copy_(self._blocks[source])

    def _restore(self, forced: bool = False) -> None:
        event = self._after_launched() if self.region.next_to_restore() is not None else None
        while (unit := self.region.next_to_restore()) is not None and (
            forced or (self.region.num_restoring < MAX_RESTORING and self._fits())
        ):
            if not self._begin(unit, event):
                break

    def _begin(self, unit: int, event: torch.cuda.Event | None) -> bool:
        self._close(unit)
        return self._submit(unit, event)

    def _close(self, unit: int) -> None:
        self.manager.begin_restore(unit)
        self._num_clean = min(self._num_clean, unit)

    def _retry(self) -> None:
        event, units = self._after_launched() if self._to_retry else None, sorted(self._to_retry)
        for unit in units:
            self._to_retry.discard(unit)
            self._submit(unit, event)

    def _after_launched(self) -> torch.cuda.Event | None:
        """An event behind every launched step; no step is planned without being launched."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def _submit(self, unit: int, event: torch.cuda.Event | None) -> bool:
        try:
            self.shared.worker.submit(unit, *self._copies[unit], event)
        except DepthfxError as error:
            self._fail(unit, error)
            if isinstance(error, RestoreError):
                self._replace_worker()
            return False
        return True

    def _replace_worker(self) -> None:
        """A new worker for one whose thread has ended."""
        if self._stream is not None:
            torch.cuda.synchronize(self._device)  # what it has queued comes to its end
        old = self.shared.resources.worker
        old.wait_idle(_LAST_WORDS_SECONDS)
        self._book()  # what it has still to tell: no unit may be waited for that nobody copies
        self._counted = self._counted[0] - old.copied_bytes, self._counted[1] - old.seconds_busy
        old.close()
        self.shared.resources.worker = RestoreWorker(self._device)

    def _stop_copy(self, unit: int) -> None:
        self._to_retry.discard(unit)
        try:
            event = self.shared.worker.cancel(unit)
        except MemoryStateError:
            return  # it was never handed over, or the worker has ended
        if event is not None and self._stream is not None:
            event.wait(self._stream)

    def collect(self) -> None:
        """Books what the worker has copied back; its failures are warned of and tried again after a while."""
        self._book()
        self._judge_try()

    def _book(self) -> None:
        while True:
            try:
                done = self.shared.worker.poll()
                break
            except RestoreError as error:
                self._fail(error.unit, error)
        for unit in done:
            self.manager.finish_restore(unit)
        self._has_worked |= bool(done)
        if done and self.settings.verify:
            self._verify(done)

    def _judge_try(self) -> None:
        if self._has_worked:
            self.num_tries_failed, self._hopeless = 0, ""
        if self.region.num_restoring > len(self._to_retry):
            return  # some of it is under way
        if self._has_failed and not self._has_worked:
            self.num_tries_failed += 1
            if self._pressed and self.num_tries_failed >= MAX_TRIES:
                tries = f"{self.num_tries_failed} tries in a row failed, the last one with: {self._failure}"
                self._hopeless = f"residual bytes cannot be copied back from the host: {tries}"
        self._has_failed = self._has_worked = False

    def _verify(self, units: list[int]) -> None:
        resident = self.region.resident()
        for entry in {e for unit in units for e in self.shared.layout.entries_of(unit) if resident[e]}:
            with self._on_stream():
                self.shared.backup.verify(self._home, *self.shared.layout.spans[entry])

    def _fail(self, unit: int | None, error: Exception) -> None:
        self.num_failures += 1
        self._failure = str(error)
        self._retry_at = self._clock() + RETRY_SECONDS
        if unit is not None:
            self._to_retry.add(unit)
        self._has_failed = True
        warnings.warn(f"a residual was not restored, its layer stays in fast precision and is tried again: {error}", stacklevel=2)

    def _guard(self, entry: int) -> Callable[[], None]:
        def check() -> None:
            if not self.region.resident()[entry]:
                raise MemoryStateError(
                    f"the residual bytes of layer {entry} are lent to the KV cache, so its full weight cannot be read now; "
                    "finish or abort the requests and call engine.restore() first"
                )

        return check

    def _on_stream(self) -> AbstractContextManager[object]:
        if self._stream is None or torch.cuda.current_stream(self._device) == self._stream:
            return nullcontext()  # the usual case, and entering a stream is most of what lending a unit costs the host
        return torch.cuda.stream(self._stream)
