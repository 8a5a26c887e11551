"""Rules of the memory manager with a shared region, one by one."""

from __future__ import annotations

import pytest

from depthfx.alloc.manager import MemoryManager
from depthfx.alloc.units import SharedRegion, UnitLayout
from depthfx.alloc.usage import ByteUsage
from depthfx.errors import InternalError, InvalidRequestError
from tests.alloc.shared_cases import BLOCK, admitted, build, computed, states, table, tokens


def test_nothing_is_lent_while_base_blocks_suffice():
    manager = build()
    assert (manager.num_available, manager.open_blocks, manager.held_blocks) == (10, 4, 0)
    admitted(manager, "a", 4)
    assert states(manager) == ["BACKED"] * 3
    assert manager.resident() == b"\1\1\1"
    assert (manager.num_available, manager.open_blocks, manager.held_blocks) == (6, 4, 4)


def test_pressure_lends_from_the_lowest_unit_on():
    manager = build()
    admitted(manager, "a", 3)
    admitted(manager, "b", 4, 100)
    assert table(manager) == {(0, 0): 0, (0, 1): 1, (0, 2): 2, (1, 0): 3, (1, 1): 4, (1, 2): 5, (1, 3): 6}
    assert states(manager) == ["FULL", "AVAIL", "BACKED"]
    assert manager.resident() == b"\0\0\1"
    assert (manager.num_available, manager.open_blocks, manager.held_blocks) == (3, 8, 7)
    assert manager.grow("b", 5 * BLOCK)  # the rest of unit 1
    assert states(manager) == ["FULL", "FULL", "BACKED"]
    assert manager.region.num_lends == 2
    assert manager.grow("b", 5 * BLOCK + 1)
    assert states(manager) == ["FULL", "FULL", "AVAIL"]
    manager.check()


def test_all_blocks_can_be_one_requests_and_count_as_what_can_ever_fit():
    manager = build()
    assert manager.max_request_tokens == 10 * BLOCK
    assert manager.can_ever_fit(10 * BLOCK)
    admitted(manager, "a", 10)
    assert (states(manager), manager.num_available, manager.resident()) == (["FULL"] * 3, 0, b"\0\0\0")
    assert not manager.grow("a", 11 * BLOCK)


def test_after_a_burst_new_requests_stay_out_of_lent_units():
    manager = build()
    for name, first in (("a", 0), ("b", 200), ("c", 400)):
        computed(manager, name, 3, first)  # nine blocks: all base ones and all units
    for name in "abc":
        manager.release(name)  # everything is cached now, the units' blocks as well
    assert states(manager) == ["FREE"] * 3
    manager.take_table_writes()
    admitted(manager, "new", 3, 800)
    assert max(table(manager).values()) < 4 and states(manager) == ["FREE"] * 3
    admitted(manager, "more", 3, 900)  # one base block is left, then the lowest unit
    assert sorted(table(manager).values()) == [3, 4, 5] and states(manager) == ["FULL", "FREE", "FREE"]
    assert manager.region.next_to_restore() == 2


def test_a_region_may_have_no_base_blocks():
    manager = build(num_base=0)
    assert (manager.open_blocks, manager.num_available) == (0, 6)
    admitted(manager, "a", 1)
    assert states(manager) == ["AVAIL", "BACKED", "BACKED"]


def test_a_failed_admission_or_growth_lends_nothing():
    manager = build()
    admitted(manager, "a", 3)
    manager.take_table_writes()
    before = manager.usage()
    assert manager.admit("b", tokens(8, 100)) is None
    assert manager.admit("b", tokens(5, 100), headroom=3) is None
    assert not manager.grow("a", 11 * BLOCK)
    assert manager.usage() == before
    assert states(manager) == ["BACKED"] * 3
    assert (manager.region.num_lends, manager.take_table_writes()) == (0, ())
    manager.check()
    assert manager.admit("b", tokens(5, 100), headroom=2) is not None  # headroom counts what could be lent, and lends none of it
    assert states(manager) == ["FULL", "FULL", "BACKED"]


def test_cached_blocks_are_evicted_before_a_unit_is_lent():
    manager = build()
    computed(manager, "old", 3)
    manager.release("old")
    assert (manager.usage().num_free, manager.usage().num_cached) == (1, 3)
    admitted(manager, "a", 4, 100)
    assert states(manager) == ["BACKED"] * 3
    assert manager.usage().num_cached == 0
    manager.release("a")
    assert manager.admit("old", tokens(3)).reused_tokens == 0


