"""Who owns what: KV blocks by request, and the bytes of the KV range by owner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from depthfx.alloc.blocks import BlockPool
from depthfx.alloc.units import SharedRegion
from depthfx.errors import InternalError


@dataclass(frozen=True)
class ByteUsage:
    """Bytes of the KV range, each under one owner. Base blocks are always KV; units are lent, backed or being restored."""

    base_free: int
    base_cached: int  # nobody holds them; findable until reclaimed
    base_held: int
    lent_free: int
    lent_cached: int
    lent_held: int
    backed: int  # units that hold residual bytes of weights
    restoring: int

    @property
    def lent(self) -> int:
        """Bytes of the units that are open to KV."""
        return self.lent_free + self.lent_cached + self.lent_held


@dataclass(frozen=True)
class BlockUsage:
    """Who owns what, in blocks. A shared block counts once in ``num_held`` and once for each of its holders."""

    num_blocks: int
    num_open: int  # fewer than num_blocks where units of the shared region are closed to KV
    num_free: int
    num_cached: int  # nobody holds them; findable until reclaimed
    num_held: int
    by_request: dict[str, int]
    bytes: ByteUsage | None = None  # None without a shared region


def bytes_by_owner(pool: BlockPool, region: SharedRegion) -> ByteUsage:
    """Counts the bytes of ``pool``'s blocks, whose units ``region`` keeps; takes time for each cached block and unit."""
    layout = region.layout
    num_base = layout.num_base_blocks
    base_cached, lent_held = pool.num_cached_below(num_base), region.num_held
    base_held, lent_cached = pool.num_held - lent_held, pool.num_cached - base_cached
    num_lent = region.num_open_units * layout.blocks_per_unit
    num_backed = layout.num_units - region.num_open_units - region.num_restoring
    blocks = (
        num_base - base_cached - base_held,
        base_cached,
        base_held,
        num_lent - lent_cached - lent_held,
        lent_cached,
        lent_held,
        num_backed * layout.blocks_per_unit,
        region.num_restoring * layout.blocks_per_unit,
    )
    return ByteUsage(*(count * layout.block_bytes for count in blocks))


def check_tables(
    tables: Mapping[str, tuple[int, Sequence[int]]], free_rows: Sequence[int], named: Callable[[int, int], int]
) -> Counter[int]:
    """Proves that each request's ``(row, blocks)`` is what the block table has (``named(row, column)``), and no row is used twice.

    Returns how often each block is held. Raises :class:`InternalError`.
    """
    counts: Counter[int] = Counter()
    for request_id, (row, blocks) in tables.items():
        if len(set(blocks)) != len(blocks):
            raise InternalError(f"request {request_id!r} has one KV block at two places: {list(blocks)}")
        counts.update(blocks)
        for column, block in enumerate(blocks):
            if (seen := named(row, column)) != block:
                raise InternalError(f"block table entry {(row, column)} of request {request_id!r} names {seen}, not block {block}")
    rows = sorted([*(row for row, _ in tables.values()), *free_rows])
    if rows != list(range(len(rows))):
        raise InternalError(f"block table rows are lost or used twice: {rows}")
    return counts


def check_region(region: SharedRegion, pool: BlockPool, counts: Sequence[int], cancelled: Sequence[int]) -> None:
    """Proves that ``pool`` and ``region`` agree; ``counts``: how often each block is held, ``cancelled``: units not yet told.

    Raises :class:`InternalError`.
    """
    region.check(lambda block: counts[block] > 0)
    layout = region.layout
    for block in range(layout.num_blocks):
        unit = layout.unit_of(block)
        is_open = unit is None or unit < region.num_open_units
        if pool.is_open(block) != is_open:
            raise InternalError(f"KV block {block} is {'closed' if is_open else 'open'}, but its owner says otherwise (unit {unit})")
    for unit in cancelled:
        if region.state(unit) in ("BACKED", "RESTORING"):
            raise InternalError(f"unit {unit} counts as cancelled and not yet told, but is {region.state(unit)}")
    usage = bytes_by_owner(pool, region)
    if sum(vars(usage).values()) != layout.num_blocks * layout.block_bytes or min(vars(usage).values()) < 0:
        raise InternalError(f"the bytes by owner do not add up to {layout.num_blocks * layout.block_bytes}: {usage}")
