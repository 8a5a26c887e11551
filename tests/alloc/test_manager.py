"""Rules of the memory manager, one by one."""

from __future__ import annotations

import pytest

from depthfx.alloc.blocks import BlockPool
from depthfx.alloc.manager import Admission, MemoryManager
from depthfx.errors import InternalError, InvalidRequestError


def build(num_blocks: int = 8, rows: int = 4, columns: int = 8, reuse: bool = True) -> MemoryManager:
    return MemoryManager(num_blocks, 4, rows, columns, reuse)


def computed(manager: MemoryManager, name: str, tokens: list[int], salt: bytes = b"") -> Admission:
    """Admits a request and counts all its tokens as computed."""
    place = manager.admit(name, tokens, salt)
    assert place is not None
    manager.register(name, tokens, len(tokens))
    manager.check()
    return place


def tokens(num: int, first: int = 0) -> list[int]:
    return list(range(first, first + num))


def test_admit_gives_a_row_and_blocks_for_the_whole_prompt():
    manager = build()
    assert manager.admit("a", tokens(9)) == Admission(0, 0)
    assert manager.take_table_writes() == ((0, 0, 0), (0, 1, 1), (0, 2, 2))
    assert manager.take_table_writes() == ()
    assert manager.usage().by_request == {"a": 3}
    assert manager.num_available == 5
    manager.check()


def test_a_failed_admission_changes_nothing():
    manager = build(num_blocks=4, rows=2)
    computed(manager, "a", tokens(8))
    manager.take_table_writes()
    before = manager.usage()
    assert manager.admit("b", tokens(8) + tokens(12, 50)) is None  # shares two blocks, needs three more, two are there
    assert manager.usage() == before
    assert manager.take_table_writes() == ()
    manager.check()
    assert manager.admit("b", tokens(8) + tokens(8, 50)) == Admission(1, 8)
    assert manager.admit("c", [1]) is None  # no block
    manager.release("b")
    assert manager.admit("c", [1], headroom=2) is None
    assert manager.admit("c", [1], headroom=1) is not None
    assert manager.admit("d", [1]) is None  # no row
    manager.check()


def test_cached_blocks_that_are_reused_do_not_count_as_available_too():
    manager = build(num_blocks=3)
    computed(manager, "a", tokens(8))
    manager.release("a")
    assert manager.admit("b", tokens(16)) is None  # two revived, two new, but only one is left
    assert manager.admit("b", tokens(12)) == Admission(0, 8)
    manager.check()


def test_one_token_is_always_left_to_compute():
    manager = build()
    computed(manager, "a", tokens(8))
    assert manager.admit("b", tokens(8)).reused_tokens == 4
    assert manager.admit("c", tokens(9)).reused_tokens == 8
    manager.check()


def test_only_computed_blocks_are_found():
    manager = build()
    manager.admit("a", tokens(12))
    assert manager.admit("b", tokens(12)).reused_tokens == 0
    manager.release("b")
    manager.register("a", tokens(12), 7)
    assert manager.admit("b", tokens(12)).reused_tokens == 4
    manager.check()


def test_a_block_is_found_only_after_its_own_chain_and_salt():
    manager = build(num_blocks=16)
    computed(manager, "a", tokens(4) + tokens(4, 90))
    assert manager.admit("b", tokens(4, 90) + tokens(4)).reused_tokens == 0
    assert manager.admit("c", tokens(4) + tokens(5, 90), salt=b"fast").reused_tokens == 0
    assert manager.admit("d", tokens(4) + tokens(5, 90)).reused_tokens == 8


def test_forgotten_content_is_found_no_more_and_not_continued():
    manager = build(num_blocks=16)
    computed(manager, "ended", tokens(8))
    manager.release("ended")
    manager.admit("running", tokens(12, 50))
    manager.register("running", tokens(12, 50), 6)
    manager.forget_content()
    manager.check()
    assert manager.usage().num_cached == 0
    manager.register("running", tokens(12, 50), 12)
    assert manager.admit("a", tokens(8)).reused_tokens == 0
    assert manager.admit("b", tokens(12, 50)).reused_tokens == 0
    manager.register("a", tokens(8), 8)
    assert manager.admit("c", tokens(8)).reused_tokens == 4
    manager.check()
    for name in ("running", "a", "b", "c"):
        manager.release(name)
        manager.check()


def test_equal_hashes_do_not_match():
    collision = 2**61 - 1
    assert hash(collision) == hash(0)
    assert hash((collision,) * 4) == hash((0,) * 4)
    manager = build()
    computed(manager, "a", [0] * 8)
    assert manager.admit("b", [collision] * 8).reused_tokens == 0


def test_prefix_reuse_can_be_off():
    manager = build(reuse=False)
    computed(manager, "a", tokens(8))
    assert manager.admit("b", tokens(8)).reused_tokens == 0
    manager.release("a")
    assert manager.usage().num_cached == 0
    manager.check()


def test_equal_prefixes_computed_at_the_same_time_end_up_shared():
    manager = build()
    for name in ("a", "b"):
        manager.admit(name, tokens(9))
    manager.take_table_writes()
    manager.register("a", tokens(9), 9)
    assert manager.take_table_writes() == ()
    manager.register("b", tokens(9), 9)
    assert manager.take_table_writes() == ((1, 0, 0), (1, 1, 1))
    assert manager.usage().num_held == 4
    manager.check()
    manager.release("a")
    manager.check()
    assert manager.admit("c", tokens(9)).reused_tokens == 8