def test_a_shared_prefix_that_is_cached_is_kept_and_a_unit_lent_instead():
    manager = build()
    computed(manager, "old", 3)
    manager.release("old")
    assert manager.admit("a", tokens(5)).reused_tokens == 3 * BLOCK
    assert states(manager) == ["AVAIL", "BACKED", "BACKED"]
    manager.check()


def test_cached_blocks_of_a_unit_are_held_again_when_they_are_shared():
    manager = build()
    computed(manager, "a", 6)
    manager.release("a")
    assert states(manager) == ["FREE", "BACKED", "BACKED"]
    assert admitted(manager, "b", 6).reused_tokens == 5 * BLOCK
    assert states(manager) == ["FULL", "BACKED", "BACKED"]
    manager.release("b")
    assert manager.region.next_to_restore() == 0


def test_a_unit_that_two_requests_share_is_free_after_both():
    manager = build()
    computed(manager, "a", 6)
    admitted(manager, "b", 6)
    manager.release("a")
    assert states(manager)[0] == "AVAIL"  # the prefix of b is in block 4; block 5 is a's alone
    manager.release("b")
    assert states(manager)[0] == "FREE"
    manager.check()


def test_cached_blocks_of_a_unit_that_begins_to_restore_are_forgotten():
    manager = build()
    computed(manager, "a", 6)
    manager.release("a")
    assert manager.usage().num_cached == 6
    manager.begin_restore(0)
    manager.check()
    assert manager.usage().num_cached == 4
    assert (states(manager), manager.open_blocks) == (["RESTORING", "BACKED", "BACKED"], 4)
    assert manager.resident() == b"\0\1\1"
    manager.finish_restore(0)
    manager.check()
    assert manager.resident() == b"\1\1\1"
    assert admitted(manager, "b", 6).reused_tokens == 4 * BLOCK


def test_blocks_that_continue_forgotten_ones_are_not_found():
    manager = build()
    admitted(manager, "x", 4, 500)
    computed(manager, "a", 3)  # blocks 4, 5, 6
    manager.release("x")
    manager.release("a")
    admitted(manager, "keep", 1, 700)  # of the free base blocks
    manager.begin_restore(1)
    manager.begin_restore(0)
    manager.check()
    assert admitted(manager, "b", 3).reused_tokens == 0


def test_units_are_restored_from_the_top():
    manager = build()
    for i in range(4):
        admitted(manager, f"r{i}", 2, 100 * i)
    assert manager.grow("r3", 4 * BLOCK)
    assert states(manager) == ["FULL", "FULL", "FULL"]
    manager.release("r2")  # unit 0
    assert states(manager) == ["FREE", "FULL", "FULL"]
    assert manager.region.next_to_restore() is None
    with pytest.raises(InternalError, match="unit 0 cannot be restored before unit 2"):
        manager.begin_restore(0)
    manager.check()
    manager.release("r3")
    order = []
    while (unit := manager.region.next_to_restore()) is not None:
        manager.begin_restore(unit)
        manager.check()
        order.append(unit)
    assert order == [2, 1, 0]
    for unit in (1, 0, 2):
        manager.finish_restore(unit)
        manager.check()
    assert manager.resident() == b"\1\1\1"


def test_free_blocks_go_lowest_first_so_that_high_units_drain():
    manager = build()
    admitted(manager, "a", 4)
    admitted(manager, "b", 6, 100)
    manager.release("a")
    manager.take_table_writes()
    admitted(manager, "c", 2, 200)
    assert sorted(table(manager).values()) == [0, 1]
    manager.release("b")
    admitted(manager, "d", 2, 300)
    assert states(manager) == ["FREE", "FREE", "FREE"]


def test_a_restoring_unit_is_lent_again_and_its_restore_cancelled():
    manager = build()
    admitted(manager, "a", 6)
    manager.release("a")
    manager.begin_restore(0)
    assert manager.num_available == 10
    admitted(manager, "b", 5)
    assert states(manager)[0] == "AVAIL"
    assert manager.region.num_cancels == 1
    with pytest.raises(InternalError, match="finish_restore is not allowed"):
        manager.finish_restore(0)  # the copy that came too late
    manager.release("b")
    with pytest.raises(InternalError, match="take_cancelled"):
        manager.begin_restore(0)  # the old copy may still run
    manager.check()
    assert manager.take_cancelled() == (0,)
    assert manager.take_cancelled() == ()
    manager.begin_restore(0)
    manager.finish_restore(0)
    manager.check()
    assert (manager.region.num_lends, manager.region.num_restores, manager.region.num_cancels) == (2, 1, 1)
    assert manager.take_cancelled() == ()


