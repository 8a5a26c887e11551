"""A pool of device memory for PyTorch's tensors: own segments, a bound in bytes, counts, and memory that really goes back.

    with MemoryPool(capacity=8 << 30) as pool:
        with pool.use():
            x = torch.empty(1 << 20, device="cuda")

PyTorch splits the segments that ``pool_allocator.c`` hands it and keeps those of freed tensors, as in any ``torch.cuda.MemPool``.
Tensors may outlive the pool and its ``close``: library and allocator stay loaded for good, and a segment goes back to the driver once
PyTorch gives it up. Nothing is given back by garbage collection: a pool that is dropped without ``close`` keeps its memory.

PyTorch lets one thread at a time into a ``MemPool`` and leaks a reference where it refuses a second one. So everybody who is inside
``use()`` has a ``MemPool`` of its own, all over the same allocator; they are kept for the next user, and ``id`` names another one.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from depthfx.alloc.pool.pool_library import FREE, MALLOC, PoolLibrary, PoolSegment, PoolStats
from depthfx.errors import BackendUnavailableError, MemoryRequestError, MemoryStateError, OutOfPhysicalMemoryError


class PoolOutOfMemoryError(OutOfPhysicalMemoryError, torch.OutOfMemoryError):
    """The pool refused memory: its capacity is spent, or the device's. Caught as PyTorch's own error too."""


@dataclass
class _Kept:
    """What must outlive every tensor of a pool."""

    library: PoolLibrary
    allocator: Any
    graph_pool: Any = None  # the one of `id`; None: closed
    idle: list[Any] = field(default_factory=list)  # those that nobody is inside; the last one left is the next one entered


_kept: list[_Kept] = []
_lock = threading.RLock()  # over what PyTorch does not allow at once: a pool let go, and any pool of the device in use
_users: Counter[int] = Counter()  # of each device: how often threads are inside use()


class MemoryPool:
    """See the module's text. Methods may be called from any thread; one pool is for one device.

    What a library keeps for itself stays in the pool as a live tensor does, if it is allocated inside ``use()``: the workspace of
    cuBLAS is, by the first product of a thread on a stream. Do one product outside first where the pool must come back to nothing.
    """

    def __init__(self, capacity: int | None = None, device: int | None = None) -> None:
        """``capacity`` bounds the bytes taken from the driver (None: the device's memory); ``device`` is an index (None: the current one).

        Raises :class:`BackendUnavailableError` (no device, no compiler, no virtual memory management), :class:`MemoryRequestError`,
        or :class:`MemoryStateError` if PyTorch's allocations do not reach the pool.
        """
        if not torch.cuda.is_available():
            raise BackendUnavailableError("a memory pool needs a CUDA device, and PyTorch sees none")
        torch.cuda.init()
        self.device = torch.cuda.current_device() if device is None else device
        count = torch.cuda.device_count()
        if not isinstance(self.device, int) or isinstance(self.device, bool) or not 0 <= self.device < count:
            raise MemoryRequestError(f"device={device!r} is not allowed; give the index of a CUDA device, 0 to {count - 1}, or None")
        self._library = PoolLibrary()
        self._library.open(self.device, capacity)
        allocator = torch.cuda.memory.CUDAPluggableAllocator(str(self._library.path), MALLOC, FREE)
        self._library.forget_file()
        self._kept = _Kept(self._library, allocator)
        _kept.append(self._kept)
        self._kept.graph_pool = self._new_torch_pool()
        try:
            self._check_routed()
        except BaseException:
            self.close()
            raise

    @property
    def id(self) -> tuple[int, int]:
        """For ``torch.cuda.graph(pool=pool.id)``; another one after a :meth:`trim`."""
        with _lock:
            self._check_open()
            return self._kept.graph_pool.id

    @contextmanager
    def use(self) -> Iterator[MemoryPool]:
        """Allocations of this thread on the pool's device come from the pool; raises :class:`PoolOutOfMemoryError` if it refuses one.

        Any number of threads may be inside, one thread more than once. What one of them frees PyTorch keeps for those who enter after it has
        left, and gives nothing idle back while anybody is inside: where freed tensors should make room, leave and :meth:`trim`.
        """
        with _lock:
            torch_pool, context = self._enter_torch_pool()
        self._library.forget_error()
        try:
            yield self
        except torch.OutOfMemoryError as error:
            refusal = self._library.last_error()
            if refusal is None or isinstance(error, PoolOutOfMemoryError):
                raise
            raise PoolOutOfMemoryError(f"{refusal}; idle segments come back with trim() outside of use()") from error
        finally:
            with _lock:
                _users[self.device] -= 1
                context.__exit__(None, None, None)
                self._kept.idle.append(torch_pool)
                del torch_pool, context  # the last reference goes under the lock, wherever that is

    def stats(self) -> PoolStats:
        """Bytes and counts at this moment, after a close too."""
        return self._library.stats(self.device)

    def snapshot(self) -> tuple[PoolSegment, ...]:
        """The segments by address, at this moment: what PyTorch holds is live, also where it is idle in PyTorch's own cache."""
        return self._library.snapshot(self.device)

    def trim(self) -> int:
        """Gives idle memory back to the driver, waiting for the device; the bytes given back.

        PyTorch's idle segments are included unless a thread is inside ``use()`` or a graph of this pool lives. Those that a live tensor
        keeps come back once it is gone, with ``torch.cuda.empty_cache()`` and another trim. Raises :class:`MemoryStateError` during a
        capture; no other thread may capture on the device meanwhile, as for any synchronisation.
        """
        with _lock:
            self._check_not_capturing()
            before = self.stats().mapped_bytes
            self._check_open()
            if not self._holders():
                self._drop_torch_pools()
                self._kept.graph_pool = self._new_torch_pool()
            self._library.trim(self.device)
            return before - self.stats().mapped_bytes

    def close(self) -> int:
        """Gives back all memory but that of live tensors, and takes no more requests; the bytes that tensors still hold.

        Their memory goes to the driver with the tensors, at the next ``torch.cuda.empty_cache()``. A second call does nothing more.
        Raises :class:`MemoryStateError`, changing nothing, while a thread is inside ``use()`` or a graph of this pool lives.
        """
        with _lock:
            self._check_not_capturing()
            if holders := self._holders():
                raise MemoryStateError(f"the pool cannot be closed: {holders}")
            self._drop_torch_pools()
            return self._library.close(self.device)

    def __enter__(self) -> MemoryPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._kept.graph_pool is None:
            raise MemoryStateError("this memory pool is closed; make a new one")

    def _enter_torch_pool(self) -> tuple[Any, Any]:
        """An idle ``MemPool`` or a new one, entered by this thread, and the context to leave; the caller holds the lock."""
        self._check_open()
        torch_pool = self._kept.idle.pop() if self._kept.idle else self._new_torch_pool()
        context = torch.cuda.use_mem_pool(torch_pool, self.device)
        try:
            context.__enter__()
        except BaseException:
            self._kept.idle.insert(0, torch_pool)  # it must not go while another one is in use
            raise
        _users[self.device] += 1
        return torch_pool, context

    def _drop_torch_pools(self) -> None:
        """PyTorch gives up the idle segments with them."""
        self._kept.graph_pool = None
        self._kept.idle.clear()

    def _new_torch_pool(self) -> Any:
        with torch.cuda.device(self.device):
            return torch.cuda.MemPool(self._kept.allocator.allocator())

    def _holders(self) -> str:
        """Who keeps PyTorch from letting the pool go; empty if nobody does. It ends the process where a pool goes while one is in use."""
        if _users[self.device]:
            return f"{_users[self.device]} thread(s) are inside use() on CUDA device {self.device}; leave it first"
        if any(pool is not None and pool.use_count() > 1 for pool in (self._kept.graph_pool, *self._kept.idle)):
            return "a CUDA graph or another context uses it; reset the graphs first"
        return ""

    def _check_not_capturing(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise MemoryStateError("the pool cannot give memory back while the current stream is captured; do it before or after")

    def _check_routed(self) -> None:
        """Some versions of PyTorch serve every pool from expandable segments, past the pool's own allocator."""
        with self.use():
            address = self._probe()
        if not any(s.address <= address < s.address + s.size for s in self.snapshot()):
            raise MemoryStateError(
                f"PyTorch put a tensor at {address:#x}, outside of the pool: some versions do so with expandable segments, all without "
                "caching; set PYTORCH_ALLOC_CONF=expandable_segments:False and unset PYTORCH_NO_CUDA_MEMORY_CACHING before the first allocation"
            )

    def _probe(self) -> int:
        return torch.empty(1, dtype=torch.uint8, device=torch.device("cuda", self.device)).data_ptr()
