"""Copies residuals back in the background: one thread in C, one stream of copies, units one after another.

Order, which the caller and this file keep together. Both views of a unit are mapped once and for good, so nothing here can fault;
what is left are races, and each has an event that prevents it:

- A unit is overwritten only behind ``after``, an event recorded behind the last step that may name the unit's blocks. A step that
  is planned but not launched counts: it is launched first, or never. The copies wait for the event on the device, not on the host.
- A unit is restored only when the host has seen the event behind its last chunk; :meth:`RestoreWorker.poll` says so, and a step that
  is launched afterwards may read the residual. A write through one address may be read through another once it has completed.
- A cancelled unit may still have chunks in the queue. :meth:`RestoreWorker.cancel` returns the end of the last one, and the
  stream that writes KV into the unit waits for it, on the device.
- Tensors of queued copies are kept alive until the copies end, so a backend that is asked to unmap below them refuses. They are let go
  by the next call of any method, before it tells of the end.

The queue holds at most ``max_in_flight`` chunks (8 of 4 MiB: about 0.6 ms of the link), which bounds what a cancelled unit still costs. The
copy engine is the restore's alone: it serves no other stream while this one has a chunk queued, so a step must not copy anything to the
device by it (`depthfx.runtime.host_ring` has the way past). Who does, as KV offload, is let in after 32 batches at most; where chunks
take longer than the link needs by itself, fewer are in flight (``copier_thread.h``). Half of the chunks are issued at a time, so that the
link has work while the thread comes back, and with one event for all. In between the thread sleeps in that event, and the driver wakes it by an interrupt. The
thread is one of ``alloc/copier``: it has nothing to do with the interpreter, so it takes its lock from nobody, least of all from the thread
that serves. Nothing may be submitted while a graph is captured.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from depthfx.alloc.copier.copier_library import CLOSED, COPIED, DIED, Copier
from depthfx.errors import HostMemoryError, MemoryRequestError, MemoryStateError, RestoreError

_MOST = 4096  # chunks in flight
_SLICE_SECONDS = 0.1  # of waits without a bound: Ctrl-C is answered in between


class CopyEvent:
    """The end of copies under way, where a stream or the host can wait for it as for a ``torch.cuda.Event``."""

    def __init__(self, copier: Copier, batch: int) -> None:
        self.copier, self._batch = copier, batch

    def wait(self, stream: torch.cuda.Stream) -> None:
        """What is queued on ``stream`` from now on waits, on the device; raises :class:`RestoreError` if the driver refuses."""
        if why := self.copier.stream_wait(self._batch, stream.cuda_stream):
            raise RestoreError(f"a stream cannot wait for copies under way: {why}")

    def query(self) -> bool:
        """Whether the worker's thread has seen the copies end."""
        return self.copier.wait_batch(self._batch, 0.0)

    def synchronize(self) -> None:
        """Waits until the worker's thread has seen the copies end."""
        while not self.copier.wait_batch(self._batch, _SLICE_SECONDS):
            pass


@dataclass(eq=False)
class _Job:
    """A unit to copy, or (None) a part of ``copy_all``; ``memory`` is what must live while its copies may be under way."""

    unit: int | None
    number: int
    memory: tuple[object, ...] | None
    error: str | None = None


_open: set[RestoreWorker] = set()  # until they are closed: the threads write to memory that only their workers keep


@atexit.register
def _end_workers() -> None:
    """Before the interpreter ends, and the memory with it."""
    for worker in list(_open):
        with contextlib.suppress(RestoreError):
            worker.close(timeout=5.0)


