"""The pool of blocks: order of handing out, ranges that open and close, blocks that move."""

from __future__ import annotations

import random

import pytest

from depthfx.alloc.blocks import BlockPool
from depthfx.errors import InternalError


def check(pool: BlockPool, *held: int) -> None:
    """Compares the pool with the blocks that are held, each by one holder."""
    pool.check([int(block in held) for block in range(pool.num_blocks)])


def cache(pool: BlockPool, *tokens: int) -> list[int]:
    """Takes, publishes and drops one block for each token, each the head of a chain of its own."""
    blocks = [pool.take() for _ in tokens]
    for block, token in zip(blocks, tokens):
        pool.publish(block, b"", (token,))
    for block in blocks:
        pool.drop(block)
    return blocks


def test_the_lowest_free_block_goes_first():
    pool = BlockPool(6)
    assert [pool.take() for _ in range(6)] == [0, 1, 2, 3, 4, 5]
    for block in (4, 1, 5, 2):
        pool.drop(block)
    assert [pool.take() for _ in range(4)] == [1, 2, 4, 5]
    check(pool, *range(6))


@pytest.mark.parametrize("seed", range(20))
def test_blocks_taken_together_are_those_taken_one_by_one(seed):
    """Over free, cached, closed and opened blocks, own ones (0 to 5) and others."""
    draw, pools = random.Random(seed), (BlockPool(14, 6), BlockPool(14, 6))
    held: list[int] = []
    end = 6  # of what is open
    for turn in range(60):
        if (way := draw.randrange(4)) == 0 and end < 14:
            end += 4
            opened = range(end - 4, end)
            for pool in pools:
                pool.open(opened)
        elif way == 1 and end > 6 and not any(block >= end - 4 for block in held):
            end -= 4
            for pool in pools:
                pool.close(range(end, end + 4))
        elif way == 2 and held:
            block = held.pop(draw.randrange(len(held)))
            for pool in pools:
                if turn % 3:
                    pool.publish(block, b"", (turn,))
                pool.drop(block)
        elif left := draw.randrange(pools[0].num_available + 1):
            one_by_one = [pools[0].take() for _ in range(left)]
            together: list[int] = []
            while len(together) < left:
                together += (some := pools[1].take_some(left - len(together)))
                assert some == sorted(some)
            assert together == one_by_one
            held += together
        for pool in pools:
            check(pool, *held)


def test_closed_blocks_are_handed_out_after_they_are_opened():
    pool = BlockPool(6, num_open=2)
    assert (pool.num_available, pool.num_open, pool.num_held) == (2, 2, 0)
    pool.take()
    pool.take()
    with pytest.raises(InternalError, match="no KV block is available"):
        pool.take()
    pool.open(range(2, 4))
    assert (pool.num_available, pool.num_open, pool.num_held) == (2, 4, 2)
    assert pool.take() == 2
    check(pool, 0, 1, 2)


def test_a_range_closes_and_opens_again_any_number_of_times():
    pool = BlockPool(4)
    for _ in range(50):
        pool.close(range(2, 4))
        check(pool)
        assert (pool.num_free, pool.num_available) == (2, 2)
        pool.open(range(2, 4))
        check(pool)
    assert len(pool._free) == 4  # closing leaves nothing behind
    pool.close(range(2, 4))
    assert [pool.take(), pool.take()] == [0, 1]
    assert pool.num_available == 0
    with pytest.raises(InternalError):
        pool.take()  # passes the entries that closing left
    check(pool, 0, 1)
    pool.open(range(2, 4))
    assert [pool.take(), pool.take()] == [2, 3]
    check(pool, 0, 1, 2, 3)


