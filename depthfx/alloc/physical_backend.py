"""What a physical backend must state: address ranges, handles of memory, and which handle backs which addresses.

All sizes, offsets and addresses are bytes. The rules (alignment, bounds, one mapping for each address, nothing freed under a
tensor) are checked here, once, before the backend's own call; so a call that raises changes nothing. Public calls may come from any
thread; do not make them from finalisers. Nothing is freed by garbage collection: release and free, or :meth:`~PhysicalBackend.close`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch

from depthfx.alloc.mapping_ledger import Access, AddressRange, Handle, MappingLedger, MappingRecord, PhysicalSnapshot, in_words
from depthfx.errors import BackendUnavailableError, MemoryRequestError, MemoryStateError, OutOfPhysicalMemoryError
from depthfx.registry import Registry

ACCESSES: tuple[Access, ...] = ("none", "read", "read_write")


class PhysicalBackend(ABC):
    """One source of physical memory; a plug-in is one file in ``alloc/physical`` that registers its class in :data:`PHYSICAL`.

    A subclass states the raw calls at the end of this class. They get checked arguments, run one at a time, and either do
    everything or raise a :class:`PhysicalMemoryError` having done nothing.
    """

    name: str
    holds_bytes = True  # False: tensors are on the meta device
    maps_from_offset = True  # whether a mapping may start inside a handle

    @classmethod
    @abstractmethod
    def unavailable(cls) -> str | None:
        """Why the backend cannot work on this machine, or None if it can."""

    def __init__(self, granularity: int | None = None, capacity: int | None = None) -> None:
        """``granularity`` is a multiple of the device's own (None: that one); ``capacity`` bounds the bytes of all handles.

        Raises :class:`BackendUnavailableError` or :class:`MemoryRequestError`.
        """
        reason = self.unavailable()
        if reason is not None:
            raise BackendUnavailableError(f"the physical backend {self.name!r} cannot be used: {reason}")
        self._lock = threading.Lock()
        self._ledger = MappingLedger()
        self._closed = False
        if capacity is not None and capacity <= 0:
            raise MemoryRequestError(f"a capacity of {capacity} bytes is not allowed; give a positive number, or None for no bound")
        self._capacity = capacity
        own = self._device_granularity()
        self._granularity = own if granularity is None else granularity
        if self._granularity < own or self._granularity % own:
            self._close()
            raise MemoryRequestError(f"a granularity of {granularity} is not allowed; {self.name} needs a multiple of {own} bytes")

    def granularity(self) -> int:
        """Bytes that sizes and offsets of handles, mappings and ranges are multiples of."""
        return self._granularity

    def reserve(self, size: int) -> AddressRange:
        """Reserves ``size`` bytes of addresses without memory behind them; their content may not be touched."""
        with self._lock:
            self._check_open()
            self._check_size(size)
            return self._ledger.add_range(self._reserve(size), size)

    def create(self, size: int) -> Handle:
        """Takes ``size`` bytes of physical memory, content unspecified; raises :class:`OutOfPhysicalMemoryError`."""
        with self._lock:
            self._check_open()
            self._check_size(size)
            taken = self._ledger.bytes_created()
            if self._capacity is not None and taken + size > self._capacity:
                left = in_words(self._capacity - taken)
                raise OutOfPhysicalMemoryError(f"{in_words(size)} exceed the {left} left of {self.name}'s capacity; release handles first")
            return self._ledger.add_handle(self._create(size), size)

    def create_many(self, count: int, size: int) -> list[Handle]:
        """``count`` handles of ``size`` bytes each, or none at all: if one fails, those before it are released."""
        if count < 1:
            raise MemoryRequestError(f"cannot create {count} handles; ask for one or more")
        with ExitStack() as undo:
            handles = []
            for _ in range(count):
                handles.append(self.create(size))
                undo.callback(self.release, handles[-1])
            undo.pop_all()
        return handles

    def map(self, at: AddressRange, offset: int, handle: Handle, handle_offset: int = 0) -> None:
        """Puts the handle's bytes from ``handle_offset`` on behind ``at`` from ``offset`` on, without access yet.

        One handle may be mapped at many addresses, and all of them show the same bytes. Raises :class:`MemoryRequestError`
        (alignment, bounds) or :class:`MemoryStateError` (addresses mapped already, range freed, handle released).
        """
        with self._lock:
            self._check_open()
            self._ledger.check_range(at)
            raw = self._ledger.raw_handle(handle)
            self._check_aligned("handle offset", handle_offset)
            if handle_offset and not self.maps_from_offset:
                raise MemoryRequestError(f"{self.name} maps a handle from its start only, not from {handle_offset}; create smaller handles")
            if not 0 <= handle_offset < handle.size:
                raise MemoryRequestError(f"handle offset {handle_offset} is outside the handle's {handle.size} bytes")
            size = handle.size - handle_offset
            self._check_inside(at, offset, size)
            self._ledger.check_unmapped(at, offset, size)
            self._map(at.address + offset, size, raw, handle_offset)
            self._ledger.add_mapping(MappingRecord(at, offset, size, handle, handle_offset, "none"))

    def map_many(self, at: AddressRange, offset: int, handles: Sequence[Handle], access: Access = "read_write") -> None:
        """Maps whole handles one behind the other and grants access in one call, or changes nothing."""
        if not handles:
            raise MemoryRequestError("there are no handles to map; give one or more")
        with ExitStack() as undo:
            end = offset
            for handle in handles:
                self.map(at, end, handle)
                undo.callback(self.unmap, at, end, handle.size)
                end += handle.size
            self.set_access(at, offset, end - offset, access)
            undo.pop_all()

    def set_access(self, at: AddressRange, offset: int, size: int, access: Access) -> None:
        """Grants or takes access to whole mappings that cover ``[offset, offset + size)`` without a gap."""
        if access not in ACCESSES:
            raise MemoryRequestError(f"access {access!r} is unknown; allowed: {', '.join(ACCESSES)}")
        with self._lock:
            self._check_open()
            self._ledger.check_range(at)
            self._check_inside(at, offset, size)
            mappings = self._ledger.whole_mappings(at, offset, size)
            if access != "read_write":
                self._ledger.check_unseen(at, offset, size)
            self._set_access(at.address + offset, size, access)
            self._ledger.note_access(mappings, access)

    def unmap(self, at: AddressRange, offset: int, size: int) -> None:
        """Takes exactly one mapping away, as it was mapped; the addresses stay reserved.

        A released handle's memory goes with its last mapping. Raises :class:`MemoryStateError` where ``[offset, offset + size)`` is not
        one mapping or a tensor still sees it. The caller makes sure that no running or queued work names the addresses.
        """
        with self._lock:
            self._check_open()
            self._ledger.check_range(at)
            self._check_inside(at, offset, size)
            mapping = self._ledger.exact_mapping(at, offset, size)
            self._ledger.check_unseen(at, offset, size)
            self._unmap_and_drop(mapping)

    def release(self, handle: Handle) -> None:
        """Gives the handle back: it can be mapped no more, and its memory is freed once nothing maps it."""
        with self._lock:
            self._check_open()
            self._give_up(handle)

    def free(self, at: AddressRange) -> None:
        """Gives a range of addresses back; raises :class:`MemoryStateError` while anything is mapped in it."""
        with self._lock:
            self._check_open()
            self._ledger.check_empty(at)
            self._free(at.address, at.size)
            self._ledger.drop_range(at)

    def tensor(self, at: AddressRange, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor over ``at`` from ``offset`` on; nothing is copied or initialised.

        All its bytes must be mapped with access "read_write". While it or a view of it lives, the mappings below it cannot be
        unmapped and the range cannot be freed: those calls raise, and memory never vanishes under a tensor.
        """
        dims = tuple(shape)
        if not all(isinstance(dim, int) and dim > 0 for dim in dims):
            raise MemoryRequestError(f"shape {list(dims)} is not allowed; every dimension must be a positive integer")
        nbytes = dtype.itemsize
        for dim in dims:
            nbytes *= dim
        with self._lock:
            self._check_open()
            self._ledger.check_range(at)
            if not isinstance(offset, int) or not 0 <= offset <= at.size - nbytes:
                raise MemoryRequestError(
                    f"{nbytes} bytes at offset {offset} do not fit the range's {at.size} bytes; reserve a larger range"
                )
            if (at.address + offset) % dtype.itemsize:
                raise MemoryRequestError(f"offset {offset} is not aligned for {dtype}; it must be a multiple of {dtype.itemsize}")
            self._ledger.check_accessible(at, offset, nbytes)
            tensor, owner = self._tensor(at.address + offset, dims, dtype, nbytes)
            self._ledger.add_tensor(at, offset, nbytes, owner)
            return tensor

    def snapshot(self) -> PhysicalSnapshot:
        """What is live now; ``snapshot().is_empty`` after everything was given back."""
        with self._lock:
            return self._ledger.snapshot()

    def close(self) -> None:
        """Unmaps, releases and frees everything; a second call does nothing. Raises while a tensor sees a mapping, changing nothing."""
        with self._lock:
            if self._closed:
                return
            ranges, handles, mappings = self._ledger.contents()
            for at in ranges:
                self._ledger.check_unseen(at, 0, at.size)
            for mapping in mappings:
                self._unmap_and_drop(mapping)
            for handle in handles:
                if self._ledger.is_live(handle):  # those released before went with their last mapping
                    self._give_up(handle)
            for at in ranges:
                self._free(at.address, at.size)
                self._ledger.drop_range(at)
            self._close()
            self._closed = True

    def __enter__(self) -> PhysicalBackend:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise MemoryStateError(f"this {self.name} backend is closed; make a new one")

    def _check_aligned(self, what: str, value: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value % self._granularity:
            raise MemoryRequestError(
                f"{what} {value!r} is not allowed; it must be a multiple of the granularity, {self._granularity} bytes"
            )

    def _check_size(self, size: int) -> None:
        self._check_aligned("size", size)
        if size <= 0:
            raise MemoryRequestError(f"size {size} is not allowed; it must be positive")

    def _check_inside(self, at: AddressRange, offset: int, size: int) -> None:
        self._check_aligned("offset", offset)
        self._check_size(size)
        if not 0 <= offset <= at.size - size:
            raise MemoryRequestError(f"[{offset}, {offset + size}) is outside the range's {at.size} bytes; reserve a larger range")

    def _give_up(self, handle: Handle) -> None:
        self._ledger.check_release(handle)
        if self._ledger.is_mapped(handle):
            self._ledger.mark_released(handle)
        else:
            self._release(self._ledger.raw_of(handle), handle.size)
            self._ledger.drop_handle(handle)

    def _unmap_and_drop(self, mapping: MappingRecord) -> None:
        """If the driver unmaps but refuses to release, the handle stays in the snapshot, and a second release tries again."""
        self._unmap(mapping.at.address + mapping.offset, mapping.size)
        self._ledger.drop_mapping(mapping)
        if self._ledger.is_released(mapping.handle) and not self._ledger.is_mapped(mapping.handle):
            self._give_up(mapping.handle)

    # The raw calls of one backend.

    @abstractmethod
    def _device_granularity(self) -> int:
        """The smallest granularity of the device in bytes; called once, first of all, and may open the device."""

    @abstractmethod
    def _reserve(self, size: int) -> int:
        """The address of ``size`` reserved bytes, aligned to the device's granularity."""

    @abstractmethod
    def _free(self, address: int, size: int) -> None:
        """Gives one reservation back, with nothing mapped in it."""

    @abstractmethod
    def _create(self, size: int) -> Any:
        """The driver's own handle of ``size`` bytes."""

    @abstractmethod
    def _release(self, raw: Any, size: int) -> None:
        """Frees the memory of a handle that nothing maps."""

    @abstractmethod
    def _map(self, address: int, size: int, raw: Any, handle_offset: int) -> None:
        """Maps without access."""

    @abstractmethod
    def _set_access(self, address: int, size: int, access: Access) -> None:
        """Sets the access of whole adjacent mappings."""

    @abstractmethod
    def _unmap(self, address: int, size: int) -> None:
        """Takes one whole mapping away, leaving the reservation."""

    @abstractmethod
    def _tensor(self, address: int, shape: tuple[int, ...], dtype: torch.dtype, nbytes: int) -> tuple[torch.Tensor, object]:
        """The tensor, and an object that lives exactly as long as the tensor's storage and can be referred to weakly."""

    @abstractmethod
    def _close(self) -> None:
        """Gives back what the constructor took."""


def retype(flat: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The storage of ``flat`` (uint8) as a tensor of any dtype, of its own and not a view in autograd's sense."""
    return torch.empty(0, dtype=dtype, device=flat.device).set_(flat.untyped_storage(), 0, shape)  # type: ignore[call-overload]


PHYSICAL: Registry[type[PhysicalBackend]] = Registry("physical backend", "depthfx.alloc.physical")
