"""The allocator's C library: compiled at first use, loaded once for each pool, its errors raised with their types.

``pool_allocator.c`` says how it works. Every :class:`PoolLibrary` is a copy of its own with its own state, because the functions that
PyTorch calls have no argument that could name a pool. It is never unloaded. All sizes and addresses are bytes.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path

from depthfx.errors import (
    BackendUnavailableError,
    DriverError,
    MemoryRequestError,
    MemoryStateError,
    OutOfPhysicalMemoryError,
    PhysicalMemoryError,
)
from depthfx.native_build import BuildError, build, find_compiler

MALLOC, FREE = "depthfx_pool_malloc", "depthfx_pool_free"
STATES = ("hole", "cached", "live", "pending", "lost")

_FOLDER = Path(__file__).parent
_SOURCES = [
    *(_FOLDER / name for name in ("pool_allocator.c", "pool_device.h", "pool_error.h", "pool_driver.h", "segment_ledger.h")),
    _FOLDER.parent / "cuda_driver.h",
]
_FLAGS = ("-O2", "-std=gnu11", "-fPIC", "-fvisibility=hidden")
_LINK = ("-lpthread", "-ldl")
_PURPOSE = "the memory pool"
_OK, _BAD_REQUEST, _BAD_STATE, _OVER_CAPACITY, _OUT_OF_MEMORY, _DRIVER_FAILED, _UNAVAILABLE = range(7)
_ERRORS: dict[int, type[PhysicalMemoryError]] = {
    _BAD_REQUEST: MemoryRequestError,
    _BAD_STATE: MemoryStateError,
    _OVER_CAPACITY: OutOfPhysicalMemoryError,
    _OUT_OF_MEMORY: OutOfPhysicalMemoryError,
    _UNAVAILABLE: BackendUnavailableError,
}
_copies = itertools.count()


@dataclass(frozen=True)
class PoolStats:
    """One device's counts; mapped bytes are live, cached, pending and lost ones together. The order is that of the C source."""

    granularity: int
    range_bytes: int  # addresses reserved
    capacity_bytes: int  # 0: no bound
    mapped_bytes: int  # memory taken from the driver
    peak_mapped_bytes: int
    live_bytes: int  # in PyTorch's hands, rounded to the granularity
    peak_live_bytes: int
    asked_bytes: int  # the same before rounding
    cached_bytes: int  # handed out again without a driver call
    pending_bytes: int  # given back, but waiting for the device failed; trim tries again
    lost_bytes: int  # neither usable nor unmapped after a driver's failure; trim tries again
    num_live: int
    num_mappings: int
    num_mallocs: int
    num_reuses: int  # of the mallocs, those that needed no new memory
    num_frees: int
    num_refused_mallocs: int
    num_refused_frees: int
    num_failed_waits: int


@dataclass(frozen=True)
class PoolSegment:
    """Adjacent bytes in one state of ``STATES``; a live or pending one is one request of ``asked`` bytes on ``stream`` (a handle)."""

    address: int
    size: int
    asked: int
    stream: int
    state: str


class _Error(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("call", ctypes.c_char * 48), ("code", ctypes.c_char * 64), ("text", ctypes.c_char * 512)]


class _Stats(ctypes.Structure):
    _fields_ = [(field.name, ctypes.c_int64) for field in fields(PoolStats)]


class _Segment(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("address", "size", "asked", "stream")),
        ("state", ctypes.c_int64),
    ]


_I, _L, _Z, _P = ctypes.c_int, ctypes.c_int64, ctypes.c_size_t, ctypes.c_void_p
_SIGNATURES = {
    "last_error": ([], ctypes.POINTER(_Error)),
    "load": ([ctypes.c_char_p], _I),
    "open": ([_I, _Z, _Z], _I),
    "malloc": ([ctypes.c_ssize_t, _I, _P], _P),
    "free": ([_P, ctypes.c_ssize_t, _I, _P], None),
    "trim": ([_I], _L),
    "close": ([_I], _L),
    "stats": ([_I, ctypes.POINTER(_Stats)], _I),
    "snapshot": ([_I, ctypes.POINTER(_Segment), _L], _L),
}


def build_pool_library() -> Path:
    """Path of the compiled library; raises :class:`BackendUnavailableError` where there is no compiler or it fails."""
    try:
        return build(find_compiler(["cc", "gcc"], _PURPOSE), _SOURCES, _FLAGS, _LINK, purpose=_PURPOSE)
    except BuildError as error:
        raise BackendUnavailableError(f"{_PURPOSE} cannot be built: {error}") from error


