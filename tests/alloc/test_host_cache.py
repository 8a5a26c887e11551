"""Rules of the host cache, one by one: what is saved, what is reloaded, and when a slot or a block may be used again."""

from __future__ import annotations

import pytest

from depthfx.alloc.host_cache import HostCache
from depthfx.alloc.manager import Admission, MemoryManager
from depthfx.alloc.units import SharedRegion, UnitLayout
from depthfx.errors import InternalError, InvalidRequestError


def build(num_blocks: int = 4, num_slots: int = 8, max_moves: int = 100, columns: int = 8) -> MemoryManager:
    return MemoryManager(num_blocks, 4, 4, columns, host=HostCache(num_slots, num_blocks, max_moves))


def tokens(num: int, first: int = 0) -> list[int]:
    return list(range(first, first + num))


def served(manager: MemoryManager, name: str, token_ids: list[int], salt: bytes = b"") -> tuple[Admission, tuple]:
    """A request that is admitted, computed in one step, and ends; also the moves of the step."""
    place = manager.admit(name, token_ids, salt)
    assert place is not None
    moves = manager.take_moves()
    manager.moves_done()
    manager.register(name, token_ids, len(token_ids))
    manager.release(name)
    manager.check()
    return place, moves


def test_what_is_evicted_is_saved_and_comes_back():
    manager = build()
    assert served(manager, "a", tokens(16)) == (Admission(0, 0), ((), ()))
    # blocks 3, 2, 1 are evicted for the other request, the deepest first
    assert served(manager, "b", tokens(12, 50)) == (Admission(0, 0), (((1, 0), (2, 1), (3, 2)), ()))
    place, (saves, loads) = served(manager, "c", tokens(16))  # block 0 is still on the device; one block is left to compute
    assert place == Admission(0, 4, 8)
    assert sorted(slot for slot, _ in loads) == [0, 1]
    assert len(saves) == 3  # of b
    host = manager.host
    assert (host.num_saved, host.num_reloaded, host.num_dropped) == (6, 2, 0)


def test_reloaded_blocks_are_shared_once_the_step_is_done():
    manager = build(num_blocks=8)
    served(manager, "a", tokens(9))
    served(manager, "b", tokens(32, 50))
    manager.admit("c", tokens(9))
    manager.take_moves()
    assert manager.admit("early", tokens(9)) == Admission(1, 0, 8)  # loads them again: the first step may fail
    manager.release("early")
    manager.moves_done()
    manager.take_moves()
    assert manager.admit("late", tokens(9)) == Admission(1, 8)
    manager.check()


def test_two_loads_of_one_content_end_up_as_one_block():
    manager = build(num_blocks=8)
    served(manager, "a", tokens(9))
    served(manager, "b", tokens(32, 50))
    assert manager.admit("c", tokens(9)).reloaded_tokens == manager.admit("d", tokens(9)).reloaded_tokens == 8
    manager.take_moves()
    manager.moves_done()
    manager.check()
    assert manager.usage().num_held == 4  # two shared ones, and one for the last token of each


def test_saves_count_only_when_their_step_is_done():
    manager = build()
    served(manager, "a", tokens(9))
    assert manager.admit("b", tokens(16, 50)) is not None
    manager.release("b")
    assert len(manager.take_moves()[0]) == 2
    assert manager.admit("c", tokens(9)) == Admission(0, 0)
    manager.release("c")
    manager.take_moves()
    manager.moves_done()
    assert manager.admit("d", tokens(9)) == Admission(0, 0, 8)
    manager.check()


def test_a_failed_step_is_forgotten():
    manager = build()
    served(manager, "a", tokens(9))
    manager.admit("b", tokens(16, 50))
    manager.take_moves()
    manager.release("b")
    manager.moves_failed()
    manager.check()
    assert manager.host.num_findable == 0
    assert manager.admit("c", tokens(9)) == Admission(0, 0)


def test_loads_of_a_failed_step_are_found_by_nobody():
    manager = build()
    served(manager, "a", tokens(9))
    served(manager, "b", tokens(16, 50))
    assert manager.admit("c", tokens(9)).reloaded_tokens == 8
    manager.take_moves()
    manager.release("c")
    manager.moves_failed()
    assert manager.admit("d", tokens(9)) == Admission(0, 0, 8)  # from the host again, not from the blocks of c
    manager.check()


def test_content_is_found_only_after_its_own_chain_and_salt():
    manager = build()
    served(manager, "a", tokens(4) + tokens(4, 90) + [1])
    served(manager, "b", tokens(16, 50))
    assert manager.admit("c", tokens(4, 90) + tokens(5)) == Admission(0, 0)
    manager.release("c")
    assert manager.admit("d", tokens(4) + tokens(5, 90), salt=b"fast") == Admission(0, 0)
    manager.release("d")
    assert manager.admit("e", tokens(4) + tokens(5, 90)) == Admission(0, 0, 8)


