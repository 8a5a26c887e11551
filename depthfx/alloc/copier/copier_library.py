"""The copier's C library: compiled at first use, loaded once; a :class:`Copier` is one thread of it. ``copier.c`` says how it works.

Calls that only look at the book-keeping keep the interpreter's lock: giving it away and taking it again would cost more than they do,
and the C thread never asks for it. Calls that may wait give it away.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from pathlib import Path
from typing import Any

from depthfx.errors import BackendUnavailableError
from depthfx.native_build import BuildError, build, find_compiler

DIED, CLOSED, NO_MEMORY = -1, -2, -3  # of `submit`
COPIED, CANCELLED, FAILED = 1, 2, 3  # of `take`
PLACES = ("before chunk", "after chunk", "before done")

_FOLDER = Path(__file__).parent
_SOURCES = [
    *(_FOLDER / name for name in ("copier.c", "copier_thread.h", "copier_state.h", "copier_hooks.h")),
    _FOLDER.parent / "cuda_driver.h",
]
_FLAGS = ("-O2", "-std=gnu11", "-fPIC", "-fvisibility=hidden")
_LINK = ("-lpthread", "-ldl")
_PURPOSE = "the copy thread of restores"
_WHY = 400


class _Report(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint64), ("state", ctypes.c_int64), ("why", ctypes.c_char * _WHY)]


class _Stats(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("copied_bytes", "busy_ns", "idle", "died", "flight", "num_slow")]


_I, _L, _U, _Z, _P, _D = ctypes.c_int, ctypes.c_long, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_double
_QUICK = {
    "submit": ([_P, _U, _P, _P, _Z, _Z, _P], _I),
    "take": ([_P, ctypes.POINTER(_Report)], _I),
    "stats": ([_P, ctypes.POINTER(_Stats)], None),
    "why": ([_P], ctypes.c_char_p),
    "free": ([_P], None),
    "disturb": ([_P, _U, _D, ctypes.c_uint, _D], None),
    "fail": ([_P, _I, _L, _L, _I], None),
    "hold": ([_P, _I, _L], None),
}
_WAITING = {
    "open": ([ctypes.c_char_p, _I, _I, ctypes.c_char_p], _P),
    "cancel": ([_P, _U], _U),
    "wait_idle": ([_P, _D], _I),
    "wait_batch": ([_P, _U, _D], _I),
    "stream_wait": ([_P, _U, _P, ctypes.c_char_p], _I),
    "close": ([_P, _D], _I),
    "held": ([_P, _D], _I),
}


def build_copier_library() -> Path:
    """Path of the compiled library; raises :class:`BackendUnavailableError` where there is no compiler or it fails."""
    try:
        return build(find_compiler(["cc", "gcc"], _PURPOSE), _SOURCES, _FLAGS, _LINK, purpose=_PURPOSE)
    except BuildError as error:
        raise BackendUnavailableError(f"{_PURPOSE} cannot be built: {error}") from error


@functools.cache
def _functions() -> dict[str, Any]:
    path = str(build_copier_library())
    found = {}
    try:
        for library, signatures in ((ctypes.PyDLL(path), _QUICK), (ctypes.CDLL(path), _WAITING)):
            for name, (arguments, result) in signatures.items():
                found[name] = getattr(library, f"depthfx_copier_{name}")
                found[name].argtypes, found[name].restype = arguments, result
    except OSError as error:
        raise BackendUnavailableError(f"{_PURPOSE} cannot be loaded: {error}; set DEPTHFX_CACHE to a folder for programs") from error
    return found


class Copier:
    """One thread that copies. Memory of a job must live until :meth:`take` tells of it. Calls may come from any thread."""

    def __init__(self, ordinal: int, most: int, driver: str | None = None) -> None:
        """``ordinal`` is the device's, -1 for copies on the host; up to ``most`` chunks are under way at a time.

        ``driver`` is the library with CUDA's driver interface (None: ``libcuda.so.1``); another one is for tests. Raises
        :class:`BackendUnavailableError`, with the driver's words where it refuses.
        """
        self._call = _functions()
        why = ctypes.create_string_buffer(_WHY)
        self._handle = self._call["open"](None if driver is None else os.fsencode(driver), ordinal, most, why)
        if not self._handle:
            raise BackendUnavailableError(f"{_PURPOSE} cannot be started: {why.value.decode(errors='replace')}")
        weakref.finalize(self, self._call["free"], self._handle).atexit = False

    def submit(self, job: int, target: int, source: int, size: int, chunk: int, after: int = 0) -> int:
        """Copies ``size`` bytes between two addresses in chunks, behind all jobs before; the first waits for the event ``after`` (a handle).

        Returns 0, or one of ``DIED``, ``CLOSED`` and ``NO_MEMORY`` when nothing was taken.
        """
        return int(self._call["submit"](self._handle, job, target, source, size, chunk, after or None))

    def cancel(self, job: int) -> int:
        """Stops a job: the number of the batch with its last chunk, or 0 if no byte of it is under way. Waits for no device."""
        return int(self._call["cancel"](self._handle, job))

    def take(self) -> tuple[int, int, str] | None:
        """The next job that ended, in their order: its number, its state (``COPIED``, ``CANCELLED``, ``FAILED``) and why it failed."""
        report = _Report()
        if not self._call["take"](self._handle, report):
            return None
        return report.id, report.state, report.why.decode(errors="replace")

    @property
    def copied_bytes(self) -> int:
        """Bytes whose copies have ended, those of cancelled jobs included; none of a job once it failed."""
        return self._stats().copied_bytes

    @property
    def seconds_busy(self) -> float:
        """Seconds in which there was something to copy."""
        return self._stats().busy_ns * 1e-9

    @property
    def in_flight(self) -> tuple[int, int]:
        """How many chunks may be under way now, and how often that was halved because somebody else used the link."""
        found = self._stats()
        return found.flight, found.num_slow

    @property
    def is_idle(self) -> bool:
        """Whether nothing is waiting or under way."""
        return bool(self._stats().idle)

    @property
    def died(self) -> str | None:
        """Why the thread ended of itself; None if it did not."""
        return self._call["why"](self._handle).decode(errors="replace") if self._stats().died else None

    def wait_idle(self, seconds: float) -> bool:
        """Waits up to so long until nothing is waiting or under way; whether that is so."""
        return bool(self._call["wait_idle"](self._handle, seconds))

    def wait_batch(self, batch: int, seconds: float) -> bool:
        """Waits up to so long until a batch has ended on the device; whether it has."""
        return bool(self._call["wait_batch"](self._handle, batch, seconds))

    def stream_wait(self, batch: int, stream: int) -> str | None:
        """Keeps what is queued on a CUDA stream (a handle) from now on behind a batch; why that failed, or None."""
        why = ctypes.create_string_buffer(_WHY)
        return why.value.decode(errors="replace") if self._call["stream_wait"](self._handle, batch, stream or None, why) else None

    def close(self, seconds: float) -> bool:
        """Issues nothing more and ends the thread once what is under way has ended; False if that took longer."""
        return bool(self._call["close"](self._handle, seconds))

    def disturb(self, seed: int, delay_share: float = 0.0, most_us: int = 0, fail_share: float = 0.0) -> None:
        """For tests: random delays and failures at all places, for a share of the arrivals; ``seed`` 0 ends it."""
        self._call["disturb"](self._handle, seed, delay_share, most_us, fail_share)

    def fail(self, place: str, nth: int, count: int = 1, ends: bool = False) -> None:
        """For tests: ``count`` arrivals at one of ``PLACES`` fail, from the nth on (0: none); with ``ends`` the thread ends."""
        self._call["fail"](self._handle, PLACES.index(place), nth, count, ends)

    def hold(self, place: str, nth: int = 1) -> None:
        """For tests: the thread stops at the nth arrival at one of ``PLACES``, until :meth:`go`."""
        self._call["hold"](self._handle, PLACES.index(place), nth)

    def go(self) -> None:
        """For tests: ends a :meth:`hold`."""
        self._call["hold"](self._handle, 0, 0)

    def held(self, seconds: float) -> bool:
        """For tests: whether the thread has come to a :meth:`hold`, waiting up to so long for it."""
        return bool(self._call["held"](self._handle, seconds))

    def _stats(self) -> _Stats:
        found = _Stats()
        self._call["stats"](self._handle, found)
        return found
