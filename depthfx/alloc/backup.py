"""The host's copy of all residual bytes: taken once at load, the source of every restore, never written again.

Weights do not change, so nothing is ever copied from the device to the host but this. The memory is anonymous, page-aligned and
pinned in one piece (``cudaHostRegister``): PyTorch's own pinned allocator would round sizes up to a power of two and keep the
memory for itself after :meth:`HostBackup.close`.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from typing import Any

import torch

from depthfx.alloc.content_hash import content_hash
from depthfx.alloc.mapping_ledger import in_words
from depthfx.errors import HostMemoryError, InternalError, MemoryRequestError, MemoryStateError


class HostBackup:
    """See the module's text. Made by :meth:`take`; ``num_bytes`` is its size, ``pinned`` whether CUDA may copy from it at full speed."""

    def __init__(self, num_bytes: int, unit_bytes: int, pin: bool, what: str = "the copy of the residuals") -> None:
        """Takes ``num_bytes`` of host memory, content zero, for units of ``unit_bytes``; raises :class:`HostMemoryError` about ``what``."""
        if num_bytes <= 0 or unit_bytes <= 0:
            raise MemoryRequestError(f"a host copy of {num_bytes} bytes in units of {unit_bytes} is not allowed; both must be positive")
        self.num_bytes = num_bytes
        self.unit_bytes = unit_bytes
        self._hashes: dict[tuple[int, int], int] = {}
        self._bytes: torch.Tensor | None = _anonymous_bytes(num_bytes, what)
        self.pinned = False
        if pin:
            _pin(self._bytes, what)
            self.pinned = True

    @classmethod
    def take(cls, home: torch.Tensor, used: int, unit_bytes: int, pin: bool, spans: Sequence[tuple[int, int]] = ()) -> HostBackup:
        """Copies ``home[:used]`` (uint8 ``[bytes]``, any device) to the host, waits for it, and hashes each of ``spans``.

        ``spans`` are the bytes [first, end) of each residual tensor in the home range; their hashes are of the bytes in ``home``, not
        of the copy, so :meth:`verify` after a restore proves the copy too. Raises :class:`HostMemoryError` or :class:`MemoryRequestError`.
        """
        if home.dtype is not torch.uint8 or home.dim() != 1 or not 0 < used <= home.numel():
            raise MemoryRequestError(
                f"cannot back up {used} bytes of a {home.dtype} tensor of shape {list(home.shape)}; give uint8 bytes in one dimension, "
                "and as many as it has or fewer"
            )
        for first, end in spans:
            if not 0 <= first < end <= used:
                raise MemoryRequestError(f"the residual [{first}, {end}) is not within the {used} bytes to back up; correct the spans")
        made = cls(used, unit_bytes, pin)
        with contextlib.ExitStack() as undo:
            undo.callback(made.close)
            made._content().copy_(home[:used])
            made._hashes = {(first, end): content_hash(home[first:end]) for first, end in spans}
            undo.pop_all()
        return made

    @property
    def num_units(self) -> int:
        """Units with residual bytes; the last may be part empty."""
        return -(-self.num_bytes // self.unit_bytes)

    @property
    def hashes(self) -> dict[tuple[int, int], int]:
        """Bytes [first, end) of each residual tensor in the home range -> its :func:`content_hash`."""
        return dict(self._hashes)

    def unit(self, unit: int) -> torch.Tensor:
        """The host's bytes of one unit, uint8 ``[unit_bytes]``, in the last unit those in use; a view, not to be written.

        Raises :class:`MemoryRequestError` for an unknown unit and :class:`MemoryStateError` after :meth:`close`.
        """
        if not 0 <= unit < self.num_units:
            raise MemoryRequestError(f"unit {unit} has no host copy; allowed: 0 to {self.num_units - 1}")
        return self._content()[unit * self.unit_bytes : min((unit + 1) * self.unit_bytes, self.num_bytes)]

    def put(self, first: int, residual: torch.Tensor) -> None:
        """Copies one residual tensor (uint8 ``[bytes]``, any device) to byte ``first`` on, waits for it, and keeps its hash.

        Raises :class:`MemoryRequestError` if it does not fit. No restore may be running.
        """
        end = first + residual.numel()
        if residual.dtype is not torch.uint8 or residual.dim() != 1 or not 0 <= first < end <= self.num_bytes:
            raise MemoryRequestError(
                f"a {residual.dtype} residual of shape {list(residual.shape)} at byte {first} does not fit a host copy of {self.num_bytes} bytes"
            )
        self._content()[first:end].copy_(residual)
        self._hashes[first, end] = content_hash(residual)

    def bytes(self, first: int, num_bytes: int) -> torch.Tensor:
        """The host's bytes [first, first + num_bytes), uint8; a view, not to be written."""
        return self._content()[first : first + num_bytes]

    def verify(self, home: torch.Tensor, first: int = 0, end: int | None = None) -> int:
        """Hashes the residual tensors that lie within [first, end) of ``home`` where they are; returns how many there were.

        Raises :class:`InternalError` naming the bytes and units of the first that is not as it was loaded: a unit was called restored
        while it holds something else. The current stream must come after the restore.
        """
        end = self.num_bytes if end is None else end
        inside = [span for span in self._hashes if first <= span[0] and span[1] <= end]
        for span in inside:
            found = content_hash(home[span[0] : span[1]])
            if found != self._hashes[span]:
                units = f"{span[0] // self.unit_bytes} to {(span[1] - 1) // self.unit_bytes}"
                raise InternalError(
                    f"the residual in bytes {span} of the home range (units {units}) has hash {found:#018x} and was loaded with "
                    f"{self._hashes[span]:#018x}; it was overwritten, or not copied back"
                )
        return len(inside)

    def close(self) -> None:
        """Unpins; the memory goes with the last view of it. No copy from it may be running. A second call does nothing."""
        if self._bytes is not None and self.pinned:
            code = _cudart().cudaHostUnregister(self._bytes.data_ptr())
            if int(code):
                _clear_last_error()
                raise HostMemoryError(
                    f"cudaHostUnregister of {in_words(self.num_bytes)} failed with {_told(code)}; the memory stays pinned"
                )
            self.pinned = False
        self._bytes = None

    def _content(self) -> torch.Tensor:
        if self._bytes is None:
            raise MemoryStateError("this host copy is closed; take a new one from the loaded weights")
        return self._bytes


def _anonymous_bytes(num_bytes: int, what: str) -> torch.Tensor:
    """Private, page-aligned, zero memory as uint8 ``[num_bytes]``, which goes with the tensor."""
    size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
    except (OSError, OverflowError) as error:
        raise HostMemoryError(
            f"the host cannot give {in_words(size)} for {what} ({error}); free host memory or raise its limit (ulimit -v)"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # advice: large pages are touched and pinned faster, where the kernel has them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]


def _pin(content: torch.Tensor, what: str = "the copy of the residuals") -> None:
    size = -(-content.numel() // mmap.PAGESIZE) * mmap.PAGESIZE
    code = _cudart().cudaHostRegister(content.data_ptr(), size, 0)
    if int(code):
        _clear_last_error()
        raise HostMemoryError(
            f"cannot pin {in_words(size)} of host memory for {what}: cudaHostRegister failed with {_told(code)}; "
            f"free host memory or raise the limit of locked memory (ulimit -l), now {_locked_limit()}"
        )


def _cudart() -> Any:
    if not torch.cuda.is_available():
        raise HostMemoryError("cannot pin host memory: PyTorch sees no CUDA device; take the host copy with pin=False")
    return torch.cuda.cudart()


def _told(code: Any) -> str:
    return f"error {int(code)} ({_cudart().cudaGetErrorString(code)})"


def _clear_last_error() -> None:
    """CUDA keeps a failed call's code for the next check of a kernel's launch, which would blame that kernel; let an own one take it."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")


def _locked_limit() -> str:
    try:
        import resource
    except ImportError:  # not on Windows
        return "unknown"
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else in_words(soft)