def test_a_unit_of_two_entries_takes_both_and_gives_them_back_together():
    manager = build(spans=((40, 100), (0, 40), (0, 0), (100, 130)))
    assert manager.resident() == b"\1\1\1\1"
    admitted(manager, "a", 5)
    assert manager.resident() == b"\0\0\1\1"
    admitted(manager, "b", 2, 100)
    assert manager.resident() == b"\0\0\1\0"
    manager.release("b")
    manager.begin_restore(1)
    assert [manager.region.entry_state(entry) for entry in range(4)] == ["STALE", "STALE", "RESIDENT", "RESTORING"]
    manager.finish_restore(1)
    assert manager.resident() == b"\0\0\1\1"
    manager.release("a")
    manager.begin_restore(0)
    manager.finish_restore(0)
    assert manager.resident() == b"\1\1\1\1"
    manager.check()


def test_bytes_by_owner():
    manager = build()
    computed(manager, "a", 3)
    admitted(manager, "b", 5, 100)
    manager.release("a")
    assert manager.usage().bytes == ByteUsage(
        base_free=0, base_cached=96, base_held=32, lent_free=0, lent_cached=0, lent_held=128, backed=64, restoring=0
    )
    manager.release("b")
    computed(manager, "c", 7, 200)  # two blocks of unit 0 and the free base block, then unit 1, then the cached ones
    manager.release("c", reuse=False)
    manager.begin_restore(1)
    usage = manager.usage()
    assert (usage.bytes.lent, usage.bytes.backed, usage.bytes.restoring) == (64, 64, 64)
    assert (usage.num_open, usage.num_blocks) == (6, 10)
    manager.check()


def test_compaction_empties_a_unit_and_keeps_tables_holders_and_index():
    manager = build()
    admitted(manager, "low", 4, 500)
    computed(manager, "a", 3)  # blocks 4 and 5 of unit 0, block 6 of unit 1
    admitted(manager, "b", 2)  # shares block 4, takes block 7
    assert states(manager) == ["FULL", "FULL", "BACKED"]
    before = table(manager)
    manager.release("low")
    assert manager.compact(0, limit=1) == []
    assert manager.compact(0, limit=2) == [(4, 0), (5, 1)]
    manager.check()
    assert states(manager) == ["FREE", "FULL", "BACKED"]
    assert table(manager) == {(1, 0): 0, (1, 1): 1, (2, 0): 0}
    assert (before[1, 0], before[2, 0]) == (4, 4)
    assert manager.compact(1, limit=8) == [(6, 2), (7, 3)]
    manager.check()
    assert (manager.region.next_to_restore(), states(manager)) == (1, ["FREE", "FREE", "BACKED"])
    assert admitted(manager, "c", 4).reused_tokens == 3 * BLOCK
    for name in ("a", "b", "c"):
        manager.release(name)
        manager.check()


def test_compaction_evicts_cached_blocks_below_or_does_nothing():
    manager = build()
    computed(manager, "low", 3, 500)
    admitted(manager, "a", 3)
    manager.release("low")
    assert states(manager) == ["FULL", "BACKED", "BACKED"]
    assert manager.compact(0, limit=2) == [(4, 2), (5, 1)]  # the deepest cached block first
    manager.check()
    assert admitted(manager, "b", 3, 500).reused_tokens == BLOCK
    assert manager.compact(0, limit=2) == []  # all base blocks are held
    assert manager.compact(2, limit=2) == []  # a closed unit holds none
    manager.check()


def test_a_moved_request_goes_on_growing_and_registering():
    manager = build()
    admitted(manager, "low", 4, 500)
    computed(manager, "a", 1)
    manager.release("low")
    assert manager.compact(0, limit=2) == [(4, 0)]
    assert manager.grow("a", 2 * BLOCK)
    manager.register("a", tokens(2), 2 * BLOCK)
    manager.check()
    assert admitted(manager, "b", 3).reused_tokens == 2 * BLOCK


def test_without_a_region_nothing_is_lent_and_its_calls_are_refused():
    manager = MemoryManager(4, BLOCK, 4, 8)
    assert (manager.resident(), manager.take_cancelled(), manager.usage().bytes) == (b"", (), None)
    assert (manager.open_blocks, manager.num_available) == (4, 4)
    for call in (lambda: manager.begin_restore(0), lambda: manager.finish_restore(0), lambda: manager.compact(0, 1)):
        with pytest.raises(InternalError, match="there is no shared region"):
            call()


def test_the_number_of_blocks_must_be_the_layouts():
    region = SharedRegion(UnitLayout(64, 2, 4, ((0, 64),)))
    with pytest.raises(InvalidRequestError, match="num_blocks=4 must be the 6 of the region's layout"):
        MemoryManager(4, BLOCK, 4, 8, region=region)
