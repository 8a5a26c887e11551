"""Broken books of a manager with a shared region: ``check()`` finds each kind."""

from __future__ import annotations

import pytest

from depthfx.alloc.manager import MemoryManager
from depthfx.errors import InternalError
from tests.alloc.shared_cases import admitted, build, computed, states


def _unit_with_two_owners(m: MemoryManager) -> None:
    m.region._states[0] = "BACKED"


def _lent_in_secret(m: MemoryManager) -> None:
    m.region.lend()


def _restored_in_secret(m: MemoryManager) -> None:
    m.region.begin_restore(1)


def _opened_in_secret(m: MemoryManager) -> None:
    m._pool.open(range(8, 10))


def _closed_in_secret(m: MemoryManager) -> None:
    m._pool.close(range(6, 8))


def _held_in_secret(m: MemoryManager) -> None:
    m._pool.take()


def _not_counted_as_held(m: MemoryManager) -> None:
    m.region.unhold(4)


def _counted_as_held(m: MemoryManager) -> None:
    m.region.hold(6)


def _resident_too_early(m: MemoryManager) -> None:
    m.region._missing[0] = 0
    m.region._resident = None


def _resident_too_late(m: MemoryManager) -> None:
    m.region._missing[2] = 1
    m.region._resident = None


def _resident_not_renewed(m: MemoryManager) -> None:
    m.region._resident = b"\1\1\1"


def _lend_not_counted(m: MemoryManager) -> None:
    m.region.num_lends -= 1


def _cancelled_though_closed(m: MemoryManager) -> None:
    m._cancelled.append(2)


def _moved_without_table(m: MemoryManager) -> None:
    m.compact(0, 2)
    m._writes.clear()


def _moved_without_count(m: MemoryManager) -> None:
    m._pool.relocate([4], 4)


@pytest.mark.parametrize(
    "damage",
    [
        _unit_with_two_owners,
        _lent_in_secret,
        _restored_in_secret,
        _opened_in_secret,
        _closed_in_secret,
        _held_in_secret,
        _not_counted_as_held,
        _counted_as_held,
        _resident_too_early,
        _resident_too_late,
        _resident_not_renewed,
        _lend_not_counted,
        _cancelled_though_closed,
        _moved_without_table,
        _moved_without_count,
    ],
    ids=lambda f: f.__name__,
)
def test_check_finds_each_kind_of_damage(damage):
    """Unit 0 is lent and part held, unit 1 lent and free, unit 2 backed; the base has two free blocks."""
    manager = build()
    admitted(manager, "gone", 2, 500)
    admitted(manager, "a", 3)
    computed(manager, "b", 3, 100)
    manager.release("b")
    manager.release("gone")
    manager.take_table_writes()
    assert states(manager) == ["AVAIL", "FREE", "BACKED"]
    manager.check()
    damage(manager)
    with pytest.raises(InternalError):
        manager.check()
