"""Semi-unified memory: physical units seen as residual bytes of weights and as KV blocks, both mapped once.

    KV range     [padding | base blocks | unit 0 | unit 1 | ...]
    home range                         [unit 0 | unit 1 | ...]      the same bytes as in the KV range

The padding, less than one granule, puts the first unit on a granule. Nothing is unmapped before :meth:`UnifiedMemory.close`, so captured
graphs keep valid addresses; who may use a unit's bytes is the business of ``SharedRegion``, and the order of writes through the two
addresses that of the caller: a write is seen through the other address by work that an event or the host orders behind it.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from depthfx.alloc.mapping_ledger import AddressRange, Handle, in_words
from depthfx.alloc.physical_backend import PhysicalBackend
from depthfx.alloc.units import UnitLayout
from depthfx.errors import MemoryRequestError, MemoryStateError, OutOfPhysicalMemoryError

ALIGNMENT = 256  # bytes; what PyTorch's own allocator gives is 512, what vector loads and the tensor copy engine need is 128

# What poisoned bytes hold. As FP16 it is 203.25, as BF16 1.5e16, as FP8 large too: finite, since attention multiplies the masked rest of a
# block by 0, and far from what weights and keys are. As a residual byte it is simply wrong, which only a hash finds.
POISON = 0x5A


class UnifiedMemory:
    """See the module's text. Made by :meth:`build`; owns the backend from then on."""

    def __init__(self, backend: PhysicalBackend, layout: UnitLayout, kv: AddressRange, home: AddressRange, base_bytes: int) -> None:
        self.backend = backend
        self.layout = layout
        self.base_bytes = base_bytes
        self.kv_bytes = base_bytes + home.size
        self.home_bytes = home.size
        self._kv = kv
        self._home = home
        self._home_view: torch.Tensor | None = None

    @classmethod
    def build(cls, backend: PhysicalBackend, layout: UnitLayout, base_bytes: int) -> UnifiedMemory:
        """Takes the memory of all units and of ``base_bytes`` for base blocks, and maps both ranges; content unspecified.

        The backend must hold nothing; it is the caller's again, as it was, if this raises: :class:`MemoryRequestError` for sizes that
        do not fit each other or the granularity, :class:`MemoryStateError` for a backend in use, or what the backend raises.
        """
        _check(backend, layout, base_bytes)
        granule = backend.granularity()
        padded = -(-base_bytes // granule) * granule
        home_bytes = layout.num_units * layout.unit_bytes
        with ExitStack() as undo:
            kv = _reserve(backend, undo, padded + home_bytes)
            home = _reserve(backend, undo, home_bytes)
            try:
                units = _create(backend, undo, layout.num_units, layout.unit_bytes)
                base = _create(backend, undo, 1, padded) if padded else []
            except OutOfPhysicalMemoryError as error:
                raise OutOfPhysicalMemoryError(
                    f"{in_words(padded + home_bytes)} for {layout.num_units} units of {in_words(layout.unit_bytes)} and {in_words(base_bytes)} "
                    f"of base KV blocks cannot be had: {error}"
                ) from error
            _map(backend, undo, kv, [*base, *units])
            _map(backend, undo, home, units)
            undo.pop_all()
        return cls(backend, layout, kv, home, base_bytes)

    @property
    def physical_bytes(self) -> int:
        """Bytes of device memory held, padding included; less than what the two ranges show together."""
        return self._kv.size

    def kv_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor from the first base block on, of up to ``kv_bytes``: base blocks first, then those of unit 0, 1, ...

        Raises :class:`MemoryRequestError` if it does not fit, :class:`MemoryStateError` after :meth:`close`.
        """
        return self.backend.tensor(self._kv, self._kv.size - self.kv_bytes, shape, dtype)

    def home_tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over residual bytes from ``offset`` of the home range on; raises as :meth:`kv_tensor` does."""
        return self.backend.tensor(self._home, offset, shape, dtype)

    def home_bytes_tensor(self) -> torch.Tensor:
        """The whole home range, uint8 ``[home_bytes]``."""
        if self._home_view is None:
            self._home_view = self.home_tensor(0, [self.home_bytes], torch.uint8)
        return self._home_view

    def unit_bytes_tensor(self, unit: int) -> torch.Tensor:
        """One unit's bytes, uint8 ``[unit_bytes]``, at its home address; raises :class:`MemoryRequestError` for an unknown unit."""
        if not 0 <= unit < self.layout.num_units:
            raise MemoryRequestError(f"unit {unit} does not exist; allowed: 0 to {self.layout.num_units - 1}")
        size = self.layout.unit_bytes
        return self.home_bytes_tensor()[unit * size : (unit + 1) * size]

    def poison(self, unit: int) -> None:
        """Overwrites a unit's bytes with :data:`POISON` on the current stream: for debugging, when the unit is lent.

        What is read of it afterwards without being written or restored shows in hashes and in answers, and does not look like zeros.
        """
        self.unit_bytes_tensor(unit).fill_(POISON)

    def close(self) -> None:
        """Gives everything back, the backend included; a second call does nothing.

        Raises :class:`MemoryStateError` while a tensor over either range lives (the KV pool, a residual of the model, a copy of the
        restore worker), changing nothing. No queued work may name the memory.
        """
        self._home_view = None
        gc.collect()  # models and their parameters are full of cycles
        try:
            self.backend.close()
        except MemoryStateError as error:
            raise MemoryStateError(f"the unified memory is still in use: {error}; close the engine and its restore worker first") from error

    def __enter__(self) -> UnifiedMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check(backend: PhysicalBackend, layout: UnitLayout, base_bytes: int) -> None:
    granule = backend.granularity()
    if layout.num_units < 1:
        raise MemoryRequestError("the layout has no unit, as no entry has a residual; unified memory needs nested weights")
    if layout.unit_bytes % granule:
        raise MemoryRequestError(
            f"units of {layout.unit_bytes} bytes are not allowed; {backend.name} needs a multiple of its granularity, {granule} bytes"
        )
    block = layout.block_bytes
    if base_bytes != layout.num_base_blocks * block:
        raise MemoryRequestError(
            f"base_bytes={base_bytes} does not fit {layout.num_base_blocks} base blocks of {block} bytes; give {layout.num_base_blocks * block}"
        )
    if base_bytes % ALIGNMENT:
        raise MemoryRequestError(
            f"base_bytes={base_bytes} is not allowed; it must be a multiple of {ALIGNMENT}: choose another number of base blocks"
        )
    if not backend.snapshot().is_empty:
        raise MemoryStateError(f"the {backend.name} backend holds memory already; give unified memory one of its own")


def _reserve(backend: PhysicalBackend, undo: ExitStack, size: int) -> AddressRange:
    at = backend.reserve(size)
    undo.callback(backend.free, at)
    return at


def _create(backend: PhysicalBackend, undo: ExitStack, count: int, size: int) -> list[Handle]:
    handles = backend.create_many(count, size)
    for handle in handles:
        undo.callback(backend.release, handle)
    return handles


def _map(backend: PhysicalBackend, undo: ExitStack, at: AddressRange, handles: list[Handle]) -> None:
    backend.map_many(at, 0, handles)
    offset = 0
    for handle in handles:
        undo.callback(backend.unmap, at, offset, handle.size)
        offset += handle.size
