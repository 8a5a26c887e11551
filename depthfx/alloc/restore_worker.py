"""Copies residuals back in the background: one thread, one stream of copies, units one after another.

Order, which the caller and this file keep together. Both views of a unit are mapped once and for good, so nothing here can fault;
what is left are races, and each has an event that prevents it:

- A unit is overwritten only behind ``after``, an event recorded behind the last step that may name the unit's blocks. A step that
  is planned but not launched counts: it is launched first, or never. The copies wait for the event on the device, not on the host.
- A unit is restored only when the host has seen the event behind its last chunk; :meth:`RestoreWorker.poll` says so, and a step that
  is launched afterwards may read the residual. A write through one address may be read through another once it has completed.
- A cancelled unit may still have chunks in the queue. :meth:`RestoreWorker.cancel` returns the event behind the last one, and the
  stream that writes KV into the unit waits for it, on the device.
- Tensors of queued copies are kept alive until the copies end, so a backend that is asked to unmap below them refuses.

The queue holds at most ``max_in_flight`` chunks: that bounds what a cancelled unit still costs the link (32 chunks of 4 MiB: about
2.6 ms). Half of them are issued at a time, so that the link has work while the thread comes back, and with one event for all. In between the
thread sleeps in that event: the driver wakes it by an interrupt, and no poll takes the GIL from the serving thread. Locks guard the
book-keeping alone and are never held over copies, waits for the device or hooks. Nothing may be submitted while a graph is being captured.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from depthfx.alloc.copy_stream import CopyStream, Event, check_copy, copy_stream
from depthfx.errors import DepthfxError, MemoryRequestError, MemoryStateError, RestoreError

# What a copy, an event or a hook may raise and a later unit may survive; anything else ends the thread, and every call says so.
_FAULTS = (RuntimeError, ValueError, TypeError, OSError, MemoryError, DepthfxError)


@dataclass(eq=False)
class _Job:
    """One unit to copy. ``issued`` bytes were handed to the stream; ``event`` lies behind the last of them."""

    unit: int
    target: torch.Tensor | None
    source: torch.Tensor | None
    after: Event | None
    num_bytes: int
    issued: int = 0
    event: Event | None = None
    in_hand: bool = False  # the thread is handing bytes of it to the stream right now
    cancelled: bool = False
    error: BaseException | None = None


@dataclass(frozen=True)
class _Piece:
    """Bytes [first, end) of a job; its tensors keep the memory alive as long as the copy may run."""

    job: _Job
    first: int
    end: int
    target: torch.Tensor
    source: torch.Tensor


@dataclass(frozen=True)
class _Batch:
    pieces: list[_Piece]
    chunks: int
    event: Event | None


_alive: weakref.WeakSet[RestoreWorker] = weakref.WeakSet()


@atexit.register
def _end_workers() -> None:
    """Before the interpreter ends: a daemon thread that is inside a call of PyTorch then would abort the process."""
    for worker in list(_alive):
        with contextlib.suppress(RestoreError):
            worker.close(timeout=5.0)


class RestoreWorker:
    """See the module's text. Calls may come from any thread; one unit has one job at a time."""

    def __init__(
        self,
        device: torch.device | str,
        chunk_bytes: int = 4 << 20,
        max_in_flight: int = 32,
        delay: Callable[[str], None] | None = None,
        stream: CopyStream | None = None,
    ) -> None:
        """``device`` is that of all targets. ``delay`` is called in the thread at "before chunk", "after chunk" and "before done" (for
        tests; on CUDA once for all chunks issued together), ``stream`` replaces the device's own. Raises :class:`MemoryRequestError`."""
        if chunk_bytes < 1 or max_in_flight < 1:
            raise MemoryRequestError(f"chunks of {chunk_bytes} bytes, {max_in_flight} in flight: not allowed; both must be at least 1")
        self.device = torch.device(device)
        self.chunk_bytes = chunk_bytes
        self._stream = copy_stream(self.device) if stream is None else stream
        self._most = max_in_flight if self._stream.queues else 1
        self._delay = delay or (lambda where: None)
        self._changed = threading.Condition()
        self._jobs: dict[int, _Job] = {}  # by unit, until polled or cancelled; a failed one stays for its event
        self._queue: deque[_Job] = deque()  # jobs with bytes that are not issued
        self._flying: deque[_Batch] = deque()
        self._done: list[_Job] = []
        self._failed: deque[_Job] = deque()  # not told yet
        self._issuing = False
        self._closing = False
        self._died: BaseException | None = None
        self._busy_since: float | None = None
        self._seconds = 0.0
        self.copied_bytes = 0
        self._thread = threading.Thread(target=self._work, name="depthfx-restore", daemon=True)
        self._thread.start()
        _alive.add(self)

    @property
    def seconds_busy(self) -> float:
        """Seconds in which there was something to copy, waiting for ``after`` included; with ``copied_bytes`` the rate of the link."""
        with self._changed:
            return self._seconds + (0.0 if self._busy_since is None else time.monotonic() - self._busy_since)

    def submit(self, unit: int, target: torch.Tensor, source: torch.Tensor, after: Event | None) -> None:
        """Copies ``source`` (host, pinned for CUDA) to ``target``, both uint8 ``[bytes]``, behind all units submitted before.

        The first chunk waits for ``after``. Raises :class:`MemoryRequestError` for tensors that do not fit each other,
        :class:`MemoryStateError` for a unit that is under way, or a closed worker, :class:`RestoreError` if the thread died.
        """
        check_copy(target, source, self.device)
        with self._changed:
            self._check_alive()
            if (known := self._jobs.get(unit)) is not None:
                if known.error is None:
                    raise MemoryStateError(f"unit {unit} is being restored already; poll until it is reported, or cancel it first")
                self._forget(known)
            job = _Job(unit, target, source, after, target.numel())
            self._jobs[unit] = job
            self._queue.append(job)
            self._start_clock()
            self._changed.notify_all()

    def cancel(self, unit: int) -> Event | None:
        """Takes a unit back whose restore is waiting, running, done or failed, but not yet polled: nothing more is issued for it.

        Returns the event behind its last chunk, for which the stream that overwrites the unit must wait; None if no chunk was issued, or on a
        CPU. Waits for nothing on the device; if the thread is handing chunks over right now, for the end of that (on a CPU: of one chunk).
        Raises :class:`MemoryStateError` for a unit that is not under way.
        """
        with self._changed:
            job = self._jobs.get(unit)
            if job is None:
                raise MemoryStateError(f"unit {unit} is not being restored, so there is nothing to cancel")
            self._forget(job)
            while job.in_hand:
                self._changed.wait()
            self._stop_clock()
            return job.event

    def poll(self) -> list[int]:
        """Units whose bytes are all there, in the order in which they ended; each is told once.

        Raises :class:`RestoreError`, once for each unit that failed, with its cause; that unit is not restored. Submit it again or cancel it.
        """
        with self._changed:
            if self._failed:
                job = self._failed.popleft()
                raise RestoreError(f"unit {job.unit} was not copied back: {type(job.error).__name__}: {job.error}", job.unit) from job.error
            done, self._done = self._done, []
            for job in done:
                del self._jobs[job.unit]
            return [job.unit for job in done]

    def idle(self) -> bool:
        """Whether no unit waits or is being copied; finished ones may still wait for :meth:`poll`."""
        with self._changed:
            return self._is_idle()

    def wait_idle(self, timeout: float) -> bool:
        """Waits up to ``timeout`` seconds until :meth:`idle`, or until the thread died; returns :meth:`idle`."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_idle() or self._died is not None, timeout)
            return self._is_idle()

    def copy_all(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], after: Event | None = None) -> Event | None:
        """For start-up: one transfer for each pair (uint8 ``[bytes]``), all queued at once; on a CPU they are done on return.

        Returns the event behind the last one, None on a CPU. Nothing can be cancelled, and :meth:`poll` tells nothing. Raises as
        :meth:`submit` does, and :class:`MemoryStateError` while units are under way.
        """
        if len(targets) != len(sources):
            raise MemoryRequestError(f"{len(targets)} targets and {len(sources)} sources do not pair; give as many of each")
        for target, source in zip(targets, sources):
            check_copy(target, source, self.device)
        with self._changed:
            self._check_alive()
            if not self._is_idle():
                raise MemoryStateError("copy_all while units are being restored is not allowed; wait until the worker is idle")
        if after is not None:
            self._stream.wait(after)
        for target, source in zip(targets, sources):
            self._stream.copy(target, source, target.numel())
        event = self._stream.record()
        unnamed = _Job(-1, None, None, None, 0, cancelled=True)  # so that the thread keeps the tensors until the event, and tells nobody
        pieces = [_Piece(unnamed, 0, target.numel(), target, source) for target, source in zip(targets, sources)]
        with self._changed:
            self._start_clock()
            self._flying.append(_Batch(pieces, self._most, event))
            self._changed.notify_all()
        return event

    def close(self, timeout: float = 10.0) -> None:
        """Ends the thread: nothing more is issued, what is queued on the device ends, units that are not done are forgotten.

        Raises :class:`RestoreError` if that takes longer than ``timeout`` seconds: the device does not come back, and the memory must
        not be freed. May be called again.
        """
        with self._changed:
            self._closing = True
            self._queue.clear()
            self._changed.notify_all()
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise RestoreError(f"the copies under way did not end within {timeout} s; the device may hang, keep its memory mapped")
        with self._changed:
            for job in self._jobs.values():
                job.target = job.source = None
            self._jobs.clear()
            self._done.clear()
            self._stop_clock()

    # The thread.

    def _work(self) -> None:
        try:
            with torch.inference_mode():  # targets may be inference tensors, which only this mode may write
                while self._turn():
                    pass
        except BaseException as error:
            with self._changed:
                self._died = error
                for job in self._jobs.values():
                    if job not in self._done:
                        self._fail(job, error)
                self._queue.clear()
                self._changed.notify_all()
            traceback.clear_frames(error.__traceback__)  # which keep tensors alive
            raise

    def _turn(self) -> bool:
        """Issues chunks where there is room, else waits for the oldest batch, else for work; False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._flying or self._closing)
            room = self._most - sum(batch.chunks for batch in self._flying)
            issue = bool(self._queue) and room >= (self._most + 1) // 2
            if not issue and not self._flying:
                return False
        if issue:
            self._issue()
        else:
            self._land()
        return True

    def _issue(self) -> None:
        """Hands the next chunks of the waiting jobs, half of the queue's room, to the stream."""
        try:
            self._delay("before chunk")
        except _FAULTS as error:
            with self._changed:
                if self._queue:
                    self._fail(self._queue[0], error)
            return
        with self._changed:
            pieces, chunks = self._gather((self._most + 1) // 2)
        if not pieces:
            return  # cancelled meanwhile
        event: Event | None = None
        faults: dict[_Job, BaseException] = {}
        try:
            for piece in pieces:
                try:
                    self._hand_over(piece)
                except _FAULTS as error:
                    faults[piece.job] = error
            try:
                event = self._stream.record()
            except _FAULTS as error:
                faults = {piece.job: error for piece in pieces}
        finally:
            with self._changed:
                self._issuing = False
                self._flying.append(_Batch(pieces, chunks, event))
                for piece in pieces:
                    piece.job.event, piece.job.in_hand = event, False
                for job, fault in faults.items():
                    self._fail(job, fault)
                self._changed.notify_all()
        self._call_hook("after chunk", pieces[0].job)

    def _gather(self, most: int) -> tuple[list[_Piece], int]:
        """Pieces of at most ``most`` chunks from the front of the queue; a job that is issued whole leaves it."""
        pieces, chunks = [], 0
        while self._queue and chunks < most:
            job = self._queue[0]
            assert job.target is not None and job.source is not None
            first, end = job.issued, min(job.issued + (most - chunks) * self.chunk_bytes, job.num_bytes)
            pieces.append(_Piece(job, first, end, job.target, job.source))
            chunks += -(-(end - first) // self.chunk_bytes)
            job.issued, job.in_hand = end, True
            if end == job.num_bytes:
                self._queue.popleft()
        self._issuing = bool(pieces)
        return pieces, chunks

    def _hand_over(self, piece: _Piece) -> None:
        if piece.first == 0 and piece.job.after is not None:
            self._stream.wait(piece.job.after)
        self._stream.copy(piece.target[piece.first : piece.end], piece.source[piece.first : piece.end], self.chunk_bytes)

    def _land(self) -> None:
        """Waits for the oldest batch, books what it finished, and lets go of its tensors before anyone hears of it."""
        batch = self._flying[0]
        self._book(batch)
        batch.pieces.clear()
        with self._changed:
            self._flying.popleft()
            self._stop_clock()
            self._changed.notify_all()

    def _book(self, batch: _Batch) -> None:
        fault: BaseException | None = None
        try:
            if batch.event is not None:
                batch.event.synchronize()
        except _FAULTS as error:
            fault = error
        finished = []
        with self._changed:
            for piece in batch.pieces:
                if fault is not None:
                    self._fail(piece.job, fault)
                elif piece.job.error is None:
                    self.copied_bytes += piece.end - piece.first
                    if piece.end == piece.job.num_bytes:
                        finished.append(piece.job)
        for job in finished:
            self._call_hook("before done", job)
            with self._changed:
                if not job.cancelled and job.error is None:
                    job.target = job.source = None
                    self._done.append(job)

    def _call_hook(self, where: str, job: _Job) -> None:
        try:
            self._delay(where)
        except _FAULTS as error:
            with self._changed:
                self._fail(job, error)

    # Book-keeping; the caller holds the lock.

    def _fail(self, job: _Job, error: BaseException) -> None:
        """Without the traceback, whose frames would keep tensors alive as long as somebody keeps the error."""
        if job.cancelled or job.error is not None or job in self._done:
            return
        job.error = error.with_traceback(None)
        job.target = job.source = None
        if job in self._queue:
            self._queue.remove(job)
        self._failed.append(job)

    def _forget(self, job: _Job) -> None:
        job.cancelled = True
        job.target = job.source = None
        del self._jobs[job.unit]
        for waiting in (self._queue, self._failed, self._done):
            if job in waiting:
                waiting.remove(job)

    def _is_idle(self) -> bool:
        return not (self._queue or self._issuing or self._flying)

    def _start_clock(self) -> None:
        if self._busy_since is None:
            self._busy_since = time.monotonic()

    def _stop_clock(self) -> None:
        if self._busy_since is not None and self._is_idle():
            self._seconds += time.monotonic() - self._busy_since
            self._busy_since = None

    def _check_alive(self) -> None:
        if self._died is not None:
            raise RestoreError(f"the restore worker ended by {type(self._died).__name__}: {self._died}; make a new one") from self._died
        if self._closing:
            raise MemoryStateError("this restore worker is closed; make a new one")
