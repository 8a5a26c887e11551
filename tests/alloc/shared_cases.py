"""A manager over a small shared region, and short ways to load and read it."""

from __future__ import annotations

from depthfx.alloc.manager import Admission, MemoryManager
from depthfx.alloc.units import SharedRegion, UnitLayout

BLOCK = 4


def build(num_base: int = 4, per_unit: int = 2, spans=((0, 64), (64, 128), (128, 180)), columns: int = 16, reuse: bool = True):
    """A manager over ``num_base`` blocks and units of 64 bytes; by default three units, each of one entry, the last part empty."""
    region = SharedRegion(UnitLayout(64, per_unit, num_base, spans))
    return MemoryManager(region.layout.num_blocks, BLOCK, 4, columns, reuse, region)


def tokens(num_blocks: int, first: int = 0) -> list[int]:
    return list(range(first, first + num_blocks * BLOCK))


def admitted(manager: MemoryManager, name: str, num_blocks: int, first: int = 0) -> Admission:
    place = manager.admit(name, tokens(num_blocks, first))
    assert place is not None
    manager.check()
    return place


def computed(manager: MemoryManager, name: str, num_blocks: int, first: int = 0) -> Admission:
    """Admits a request and counts all its tokens as computed."""
    place = admitted(manager, name, num_blocks, first)
    manager.register(name, tokens(num_blocks, first), num_blocks * BLOCK)
    manager.check()
    return place


def table(manager: MemoryManager) -> dict[tuple[int, int], int]:
    return {(row, column): block for row, column, block in manager.take_table_writes()}


def states(manager: MemoryManager) -> list[str]:
    return [manager.region.state(unit) for unit in range(manager.region.layout.num_units)]