class PoolLibrary:
    """One loaded copy. Calls may come from any thread; those that fail raise a :class:`PhysicalMemoryError` and change nothing."""

    def __init__(self, driver: str | None = None) -> None:
        """``driver`` is the library with CUDA's driver interface; None: ``libcuda.so.1``. Another one is for tests."""
        built = build_pool_library()
        try:
            self._folder = tempfile.TemporaryDirectory(dir=built.parent)
            self.path = Path(self._folder.name) / f"pool-{os.getpid()}-{next(_copies)}.so"  # a name that this process never had loaded
            shutil.copyfile(built, self.path)
            handle = ctypes.CDLL(str(self.path))
        except OSError as error:
            raise BackendUnavailableError(f"{_PURPOSE} cannot be loaded: {error}; set DEPTHFX_CACHE to a folder for programs") from error
        self._calls = {}
        for name, (arguments, result) in _SIGNATURES.items():
            self._calls[name] = getattr(handle, f"depthfx_pool_{name}")
            self._calls[name].argtypes, self._calls[name].restype = arguments, result
        self._check(self._calls["load"](None if driver is None else os.fsencode(driver)))

    def forget_file(self) -> None:
        """Deletes the copy's file once everyone has loaded it."""
        self._folder.cleanup()

    def open(self, device: int, capacity: int | None = None, range_bytes: int | None = None) -> None:
        """Reserves addresses on a device (None: four for each byte of its memory); ``capacity`` bounds the bytes taken from the driver."""
        for name, value in (("capacity", capacity), ("range_bytes", range_bytes)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value <= 0):
                raise MemoryRequestError(f"{name}={value!r} is not allowed; give a positive number of bytes, or None")
        self._check(self._calls["open"](device, capacity or 0, range_bytes or 0))

    def malloc(self, size: int, device: int, stream: int = 0) -> int:
        """Address of a segment of ``size`` bytes: what PyTorch calls, with an exception instead of a null pointer."""
        address = self._calls["malloc"](size, device, stream)
        if not address:
            self._check(-1)
        return int(address)

    def free(self, address: int, size: int, device: int, stream: int = 0) -> None:
        """Gives a segment back with the size it was asked for, after the device's work is done; a failed wait raises too."""
        self._calls["free"](address, size, device, stream)
        if self._calls["last_error"]().contents.kind != _OK:
            self._check(-1)

    def trim(self, device: int) -> int:
        """Waits for the device and unmaps what is cached; the bytes given back to the driver. A handle with a live byte stays."""
        return self._check(self._calls["trim"](device))

    def close(self, device: int) -> int:
        """As :meth:`trim`, and for good: refuses every malloc from now on. The bytes that live segments still hold.

        What is freed later goes to the driver at once, and the last of it takes the addresses along.
        """
        return self._check(self._calls["close"](device))

    def stats(self, device: int) -> PoolStats:
        """The device's counts at one moment; zeros before it is opened."""
        found = _Stats()
        self._check(self._calls["stats"](device, found))
        return PoolStats(**{field.name: getattr(found, field.name) for field in fields(PoolStats)})

    def snapshot(self, device: int) -> tuple[PoolSegment, ...]:
        """All segments that have memory, by address, at one moment."""
        room = 64
        while True:
            found = (_Segment * room)()
            count = self._check(self._calls["snapshot"](device, found, room))
            if count <= room:
                return tuple(PoolSegment(s.address, s.size, s.asked, s.stream, STATES[s.state]) for s in found[:count])
            room = 2 * count

    def last_error(self) -> PhysicalMemoryError | None:
        """Why this thread's last call of malloc, free or any other function failed; None if it did not."""
        error = self._calls["last_error"]().contents
        if error.kind == _OK:
            return None
        text = error.text.decode(errors="replace")
        call, code = error.call.decode(), error.code.decode()
        if error.kind == _DRIVER_FAILED:
            return DriverError(call, code, text)
        return _ERRORS[error.kind](f"{call} failed with {code}: {text}" if call else text)

    def forget_error(self) -> None:
        """Sets this thread's last error to none."""
        self._check(self._calls["load"](None))

    def _check(self, result: int) -> int:
        if result >= 0:
            return result
        error = self.last_error()
        raise error if error is not None else PhysicalMemoryError("the memory pool failed without a reason")
