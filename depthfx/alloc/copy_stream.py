"""Where the copies of a restore are queued: a CUDA stream of their own, or no queue at all on a CPU.

Both take the calls of one worker thread in order: ``wait``, ``copy``, ``record``. On CUDA these return before the bytes are there, and
the event of ``record`` follows everything queued before it; on a CPU ``copy`` has copied when it returns, and there is no event.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from depthfx.errors import MemoryRequestError

Event = torch.cuda.Event


class CopyStream(ABC):
    """See the module's text; ``queues`` says whether ``copy`` returns before the bytes are there."""

    queues: bool

    @abstractmethod
    def wait(self, after: Event) -> None:
        """Keeps what is queued from now on behind ``after``, without stopping the caller where there is a queue."""

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor, chunk_bytes: int) -> None:
        """Queues ``target.copy_(source)`` (uint8 ``[bytes]``) in transfers of ``chunk_bytes``; raises what PyTorch raises."""

    @abstractmethod
    def record(self) -> Event | None:
        """An event behind all that was queued; None where nothing is ever queued."""


class HostCopies(CopyStream):
    """Copies at once, in the thread that asks."""

    queues = False

    def wait(self, after: Event) -> None:
        after.synchronize()

    def copy(self, target: torch.Tensor, source: torch.Tensor, chunk_bytes: int) -> None:
        """See :class:`CopyStream`."""
        for to, data in zip(target.split(chunk_bytes), source.split(chunk_bytes)):
            to.copy_(data)

    def record(self) -> Event | None:
        return None


class DeviceCopies(CopyStream):
    """A CUDA stream of its own, made by the first use; nothing of CUDA is touched before.

    The chunks of one ``copy`` are issued by one call into PyTorch, which lets go of the GIL: at 80 us for a chunk of 4 MiB on the
    link, a Python call for each chunk would take the GIL from the thread that plans the next step too often.
    """

    queues = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: torch.cuda.Stream | None = None

    def wait(self, after: Event) -> None:
        self._stream().wait_event(after)

    def copy(self, target: torch.Tensor, source: torch.Tensor, chunk_bytes: int) -> None:
        """See :class:`CopyStream`."""
        with torch.cuda.stream(self._stream()):
            torch._foreach_copy_(list(target.split(chunk_bytes)), list(source.split(chunk_bytes)), non_blocking=True)

    def record(self) -> Event | None:
        """An event whose ``synchronize`` sleeps in the driver, without the GIL, until the device raises an interrupt."""
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream())
        return event

    def _stream(self) -> torch.cuda.Stream:
        if self._made is None:
            self._made = torch.cuda.Stream(self._device)
        return self._made


def copy_stream(device: torch.device) -> CopyStream:
    """The stream for targets on ``device``."""
    return DeviceCopies(device) if device.type == "cuda" else HostCopies()


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
    if target.device.type == "cuda" and not source.is_pinned():
        raise MemoryRequestError("a source in unpinned memory would be copied by the host, step by step; take the host copy with pin=True")
