"""Pool of KV blocks: free blocks, holders counted per block, and the index that finds a block by its content."""

from __future__ import annotations

from collections import OrderedDict

from depthfx.errors import InternalError

# What a full block is found by: the chain it continues (a salt for the first block of a chain, else the number of the
# parent's chain) and its own tokens. A dict compares keys by value, so two different contents never match, whatever
# their hashes are.
ChainKey = tuple[int | bytes, tuple[int, ...]]


class BlockPool:
    """Every block is exactly one of: free, cached (free, but still findable) or held by one or more requests.

    Each operation takes constant time. Blocks that nobody holds are handed out in this order: plain free ones, then
    the cached block that was given up first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack; low numbers go first
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._holders = [0] * num_blocks
        self._keys: list[ChainKey | None] = [None] * num_blocks  # None: not findable
        self._chains: list[int | None] = [None] * num_blocks  # number of the chain that ends in this block
        self._index: dict[ChainKey, int] = {}
        self._next_chain = 0

    @property
    def num_free(self) -> int:
        """Blocks with no content that anyone could reuse."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and that are still findable."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that :meth:`take` can hand out."""
        return len(self._free) + len(self._cached)

    def is_cached(self, block: int) -> bool:
        """Whether nobody holds the block, and it is still findable."""
        return block in self._cached

    def take(self) -> int:
        """Hands out one block with unspecified content, held once. Raises :class:`InternalError` if none is available."""
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self._unpublish(block)
        else:
            raise InternalError("no KV block is available; ask for num_available before taking blocks")
        self._chains[block] = None
        self._holders[block] = 1
        return block

    def share(self, block: int) -> None:
        """Adds a holder to a held or cached block."""
        if self._holders[block] == 0:
            if block not in self._cached:
                raise InternalError(f"KV block {block} is neither held nor cached, so it cannot be shared")
            del self._cached[block]
        self._holders[block] += 1

    def drop(self, block: int) -> bool:
        """Takes one holder away; True if it was the last one, and the block is now cached (if findable) or free."""
        if self._holders[block] <= 0:
            raise InternalError(f"KV block {block} is dropped, but nobody holds it")
        self._holders[block] -= 1
        if self._holders[block]:
            return False
        if self._keys[block] is None:
            self._free.append(block)
        else:
            self._cached[block] = None
        return True

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
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def check(self, holders: list[int]) -> None:
        """Compares the pool with ``holders`` (how often each block stands in a table); raises :class:`InternalError`."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise InternalError("a KV block stands twice in the free list")
        for block in range(self.num_blocks):
            if self._holders[block] != holders[block]:
                raise InternalError(f"KV block {block} counts {self._holders[block]} holders, but {holders[block]} table entries name it")
            owners = (block in free) + (block in self._cached) + (holders[block] > 0)
            if owners != 1:
                raise InternalError(f"KV block {block} has {owners} owners among free, cached and held; it must have one")
            key = self._keys[block]
            if key is not None and self._index.get(key) != block:
                raise InternalError(f"KV block {block} has a key, but the index does not lead to it")
            if block in self._cached and key is None:
                raise InternalError(f"KV block {block} is cached, but cannot be found")
        if len(self._index) != sum(key is not None for key in self._keys):
            raise InternalError("the index of findable KV blocks has entries that no block owns")
        self._check_reclaim_order()

    def _unpublish(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._index[key]
            self._keys[block] = None

    def _check_reclaim_order(self) -> None:
        place = {block: i for i, block in enumerate(self._cached)}
        by_chain = {self._chains[block]: block for block in self._index.values()}
        for block in self._index.values():
            parent = by_chain.get(self._keys[block][0])  # type: ignore[index,arg-type]
            if parent is None or parent not in place:
                continue
            if self._holders[block]:
                raise InternalError(f"KV block {parent} can be reclaimed, but block {block} continues it and is held")
            if place[block] > place[parent]:
                raise InternalError(f"KV block {parent} would be reclaimed before block {block}, which continues it")
