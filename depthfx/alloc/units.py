"""Units of the shared region: which holds residual bytes of weights, which is lent to the KV cache, and how they change.

One unit is one physical handle, seen at two addresses: in the home range (residual bytes of the weights) and in the KV range
(blocks). This file counts and names states; it owns no memory and knows no pool of blocks.

    home range   [unit 0 | unit 1 | ...]                 entries one after another, in the order in which they are lent
    KV range     [base blocks | unit 0 | unit 1 | ...]   block ids in this order

KV takes the lowest closed unit and gives back the highest open one, so units [0, n) are open and all others are closed.
An *entry* is one entry of the precision state: a layer, or the head.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from depthfx.errors import InternalError, MemoryRequestError

UnitState = Literal["BACKED", "FREE", "AVAIL", "FULL", "RESTORING"]
EntryState = Literal["RESIDENT", "RESTORING", "STALE", "EVICTED"]
Move = Literal["lend", "begin_restore", "finish_restore", "hold", "unhold"]

# What a unit does in each state, and every way from one to another. Anything else is an InternalError.
STATES: dict[UnitState, str] = {
    "BACKED": "holds its residual bytes, closed to KV",
    "FREE": "open to KV, no block held (cached ones may lie there), residual bytes gone",
    "AVAIL": "open to KV, at least one block held and at least one not, residual bytes gone",
    "FULL": "open to KV, all blocks held, residual bytes gone",
    "RESTORING": "closed to KV, its residual bytes are being copied back",
}
MOVES: dict[Move, frozenset[tuple[UnitState, UnitState]]] = {
    "lend": frozenset({("BACKED", "FREE"), ("RESTORING", "FREE")}),  # from RESTORING: the restore is cancelled
    "begin_restore": frozenset({("FREE", "RESTORING")}),
    "finish_restore": frozenset({("RESTORING", "BACKED")}),
    "hold": frozenset({("FREE", "AVAIL"), ("FREE", "FULL"), ("AVAIL", "AVAIL"), ("AVAIL", "FULL")}),
    "unhold": frozenset({("FULL", "AVAIL"), ("FULL", "FREE"), ("AVAIL", "AVAIL"), ("AVAIL", "FREE")}),
}
_CLOSED = ("BACKED", "RESTORING")


@dataclass(frozen=True)
class UnitLayout:
    """Where units, blocks and the residual bytes of entries lie.

    ``unit_bytes`` bytes and ``blocks_per_unit`` KV blocks in each unit, after ``num_base_blocks`` blocks that are always KV.
    ``spans`` has for each entry, by its index, the bytes [first, end) of the home range; (0, 0) for an entry without residual.
    Raises :class:`MemoryRequestError` if a size is not positive or does not divide, or if spans overlap or leave a unit empty.
    """

    unit_bytes: int
    blocks_per_unit: int
    num_base_blocks: int
    spans: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        for name, least in (("unit_bytes", 1), ("blocks_per_unit", 1), ("num_base_blocks", 0)):
            if getattr(self, name) < least:
                raise MemoryRequestError(f"layout of units: {name}={getattr(self, name)} must be at least {least}; give a larger value")
        if self.unit_bytes % self.blocks_per_unit:
            raise MemoryRequestError(
                f"layout of units: unit_bytes={self.unit_bytes} must be a multiple of blocks_per_unit={self.blocks_per_unit}: "
                "a unit holds whole KV blocks"
            )
        end = 0
        for span in sorted(span for span in self.spans if span != (0, 0)):
            if not end <= span[0] < span[1]:
                raise MemoryRequestError(
                    f"layout of units: span {span} is empty or begins before byte {end}; give each entry bytes of its own"
                )
            end = span[1]
        for unit in range(self.num_units):
            if not self.entries_of(unit):
                raise MemoryRequestError(f"layout of units: unit {unit} holds no residual bytes; place the entries without gaps")

    @cached_property
    def num_units(self) -> int:
        """Units of the shared region; the last one may be part empty."""
        return -(-max((end for _, end in self.spans), default=0) // self.unit_bytes)

    @cached_property
    def num_blocks(self) -> int:
        """Blocks of the KV range, those of closed units included."""
        return self.num_base_blocks + self.num_units * self.blocks_per_unit

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block."""
        return self.unit_bytes // self.blocks_per_unit

    def unit_of(self, block: int) -> int | None:
        """The unit that a block lies in; None for a base block. Raises :class:`InternalError` for an unknown block."""
        if not 0 <= block < self.num_blocks:
            raise InternalError(f"KV block {block} does not exist; there are {self.num_blocks}")
        return None if block < self.num_base_blocks else (block - self.num_base_blocks) // self.blocks_per_unit

    def blocks_of(self, unit: int) -> range:
        """The blocks that lie in a unit."""
        self._check_unit(unit)
        first = self.num_base_blocks + unit * self.blocks_per_unit
        return range(first, first + self.blocks_per_unit)

    def units_of(self, entry: int) -> range:
        """The units that an entry's residual touches; empty without one."""
        if not 0 <= entry < len(self.spans):
            raise InternalError(f"entry {entry} does not exist; there are {len(self.spans)}")
        first, end = self.spans[entry]
        return range(first // self.unit_bytes, -(-end // self.unit_bytes))

    def entries_of(self, unit: int) -> tuple[int, ...]:
        """The entries whose residual touches a unit, in ascending order."""
        self._check_unit(unit)
        return self._entries[unit]

    def pieces_of(self, unit: int) -> tuple[int, int]:
        """The bytes [first, end) of the home range in a unit that residuals really use."""
        start = unit * self.unit_bytes
        spans = [self.spans[entry] for entry in self.entries_of(unit)]
        return max(start, min(first for first, _ in spans)), min(start + self.unit_bytes, max(end for _, end in spans))

    @cached_property
    def _entries(self) -> tuple[tuple[int, ...], ...]:
        entries: list[list[int]] = [[] for _ in range(self.num_units)]
        for entry in range(len(self.spans)):
            for unit in self.units_of(entry):
                entries[unit].append(entry)
        return tuple(tuple(found) for found in entries)

    def _check_unit(self, unit: int) -> None:
        if not 0 <= unit < self.num_units:
            raise InternalError(f"unit {unit} does not exist; there are {self.num_units}")


class SharedRegion:
    """The state of each unit. All residual bytes are in place at first; each operation on a block takes constant time."""

    def __init__(self, layout: UnitLayout) -> None:
        self.layout = layout
        self.num_lends = 0  # cancelled restores included
        self.num_restores = 0  # finished ones
        self.num_cancels = 0
        self._first_block = layout.num_base_blocks
        self._per_unit = layout.blocks_per_unit
        self._num_units = layout.num_units
        self._entries = [layout.entries_of(unit) for unit in range(layout.num_units)]
        self._states: list[UnitState] = ["BACKED"] * layout.num_units
        self._num_open = 0  # units [0, _num_open) are open to KV
        self._held = [0] * layout.num_units  # blocks held in each unit
        self._missing = [0] * len(layout.spans)  # units of each entry that are not BACKED
        self._resident: bytes | None = None  # kept until an entry changes

    @property
    def num_open_units(self) -> int:
        """Units that are open to KV."""
        return self._num_open

    @property
    def num_restoring(self) -> int:
        """Units whose residual bytes are being copied back."""
        return self.num_lends - self._num_open - self.num_restores - self.num_cancels

    @property
    def num_lendable_blocks(self) -> int:
        """Blocks of the units that could be lent: those that are backed or being restored."""
        return (self._num_units - self._num_open) * self._per_unit

    @property
    def num_held(self) -> int:
        """Blocks held in units."""
        return sum(self._held[: self._num_open])

    def state(self, unit: int) -> UnitState:
        """A unit's state, one of :data:`STATES`."""
        self.layout._check_unit(unit)
        return self._states[unit]

    def entry_state(self, entry: int) -> EntryState:
        """RESIDENT: all units backed. STALE: KV blocks are held in one. EVICTED: one is open, none held. Else RESTORING."""
        states = {self._states[unit] for unit in self.layout.units_of(entry)}
        if states <= {"BACKED"}:
            return "RESIDENT"
        if states & {"AVAIL", "FULL"}:
            return "STALE"
        return "EVICTED" if "FREE" in states else "RESTORING"

    def resident(self) -> bytes:
        """``[entries]``: 1 where the residual may be read (also where there is none), else 0."""
        if self._resident is None:
            self._resident = bytes([not missing for missing in self._missing])
        return self._resident

    def next_to_lend(self) -> int | None:
        """The lowest closed unit; None if all are open."""
        return self._num_open if self._num_open < self.layout.num_units else None

    def lend(self, count: int = 1) -> tuple[range, list[int]]:
        """Opens the lowest ``count`` closed units to KV; returns them, and those of them whose restore is thereby cancelled.

        Their residual bytes count as gone from now on. Raises :class:`InternalError` if so many are not closed.
        """
        units = range(self._num_open, self._num_open + count)
        if units.stop > self._num_units:
            raise InternalError(f"{self._num_open} of all {self._num_units} units are open to KV, so {count} more cannot be lent")
        cancelled = []
        for unit in units:
            if self._states[unit] == "RESTORING":
                cancelled.append(unit)
            else:
                for entry in self._entries[unit]:
                    self._missing[entry] += 1
            self._move("lend", unit, "FREE")
        self._num_open = units.stop
        self.num_lends += count
        self.num_cancels += len(cancelled)
        self._resident = None
        return units, cancelled

    def next_to_restore(self) -> int | None:
        """The highest open unit, if no block in it is held; else None."""
        top = self._num_open - 1
        return top if top >= 0 and self._states[top] == "FREE" else None

    def begin_restore(self, unit: int) -> None:
        """Closes a unit to KV. Raises :class:`InternalError` unless it is :meth:`next_to_restore`."""
        state = self.state(unit)
        if state == "FREE" and unit != self._num_open - 1:
            raise InternalError(f"unit {unit} cannot be restored before unit {self._num_open - 1}, the highest that is open to KV")
        self._move("begin_restore", unit, "RESTORING")
        self._num_open -= 1

    def finish_restore(self, unit: int) -> None:
        """Counts a unit's residual bytes as there again. Raises :class:`InternalError` if it is not being restored."""
        self.layout._check_unit(unit)
        self._move("finish_restore", unit, "BACKED")
        self.num_restores += 1
        for entry in self._entries[unit]:
            self._missing[entry] -= 1
        self._resident = None

    def hold(self, block: int) -> None:
        """Counts a block that nobody held as held; nothing to count for a base block."""
        if block >= self._first_block:
            unit = (block - self._first_block) // self._per_unit
            count = self._held[unit] + 1
            to: UnitState = "FULL" if count == self._per_unit else "AVAIL"
            if self._states[unit] != to:  # AVAIL to AVAIL is the usual case
                self._move("hold", unit, to)
            self._held[unit] = count

    def hold_all(self, blocks: Sequence[int]) -> None:
        """As :meth:`hold` for each of ``blocks``, which ascend: one move for each unit."""
        at = bisect_left(blocks, self._first_block)
        while at < len(blocks):
            unit = (blocks[at] - self._first_block) // self._per_unit
            behind = bisect_left(blocks, self._first_block + (unit + 1) * self._per_unit, at)
            count = self._held[unit] + behind - at
            self._move("hold", unit, "FULL" if count == self._per_unit else "AVAIL")
            self._held[unit], at = count, behind

    def unhold(self, block: int) -> None:
        """Counts a block as held by nobody any more."""
        if block >= self._first_block:
            unit = (block - self._first_block) // self._per_unit
            count = self._held[unit] - 1
            to: UnitState = "AVAIL" if count else "FREE"
            if self._states[unit] != to:
                self._move("unhold", unit, to)
            self._held[unit] = count

    def check(self, held: Callable[[int], bool]) -> None:
        """Compares states and counts with each other and with ``held(block)``; raises :class:`InternalError`."""
        for unit, state in enumerate(self._states):
            count = sum(held(block) for block in self.layout.blocks_of(unit))
            if count != self._held[unit]:
                raise InternalError(f"unit {unit} counts {self._held[unit]} held KV blocks, but {count} are held")
            if (state in _CLOSED) != (unit >= self._num_open):
                raise InternalError(f"unit {unit} is {state}, but units [0, {self._num_open}) are open to KV and no others")
            if state in _CLOSED and count:
                raise InternalError(f"unit {unit} has two owners: it is {state}, and {count} KV blocks in it are held")
            by_count = "FREE" if not count else "FULL" if count == self.layout.blocks_per_unit else "AVAIL"
            if state not in _CLOSED and state != by_count:
                raise InternalError(f"unit {unit} is {state}, but with {count} held KV blocks it must be {by_count}")
        for entry, missing in enumerate(self._missing):
            true = sum(self._states[unit] != "BACKED" for unit in self.layout.units_of(entry))
            if missing != true:
                raise InternalError(f"entry {entry} counts {missing} units without its residual bytes, but there are {true}")
        if self.resident() != bytes([not missing for missing in self._missing]):
            raise InternalError(f"the resident entries are {list(self.resident())}, but counts of missing units are {self._missing}")
        restoring = self._states.count("RESTORING")
        if self.num_restoring != restoring:
            raise InternalError(f"{self.num_restoring} restores have begun and not ended, but {restoring} units are RESTORING")

    def _move(self, move: Move, unit: int, to: UnitState) -> None:
        state = self._states[unit]
        if (state, to) not in MOVES[move]:
            raise InternalError(f"unit {unit} is {state} ({STATES[state]}), so {move} is not allowed")
        self._states[unit] = to
