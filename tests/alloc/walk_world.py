"""The bytes below a walk of the manager: unified memory over one backend, the host's copy, and the worker that restores.

KV blocks are stamped with what they hold, residuals have random bytes and hashes. Where a backend has no bytes only its mappings are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from depthfx.alloc.backup import HostBackup
from depthfx.alloc.physical_backend import PhysicalBackend
from depthfx.alloc.restore_worker import RestoreWorker
from depthfx.alloc.unified_memory import POISON, UnifiedMemory
from depthfx.alloc.units import UnitLayout

BASE, UNITS, PER_UNIT = 3, 4, 2
NUM_BLOCKS = BASE + UNITS * PER_UNIT
WAIT = 60.0


def layout_over(unit: int) -> UnitLayout:
    """Units of ``unit`` bytes. Unit 0 holds bytes of entries 1 and 3, unit 2 of 0 and 3; entry 2 has none; the last unit is part empty."""
    part = unit // 64
    return UnitLayout(unit, PER_UNIT, BASE, ((140 * part, 230 * part + 3), (0, 50 * part), (0, 0), (50 * part, 140 * part)))


class World:
    """See the module's text. All methods do nothing to bytes that a backend does not have."""

    def __init__(self, make: Callable[[], PhysicalBackend], device: str = "cpu") -> None:
        backend = make()
        self.layout = layout_over(backend.granularity())
        self.memory = UnifiedMemory.build(backend, self.layout, BASE * self.layout.block_bytes)
        self.mappings = backend.snapshot()
        self.has_bytes = backend.holds_bytes
        self.worker: RestoreWorker | None = None
        self._copied: set[int] = set()  # units that the worker has told of, and whose restore has not been finished
        if not self.has_bytes:
            return
        self._cuda = device != "cpu"
        self.home = self.memory.home_bytes_tensor()
        used = max(end for _, end in self.layout.spans)
        self.home.copy_(torch.randint(0, 256, self.home.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)))
        spans = [span for span in self.layout.spans if span != (0, 0)]
        self.host = HostBackup.take(self.home, used, self.layout.unit_bytes, pin=self._cuda, spans=spans)
        self.blocks = self.memory.kv_tensor((NUM_BLOCKS, self.layout.block_bytes // 8), torch.int64)
        self.worker = RestoreWorker(device, chunk_bytes=self.layout.unit_bytes // 4 + 8)
        self._stream = torch.cuda.current_stream() if self._cuda else None

    def begin(self) -> None:
        """All residuals where they belong, no copy under way, base blocks of nobody."""
        if self.worker is None:
            return
        assert self.worker.wait_idle(WAIT)
        self.worker.poll()
        self._copied.clear()
        units = range(UNITS)
        self.worker.copy_all([self._target(unit) for unit in units], [self.host.unit(unit) for unit in units], self._event())
        self.stamp(range(BASE), "nobody's")

    def stamp(self, blocks: Iterable[int], content: object) -> None:
        """The owner's write to all bytes of its blocks."""
        for block in blocks if self.has_bytes else ():
            self.blocks[block].fill_(_number(content))

    def copy(self, moves: Iterable[tuple[int, int]]) -> None:
        """Blocks to other places, (source, target), as a compaction does; nothing is left at the sources."""
        for source, target in moves if self.has_bytes else ():
            self.blocks[target].copy_(self.blocks[source])
            self.stamp([source], "moved away")

    def holds(self, blocks: Iterable[int], contents: Iterable[object]) -> None:
        """Asserts that every byte of the blocks is as it was stamped."""
        if self.has_bytes:
            checks = [(block, content) for block, content in zip(blocks, contents, strict=True)]
            if checks:
                wrong = [(self.blocks[block] != _number(content)).sum() for block, content in checks]
                counts = torch.stack(wrong).tolist()
                assert not any(counts), [(*check, f"{n} words") for check, n in zip(checks, counts) if n]

    def lend(self, unit: int, restoring: bool) -> None:
        """The unit is KV from now on: a copy into it is stopped, its bytes are poisoned."""
        if self.worker is None:
            return
        if unit in self._copied:
            self._copied.remove(unit)
        elif restoring and (event := self.worker.cancel(unit)) is not None and self._stream is not None:
            event.wait(self._stream)
        self.memory.poison(unit)
        seen = self.blocks[BASE + unit * PER_UNIT : BASE + (unit + 1) * PER_UNIT].view(torch.uint8)
        assert bool((seen == POISON).all()), f"unit {unit} is not the same bytes at both of its addresses"

    def restore(self, unit: int) -> None:
        """Begins the copy of a unit's residual bytes, behind everything that was queued."""
        if self.worker is not None:
            self.worker.submit(unit, self._target(unit), self.host.unit(unit), self._event())

    def finish(self, unit: int) -> None:
        """Waits until a unit's bytes are there."""
        if self.worker is not None and unit not in self._copied:
            assert self.worker.wait_idle(WAIT)
            self._copied.update(self.worker.poll())
        self._copied.discard(unit)

    def verify(self, entry: int) -> None:
        """Asserts by its hash that an entry's residual is whole."""
        if self.has_bytes and self.layout.spans[entry] != (0, 0):
            assert self.host.verify(self.home, *self.layout.spans[entry]) == 1

    def is_unchanged(self) -> bool:
        """Whether every address is still backed by what was behind it at first."""
        now = self.memory.backend.snapshot()
        return (now.ranges, now.handles, now.mappings) == (self.mappings.ranges, self.mappings.handles, self.mappings.mappings)

    def close(self) -> None:
        """Gives everything back and asserts that nothing is left."""
        if self.worker is not None:
            self.worker.close(WAIT)
            self.home = self.blocks = torch.empty(0)
            if self._cuda:
                torch.cuda.synchronize()
            self.host.close()
        self.memory.close()
        assert self.memory.backend.snapshot().is_empty

    def _target(self, unit: int) -> torch.Tensor:
        return self.home[slice(*self.layout.pieces_of(unit))]

    def _event(self) -> torch.cuda.Event | None:
        return None if self._stream is None else self._stream.record_event()


def _number(content: object) -> int:
    return hash(content) >> 1  # of 63 bits; equal within one process, and nobody looks at it elsewhere
