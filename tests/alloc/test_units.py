"""Units of the shared region: layout, states, and every move from every state."""

from __future__ import annotations

import itertools

import pytest

from depthfx.alloc.units import MOVES, STATES, SharedRegion, UnitLayout
from depthfx.errors import InternalError, MemoryRequestError

# Entry 2 is lent first, entry 1 has no residual, unit 1 holds bytes of three entries, unit 2 is part empty.
LAYOUT = UnitLayout(unit_bytes=64, blocks_per_unit=2, num_base_blocks=3, spans=((96, 150), (0, 0), (0, 70), (70, 96)))


def test_layout_places_units_blocks_and_entries():
    assert (LAYOUT.num_units, LAYOUT.num_blocks, LAYOUT.block_bytes) == (3, 9, 32)
    assert [LAYOUT.unit_of(block) for block in range(9)] == [None, None, None, 0, 0, 1, 1, 2, 2]
    assert [LAYOUT.blocks_of(unit) for unit in range(3)] == [range(3, 5), range(5, 7), range(7, 9)]
    assert [LAYOUT.units_of(entry) for entry in range(4)] == [range(1, 3), range(0), range(2), range(1, 2)]
    assert [LAYOUT.entries_of(unit) for unit in range(3)] == [(2,), (0, 2, 3), (0,)]
    assert [LAYOUT.pieces_of(unit) for unit in range(3)] == [(0, 64), (64, 128), (128, 150)]


def test_a_gap_for_alignment_is_no_residual():
    layout = UnitLayout(64, 1, 0, ((0, 60), (72, 100)))
    assert layout.pieces_of(1) == (72, 100)
    assert layout.entries_of(1) == (1,)


def test_without_residuals_there_are_no_units():
    region = SharedRegion(UnitLayout(64, 2, 3, ((0, 0), (0, 0))))
    assert (region.layout.num_units, region.layout.num_blocks, region.num_lendable_blocks) == (0, 3, 0)
    assert (region.next_to_lend(), region.next_to_restore(), region.resident()) == (None, None, b"\1\1")
    region.check(lambda block: False)


@pytest.mark.parametrize(
    "values, text",
    [
        ((0, 1, 1, ()), "unit_bytes=0 must be at least 1"),
        ((64, 0, 1, ()), "blocks_per_unit=0 must be at least 1"),
        ((64, 2, -1, ()), "num_base_blocks=-1 must be at least 0"),
        ((64, 3, 1, ()), "unit_bytes=64 must be a multiple of blocks_per_unit=3"),
        ((64, 2, 1, ((0, 64), (60, 70))), r"span \(60, 70\) is empty or begins before byte 64"),
        ((64, 2, 1, ((5, 5),)), r"span \(5, 5\) is empty"),
        ((64, 2, 1, ((-8, 5),)), r"span \(-8, 5\)"),
        ((64, 2, 1, ((0, 64), (128, 140))), "unit 1 holds no residual bytes"),
    ],
)
def test_bad_layouts_are_named(values, text):
    with pytest.raises(MemoryRequestError, match=text):
        UnitLayout(*values)


@pytest.mark.parametrize(
    "call", [lambda: LAYOUT.unit_of(9), lambda: LAYOUT.blocks_of(3), lambda: LAYOUT.units_of(4), lambda: SharedRegion(LAYOUT).state(-1)]
)
def test_unknown_blocks_units_and_entries_are_named(call):
    with pytest.raises(InternalError, match="does not exist"):
        call()


def test_lend_opens_the_lowest_unit_and_its_entries_are_no_longer_resident():
    region = SharedRegion(LAYOUT)
    assert (region.num_lendable_blocks, region.next_to_lend()) == (6, 0)
    assert region.resident() == b"\1\1\1\1"
    assert region.lend() == (range(1), [])
    assert region.resident() == b"\1\1\0\1"
    assert region.lend() == (range(1, 2), [])
    assert region.resident() == b"\0\1\0\0"
    assert (region.num_lendable_blocks, region.next_to_lend(), region.num_open_units) == (2, 2, 2)
    region.lend()
    with pytest.raises(InternalError, match="3 of all 3 units are open"):
        region.lend()
    assert (region.num_lends, region.next_to_lend()) == (3, None)
    region.check(lambda block: False)


def test_units_are_restored_from_the_top_and_finish_in_any_order():
    region = SharedRegion(LAYOUT)
    assert region.next_to_restore() is None
    for _ in range(3):
        region.lend()
    with pytest.raises(InternalError, match="unit 0 cannot be restored before unit 2"):
        region.begin_restore(0)
    region.hold(7)
    assert region.next_to_restore() is None  # units 0 and 1 are free, but below one that is not
    region.unhold(7)
    for unit in (2, 1, 0):
        assert region.next_to_restore() == unit
        region.begin_restore(unit)
    assert region.next_to_restore() is None
    assert [region.entry_state(entry) for entry in range(4)] == ["RESTORING", "RESIDENT", "RESTORING", "RESTORING"]
    region.finish_restore(1)
    assert region.resident() == b"\0\1\0\1"  # entry 3 lies in unit 1 alone
    region.finish_restore(2)
    assert region.resident() == b"\1\1\0\1"
    region.finish_restore(0)
    assert region.resident() == b"\1\1\1\1"
    assert (region.num_lends, region.num_restores, region.num_cancels) == (3, 3, 0)
    region.check(lambda block: False)


