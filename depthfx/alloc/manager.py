"""Memory manager: which request owns which KV blocks, in which row of the block table.

When is a block safe to reuse? Blocks are released when a step is committed, and the next step may already be queued by
then. A freed block may still be named by a step that runs; its new owner writes it in a later step. All steps run on one
stream in the order in which they were planned, so that write comes after the last read. Whoever fills a freed block
from anywhere else (another stream, the host) has to wait for an event recorded after the last launched step:
`MemoryManager.release` returns the blocks that became ownerless for that purpose.

With a shared region, blocks beyond the base ones are lent by weights, a whole unit at a time (`depthfx.alloc.units`). The manager
lends when it must and says so afterwards: `resident` tells which residuals may still be read, `take_cancelled` which copies to stop.

With a host cache (`depthfx.alloc.host_cache`) evicted blocks are kept on the host. Moves are part of the plan: `take_moves` once for each plan,
then `moves_done` or `moves_failed` for each, in the same order.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, repeat

from depthfx.alloc.blocks import BlockPool
from depthfx.alloc.host_cache import NOTHING, HostCache, Moves
from depthfx.alloc.units import SharedRegion
from depthfx.alloc.usage import BlockUsage, bytes_by_owner, check_region, check_tables
from depthfx.errors import InternalError, InvalidRequestError


@dataclass(frozen=True)
class Admission:
    """A request's place: its row of the block table and how many leading tokens have their KV, or get it from the host before the step."""

    table_row: int
    reused_tokens: int
    reloaded_tokens: int = 0  # after the reused ones


@dataclass
class _Holder:
    table_row: int
    salt: bytes
    blocks: list[int] = field(default_factory=list)
    num_published: int = 0  # leading blocks that are findable


