"""The book of one physical backend: live ranges, handles, mappings and tensors, and the rules between them.

It knows nothing of any driver. Checks raise without changing anything; the other methods record what the driver has done.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from depthfx.errors import MemoryStateError

Access = Literal["none", "read", "read_write"]


@dataclass(frozen=True, eq=False)
class AddressRange:
    """``size`` reserved bytes from ``address`` on; compared by identity, so a freed range never passes for a new one."""

    address: int
    size: int


@dataclass(frozen=True, eq=False)
class Handle:
    """``size`` bytes of physical memory; ``number`` is unique in its backend and never used again."""

    number: int
    size: int


@dataclass(frozen=True)
class MappingRecord:
    """Bytes of ``handle`` from ``handle_offset`` on, seen at ``[offset, offset + size)`` of the range ``at``."""

    at: AddressRange
    offset: int
    size: int
    handle: Handle
    handle_offset: int
    access: Access


@dataclass(frozen=True)
class PhysicalSnapshot:
    """What is live in a backend: ranges, handles (with those released but still mapped), mappings, and tensors over them."""

    ranges: tuple[AddressRange, ...]
    handles: tuple[Handle, ...]
    mappings: tuple[MappingRecord, ...]
    num_tensors: int

    @property
    def is_empty(self) -> bool:
        """Whether nothing is live."""
        return not (self.ranges or self.handles or self.mappings or self.num_tensors)

    @property
    def bytes_reserved(self) -> int:
        """Bytes of addresses."""
        return sum(at.size for at in self.ranges)

    @property
    def bytes_created(self) -> int:
        """Bytes of physical memory."""
        return sum(handle.size for handle in self.handles)

    @property
    def bytes_mapped(self) -> int:
        """Bytes of addresses with memory behind them; a handle counts once for each mapping."""
        return sum(mapping.size for mapping in self.mappings)


@dataclass
class _Range:
    offsets: list[int] = field(default_factory=list)  # of the mappings, sorted
    mappings: dict[int, MappingRecord] = field(default_factory=dict)  # by offset
    tensors: list[tuple[int, int, weakref.ref]] = field(default_factory=list)  # first byte, byte behind, owner


@dataclass
class _Handle:
    raw: Any
    num_mappings: int = 0
    released: bool = False


class MappingLedger:
    """See the module's text; not thread-safe by itself."""

    def __init__(self) -> None:
        self._ranges: dict[AddressRange, _Range] = {}
        self._handles: dict[Handle, _Handle] = {}
        self._next_number = 0

    def add_range(self, address: int, size: int) -> AddressRange:
        """Records a reservation."""
        at = AddressRange(address, size)
        self._ranges[at] = _Range()
        return at

    def drop_range(self, at: AddressRange) -> None:
        del self._ranges[at]

    def check_range(self, at: AddressRange) -> None:
        """Raises :class:`MemoryStateError` unless the range is live here."""
        if at not in self._ranges:
            raise MemoryStateError(f"the address range {at} is freed or belongs to another backend; reserve one here")

    def check_empty(self, at: AddressRange) -> None:
        """Raises :class:`MemoryStateError` if anything is mapped in the range."""
        self.check_range(at)
        count = len(self._ranges[at].offsets)
        if count:
            raise MemoryStateError(f"the address range {at} still holds {count} mappings; unmap them before freeing it")

    def add_handle(self, raw: Any, size: int) -> Handle:
        """Records a handle with the driver's own value for it."""
        handle = Handle(self._next_number, size)
        self._next_number += 1
        self._handles[handle] = _Handle(raw)
        return handle

    def raw_of(self, handle: Handle) -> Any:
        return self._handles[handle].raw

    def raw_handle(self, handle: Handle) -> Any:
        """The driver's value of a handle that may be mapped; raises :class:`MemoryStateError` if it is released or foreign."""
        if handle not in self._handles or self._handles[handle].released:
            raise MemoryStateError(f"{handle} is released or belongs to another backend; create one here")
        return self._handles[handle].raw

    def check_release(self, handle: Handle) -> None:
        """Raises :class:`MemoryStateError` for a second release, except where the driver refused to free the memory."""
        state = self._handles.get(handle)
        if state is None or (state.released and state.num_mappings):
            raise MemoryStateError(f"{handle} is released already or belongs to another backend; release a handle once")

    def mark_released(self, handle: Handle) -> None:
        self._handles[handle].released = True

    def is_live(self, handle: Handle) -> bool:
        return handle in self._handles

    def is_mapped(self, handle: Handle) -> bool:
        return self._handles[handle].num_mappings > 0

    def is_released(self, handle: Handle) -> bool:
        return self._handles[handle].released

    def drop_handle(self, handle: Handle) -> None:
        del self._handles[handle]

    def bytes_created(self) -> int:
        return sum(handle.size for handle in self._handles)

    def add_mapping(self, mapping: MappingRecord) -> None:
        """Records a mapping that :meth:`check_unmapped` allowed."""
        state = self._ranges[mapping.at]
        insort(state.offsets, mapping.offset)
        state.mappings[mapping.offset] = mapping
        self._handles[mapping.handle].num_mappings += 1

    def drop_mapping(self, mapping: MappingRecord) -> None:
        """Records that a mapping is gone."""
        state = self._ranges[mapping.at]
        del state.mappings[mapping.offset]
        del state.offsets[bisect_left(state.offsets, mapping.offset)]
        self._handles[mapping.handle].num_mappings -= 1

    def note_access(self, mappings: list[MappingRecord], access: Access) -> None:
        """Records the access of mappings."""
        for mapping in mappings:
            self._ranges[mapping.at].mappings[mapping.offset] = replace(mapping, access=access)

    def overlapping(self, at: AddressRange, offset: int, size: int) -> list[MappingRecord]:
        """The mappings that share a byte with ``[offset, offset + size)``, by offset."""
        state = self._ranges[at]
        first = max(bisect_right(state.offsets, offset) - 1, 0)
        last = bisect_left(state.offsets, offset + size)
        found = [state.mappings[o] for o in state.offsets[first:last]]
        return [m for m in found if m.offset + m.size > offset]

    def check_unmapped(self, at: AddressRange, offset: int, size: int) -> None:
        """Raises :class:`MemoryStateError` if a byte is mapped."""
        for mapping in self.overlapping(at, offset, size):
            end = mapping.offset + mapping.size
            raise MemoryStateError(f"[{offset}, {offset + size}) overlaps the mapping [{mapping.offset}, {end}); unmap that first")

    def exact_mapping(self, at: AddressRange, offset: int, size: int) -> MappingRecord:
        """The mapping that covers exactly these bytes; raises :class:`MemoryStateError` if there is none."""
        mapping = self._ranges[at].mappings.get(offset)
        if mapping is None or mapping.size != size:
            near = ", ".join(f"[{m.offset}, {m.offset + m.size})" for m in self.overlapping(at, offset, max(size, 1))[:4]) or "nothing"
            raise MemoryStateError(f"[{offset}, {offset + size}) is not one whole mapping; mapped there: {near}")
        return mapping

    def whole_mappings(self, at: AddressRange, offset: int, size: int) -> list[MappingRecord]:
        """The mappings that tile these bytes; raises :class:`MemoryStateError` for a gap or half a mapping."""
        found = self.overlapping(at, offset, size)
        self._check_no_gap(found, offset, size)
        if found[0].offset < offset or found[-1].offset + found[-1].size > offset + size:
            raise MemoryStateError(f"[{offset}, {offset + size}) ends inside a mapping; access is set for whole mappings")
        return found

    def check_accessible(self, at: AddressRange, offset: int, size: int) -> None:
        """Raises :class:`MemoryStateError` unless every byte is mapped with access "read_write"."""
        found = self.overlapping(at, offset, size)
        self._check_no_gap(found, offset, size)
        for mapping in found:
            if mapping.access != "read_write":
                raise MemoryStateError(
                    f"the mapping at offset {mapping.offset} has access {mapping.access!r}; a tensor needs 'read_write': call set_access first"
                )

    @staticmethod
    def _check_no_gap(found: list[MappingRecord], offset: int, size: int) -> None:
        end = offset
        for mapping in found:
            if mapping.offset > end:
                break
            end = mapping.offset + mapping.size
        if end < offset + size:
            raise MemoryStateError(f"nothing is mapped at offset {end} of [{offset}, {offset + size}); map it first")

    def add_tensor(self, at: AddressRange, offset: int, size: int, owner: object) -> None:
        """Records a tensor over ``size`` bytes that lives as long as ``owner``."""
        state = self._ranges[at]
        state.tensors = [seen for seen in state.tensors if seen[2]() is not None]
        state.tensors.append((offset, offset + size, weakref.ref(owner)))

    def check_unseen(self, at: AddressRange, offset: int, size: int) -> None:
        """Raises :class:`MemoryStateError` if a live tensor has a byte in ``[offset, offset + size)``."""
        state = self._ranges[at]
        state.tensors = [seen for seen in state.tensors if seen[2]() is not None]
        count = sum(first < offset + size and end > offset for first, end, _ in state.tensors)
        if count:
            raise MemoryStateError(f"{count} tensors still see [{offset}, {offset + size}) of {at}; drop them and their views first")

    def contents(self) -> tuple[list[AddressRange], list[Handle], list[MappingRecord]]:
        """All that is live, as new lists."""
        mappings = [state.mappings[offset] for state in self._ranges.values() for offset in state.offsets]
        return list(self._ranges), list(self._handles), mappings

    def snapshot(self) -> PhysicalSnapshot:
        """All that is live, as a record."""
        ranges, handles, mappings = self.contents()
        num_tensors = sum(owner() is not None for state in self._ranges.values() for _, _, owner in state.tensors)
        return PhysicalSnapshot(tuple(ranges), tuple(handles), tuple(mappings), num_tensors)


def in_words(size: int) -> str:
    """``size`` bytes for a message: ``3 MiB`` or ``4,096 bytes``."""
    return f"{size >> 20:,} MiB" if size and size % (1 << 20) == 0 else f"{size:,} bytes"