def test_reclaim_takes_the_oldest_and_the_deepest_block_first():
    manager = build(num_blocks=6)
    computed(manager, "old", tokens(12))
    computed(manager, "young", tokens(8, 50))
    manager.release("old")
    manager.release("young")
    assert (manager.usage().num_cached, manager.usage().num_free) == (5, 1)
    manager.admit("x", tokens(8, 100))  # the free block, then the deepest of the oldest chain
    manager.check()
    manager.release("x")
    assert manager.admit("y", tokens(13)).reused_tokens == 8
    manager.release("y")
    assert manager.admit("z", tokens(9, 50)).reused_tokens == 8
    manager.check()


def test_use_renews_a_chain():
    manager = build(num_blocks=4)
    computed(manager, "a", tokens(8))
    computed(manager, "b", tokens(8, 50))
    for name in ("a", "b"):
        manager.release(name)
    manager.admit("c", tokens(8))  # takes one block of a's chain, and reclaims a's second one
    manager.release("c")
    manager.check()
    manager.admit("d", tokens(8, 100))
    assert manager.admit("e", tokens(5)).reused_tokens == 4
    manager.check()


def test_grow_is_all_or_nothing():
    manager = build(num_blocks=4)
    manager.admit("a", tokens(4))
    assert manager.grow("a", 4)
    assert manager.grow("a", 5)
    before = manager.usage()
    assert not manager.grow("a", 17)
    assert manager.usage() == before
    assert manager.grow("a", 16)
    manager.check()
    with pytest.raises(InternalError, match="a table row ends at 16"):
        manager.grow("a", 33)  # more than the eight columns of its row


def test_release_returns_the_blocks_that_nobody_holds():
    manager = build()
    computed(manager, "a", tokens(9))
    manager.admit("b", tokens(9))
    assert manager.release("a") == (2,)
    assert sorted(manager.release("b")) == [0, 1, 3]
    assert manager.usage().num_held == 0
    manager.check()


def test_content_can_be_dropped_at_release():
    manager = build()
    computed(manager, "a", tokens(9))
    computed(manager, "b", tokens(9) + tokens(8, 60))
    manager.release("a", reuse=False)
    manager.check()
    assert manager.admit("c", tokens(9)).reused_tokens == 0
    manager.register("c", tokens(9), 9)
    manager.release("b")
    manager.check()
    assert manager.admit("d", tokens(9)).reused_tokens == 8
    manager.check()


def test_what_can_ever_fit():
    manager = build(num_blocks=8, columns=4)
    assert manager.can_ever_fit(16)
    assert not manager.can_ever_fit(17)
    assert manager.admit("a", tokens(17)) is None
    assert build(num_blocks=2).max_request_tokens == 8


def test_tables_can_be_sent_again():
    manager = build()
    manager.admit("a", tokens(8))
    first = manager.take_table_writes()
    manager.resend_tables()
    assert manager.take_table_writes() == first


def test_wrong_use_is_named():
    manager = build()
    manager.admit("a", [1])
    with pytest.raises(InternalError, match="'a' is admitted twice"):
        manager.admit("a", [1])
    for call in (manager.release, lambda name: manager.grow(name, 1), lambda name: manager.register(name, [1], 1)):
        with pytest.raises(InternalError, match="'b' holds no KV blocks"):
            call("b")
    with pytest.raises(InvalidRequestError, match="num_blocks=0"):
        MemoryManager(0, 4, 4, 4)
    pool = BlockPool(1)
    block = pool.take()
    for act in (pool.take, lambda: pool.chain(block), lambda: (pool.drop(block), pool.drop(block)), lambda: pool.share(block)):
        with pytest.raises(InternalError):
            act()


def _lose_block(m: MemoryManager) -> None:
    m._pool._free.pop()


def _own_twice(m: MemoryManager) -> None:
    m._pool._free.append(m._holders["a"].blocks[0])


def _free_twice(m: MemoryManager) -> None:
    m._pool._free.append(m._pool._free[-1])


def _miscount(m: MemoryManager) -> None:
    m._pool._holders[m._holders["a"].blocks[0]] += 1


def _wrong_table(m: MemoryManager) -> None:
    m._sent[0][0] = 7


def _lose_row(m: MemoryManager) -> None:
    m._free_rows.pop()


def _lose_index(m: MemoryManager) -> None:
    m._pool._index.popitem()


def _swap_blocks(m: MemoryManager) -> None:
    blocks = m._holders["a"].blocks
    blocks[0], blocks[1] = blocks[1], blocks[0]


def _turn_cache(m: MemoryManager) -> None:
    m.release("a")
    m._pool._cached.move_to_end(next(iter(m._pool._cached)))


@pytest.mark.parametrize(
    "damage",
    [_lose_block, _own_twice, _free_twice, _miscount, _wrong_table, _lose_row, _lose_index, _swap_blocks, _turn_cache],
    ids=lambda f: f.__name__,
)
def test_check_finds_each_kind_of_damage(damage):
    manager = build()
    computed(manager, "a", tokens(9))
    manager.take_table_writes()
    manager.check()
    damage(manager)
    with pytest.raises(InternalError):
        manager.check()
