"""KV offload: evicted KV blocks go to host memory and come back when their content is needed (setting ``kv_offload_gib``)."""

from __future__ import annotations

from depthfx.alloc.host_blocks import HostBlocks
from depthfx.alloc.host_cache import HostCache
from depthfx.alloc.mapping_ledger import in_words
from depthfx.errors import SettingError
from depthfx.report import CompileReport
from depthfx.runtime.runner import Runner

# Admissions of one step cause at most so many bytes of moves, unless the first one needs more alone: 20 ms of a PCIe 5 link, less than
# computing the blocks of any model anew, and no more than a long prefill chunk delays the decodes beside it.
MOVE_BYTES = 1 << 30


def offload(runner: Runner, gib: float | None, report: CompileReport) -> HostCache | None:
    """Gives ``runner`` host memory of ``gib`` GiB for the blocks of its KV pool; returns its books, or None without ``gib``.

    Raises :class:`SettingError` if it is less than a block, :class:`HostMemoryError` if it cannot be had or pinned.
    """
    if gib is None:
        return None
    num_blocks, block_bytes = runner.kv_pool.shape[0], runner.kv_pool[0].nbytes
    num_slots = int(gib * 2**30 // block_bytes)
    if num_slots < 1:
        raise SettingError(f"setting kv_offload_gib={gib} is less than one KV block of {in_words(block_bytes)}; raise it, or leave it out")
    runner.host_blocks = HostBlocks(num_slots, block_bytes, runner.device)
    pinned = "pinned" if runner.host_blocks.pinned else "not pinned"
    report.add("memory", f"KV offload: {num_slots} blocks, {in_words(num_slots * block_bytes)} of host memory, {pinned}")
    return HostCache(num_slots, num_blocks, max(1, MOVE_BYTES // block_bytes))