def test_lending_cancels_a_restore_and_its_bytes_stay_gone():
    region = SharedRegion(LAYOUT)
    region.lend()
    region.begin_restore(0)
    assert region.lend() == (range(1), [0])
    assert region.resident() == b"\1\1\0\1"
    with pytest.raises(InternalError, match=r"unit 0 is FREE .* finish_restore is not allowed"):
        region.finish_restore(0)
    region.begin_restore(0)
    region.finish_restore(0)
    assert region.resident() == b"\1\1\1\1"
    assert (region.num_lends, region.num_restores, region.num_cancels) == (2, 1, 1)
    region.check(lambda block: False)


def test_states_of_entries_follow_their_units():
    region = SharedRegion(LAYOUT)
    region.lend()
    region.lend()
    assert [region.entry_state(entry) for entry in range(4)] == ["EVICTED", "RESIDENT", "EVICTED", "EVICTED"]
    region.hold(3)
    assert [region.entry_state(entry) for entry in range(4)] == ["EVICTED", "RESIDENT", "STALE", "EVICTED"]
    region.begin_restore(1)
    assert [region.entry_state(entry) for entry in range(4)] == ["RESTORING", "RESIDENT", "STALE", "RESTORING"]
    region.hold(4)
    assert region.state(0) == "FULL"
    assert region.num_held == 2
    region.check(lambda block: block in (3, 4))


def test_blocks_held_together_count_like_blocks_held_one_by_one():
    regions = SharedRegion(LAYOUT), SharedRegion(LAYOUT)
    last = LAYOUT.num_blocks - 1
    for region in regions:
        region.lend(LAYOUT.num_units)
        region.hold(LAYOUT.num_base_blocks)
    blocks = [0, *range(LAYOUT.num_base_blocks + 1, last)]
    regions[0].hold_all(blocks)
    for block in blocks:
        regions[1].hold(block)
    for region in regions:
        region.check(lambda block: LAYOUT.num_base_blocks <= block < last)
    units = range(LAYOUT.num_units)
    assert [regions[0].state(unit) for unit in units] == [regions[1].state(unit) for unit in units]
    with pytest.raises(InternalError):
        SharedRegion(LAYOUT).hold_all([0, LAYOUT.num_base_blocks])


def test_base_blocks_are_not_counted():
    region = SharedRegion(LAYOUT)
    region.hold(2)
    region.unhold(2)
    assert region.num_held == 0
    region.check(lambda block: block == 2)


def brought_to(state: str) -> SharedRegion:
    """A region of one unit in the given state."""
    region = SharedRegion(UnitLayout(64, 2, 1, ((0, 50),)))
    if state != "BACKED":
        region.lend()
    if state == "RESTORING":
        region.begin_restore(0)
    for block in range(1, 1 + {"AVAIL": 1, "FULL": 2}.get(state, 0)):
        region.hold(block)
    assert region.state(0) == state
    return region


ACTS = {
    "lend": lambda region: region.lend(),
    "begin_restore": lambda region: region.begin_restore(0),
    "finish_restore": lambda region: region.finish_restore(0),
    "hold": lambda region: region.hold(1),
    "unhold": lambda region: region.unhold(1),
}
ALLOWED = {
    ("lend", "BACKED"): "FREE",
    ("lend", "RESTORING"): "FREE",
    ("begin_restore", "FREE"): "RESTORING",
    ("finish_restore", "RESTORING"): "BACKED",
    ("hold", "FREE"): "AVAIL",
    ("hold", "AVAIL"): "FULL",
    ("unhold", "FULL"): "AVAIL",
    ("unhold", "AVAIL"): "FREE",
}


@pytest.mark.parametrize("move, state", list(itertools.product(MOVES, STATES)))
def test_every_move_from_every_state(move, state):
    region = brought_to(state)
    if (move, state) in ALLOWED:
        ACTS[move](region)
        assert region.state(0) == ALLOWED[move, state]
        return
    before = (list(region._held), region.resident(), region.num_lends, region.num_restores, region.num_cancels)
    with pytest.raises(InternalError):
        ACTS[move](region)
    assert region.state(0) == state
    assert (list(region._held), region.resident(), region.num_lends, region.num_restores, region.num_cancels) == before


def test_a_unit_of_one_block_is_free_or_full():
    region = SharedRegion(UnitLayout(64, 1, 0, ((0, 50),)))
    region.lend()
    region.hold(0)
    assert region.state(0) == "FULL"
    region.unhold(0)
    assert region.state(0) == "FREE"


def _miscount(region: SharedRegion) -> None:
    region._held[0] += 1


def _wrong_state(region: SharedRegion) -> None:
    region._states[0] = "FULL"


def _two_owners(region: SharedRegion) -> None:
    region._states[0] = "BACKED"


def _closed_below(region: SharedRegion) -> None:
    region._num_open += 1


def _forgotten_entry(region: SharedRegion) -> None:
    region._missing[2] = 0


def _old_resident(region: SharedRegion) -> None:
    region._resident = b"\1\1\1\1"


def _lost_restore(region: SharedRegion) -> None:
    region._states[1] = "BACKED"
    region._missing = [0, 0, 1, 0]
    region._resident = None


@pytest.mark.parametrize(
    "damage",
    [_miscount, _wrong_state, _two_owners, _closed_below, _forgotten_entry, _old_resident, _lost_restore],
    ids=lambda f: f.__name__,
)
def test_check_finds_each_kind_of_damage(damage):
    region = SharedRegion(LAYOUT)
    region.lend()
    region.lend()
    region.begin_restore(1)
    region.hold(3)
    region.resident()
    region.check(lambda block: block == 3)
    damage(region)
    with pytest.raises(InternalError):
        region.check(lambda block: block == 3)


def test_check_finds_a_held_block_of_a_closed_unit():
    with pytest.raises(InternalError, match="unit 2 counts 0 held KV blocks, but 1 are held"):
        SharedRegion(LAYOUT).check(lambda block: block == 7)
