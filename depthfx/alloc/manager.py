"""Memory manager: which request owns which KV blocks, in which row of the block table.

When is a block safe to reuse? Blocks are released when a step is committed, and the next step may already be queued by
then. A freed block may still be named by a step that runs; its new owner writes it in a later step. All steps run on one
stream in the order in which they were planned, so that write comes after the last read. Whoever fills a freed block
from anywhere else (another stream, the host) has to wait for an event recorded after the last launched step:
`MemoryManager.release` returns the blocks that became ownerless for that purpose.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from depthfx.alloc.blocks import BlockPool
from depthfx.errors import InternalError, InvalidRequestError


@dataclass(frozen=True)
class Admission:
    """A request's place: its row of the block table and how many leading tokens already have their KV."""

    table_row: int
    reused_tokens: int


@dataclass(frozen=True)
class BlockUsage:
    """Who owns what, in blocks. A shared block counts once in ``num_held`` and once for each of its holders."""

    num_blocks: int
    num_free: int
    num_cached: int  # nobody holds them; findable until reclaimed
    num_held: int
    by_request: dict[str, int]


@dataclass
class _Holder:
    table_row: int
    salt: bytes
    blocks: list[int] = field(default_factory=list)
    num_published: int = 0  # leading blocks that are findable


class MemoryManager:
    """Hands out KV blocks and block table rows; shares whole blocks of equal prefixes.

    ``num_blocks`` blocks of ``block_tokens`` tokens; a block table of ``num_table_rows`` rows (one for each admitted
    request) and ``blocks_per_row`` columns. Raises :class:`InvalidRequestError` if one of them is not positive.
    """

    def __init__(self, num_blocks: int, block_tokens: int, num_table_rows: int, blocks_per_row: int, prefix_reuse: bool = True) -> None:
        sizes = {"num_blocks": num_blocks, "block_tokens": block_tokens, "num_table_rows": num_table_rows, "blocks_per_row": blocks_per_row}
        for name, value in sizes.items():
            if value < 1:
                raise InvalidRequestError(f"memory manager: {name}={value} must be at least 1; give it a larger value")
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.num_table_rows = num_table_rows
        self.blocks_per_row = blocks_per_row
        self.prefix_reuse = prefix_reuse
        self.num_releases = 0  # grows whenever blocks or a table row may have become available
        self._pool = BlockPool(num_blocks)
        self._free_rows = list(range(num_table_rows - 1, -1, -1))
        self._holders: dict[str, _Holder] = {}
        self._writes: dict[tuple[int, int], int] = {}  # a later write to the same entry replaces the earlier one
        self._sent = [array("i", [-1]) * blocks_per_row for _ in range(num_table_rows)]  # what the device's table holds

    @property
    def max_request_tokens(self) -> int:
        """Tokens of KV that one request can have when it is alone."""
        return min(self.num_blocks, self.blocks_per_row) * self.block_tokens

    @property
    def num_available(self) -> int:
        """Blocks that could be handed out now."""
        return self._pool.num_available

    def holds(self, request_id: str) -> bool:
        """Whether the request has a table row."""
        return request_id in self._holders

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether ``num_tokens`` tokens of one request fit if nothing else is held."""
        return num_tokens <= self.max_request_tokens

    def admit(self, request_id: str, token_ids: Sequence[int], salt: bytes = b"", headroom: int = 0) -> Admission | None:
        """Gives a request a table row and blocks for all of ``token_ids``; None, and no change, if there is no room.

        Whole leading blocks with equal tokens and equal ``salt`` are shared, but at least one token is left to compute.
        ``headroom`` blocks must remain available afterwards. Raises :class:`InternalError` if the request is admitted already.
        """
        if request_id in self._holders:
            raise InternalError(f"request {request_id!r} is admitted twice; release it first")
        if not self._free_rows or not token_ids or not self.can_ever_fit(len(token_ids)):
            return None
        reused = self._match(token_ids, salt)
        num_new = self._blocks_for(len(token_ids)) - len(reused)
        num_revived = sum(self._pool.is_cached(block) for block in reused)
        if num_new + headroom > self._pool.num_available - num_revived:
            return None
        holder = _Holder(self._free_rows.pop(), salt, num_published=len(reused))
        self._holders[request_id] = holder
        for block in reused:
            self._pool.share(block)
            self._append(holder, block)
        for _ in range(num_new):
            self._append(holder, self._pool.take())
        return Admission(holder.table_row, len(reused) * self.block_tokens)

    def grow(self, request_id: str, num_tokens: int) -> bool:
        """Makes sure that tokens [0, num_tokens) have blocks; False, and no change, if too few are available."""
        holder = self._holder(request_id)
        num_new = self._blocks_for(num_tokens) - len(holder.blocks)
        if num_new <= 0:
            return True
        if len(holder.blocks) + num_new > self.blocks_per_row:
            raise InternalError(f"request {request_id!r} needs KV for {num_tokens} tokens; a table row ends at {self.max_request_tokens}")
        if num_new > self._pool.num_available:
            return False
        for _ in range(num_new):
            self._append(holder, self._pool.take())
        return True

    def register(self, request_id: str, token_ids: Sequence[int], num_computed: int) -> None:
        """Makes the full blocks of ``token_ids[:num_computed]`` findable: their KV has been computed.

        Where another block with the same content is findable already, the request is moved to it and its own block is
        given back, so equal prefixes that were computed at the same time end up shared.
        """
        holder = self._holder(request_id)
        num_full = num_computed // self.block_tokens
        if num_full <= holder.num_published or not self.prefix_reuse:
            return
        for i in range(holder.num_published, num_full):
            block = holder.blocks[i]
            parent = self._pool.chain(holder.blocks[i - 1]) if i else holder.salt
            tokens = tuple(token_ids[i * self.block_tokens : (i + 1) * self.block_tokens])
            known = self._pool.publish(block, parent, tokens)
            if known != block:
                self._pool.share(known)
                self._pool.drop(block)
                self.num_releases += 1
                holder.blocks[i] = known
                self._writes[holder.table_row, i] = known
        holder.num_published = num_full

    def release(self, request_id: str, reuse: bool = True) -> tuple[int, ...]:
        """Ends a request's hold on its row and blocks; returns the blocks that nobody holds any more.

        Those may still be read by steps that are queued: see the head of this file before filling them from another
        stream. With ``reuse=False`` their content (and what is shared of it) is no longer findable.
        """
        holder = self._holder(request_id)
        del self._holders[request_id]
        self._free_rows.append(holder.table_row)
        self.num_releases += 1
        freed = []
        for block in reversed(holder.blocks):  # the deepest block first, so that it is reclaimed first
            if not reuse:
                self._pool.forget(block)
            if self._pool.drop(block):
                freed.append(block)
        return tuple(freed)

    def forget_content(self) -> None:
        """Makes everything computed so far unfindable, and what admitted requests go on to compute after it as well."""
        for block in range(self.num_blocks):
            self._pool.forget(block)
        for holder in self._holders.values():
            holder.num_published = self.blocks_per_row  # their next blocks continue the old content

    def take_table_writes(self) -> tuple[tuple[int, int, int], ...]:
        """The block table entries (row, column, block) that changed since the last call; each entry at most once."""
        writes = tuple((row, column, block) for (row, column), block in self._writes.items())
        for row, column, block in writes:
            self._sent[row][column] = block
        self._writes.clear()
        return writes

    def resend_tables(self) -> None:
        """Queues every entry of every admitted request again, after writes that may not have reached the device."""
        for holder in self._holders.values():
            for column, block in enumerate(holder.blocks):
                self._writes[holder.table_row, column] = block

    def usage(self) -> BlockUsage:
        """Counts of blocks by owner."""
        free, cached = self._pool.num_free, self._pool.num_cached
        by_request = {request_id: len(holder.blocks) for request_id, holder in self._holders.items()}
        return BlockUsage(self.num_blocks, free, cached, self.num_blocks - free - cached, by_request)

    def check(self) -> None:
        """Proves that no block or row is lost or owned twice and that all tables are right; else :class:`InternalError`."""
        counts = [0] * self.num_blocks
        rows = list(self._free_rows)
        for request_id, holder in self._holders.items():
            rows.append(holder.table_row)
            if len(set(holder.blocks)) != len(holder.blocks):
                raise InternalError(f"request {request_id!r} has one KV block at two places: {holder.blocks}")
            for column, block in enumerate(holder.blocks):
                counts[block] += 1
                place = (holder.table_row, column)
                seen = self._writes.get(place, self._sent[holder.table_row][column])
                if seen != block:
                    raise InternalError(f"block table entry {place} of request {request_id!r} names {seen}, not block {block}")
        if sorted(rows) != list(range(self.num_table_rows)):
            raise InternalError(f"block table rows are lost or used twice: {sorted(rows)}")
        self._pool.check(counts)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def _holder(self, request_id: str) -> _Holder:
        holder = self._holders.get(request_id)
        if holder is None:
            raise InternalError(f"request {request_id!r} holds no KV blocks; admit it first")
        return holder

    def _append(self, holder: _Holder, block: int) -> None:
        self._writes[holder.table_row, len(holder.blocks)] = block
        holder.blocks.append(block)

    def _match(self, token_ids: Sequence[int], salt: bytes) -> list[int]:
        found: list[int] = []
        if not self.prefix_reuse:
            return found
        parent: int | bytes = salt
        for start in range(0, (len(token_ids) - 1) // self.block_tokens * self.block_tokens, self.block_tokens):
            block = self._pool.find(parent, tuple(token_ids[start : start + self.block_tokens]))
            if block is None:
                break
            found.append(block)
            parent = self._pool.chain(block)
        return found
