"""A runner without a model over real shared memory: KV lies as bytes in the pool, residuals are compared with what they were, step by step."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from depthfx.alloc.manager import MemoryManager
from depthfx.alloc.units import SharedRegion
from depthfx.lowering.stored_weight import StoredWeight
from depthfx.records import KvShape
from depthfx.report import CompileReport
from depthfx.runtime.elastic import ElasticControl
from depthfx.runtime.elastic_memory import share_memory
from depthfx.runtime.engine import Engine
from depthfx.runtime.scheduler import Scheduler
from depthfx.settings import ElasticMemory
from tests.runtime.fake_runner import FakeRunner

VOCAB, BLOCK, LENGTH, BATCH = 97, 4, 48, 10
KV = KvShape(num_layers=4, num_kv_heads=1, head_dim=16, block_tokens=BLOCK, element_bytes=2)  # 1 KiB a block


class PoolSlots:
    """Slots of (position, token), written all over a token's share of its block and read back whole."""

    def __init__(self, pool: torch.Tensor) -> None:
        self.words = pool.view(torch.int32).reshape(pool.shape[0] * BLOCK, -1).numpy()

    def __setitem__(self, slot: int, value: tuple[int, int]) -> None:
        self.words[slot, 0::2], self.words[slot, 1::2] = value

    def __getitem__(self, slot: int) -> tuple[int, int]:
        found = self.words[slot].reshape(-1, 2)
        assert (found == found[0]).all(), f"slot {slot} was written by somebody else: {np.unique(found, axis=0)}"
        return int(found[0, 0]), int(found[0, 1])


class ByteRunner(FakeRunner):
    """Also checks the residual bytes of every entry that a step reads, and that what an admission reuses is of one precision."""

    def __init__(self, pool: torch.Tensor, control: ElasticControl, originals: dict[int, list[bytes]]) -> None:
        super().__init__(pool.shape[0], BLOCK, BATCH, LENGTH // BLOCK, VOCAB)
        self.kv = PoolSlots(pool)
        self.control, self.originals = control, originals
        self.precisions: list[bytes] = []
        self.computed: dict[int, bytes] = {}
        self.ends: dict[str, int] = {}
        self.num_reused = self.num_moved = 0
        self._compact = control.manager.compact
        control.manager.compact = self.compact  # the control moves the bytes

    def compact(self, unit: int, limit: int) -> list[tuple[int, int]]:
        """What was computed in which precision moves with the blocks."""
        moves = self._compact(unit, limit)
        for source, target in moves:
            for i in range(BLOCK):
                self.computed[target * BLOCK + i] = self.computed.get(source * BLOCK + i, b"never computed")
        self.num_moved += len(moves)
        return moves

    def launch(self, plan):
        self.precisions.append(plan.precision)
        for entry, full in enumerate(plan.precision):
            if full:
                self.check_residual(entry)
        for chunk in plan.decodes + plan.prefills:
            if chunk.start and chunk.start != self.ends.get(chunk.request_id, 0):
                tables = {(row, column): block for row, column, block in plan.table_writes}
                table = [tables.get((chunk.table_row, c), b) for c, b in enumerate(self.tables[chunk.table_row])]
                found = {self.computed[table[p // BLOCK] * BLOCK + p % BLOCK] for p in range(chunk.start)}
                assert len(found) == 1, f"step {plan.step_id} reuses KV of {found}"
                self.num_reused += 1
            self.ends[chunk.request_id] = chunk.start + chunk.num_tokens
        result = super().launch(plan)
        for chunk in plan.decodes + plan.prefills:
            for position in range(chunk.start, chunk.start + chunk.num_tokens):
                self.computed[self._slot(chunk.table_row, position)] = plan.precision
        return result

    def check_residual(self, entry: int) -> None:
        """Each residual tensor of the entry holds what it was loaded with."""
        now = [bytes(w.lower.reshape(-1).numpy()) for w, _ in self.control.shared.weights if w.entry == entry]
        assert now == self.originals.get(entry, []), f"the residual of entry {entry} is read, but it is not what was loaded"

    def release(self) -> None:
        del self.kv


def stored_weights(sizes: dict[int, list[int]]) -> list[StoredWeight]:
    """Random weights ``[N, 16]`` of each entry, by the N of its tensors; no module of a model reads them."""
    made = []
    for entry, rows in sizes.items():
        for number, n in enumerate(rows):
            holder = nn.Module()
            for part in ("upper", "lower"):
                holder.register_buffer(f"w{number}_{part}", torch.randint(0, 256, (n, 16), dtype=torch.uint8))
            made.append(StoredWeight(entry, f"w{number}", holder, ()))
    return made


def byte_engine(settings: ElasticMemory, sizes: dict[int, list[int]], entries: int, base_blocks: int, lookahead: bool) -> Engine:
    """An engine of everything but the model: shared memory over memfd, worker, control, manager, scheduler, byte runner."""
    torch.manual_seed(3)
    weights = stored_weights(sizes)
    originals = {entry: [bytes(w.lower.reshape(-1).numpy()) for w in weights if w.entry == entry] for entry in sizes}
    shared = share_memory(weights, KV, entries, base_blocks, settings, torch.device("cpu"), CompileReport())
    region = SharedRegion(shared.layout)
    manager = MemoryManager(shared.layout.num_blocks, BLOCK, BATCH, LENGTH // BLOCK, True, region)
    control = ElasticControl(shared, manager, settings)
    runner = ByteRunner(shared.kv_pool(KV, torch.float16), control, originals)
    layers = (*range(entries - 1), "head")
    return Engine(Scheduler(manager, BATCH, 24, 8, LENGTH), runner, VOCAB, lookahead, check=True, layers=layers, control=control)