def test_closing_forgets_cached_blocks():
    pool = BlockPool(4)
    assert cache(pool, 1, 2, 3, 4) == [0, 1, 2, 3]
    pool.close(range(2, 4))
    check(pool)
    assert (pool.num_cached, pool.num_free) == (2, 0)
    assert pool.find(b"", (3,)) is None
    assert pool.find(b"", (2,)) == 1
    pool.open(range(2, 4))
    check(pool)
    assert (pool.num_cached, pool.num_free) == (2, 2)


def test_a_range_with_a_held_block_is_not_closed():
    pool = BlockPool(4)
    held = [pool.take() for _ in range(3)]
    pool.drop(0)
    pool.drop(1)
    with pytest.raises(InternalError, match="KV block 2 is closed, but it is held"):
        pool.close(range(4))
    check(pool, held[2])
    assert pool.num_available == 3
    pool.close(range(2))
    with pytest.raises(InternalError, match="KV block 1 is closed, but it is closed already"):
        pool.close(range(1, 2))
    with pytest.raises(InternalError, match="KV blocks 1 to 2 are opened, but not all of them are closed"):
        pool.open(range(1, 3))
    check(pool, 2)


def test_relocate_moves_holders_key_and_chain():
    pool = BlockPool(6)
    blocks = [pool.take() for _ in range(6)]
    pool.publish(4, b"", (7,))
    pool.share(4)
    pool.publish(5, pool.chain(4), (8,))
    chain = pool.chain(4)
    for block in blocks[1:3]:
        pool.drop(block)
    assert pool.relocate([4], 4) == [(4, 1)]
    pool.check([1, 2, 0, 1, 0, 1])
    assert pool.find(b"", (7,)) == 1
    assert pool.chain(1) == chain
    assert pool.find(chain, (8,)) == 5
    assert pool.take() == 2
    assert pool.take() == 4


def test_relocate_takes_free_blocks_then_the_oldest_cached_or_changes_nothing():
    pool = BlockPool(6)
    assert cache(pool, 1, 2) == [0, 1]
    held = [pool.take() for _ in range(4)]
    assert held == [2, 3, 4, 5]
    pool.drop(2)
    assert pool.relocate([4, 5], 2) == [(4, 0), (5, 1)]
    check(pool, 0, 1, 3)
    assert pool.find(b"", (1,)) is None
    assert pool.relocate([3], 0) == []
    assert pool.relocate([3, 1], 3) == []  # one free block below, no cached one
    check(pool, 0, 1, 3)
    assert [pool.take() for _ in range(3)] == [2, 4, 5]


def test_relocate_leaves_cached_blocks_above_alone():
    pool = BlockPool(4)
    held = [pool.take() for _ in range(3)]
    assert cache(pool, 1) == [3]
    assert pool.relocate([2], 2) == []
    check(pool, *held)
    assert pool.find(b"", (1,)) == 3


def _closed_and_free(pool: BlockPool) -> None:
    pool._num_stale = 0


def _open_and_stale(pool: BlockPool) -> None:
    pool._num_stale += 1


def _listed_unseen(pool: BlockPool) -> None:
    pool._listed[3] = 0


def _listed_twice(pool: BlockPool) -> None:
    pool._listed[0] = 1


def _no_heap(pool: BlockPool) -> None:
    pool._free.reverse()


def _miscounted(pool: BlockPool) -> None:
    pool.num_open += 1


def _opened_alone(pool: BlockPool) -> None:
    pool._closed[3] = 0


def _closed_alone(pool: BlockPool) -> None:
    pool._closed[0] = 1
    pool.num_open -= 1


@pytest.mark.parametrize(
    "damage",
    [_closed_and_free, _open_and_stale, _listed_unseen, _listed_twice, _no_heap, _miscounted, _opened_alone, _closed_alone],
    ids=lambda f: f.__name__,
)
def test_check_finds_each_kind_of_damage(damage):
    pool = BlockPool(4)
    assert pool.take() == 0
    pool.close(range(2, 4))
    check(pool, 0)
    damage(pool)
    with pytest.raises(InternalError):
        check(pool, 0)
