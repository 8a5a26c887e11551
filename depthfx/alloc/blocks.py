"""Pool of KV blocks: free blocks, holders counted per block, and the index that finds a block by its content."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from depthfx.errors import InternalError

# What a full block is found by: the chain it continues (a salt for the first block of a chain, else the number of the
# parent's chain) and its own tokens. A dict compares keys by value, so two different contents never match, whatever
# their hashes are.
ChainKey = tuple[int | bytes, tuple[int, ...]]


class BlockPool:
    """Every block is exactly one of: free, cached (free, but still findable), held by one or more requests, or closed.

    Operations on one block take constant time, or logarithmic time in the number of free blocks. Blocks that nobody holds are
    handed out in this order: plain free ones, the lowest first, then the cached block that was given up first. Blocks from
    ``num_open`` on are closed at first (None: no block is): they exist, but cannot be handed out until they are opened. ``on_evict`` is told
    each cached block that :meth:`take` hands out, while its content is still there. As long as blocks from ``num_open`` on are open, the
    cached blocks below go before them, and of those above the lowest goes first, so that lent memory empties and can be given back.
    """

    def __init__(self, num_blocks: int, num_open: int | None = None, on_evict: Callable[[int], None] | None = None) -> None:
        self.num_blocks = num_blocks
        self.num_open = num_blocks if num_open is None else num_open
        self._free = list(range(self.num_open))  # a heap of free blocks, and of stale ones
        self._listed = bytearray(b"\1") * self.num_open + bytearray(num_blocks - self.num_open)  # 1: stands in the heap
        self._num_stale = 0  # closed while free: they leave the heap when they come to its top, unless they are opened before
        self._closed = bytearray(self.num_open) + b"\1" * (num_blocks - self.num_open)
        self._num_own = self.num_open  # blocks below are never closed
        self._cached: OrderedDict[int, None] = OrderedDict()  # those below _num_own, oldest first
        self._lent: OrderedDict[int, None] = OrderedDict()  # cached ones from there on
        self._lent_heap: list[int] = []  # of those, and of some that are cached no more
        self._holders = [0] * num_blocks
        self._keys: list[ChainKey | None] = [None] * num_blocks  # None: not findable
        self._chains: list[int | None] = [None] * num_blocks  # number of the chain that ends in this block
        self._index: dict[ChainKey, int] = {}
        self._next_chain = 0
        self._on_evict = on_evict

    @property
    def num_free(self) -> int:
        """Blocks with no content that anyone could reuse."""
        return len(self._free) - self._num_stale

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and that are still findable."""
        return len(self._cached) + len(self._lent)

    @property
    def num_available(self) -> int:
        """Blocks that :meth:`take` can hand out."""
        return len(self._free) - self._num_stale + len(self._cached) + len(self._lent)

    @property
    def num_held(self) -> int:
        """Blocks that someone holds."""
        return self.num_open - self.num_available

    def is_held(self, block: int) -> bool:
        """Whether someone holds the block."""
        return self._holders[block] > 0

    def is_open(self, block: int) -> bool:
        """Whether the block can be handed out, or is."""
        return not self._closed[block]

    def num_cached_below(self, end: int) -> int:
        """Cached blocks with an id below ``end``; takes time for each cached block unless ``end`` parts own from lent blocks."""
        if end == self._num_own:
            return len(self._cached)
        return sum(block < end for cache in (self._cached, self._lent) for block in cache)

    def is_cached(self, block: int) -> bool:
        """Whether nobody holds the block, and it is still findable."""
        return block in self._cache_of(block)

    def take(self) -> int:
        """Hands out one block with unspecified content, held once. Raises :class:`InternalError` if none is available."""
        return self.take_some(1)[0]

    def take_some(self, most: int) -> list[int]:
        """Hands out at least one block and up to ``most``, ascending: those that :meth:`take` would give one after another, free ones at once.

        Raises :class:`InternalError` if none is available.
        """
        own_first = bool(self._cached) and self.num_open > self._num_own
        lowest = self._lowest_lent()
        end = self._num_own if own_first else self.num_blocks if lowest is None else lowest
        blocks = self._pop_free(end, most) or [self._reclaim(lowest)]
        for block in blocks:
            self._chains[block] = None
            self._holders[block] = 1
        return blocks

    def share(self, block: int) -> None:
        """Adds a holder to a held or cached block."""
        if self._holders[block] == 0:
            cache = self._cache_of(block)
            if block not in cache:
                raise InternalError(f"KV block {block} is neither held nor cached, so it cannot be shared")
            del cache[block]
        self._holders[block] += 1

    def drop(self, block: int) -> bool:
        """Takes one holder away; True if it was the last one, and the block is now cached (if findable) or free."""
        if self._holders[block] <= 0:
            raise InternalError(f"KV block {block} is dropped, but nobody holds it")
        self._holders[block] -= 1
        if self._holders[block]:
            return False
        if self._keys[block] is None:
            self._push_free(block)
        else:
            self._cache_of(block)[block] = None
            if block >= self._num_own:
                heappush(self._lent_heap, block)
        return True

    def open(self, blocks: range) -> None:
        """Makes closed blocks free, with unspecified content. Raises :class:`InternalError`, and changes nothing, if one is open."""
        place, ones = slice(blocks.start, blocks.stop), b"\1" * len(blocks)
        if self._closed[place] != ones:
            raise InternalError(f"KV blocks {blocks.start} to {blocks.stop - 1} are opened, but not all of them are closed")
        self._closed[place] = bytes(len(blocks))
        self.num_open += len(blocks)
        if len(self._free) == self._num_stale:  # no block is free, as when a unit is lent
            self._free, self._listed, self._num_stale = list(blocks), bytearray(self.num_blocks), 0
            self._listed[place] = ones
            return
        num_listed = self._listed[place].count(1)
        self._num_stale -= num_listed
        for block in blocks if num_listed < len(blocks) else ():
            if not self._listed[block]:
                self._push_free(block)

    def close(self, blocks: range) -> None:
        """Takes blocks that nobody holds out of use; cached ones are forgotten.

        Raises :class:`InternalError`, and changes nothing, if one is held or closed.
        """
        place = slice(blocks.start, blocks.stop)
        if any(self._closed[place]) or any(self._holders[place]):
            block = next(block for block in blocks if self._closed[block] or self._holders[block])
            raise InternalError(f"KV block {block} is closed, but it is {'closed already' if self._closed[block] else 'held'}")
        num_listed = self._listed[place].count(1)
        for block in blocks if num_listed < len(blocks) else ():
            if not self._listed[block]:  # cached
                del self._cache_of(block)[block]
                self._unpublish(block)
        self._num_stale += num_listed
        self._closed[place] = b"\1" * len(blocks)
        self.num_open -= len(blocks)

    def relocate(self, sources: Sequence[int], end: int) -> list[tuple[int, int]]:
        """Moves held blocks to blocks below ``end`` that nobody holds; returns (source, target) pairs, the sources being free now.

        Holders, chain and key go along; the caller copies the content. Targets are free blocks, the lowest first, then cached ones, oldest
        first. Returns nothing, and changes nothing, if there are too few. Takes time for each cached block.
        """
        targets = self._pop_free(end, len(sources))
        num_free = len(targets)
        targets += [block for cache in (self._cached, self._lent) for block in cache if block < end][: len(sources) - num_free]
        if len(targets) < len(sources):
            for block in targets[:num_free]:
                self._push_free(block)
            return []
        for block in targets[num_free:]:
            del self._cache_of(block)[block]
            self._unpublish(block)
        for source, target in zip(sources, targets):
            self._move(source, target)
        return list(zip(sources, targets))

    def find(self, parent: int | bytes, tokens: tuple[int, ...]) -> int | None:
        """The block that holds exactly ``tokens`` after chain ``parent`` (a chain number, or a salt for a first block)."""
        return self._index.get((parent, tokens))

    def publish(self, block: int, parent: int | bytes, tokens: tuple[int, ...]) -> int:
        """Makes a held block findable and returns it; or returns the block that already has this content, unchanged."""
        key = (parent, tokens)
        known = self._index.get(key)
        if known is not None:
            return known
        self._index[key] = block
        self._keys[block] = key
        self._chains[block] = self._next_chain
        self._next_chain += 1
        return block

    def match(self, token_ids: Sequence[int], salt: bytes, block_tokens: int) -> list[int]:
        """The findable blocks of whole leading blocks of ``token_ids``; of all but the last token at most, for one is left to compute."""
        found: list[int] = []
        parent: int | bytes = salt
        for start in range(0, (len(token_ids) - 1) // block_tokens * block_tokens, block_tokens):
            block = self.find(parent, tuple(token_ids[start : start + block_tokens]))
            if block is None:
                break
            found.append(block)
            parent = self.chain(block)
        return found

    def chain(self, block: int) -> int:
        """Number of the chain that ends in a published block; never used twice."""
        chain = self._chains[block]
        if chain is None:
            raise InternalError(f"KV block {block} continues no chain: it was never published")
        return chain

    def forget(self, block: int) -> None:
        """Makes a block unfindable; blocks that continue its chain can then no longer be reached and age out."""
        if self._keys[block] is None:
            return
        self._unpublish(block)
        cache = self._cache_of(block)
        if block in cache:
            del cache[block]
            self._push_free(block)

    def check(self, holders: list[int]) -> None:
        """Compares the pool with ``holders`` (how often each block stands in a table); raises :class:`InternalError`."""
        self._check_heap()
        free = {block for block in self._free if not self._closed[block]}
        for block in range(self.num_blocks):
            if self._holders[block] != holders[block]:
                raise InternalError(f"KV block {block} counts {self._holders[block]} holders, but {holders[block]} table entries name it")
            owners = (block in free) + self.is_cached(block) + (holders[block] > 0) + self._closed[block]
            if owners != 1:
                raise InternalError(f"KV block {block} has {owners} owners among free, cached, held and closed; it must have one")
            key = self._keys[block]
            if key is not None and self._index.get(key) != block:
                raise InternalError(f"KV block {block} has a key, but the index does not lead to it")
            if self.is_cached(block) and key is None:
                raise InternalError(f"KV block {block} is cached, but cannot be found")
        if len(self._index) != sum(key is not None for key in self._keys):
            raise InternalError("the index of findable KV blocks has entries that no block owns")
        self._check_reclaim_order()

    def _cache_of(self, block: int) -> OrderedDict[int, None]:
        return self._cached if block < self._num_own else self._lent

    def _lowest_lent(self) -> int | None:
        heap, lent = self._lent_heap, self._lent
        while heap and heap[0] not in lent:
            heappop(heap)
        if len(heap) > 2 * len(lent) + 64:  # blocks that were found again and given up again stand in it many times
            self._lent_heap = heap = sorted(lent)
        return heap[0] if heap else None

    def _push_free(self, block: int) -> None:
        heappush(self._free, block)
        self._listed[block] = 1

    def _pop_free(self, end: int, most: int) -> list[int]:
        """Up to ``most`` free blocks below ``end``, the lowest first."""
        free, listed, closed, found = self._free, self._listed, self._closed, list[int]()
        if len(free) <= most and not self._num_stale and end == self.num_blocks:  # all of them, as behind a loan
            self._free, self._listed = [], bytearray(self.num_blocks)
            return sorted(free)
        while free and free[0] < end and len(found) < most:
            block = heappop(free)
            listed[block] = 0
            if closed[block]:
                self._num_stale -= 1
            else:
                found.append(block)
        return found

    def _reclaim(self, lowest: int | None) -> int:
        """Takes the next cached block from its content; ``lowest`` is :meth:`_lowest_lent`."""
        if self._cached:
            block, _ = self._cached.popitem(last=False)
        elif lowest is not None:
            block = lowest
            del self._lent[block]
        else:
            raise InternalError("no KV block is available; ask for num_available before taking blocks")
        if self._on_evict is not None:
            self._on_evict(block)
        self._unpublish(block)
        return block

    def _move(self, source: int, target: int) -> None:
        key = self._keys[target] = self._keys[source]
        self._chains[target] = self._chains[source]
        self._holders[target] = self._holders[source]
        if key is not None:
            self._index[key] = target
        self._keys[source] = self._chains[source] = None
        self._holders[source] = 0
        self._push_free(source)

    def _unpublish(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._index[key]
            self._keys[block] = None

    def _check_heap(self) -> None:
        if len(set(self._free)) != len(self._free):
            raise InternalError("a KV block stands twice in the free list")
        if any(self._free[(i - 1) // 2] > self._free[i] for i in range(1, len(self._free))):
            raise InternalError("the free list is no heap: a low KV block may be handed out after a higher one")
        if self._num_stale != sum(self._closed[block] for block in self._free):
            raise InternalError(f"{self._num_stale} blocks of the free list count as closed, but others are")
        if sum(self._listed) != len(self._free) or not all(self._listed[block] for block in self._free):
            raise InternalError("the free list and the marks of the KV blocks that stand in it do not agree")
        if self.num_open != self.num_blocks - sum(self._closed):
            raise InternalError(f"{self.num_open} KV blocks count as open, but {self.num_blocks - sum(self._closed)} are")

    def _check_reclaim_order(self) -> None:
        place = {block: i for cache in (self._cached, self._lent) for i, block in enumerate(cache)}
        by_chain = {self._chains[block]: block for block in self._index.values()}
        for block in self._index.values():
            parent = by_chain.get(self._keys[block][0])  # type: ignore[index,arg-type]
            if parent is None or parent not in place:
                continue
            if self._holders[block]:
                raise InternalError(f"KV block {parent} can be reclaimed, but block {block} continues it and is held")
            own = block < self._num_own and parent < self._num_own  # of others the lowest goes first, whatever continues it
            if own and place[block] > place[parent]:
                raise InternalError(f"KV block {parent} would be reclaimed before block {block}, which continues it")