def test_the_least_recently_used_slot_goes_first():
    manager = build(num_blocks=2, num_slots=3)
    for first in (0, 100, 200, 300):  # each evicts the one before
        served(manager, f"first {first}", tokens(5, first))
    assert manager.host.num_findable == 3  # 0, 100, 200
    assert served(manager, "again", tokens(5))[0].reloaded_tokens == 4  # uses 0, and saves 300 over 100
    found = {}
    for first in (0, 100, 200, 300):
        manager.take_moves()
        manager.moves_done()
        found[first] = len(manager.host.match(tokens(5, first), b"", [], 4).slots)
    assert found == {0: 1, 100: 0, 200: 1, 300: 1}


def test_content_that_the_host_has_is_not_saved_again():
    manager = build(num_blocks=2)
    for _ in range(3):
        served(manager, "a", tokens(5))
        served(manager, "b", tokens(5, 50))
    assert manager.host.num_saved == 2
    assert manager.host.num_reloaded == 4


def test_a_slot_is_not_saved_to_in_the_plan_that_loads_from_it():
    manager = build(num_blocks=2, num_slots=1)
    served(manager, "a", tokens(5))
    served(manager, "b", tokens(5, 50))
    place, (saves, loads) = served(manager, "c", tokens(5))
    assert place.reloaded_tokens == 4 and len(loads) == 1
    assert saves == () and manager.host.num_dropped == 1


def test_forgotten_content_does_not_come_back():
    manager = build()
    served(manager, "a", tokens(9))
    manager.admit("b", tokens(16, 50))
    manager.take_moves()  # saves on their way
    manager.forget_content()
    manager.moves_done()
    manager.register("b", tokens(16, 50), 16)
    manager.release("b")
    manager.check()
    assert manager.host.num_findable == 0
    assert manager.admit("c", tokens(9)) == Admission(0, 0)


def test_content_that_met_nan_does_not_come_back():
    manager = build(num_blocks=8)
    served(manager, "a", tokens(9))
    served(manager, "b", tokens(32, 50))
    place = manager.admit("c", tokens(9))
    assert place.reloaded_tokens == 8
    manager.take_moves()
    manager.moves_done()
    manager.release("c", reuse=False)
    manager.check()
    assert manager.admit("d", tokens(9)) == Admission(0, 0)


def test_a_shared_block_is_saved_again_after_all_was_forgotten():
    """One request with NaN must not keep a prompt that everybody shares off the host for ever."""
    manager = build(num_blocks=8)
    served(manager, "shared", tokens(9))
    manager.admit("nan", tokens(5, 80))
    manager.release("nan", reuse=False)
    assert served(manager, "user", tokens(9))[0] == Admission(0, 8)
    served(manager, "evicts", tokens(32, 50))
    assert served(manager, "user", tokens(9))[0] == Admission(0, 0, 8)


def test_admissions_beyond_the_limit_wait_for_the_next_plan():
    manager = build(num_blocks=16, max_moves=3)
    served(manager, "a", tokens(9))
    served(manager, "b", tokens(9, 20))
    served(manager, "evicts", tokens(32, 50))
    served(manager, "evicts too", tokens(32, 90))
    assert manager.host.num_saved >= 4
    assert manager.admit("a", tokens(9)).reloaded_tokens == 8
    releases = manager.num_releases
    assert manager.admit("b", tokens(9, 20)) is None
    manager.check()
    manager.take_moves()
    assert manager.num_releases > releases  # the scheduler tries again
    assert manager.admit("b", tokens(9, 20)).reloaded_tokens == 8
    manager.check()


def test_one_admission_may_go_beyond_the_limit():
    manager = build(num_blocks=8, max_moves=1)
    served(manager, "a", tokens(17))
    served(manager, "evicts", tokens(32, 50))
    assert manager.admit("a", tokens(17)).reloaded_tokens == 16


def shared_manager() -> MemoryManager:
    layout = UnitLayout(unit_bytes=32, blocks_per_unit=2, num_base_blocks=2, spans=((0, 64),))
    return MemoryManager(layout.num_blocks, 4, 4, 8, region=SharedRegion(layout), host=HostCache(8, layout.num_blocks, 100))


def test_units_that_are_given_back_are_not_saved_from():
    manager = shared_manager()
    served(manager, "a", tokens(16))  # lends unit 0
    manager.admit("b", tokens(16, 50))  # evicts all of a
    manager.release("b")
    manager.begin_restore(0)  # before the plan: residual bytes overwrite blocks 2 and 3
    saves, _ = manager.take_moves()
    assert [block for block, _ in saves] == [0, 1]
    manager.moves_done()
    manager.check()


def with_content(num_slots: int, *firsts: int) -> HostCache:
    """A host cache that was given one block of four tokens for each of ``firsts``, oldest first; block i held the one with number i."""
    host = HostCache(num_slots, 8, 100)
    for block, first in enumerate(firsts):
        host.computed(block, None, b"", tokens(4, first))
        save(host, block)
    return host