class RestoreWorker:
    """See the module's text. Calls may come from any thread; one unit has one job at a time."""

    def __init__(self, device: torch.device | str, chunk_bytes: int = 4 << 20, max_in_flight: int = 8, driver: str | None = None) -> None:
        """``device`` is that of all targets. ``driver`` replaces CUDA's driver library; for tests, with targets on the host.

        Raises :class:`MemoryRequestError`, or :class:`BackendUnavailableError` where the thread cannot be built or started.
        """
        if chunk_bytes < 1 or not 1 <= max_in_flight <= _MOST:
            raise MemoryRequestError(
                f"chunks of {chunk_bytes} bytes, {max_in_flight} in flight: not allowed; both must be at least 1, and at most {_MOST} in flight"
            )
        self.device = torch.device(device)
        self.chunk_bytes = chunk_bytes  # of what is submitted from now on
        self._queues = self.device.type == "cuda" or driver is not None
        ordinal = -1
        if self._queues:
            ordinal = self.device.index or 0
            if self.device.type == "cuda" and self.device.index is None:
                ordinal = torch.cuda.current_device()
        self.copier = Copier(ordinal, max_in_flight if self._queues else 1, driver)
        self._lock = threading.Lock()  # over what follows; never held over a wait
        self._numbers = itertools.count(1)
        self._under_way: dict[int, _Job] = {}  # by number, until no byte can be under way
        self._jobs: dict[int, _Job] = {}  # by unit, until polled or cancelled
        self._done: list[_Job] = []
        self._failed: deque[_Job] = deque()  # not told yet
        _open.add(self)

    @property
    def copied_bytes(self) -> int:
        """Bytes whose copies have ended, those of cancelled units included; none of a unit once it failed."""
        return self.copier.copied_bytes

    @property
    def seconds_busy(self) -> float:
        """Seconds in which there was something to copy, waiting for ``after`` included; with ``copied_bytes`` the rate of the link."""
        return self.copier.seconds_busy

    @property
    def in_flight(self) -> tuple[int, int]:
        """How many chunks may be under way now, and how often that was halved because somebody else used the link."""
        return self.copier.in_flight

    def submit(self, unit: int, target: torch.Tensor, source: torch.Tensor, after: torch.cuda.Event | CopyEvent | None) -> None:
        """Copies ``source`` (host, pinned for CUDA) to ``target``, both uint8 ``[bytes]``, behind all units submitted before.

        The first chunk waits for ``after``, which is None on a CPU. Raises :class:`MemoryRequestError` for tensors that do not fit each
        other, :class:`MemoryStateError` for a unit that is under way, or a closed worker, :class:`RestoreError` if the thread died.
        """
        check_copy(target, source, self.device)
        with self._lock:
            self._collect()
            self._check_alive()
            if (known := self._jobs.get(unit)) is not None:
                if known.error is None:
                    raise MemoryStateError(f"unit {unit} is being restored already; poll until it is reported, or cancel it first")
                self._forget(known)
            self._jobs[unit] = self._hand_over(unit, target, source, self.chunk_bytes, after)

    def cancel(self, unit: int) -> CopyEvent | None:
        """Takes a unit back whose restore is waiting, running, done or failed, but not yet polled: nothing more is issued for it.

        Returns the end of its last chunk, for which the stream that overwrites the unit must wait; None if no chunk is under way, as
        always on a CPU. Waits for nothing on the device, but until the chunk that is being handed over (on a CPU: copied) is.
        Raises :class:`MemoryStateError` for a unit that is not under way.
        """
        with self._lock:
            self._collect()
            job = self._jobs.get(unit)
            if job is None:
                raise MemoryStateError(f"unit {unit} is not being restored, so there is nothing to cancel")
            self._forget(job)
        batch = self.copier.cancel(job.number)
        return CopyEvent(self.copier, batch) if batch else None

    def poll(self) -> list[int]:
        """Units whose bytes are all there, in the order in which they ended; each is told once.

        Raises :class:`RestoreError`, once for each unit that failed, with the cause; that unit is not restored. Submit it again or cancel it.
        """
        with self._lock:
            self._collect()
            if self._failed:
                job = self._failed.popleft()
                raise RestoreError(f"unit {job.unit} was not copied back: {job.error}", job.unit)
            done, self._done = self._done, []
            units = [job.unit for job in done if job.unit is not None]
            for unit in units:
                del self._jobs[unit]
            return units

    def idle(self) -> bool:
        """Whether no unit waits or is being copied; finished ones may still wait for :meth:`poll`."""
        return self.wait_idle(0.0)

    def wait_idle(self, timeout: float) -> bool:
        """Waits up to ``timeout`` seconds until :meth:`idle`, or until the thread died; returns :meth:`idle`."""
        idle = self.copier.wait_idle(timeout)
        with self._lock:
            self._collect()
        return idle

    def copy_all(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], after: torch.cuda.Event | CopyEvent | None = None
    ) -> None:
        """For start-up: one transfer for each pair (uint8 ``[bytes]``), all done on return; :meth:`poll` tells nothing of them.

        Raises as :meth:`submit` does, :class:`MemoryStateError` while units are under way, :class:`RestoreError` if a transfer fails.
        """
        if len(targets) != len(sources):
            raise MemoryRequestError(f"{len(targets)} targets and {len(sources)} sources do not pair; give as many of each")
        for target, source in zip(targets, sources):
            check_copy(target, source, self.device)
        with self._lock:
            self._check_alive()
            if not self.copier.is_idle:
                raise MemoryStateError("copy_all while units are being restored is not allowed; wait until the worker is idle")
            jobs = [
                self._hand_over(None, target, source, target.numel(), None if index else after)
                for index, (target, source) in enumerate(zip(targets, sources))
            ]
        while any(job.memory is not None for job in jobs):
            self.wait_idle(_SLICE_SECONDS)
        for job in jobs:
            if job.error is not None:
                raise RestoreError(f"residuals were not copied to the device: {job.error}")

    def close(self, timeout: float = 10.0) -> None:
        """Ends the thread: nothing more is issued, what is queued on the device ends, units that are not done are forgotten.

        Raises :class:`RestoreError` if that takes longer than ``timeout`` seconds: the device does not come back, and the memory must
        not be freed. May be called again.
        """
        if not self.copier.close(timeout):
            raise RestoreError(f"the copies under way did not end within {timeout} s; the device may hang, keep its memory mapped")
        with self._lock:
            self._collect()
            self._jobs.clear()
            self._under_way.clear()  # a forked process is told of nothing
            self._done.clear()
            self._failed.clear()
        _open.discard(self)

    # The caller holds the lock.

    def _hand_over(
        self, unit: int | None, target: torch.Tensor, source: torch.Tensor, chunk: int, after: torch.cuda.Event | CopyEvent | None
    ) -> _Job:
        job = _Job(unit, next(self._numbers), (target, source, after))
        event = self._event_of(after)
        self._under_way[job.number] = job
        refused = self.copier.submit(job.number, target.data_ptr(), source.data_ptr(), target.numel(), chunk, event)
        if refused:
            del self._under_way[job.number]
            if refused in (DIED, CLOSED):
                self._check_alive()
                raise MemoryStateError("this restore worker is closed; make a new one")
            raise HostMemoryError("the host has no memory for another job of the restore worker; restore fewer units at a time")
        return job

    def _event_of(self, after: torch.cuda.Event | CopyEvent | None) -> int:
        """The driver's handle; 0: nothing to wait for, as for copies before on the same stream."""
        if after is None or (isinstance(after, CopyEvent) and after.copier is self.copier):
            return 0
        if not self._queues or isinstance(after, CopyEvent):
            raise MemoryRequestError(
                f"after={after!r} is not allowed; give a torch.cuda.Event on CUDA or an event of this worker, and None on a CPU"
            )
        return after.cuda_event or 0

    def _collect(self) -> None:
        """Books what has ended, and lets go of its tensors before anyone hears of it."""
        while (told := self.copier.take()) is not None:
            number, state, why = told
            job = self._under_way.pop(number)
            job.memory = None
            if job.unit is None:
                job.error = None if state == COPIED else why or "the worker was closed"
            elif self._jobs.get(job.unit) is not job:
                continue
            elif state == COPIED:
                self._done.append(job)
            elif why:
                job.error = why
                self._failed.append(job)

    def _forget(self, job: _Job) -> None:
        assert job.unit is not None
        del self._jobs[job.unit]
        for waiting in (self._failed, self._done):
            if job in waiting:
                waiting.remove(job)

    def _check_alive(self) -> None:
        if (why := self.copier.died) is not None:
            raise RestoreError(f"the restore worker ended: {why}; make a new one")


def check_copy(target: torch.Tensor, source: torch.Tensor, device: torch.device) -> None:
    """Raises :class:`MemoryRequestError` unless both are uint8 ``[bytes]`` of one size, the target on ``device``, the source pinned for CUDA."""
    for name, tensor in (("target", target), ("source", source)):
        if tensor.dtype is not torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous() or not tensor.numel():
            raise MemoryRequestError(
                f"a {name} of {tensor.dtype} and shape {list(tensor.shape)} is not allowed; give contiguous uint8 bytes in one dimension"
            )
    if target.numel() != source.numel():
        raise MemoryRequestError(f"a source of {source.numel()} bytes does not fill a target of {target.numel()}; give as many bytes")
    if target.device.type != device.type or device.index not in (None, target.device.index):
        raise MemoryRequestError(f"a target on {target.device} is not allowed; this worker copies to {device}")
    if source.device.type != "cpu":
        raise MemoryRequestError(f"a source on {source.device} is not allowed; give the host's copy")
    if target.device.type == "cuda" and not source.is_pinned():
        raise MemoryRequestError("a source in unpinned memory would be copied by the host, step by step; take the host copy with pin=True")
