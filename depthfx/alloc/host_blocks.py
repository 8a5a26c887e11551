"""Host memory for evicted KV blocks, pinned on CUDA, and the copies between it and the KV pool."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator

import torch

from depthfx.alloc.backup import HostBackup
from depthfx.alloc.mapping_ledger import in_words
from depthfx.errors import HostMemoryError


class HostBlocks:
    """``num_slots`` slots of ``block_bytes`` bytes each; the bytes of a whole block, whatever their dtype."""

    def __init__(self, num_slots: int, block_bytes: int, device: torch.device) -> None:
        """Raises :class:`HostMemoryError` if the host has not so much memory, or it cannot be pinned for a CUDA ``device``."""
        size, total = num_slots * block_bytes, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if size > total:
            raise HostMemoryError(
                f"the host has {in_words(total)} of memory, so it cannot hold {in_words(size)} of evicted KV blocks; lower kv_offload_gib"
            )
        self.num_slots, self.block_bytes = num_slots, block_bytes
        self._memory = HostBackup(size, block_bytes, device.type == "cuda", "evicted KV blocks")
        self._slots: torch.Tensor | None = self._memory.bytes(0, size).view(num_slots, block_bytes)
        # pinned memory must be given back before its addresses are; not at exit, where CUDA may be gone
        self._close = weakref.finalize(self, _give_back, self._memory, device)
        self._close.atexit = False

    @property
    def pinned(self) -> bool:
        """Whether copies run at the full speed of the link, beside the host."""
        return self._memory.pinned

    def move(self, kv_pool: torch.Tensor, saves: tuple[tuple[int, int], ...], loads: tuple[tuple[int, int], ...]) -> None:
        """Queues, on the current stream, all ``saves`` (block, slot) and then all ``loads`` (slot, block); ``kv_pool [blocks, ...]`` is contiguous.

        Neighbours on both sides go in one copy. No slot stands in both, and no target stands twice.
        """
        assert self._slots is not None, "the host memory was given back"
        blocks = kv_pool.view(kv_pool.shape[0], -1).view(torch.uint8)
        for block, slot, count in runs(saves):
            self._slots[slot : slot + count].copy_(blocks[block : block + count], non_blocking=True)
        for slot, block, count in runs(loads):
            blocks[block : block + count].copy_(self._slots[slot : slot + count], non_blocking=True)

    def close(self) -> None:
        """Waits for copies and gives the memory back; a second call does nothing."""
        self._slots = None
        self._close()


def runs(pairs: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, int, int]]:
    """``(first, first, count)`` of neighbours: pairs that go up by one on both sides."""
    i = 0
    while i < len(pairs):
        (a, b), count = pairs[i], 1
        while i + count < len(pairs) and pairs[i + count] == (a + count, b + count):
            count += 1
        yield a, b, count
        i += count


def _give_back(memory: HostBackup, device: torch.device) -> None:
    if memory.pinned:
        torch.cuda.synchronize(device)
    memory.close()