def save(host: HostCache, *blocks: int) -> tuple:
    for block in blocks:
        host.evicted(block)
    moves = host.take_moves(lambda name: [7])
    host.landed()
    host.check(lambda name: [])
    return moves


def found(host: HostCache, *firsts: int) -> list[int]:
    return [len(host.match(tokens(5, first), b"", [], 4).slots) for first in firsts]


def test_loading_is_using():
    host = with_content(3, 0, 50, 90)
    host.load("r", host.match(tokens(5), b"", [], 4), [7])
    save(host)
    host.computed(3, None, b"", tokens(4, 200))
    save(host, 3)
    assert found(host, 0, 50, 90, 200) == [1, 0, 1, 1]


def test_being_evicted_again_is_using():
    host = with_content(3, 0, 50, 90)
    assert save(host, 0) == ((), ())
    host.computed(3, None, b"", tokens(4, 200))
    save(host, 3)
    assert found(host, 0, 50, 90, 200) == [1, 0, 1, 1]


def test_where_slots_are_few_the_last_that_was_evicted_is_kept():
    host = HostCache(1, 8, 100)
    host.computed(0, None, b"", tokens(4))
    host.computed(1, 0, b"", tokens(4, 50))
    assert save(host, 1, 0) == (((0, 0),), ())
    assert found(host, 0) == [1]


def test_a_planned_load_keeps_its_slot_though_all_is_forgotten():
    host = with_content(1, 0)
    host.load("r", host.match(tokens(5), b"", [], 4), [7])
    host.clear()
    host.computed(1, None, b"", tokens(4, 50))
    assert save(host, 1) == ((), ((0, 7),))


def test_what_a_block_holds_is_forgotten_too():
    host = HostCache(4, 8, 100)
    host.computed(0, None, b"", tokens(4))
    host.clear()
    assert save(host, 0) == ((), ())


def test_loads_on_their_way_are_not_shared_after_all_was_forgotten():
    manager = build()
    served(manager, "a", tokens(9))
    served(manager, "b", tokens(16, 50))
    assert manager.admit("c", tokens(9)).reloaded_tokens == 8
    manager.take_moves()
    manager.forget_content()
    manager.moves_done()
    manager.release("c")
    assert manager.admit("d", tokens(9)) == Admission(0, 0)
    manager.check()


def test_what_was_moved_over_is_not_saved():
    host = HostCache(4, 8, 100)
    for block, first in ((0, 0), (1, 50), (2, 90)):
        host.computed(block, None, b"", tokens(4, first))
    host.evicted(0)
    host.evicted(1)
    host.moved([(2, 0)])  # as compaction does, before the next step
    assert save(host) == (((1, 0),), ())
    save(host, 0)  # now what block 2 held
    assert found(host, 0, 50, 90) == [0, 1, 1]


def test_compaction_keeps_the_host_cache_right():
    manager = shared_manager()
    manager.admit("base", tokens(8))
    manager.admit("lent", tokens(8, 70))
    manager.take_moves()
    manager.moves_done()
    manager.register("lent", tokens(8, 70), 8)
    manager.release("base")
    assert manager.compact(0, 2) == [(2, 0), (3, 1)]
    manager.release("lent")
    manager.check()
    served(manager, "evicts", tokens(24, 100))
    assert manager.admit("again", tokens(9, 70)).reloaded_tokens == 8
    manager.check()


@pytest.mark.parametrize("bad", [{"num_slots": 0}, {"num_blocks": -1}, {"max_moves": 0}], ids=lambda bad: next(iter(bad)))
def test_sizes_must_be_positive(bad):
    with pytest.raises(InvalidRequestError, match=f"{next(iter(bad))}=.*at least 1"):
        HostCache(**{"num_slots": 1, "num_blocks": 1, "max_moves": 1, **bad})


def test_moves_are_booked_once():
    manager = build()
    manager.take_moves()
    manager.moves_done()
    with pytest.raises(InternalError, match="no plan is outstanding"):
        manager.moves_done()


@pytest.mark.parametrize("damage", ["slot lost", "slot twice", "saved twice", "reload without blocks"])
def test_check_notices(damage):
    manager = build()
    served(manager, "a", tokens(9))
    served(manager, "b", tokens(16, 50))
    host = manager.host
    assert manager.admit("c", tokens(9)).reloaded_tokens == 8
    manager.check()
    if damage == "slot lost":
        host._free.pop()
    elif damage == "slot twice":
        host._free[-1] = next(iter(host._slots.values()))
    elif damage == "saved twice":
        host._saving.add(next(iter(host._slots)))
    else:
        manager._holders["c"].blocks[1:] = []
    with pytest.raises(InternalError):
        manager.check()