class MemoryManager:
    """Hands out KV blocks and block table rows; shares whole blocks of equal prefixes.

    ``num_blocks`` blocks of ``block_tokens`` tokens; a block table of ``num_table_rows`` rows (one for each admitted
    request) and ``blocks_per_row`` columns. With a ``region``, ``num_blocks`` counts the blocks of all its units too, and they are
    lent when free and cached blocks are used up. ``host`` keeps what is evicted. Raises :class:`InvalidRequestError` if a number is
    not positive or does not agree with the region.
    """

    def __init__(
        self, num_blocks: int, block_tokens: int, num_table_rows: int, blocks_per_row: int, prefix_reuse: bool = True,
        region: SharedRegion | None = None, host: HostCache | None = None,
    ) -> None:  # fmt: skip
        sizes = {"num_blocks": num_blocks, "block_tokens": block_tokens, "num_table_rows": num_table_rows, "blocks_per_row": blocks_per_row}
        for name, value in sizes.items():
            if value < 1:
                raise InvalidRequestError(f"memory manager: {name}={value} must be at least 1; give it a larger value")
        num_open = num_blocks if region is None else num_blocks - region.num_lendable_blocks
        if region is not None and num_blocks != region.layout.num_blocks:
            raise InvalidRequestError(
                f"memory manager: num_blocks={num_blocks} must be the {region.layout.num_blocks} of the region's layout, base and units"
            )
        self.num_blocks, self.block_tokens = num_blocks, block_tokens
        self.num_table_rows, self.blocks_per_row = num_table_rows, blocks_per_row
        self.prefix_reuse = prefix_reuse
        self.may_lend = True  # False: closed units stay closed, whoever needs blocks; settable between plans
        self.num_releases = 0  # grows whenever blocks or a table row may have become available
        self.region, self.host = region, host  # to read: only this manager changes them
        self._pool = BlockPool(num_blocks, num_open, None if host is None else host.evicted)
        self._cancelled: list[int] = []  # units whose restore was cancelled, not yet told
        self._free_rows = list(range(num_table_rows - 1, -1, -1))
        self._holders: dict[str, _Holder] = {}
        self._writes: dict[tuple[int, int], int] = {}  # a later write to the same entry replaces the earlier one
        self._sent = [array("i", [-1]) * blocks_per_row for _ in range(num_table_rows)]  # what the device's table holds

    @property
    def max_request_tokens(self) -> int:
        """Tokens of KV that one request can have when it is alone."""
        return min(self.num_blocks, self.blocks_per_row) * self.block_tokens

    @property
    def max_full_tokens(self) -> int:
        """Likewise, while no unit is lent."""
        base = self.num_blocks if self.region is None else self.region.layout.num_base_blocks
        return min(base, self.blocks_per_row) * self.block_tokens

    @property
    def num_available(self) -> int:
        """Blocks that could be handed out now, by lending units where that is needed and allowed."""
        region = self.region
        return self._pool.num_available + (0 if region is None or not self.may_lend else region.num_lendable_blocks)

    @property
    def num_lent_units(self) -> int:
        """Units that are open to KV."""
        return 0 if self.region is None else self.region.num_open_units

    @property
    def held_blocks(self) -> int:
        """Blocks that requests hold now."""
        return self._pool.num_held

    @property
    def cached_blocks(self) -> int:
        """Blocks that nobody holds and that are still findable by their content."""
        return self._pool.num_cached

    @property
    def open_blocks(self) -> int:
        """Blocks that are KV now, held or not: base blocks and those of lent units."""
        return self._pool.num_open

    def holds(self, request_id: str) -> bool:
        """Whether the request has a table row."""
        return request_id in self._holders

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether ``num_tokens`` tokens of one request fit if nothing else is held."""
        return num_tokens <= self.max_request_tokens

    def admit(
        self, request_id: str, token_ids: Sequence[int], salt: bytes = b"", headroom: int = 0, num_alike: int | None = None
    ) -> Admission | None:
        """Gives a request a table row and blocks for all of ``token_ids``; None, and no change, if there is no room.

        Whole leading blocks with equal tokens and equal ``salt`` are shared, but at least one token is left to compute, and so are all
        behind the first ``num_alike`` (None: all are alike), whose KV is of another salt.
        ``headroom`` blocks must remain available afterwards. Units are lent where free and cached blocks do not suffice.
        Raises :class:`InternalError` if the request is admitted already.
        """
        if request_id in self._holders:
            raise InternalError(f"request {request_id!r} is admitted twice; release it first")
        if not self._free_rows or not token_ids or not self.can_ever_fit(len(token_ids)):
            return None
        alike = token_ids if num_alike is None else token_ids[: num_alike + 1]
        reused = self._match(alike, salt)
        num_new = self._blocks_for(len(token_ids)) - len(reused)
        num_revived = sum(self._pool.is_cached(block) for block in reused)
        if num_new + headroom > self.num_available - num_revived:
            return None
        host = self.host
        reload = NOTHING if host is None else host.match(alike, salt, reused, self.block_tokens)
        if host is not None and not host.admits(request_id, len(reload.slots) + max(0, num_new - self._pool.num_free)):
            return None
        holder = _Holder(self._free_rows.pop(), salt, num_published=len(reused))
        self._holders[request_id] = holder
        for block in reused:
            self._share(block)
        self._append(holder, reused)
        self._take(holder, num_new)
        if host is not None:
            host.load(request_id, reload, holder.blocks)
        return Admission(holder.table_row, len(reused) * self.block_tokens, len(reload.slots) * self.block_tokens)

    def grow(self, request_id: str, num_tokens: int) -> bool:
        """Makes sure that tokens [0, num_tokens) have blocks; False, and no change, if too few are available.

        Units are lent where free and cached blocks do not suffice.
        """
        holder = self._holder(request_id)
        num_new = self._blocks_for(num_tokens) - len(holder.blocks)
        if num_new <= 0:
            return True
        if len(holder.blocks) + num_new > self.blocks_per_row:
            raise InternalError(f"request {request_id!r} needs KV for {num_tokens} tokens; a table row ends at {self.max_request_tokens}")
        if num_new > self.num_available:
            return False
        self._take(holder, num_new)
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
            self._publish(holder, i, tuple(token_ids[i * self.block_tokens : (i + 1) * self.block_tokens]))

    def release(self, request_id: str, reuse: bool = True) -> tuple[int, ...]:
        """Ends a request's hold on its row and blocks; returns the blocks that nobody holds any more.

        Those may still be read by steps that are queued: see the head of this file before filling them from another
        stream. With ``reuse=False`` their content (and what is shared of it) is no longer findable.
        """
        holder = self._holder(request_id)
        del self._holders[request_id]
        self._free_rows.append(holder.table_row)
        self.num_releases += 1
        if self.host is not None:
            self.host.released(request_id, reuse)
        freed = []
        for block in reversed(holder.blocks):  # the deepest block first, so that it is reclaimed first
            if not reuse:
                self._pool.forget(block)
            if self._drop(block):
                freed.append(block)
        return tuple(freed)

    def forget_content(self) -> None:
        """Makes everything computed so far unfindable, and what admitted requests go on to compute after it as well."""
        if self.host is not None:
            self.host.clear()
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

    def take_moves(self) -> tuple[Moves, Moves]:
        """The (block, slot) saves and then (slot, block) loads of the plan that is being made; none without a host cache."""
        if self.host is None:
            return (), ()
        self.num_releases += self.host.take_deferred()  # the next plan has room for moves again
        return self.host.take_moves(lambda request_id: self._holder(request_id).blocks)

    def moves_done(self) -> None:
        """The moves of the oldest plan are done: what was saved can be found, what was loaded is shared like computed blocks."""
        reloads = {} if self.host is None else self.host.landed()
        for request_id, reload in reloads.items():
            holder = self._holders.get(request_id)
            if holder is not None and holder.num_published == reload.first:
                for i, tokens in enumerate(reload.tokens, reload.first):
                    self._publish(holder, i, tokens)

    def moves_failed(self) -> None:
        """The step of the oldest plan failed, and nobody knows which of its moves were done. Requests that it admitted must be released."""
        if self.host is not None:
            self.host.lost()

    def resend_tables(self) -> None:
        """Queues every entry of every admitted request again, after writes that may not have reached the device."""
        for holder in self._holders.values():
            for column, block in enumerate(holder.blocks):
                self._writes[holder.table_row, column] = block

    def resident(self) -> bytes:
        """``[entries]``: 1 where the residual may be read by the steps planned from here on; empty without a region."""
        return b"" if self.region is None else self.region.resident()

    def lend(self, num_units: int = 1) -> None:
        """Opens up to ``num_units`` closed units to KV ahead of need, the lowest first; none where lending is not allowed."""
        region = self._shared()
        blocks = min(num_units * region.layout.blocks_per_unit, region.num_lendable_blocks)
        if blocks and self.may_lend:
            self._lend(region, blocks)

    def begin_restore(self, unit: int) -> None:
        """Closes a unit to KV, so that its residual bytes can be copied back; its cached blocks are forgotten.

        The copy must wait for the last launched step, which may still read the unit's blocks. Raises :class:`InternalError` unless the
        unit is the region's ``next_to_restore()``, or if it stands in :meth:`take_cancelled`: its old copy must be stopped first.
        """
        region = self._shared()
        if unit in self._cancelled:
            raise InternalError(f"unit {unit} cannot be restored: take_cancelled() has yet to tell that its last restore was cancelled")
        region.begin_restore(unit)
        self._pool.close(region.layout.blocks_of(unit))
        if self.host is not None:
            self.host.overwritten(region.layout.blocks_of(unit))

    def finish_restore(self, unit: int) -> None:
        """Counts a unit's residual bytes as there. Raises :class:`InternalError` if it is not being restored, or no longer."""
        self._shared().finish_restore(unit)

    def take_cancelled(self) -> tuple[int, ...]:
        """The units that were lent while they were being restored, since the last call; their copies must be stopped."""
        cancelled = tuple(self._cancelled)
        self._cancelled.clear()
        return cancelled

    def compact(self, unit: int, limit: int) -> list[tuple[int, int]]:
        """Empties a lent unit: moves its held blocks to lower blocks that are free or, where these do not suffice, cached.

        Returns (source, target) pairs, sources ascending; none, and no change, if none of its blocks is held or more than ``limit`` are, or if
        too few lower ones are not. Holders, table entries and what is findable change at once; the bytes are copied by the caller, behind
        every launched step and before the next one is launched, in any order: no target is a source. Takes time for each held and cached
        block. Raises :class:`InternalError` without a region or for an unknown unit.
        """
        region = self._shared()
        blocks = region.layout.blocks_of(unit)
        sources = [block for block in blocks if self._pool.is_held(block)]
        if not 0 < len(sources) <= limit:
            return []
        moves = self._pool.relocate(sources, blocks.start)
        if self.host is not None:
            self.host.moved(moves)
        for source, target in moves:
            region.unhold(source)
            region.hold(target)
        to = dict(moves)
        for holder in self._holders.values() if moves else ():
            if to.keys().isdisjoint(holder.blocks):
                continue
            for column, block in enumerate(holder.blocks):
                if block in to:
                    holder.blocks[column] = self._writes[holder.table_row, column] = to[block]
        return moves

    def usage(self) -> BlockUsage:
        """Counts of blocks by owner; with a region, of bytes too."""
        pool = self._pool
        by_request = {request_id: len(holder.blocks) for request_id, holder in self._holders.items()}
        owners = None if self.region is None else bytes_by_owner(pool, self.region)
        return BlockUsage(self.num_blocks, pool.num_open, pool.num_free, pool.num_cached, pool.num_held, by_request, owners)

    def check(self) -> None:
        """Proves that no block, unit or row is lost or owned twice and that all tables are right; else :class:`InternalError`."""
        tables = {request_id: (holder.table_row, holder.blocks) for request_id, holder in self._holders.items()}
        counts = check_tables(tables, self._free_rows, lambda row, column: self._writes.get((row, column), self._sent[row][column]))
        if sum(map(len, (tables, self._free_rows))) != self.num_table_rows:
            raise InternalError(f"{len(tables)} block table rows are in use and {len(self._free_rows)} free, of {self.num_table_rows}")
        held = [counts[block] for block in range(self.num_blocks)]
        self._pool.check(held)
        if self.region is not None:
            check_region(self.region, self._pool, held, self._cancelled)
        if self.host is not None:
            self.host.check(lambda request_id: self._holder(request_id).blocks)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def _holder(self, request_id: str) -> _Holder:
        holder = self._holders.get(request_id)
        if holder is None:
            raise InternalError(f"request {request_id!r} holds no KV blocks; admit it first")
        return holder

    def _shared(self) -> SharedRegion:
        if self.region is None:
            raise InternalError("there is no shared region; give the memory manager one to lend and restore units")
        return self.region

    def _take(self, holder: _Holder, num_new: int) -> None:
        """Algorithm 1 of the paper on semi-unified memory: free blocks, then cached ones, then units of the weights."""
        pool, region = self._pool, self.region
        while num_new > 0:
            if region is not None and not pool.num_available:
                self._lend(region, num_new)
            blocks = pool.take_some(num_new)
            if region is not None:
                region.hold_all(blocks)
            self._append(holder, blocks)
            num_new -= len(blocks)

    def _lend(self, region: SharedRegion, num_blocks: int) -> None:
        units, cancelled = region.lend(-(-num_blocks // region.layout.blocks_per_unit))
        self._cancelled += cancelled
        self._pool.open(range(region.layout.blocks_of(units[0]).start, region.layout.blocks_of(units[-1]).stop))

    def _share(self, block: int) -> None:
        if self.region is not None and self._pool.is_cached(block):
            self.region.hold(block)
        self._pool.share(block)

    def _drop(self, block: int) -> bool:
        last = self._pool.drop(block)
        if last and self.region is not None:
            self.region.unhold(block)
        return last

    def _publish(self, holder: _Holder, i: int, tokens: tuple[int, ...]) -> None:
        block, before = holder.blocks[i], holder.blocks[i - 1] if i else None
        known = self._pool.publish(block, holder.salt if before is None else self._pool.chain(before), tokens)
        holder.num_published = i + 1
        if known != block:
            self._share(known)
            self._drop(block)
            self.num_releases += 1
            holder.blocks[i] = self._writes[holder.table_row, i] = known
        elif self.host is not None:
            self.host.computed(block, before, holder.salt, tokens)

    def _append(self, holder: _Holder, blocks: Sequence[int]) -> None:
        self._writes.update(zip(zip(repeat(holder.table_row), count(len(holder.blocks))), blocks))
        holder.blocks += blocks

    def reusable_tokens(self, token_ids: Sequence[int], salt: bytes) -> int:
        """How many leading tokens an admission would find the KV of on the device."""
        return len(self._match(token_ids, salt)) * self.block_tokens

    def _match(self, token_ids: Sequence[int], salt: bytes) -> list[int]:
        return self._pool.match(token_ids, salt, self.block_tokens) if self.prefix_reuse else []
