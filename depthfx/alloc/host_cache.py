"""Second level of the prefix cache: which evicted KV blocks lie in which slots of host memory, and which blocks have to be moved.

Books only: `depthfx.alloc.host_blocks` moves the bytes. A block's content is named by a digest of salt and all tokens up to its end, since
the device index counts its chains anew when they are computed again. The rules that keep it exact:

1. The content of a block that is evicted is intact until the next step is launched. That step's plan saves it, before it loads and computes.
2. A plan executes all its saves, then all its loads, then its step, on the stream of the steps. So a slot may be saved to again as soon as the plan
   that loads from it was made, but not in that plan.
3. What a plan saved can be found, and what it loaded can be shared, once its step was committed. So a step that fails takes nobody else along.
4. Slots are chosen when the plan is made: free ones, then the least recently used. Up to then a save is a block and a digest, and can be dropped.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import pairwise

from depthfx.errors import InternalError, InvalidRequestError

Moves = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Reload:
    """Blocks of one request that are to be filled from slots: its blocks ``first``, ``first + 1``, ..., whose tokens are ``tokens``."""

    first: int
    digests: list[bytes] = field(default_factory=list)
    tokens: list[tuple[int, ...]] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)


NOTHING = Reload(0)


@dataclass
class _Flight:
    """Moves of a plan that was made and whose step is not committed."""

    saves: list[tuple[int, bytes]]  # (slot, digest), evicted first comes first
    reloads: dict[str, Reload]
    stale: bool = False  # the content was forgotten meanwhile


class HostCache:
    """``num_slots`` slots on the host for content of ``num_blocks`` device blocks; every slot is free, findable, or being saved to.

    An admission waits for the next plan where the admissions of a plan would cause more than ``max_moves`` moves; the first one never does.
    Raises :class:`InvalidRequestError` if a number is not positive.
    """

    def __init__(self, num_slots: int, num_blocks: int, max_moves: int) -> None:
        for name, value in {"num_slots": num_slots, "num_blocks": num_blocks, "max_moves": max_moves}.items():
            if value < 1:
                raise InvalidRequestError(f"host cache: {name}={value} must be at least 1; give it a larger value")
        self.num_slots = num_slots
        self.max_moves = max_moves
        self.num_saved = 0  # blocks, in steps that were committed; so is the next
        self.num_reloaded = 0
        self.num_dropped = 0  # evicted blocks for which there was no slot
        self._digests: list[bytes | None] = [None] * num_blocks  # of the content that a published or reloading block holds; None: unknown
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # findable; least recently used first
        self._free = list(range(num_slots))  # a heap
        self._evicted: dict[int, bytes] = {}  # block -> content that the next plan saves
        self._saving: set[bytes] = set()  # digests of _evicted and of flights that are not stale
        self._planned: dict[str, Reload] = {}  # of requests admitted since the last plan
        self._flights: deque[_Flight] = deque()
        self._num_moves: dict[str, int] = {}  # that admissions since the last plan may cause, by request
        self._deferred = False

    @property
    def num_findable(self) -> int:
        """Slots whose content can be reloaded."""
        return len(self._slots)

    def computed(self, block: int, before: int | None, salt: bytes, tokens: Sequence[int]) -> None:
        """``block`` was published: it holds ``tokens`` after what block ``before`` holds (None: it is the first of its chain)."""
        parent = _seed(salt) if before is None else self._digests[before]
        self._digests[block] = None if parent is None else _digest(parent, tokens)

    def evicted(self, block: int) -> None:
        """The device index gives a block up, whose content nothing has overwritten so far."""
        digest = self._digests[block]
        if digest is None or digest in self._saving:
            return
        if digest in self._slots:
            self._slots.move_to_end(digest)
            return
        self.overwritten((block,))
        self._evicted[block] = digest
        self._saving.add(digest)

    def overwritten(self, blocks: Iterable[int]) -> None:
        """Something else than the next step writes these blocks: what was to be saved from them is lost."""
        for block in blocks if self._evicted else ():
            digest = self._evicted.pop(block, None)
            if digest is not None:
                self._saving.remove(digest)

    def moved(self, moves: Iterable[tuple[int, int]]) -> None:
        """(source, target) blocks: the target now holds what the source held."""
        for source, target in moves:
            self.overwritten((target,))
            self._digests[target] = self._digests[source]

    def match(self, token_ids: Sequence[int], salt: bytes, reused: Sequence[int], block_tokens: int) -> Reload:
        """What follows the blocks ``reused`` of the device in the chain of ``token_ids``; at least one token is left to compute."""
        for column, block in enumerate(reused):
            if self._digests[block] is None:  # forgotten by `clear`, and still shared
                start = column * block_tokens
                self.computed(block, reused[column - 1] if column else None, salt, token_ids[start : start + block_tokens])
        digest = self._digests[reused[-1]] if reused else _seed(salt)
        assert digest is not None
        found = Reload(len(reused))
        for start in range(len(reused) * block_tokens, (len(token_ids) - 1) // block_tokens * block_tokens, block_tokens):
            tokens = tuple(token_ids[start : start + block_tokens])
            digest = _digest(digest, tokens)
            slot = self._slots.get(digest)
            if slot is None:
                break
            found.digests.append(digest)
            found.tokens.append(tokens)
            found.slots.append(slot)
        return found

    def admits(self, request_id: str, num_moves: int) -> bool:
        """Whether the next plan may admit one more request, with so many moves; if not, :meth:`take_deferred` tells when to try again."""
        before = sum(self._num_moves.values())
        if num_moves and before and before + num_moves > self.max_moves:
            self._deferred = True
            return False
        self._num_moves[request_id] = num_moves
        return True

    def take_deferred(self) -> bool:
        """Whether an admission had to wait since the last call."""
        deferred, self._deferred = self._deferred, False
        return deferred

    def load(self, request_id: str, reload: Reload, blocks: Sequence[int]) -> None:
        """The next plan fills the request's ``blocks`` from ``reload.first`` on, which nobody else holds, from its slots."""
        if not reload.slots:
            return
        for digest in reversed(reload.digests):  # the deepest is used least
            self._slots.move_to_end(digest)
        for block, digest in zip(blocks[reload.first :], reload.digests):
            self._digests[block] = digest
        self._planned[request_id] = reload

    def released(self, request_id: str, reuse: bool) -> None:
        """The request gave its blocks back: loads into them that are not part of a plan yet are dropped.

        Without ``reuse`` their content is not to be found again. Digests do not tell which other content rests on it, so all is forgotten;
        that is for NaN.
        """
        self._planned.pop(request_id, None)
        self._num_moves.pop(request_id, None)
        if not reuse:
            self.clear()

    def take_moves(self, blocks_of: Callable[[str], Sequence[int]]) -> tuple[Moves, Moves]:
        """(block, slot) saves and (slot, block) loads of the plan that is being made, each in the order of blocks.

        ``blocks_of``: the blocks of a request. Every call is followed by one of :meth:`landed` or :meth:`lost`, in the same order.
        """
        loads = [
            (slot, blocks_of(request_id)[reload.first + i])
            for request_id, reload in self._planned.items()
            for i, slot in enumerate(reload.slots)
        ]
        slots = self._make_room(len(self._evicted), {slot for slot, _ in loads})
        num_lost = len(self._evicted) - len(slots)
        for block in list(self._evicted)[:num_lost]:  # evicted first: the deepest of their chains
            self._saving.remove(self._evicted.pop(block))
        self.num_dropped += num_lost
        saves = tuple(zip(sorted(self._evicted), sorted(slots)))
        slot_of = dict(saves)
        self._flights.append(_Flight([(slot_of[block], digest) for block, digest in self._evicted.items()], self._planned))
        self._evicted, self._planned, self._num_moves = {}, {}, {}
        return saves, tuple(sorted(loads, key=lambda load: load[1]))

    def landed(self) -> dict[str, Reload]:
        """The step of the oldest plan is done: what it saved can be found; returns what it loaded, by request."""
        flight = self._oldest()
        for slot, digest in flight.saves:
            if flight.stale:
                heappush(self._free, slot)
            else:
                self._saving.remove(digest)
                self._slots[digest] = slot
        self.num_saved += len(flight.saves)
        self.num_reloaded += sum(len(reload.slots) for reload in flight.reloads.values())
        return flight.reloads

    def lost(self) -> None:
        """The step of the oldest plan failed: nobody knows what its moves did, so what it saved is forgotten."""
        flight = self._oldest()
        for slot, digest in flight.saves:
            heappush(self._free, slot)
            if not flight.stale:
                self._saving.remove(digest)

    def clear(self) -> None:
        """Forgets all content, of slots and of what blocks hold now; loads that are planned still take place."""
        self._digests = [None] * len(self._digests)
        for slot in self._slots.values():
            heappush(self._free, slot)
        self._slots.clear()
        self._evicted.clear()
        self._saving.clear()
        for flight in self._flights:
            flight.stale = True

    def check(self, blocks_of: Callable[[str], Sequence[int]]) -> None:
        """Proves that no slot is lost or used twice and that planned moves make sense; raises :class:`InternalError`."""
        owners = sorted([*self._free, *self._slots.values(), *(slot for flight in self._flights for slot, _ in flight.saves)])
        if owners != list(range(self.num_slots)):
            raise InternalError(f"host slots are lost or have two owners among free, findable and being saved to: {owners}")
        if any(self._free[(i - 1) // 2] > self._free[i] for i in range(1, len(self._free))):
            raise InternalError("the list of free host slots is no heap")
        saving = [*self._evicted.values(), *(d for flight in self._flights if not flight.stale for _, d in flight.saves)]
        if len(saving) != len(self._saving) or set(saving) != self._saving or not self._saving.isdisjoint(self._slots):
            raise InternalError("content is saved to the host twice, or counts as being saved and is not")
        targets: list[int] = []
        for request_id, reload in self._planned.items():
            blocks = blocks_of(request_id)[reload.first : reload.first + len(reload.slots)]
            if len(blocks) != len(reload.slots) or not reload.slots:
                raise InternalError(f"request {request_id!r} reloads {len(reload.slots)} KV blocks, but holds {len(blocks)} of them")
            targets += blocks
        if any(a == b for a, b in pairwise(sorted(targets))):
            raise InternalError(f"a KV block is reloaded twice in one plan: {sorted(targets)}")

    def _make_room(self, num_wanted: int, pinned: set[int]) -> list[int]:
        """Up to ``num_wanted`` slots: free ones, lowest first, then the least recently used; none of ``pinned``."""
        slots: list[int] = []
        skipped: list[int] = []
        while self._free and len(slots) < num_wanted:
            slot = heappop(self._free)
            (skipped if slot in pinned else slots).append(slot)
        for slot in skipped:
            heappush(self._free, slot)
        missing = num_wanted - len(slots)
        if missing:
            oldest: list[bytes] = []
            for digest, slot in self._slots.items():
                if len(oldest) == missing:
                    break
                if slot not in pinned:
                    oldest.append(digest)
            slots += [self._slots.pop(digest) for digest in oldest]
        return slots

    def _oldest(self) -> _Flight:
        if not self._flights:
            raise InternalError("moves of KV blocks are booked, but no plan is outstanding")
        return self._flights.popleft()


def _seed(salt: bytes) -> bytes:
    return blake2b(salt, digest_size=32, person=b"salt").digest()


def _digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=32).digest()
