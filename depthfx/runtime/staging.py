"""Packing of a step's integers into one buffer and one transfer to the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from depthfx.records import PREFILL_TILE_ROWS, Chunk, StepPlan
from depthfx.runtime.host_ring import TURNS, HostRing

# Fields start at multiples of this many int32 (64 bytes), so that a field's alignment never depends on the step.
_ALIGN = 16


@dataclass(frozen=True)
class Uploaded:
    """Device views of one step's integers, int32; see :class:`depthfx.records.StepInputs` for the meanings."""

    num_decode_rows: int
    token_ids: torch.Tensor  # [T], 0 where the token is still on the device
    source: torch.Tensor  # [T], sampled row of the step before, or -1
    positions: torch.Tensor  # [T]
    table_rows: torch.Tensor  # [T]
    logit_rows: torch.Tensor  # [R]
    write_places: torch.Tensor  # [W], flat places in the block tables
    write_blocks: torch.Tensor  # [W]
    chunk_starts: torch.Tensor  # [C + 1]
    tile_chunks: torch.Tensor  # [Q]
    tile_starts: torch.Tensor  # [Q]
    request_ids: torch.Tensor  # [T], or empty in a dense step, as the next two
    forced_run: torch.Tensor  # [T]
    is_prompt: torch.Tensor  # [T]


class Staging:
    """Host buffers (pinned on CUDA) and the one device buffer that steps are uploaded into.

    The device buffer is overwritten by each step; this is safe because all steps run on one stream. With ``pad_to`` the
    views of equal bucket sizes are the same memory, so that a captured graph may hold them.
    """

    def __init__(self, max_tokens: int, max_rows: int, blocks_per_row: int, device: torch.device) -> None:
        self.device = device
        self.max_writes = max(4096, max_tokens)
        self._columns, self._max_rows = blocks_per_row, max_rows
        tiles = max_tokens // PREFILL_TILE_ROWS + 2 * max_rows + 2
        capacity = 8 * max_tokens + 2 * self.max_writes + max_rows + 2 * tiles + 16 * _ALIGN
        pin = device.type == "cuda"
        self._ring = HostRing(capacity, device)
        self._tokens = [torch.zeros(max(max_rows, 1), dtype=torch.int64, device="cpu", pin_memory=pin) for _ in range(TURNS)]
        self._device = torch.zeros(capacity, dtype=torch.int32, device=device) if pin else None
        self._token_turn = 0

    def upload(self, plan: StepPlan, pad_to: int | None = None, routed: bool = False) -> Uploaded:
        """Pack ``plan`` and copy it to the device; ``pad_to`` pads a pure decode step to a bucket with idle rows, ``routed`` adds what routing needs."""
        assert len(plan.table_writes) <= self.max_writes, "the runner applies larger sets of writes beforehand"
        fields = _pack(plan, pad_to, self._columns, self._columns * self._max_rows)
        fields += _pack_routing(plan, pad_to) if routed else (_NOTHING, _NOTHING, _NOTHING)
        host = self._ring.next()
        flat = host.numpy()
        places, at = [], 0
        for values in fields:
            flat[at : at + len(values)] = values
            places.append((at, len(values)))
            at += -(-max(len(values), 1) // _ALIGN) * _ALIGN
        if self._device is None:
            # views are read only until the next upload of the same buffer
            views = [host[a : a + n] for a, n in places]
        else:
            self._ring.send(host[:at], self._device[:at])
            views = [self._device[a : a + n] for a, n in places]
        return Uploaded(len(plan.decodes) if pad_to is None else pad_to, *views)

    def token_buffer(self) -> torch.Tensor:
        """Host buffer ``[rows]`` int64 for the tokens of one step; in rotation, apart from the uploads."""
        self._token_turn = (self._token_turn + 1) % TURNS
        return self._tokens[self._token_turn]

    def tape_buffer(self, shape: torch.Size) -> torch.Tensor:
        """Host buffer ``shape`` int8 for the tape of one step, the caller's own."""
        return torch.empty(shape, dtype=torch.int8, device="cpu", pin_memory=self._device is not None)


def _pack(plan: StepPlan, pad_to: int | None, columns: int, trash: int) -> tuple[np.ndarray, ...]:
    """The tensors of :class:`Uploaded` in order; padding writes of the block tables go to place ``trash``, past the end."""
    chunks = plan.decodes + plan.prefills
    lengths = [c.num_tokens for c in chunks]
    token_ids = [t for c in chunks for t in (c.token_ids or (0,))]
    source = np.full(len(token_ids), -1, dtype=np.int32)
    source[: len(plan.decodes)] = [c.source for c in plan.decodes]
    starts = np.array([c.start for c in chunks], dtype=np.int32)
    first_rows = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    positions = np.repeat(starts - first_rows[:-1], lengths) + np.arange(len(token_ids), dtype=np.int32)
    table_rows = np.repeat(np.array([c.table_row for c in chunks], dtype=np.int32), lengths)
    logit_rows = [int(last) - 1 for c, last in zip(chunks, first_rows[1:], strict=True) if c.samples]
    writes = np.array(plan.table_writes, dtype=np.int64).reshape(-1, 3)
    write_places, write_blocks = writes[:, 0] * columns + writes[:, 1], writes[:, 2]
    tile_chunks, tile_starts = prefill_tiles(plan.prefills)
    chunk_starts = first_rows[len(plan.decodes) :] if plan.prefills else first_rows[:0]
    if pad_to is not None:
        idle = pad_to - len(token_ids)
        token_ids, logit_rows = token_ids + [0] * idle, list(range(pad_to))
        source, positions = np.pad(source, (0, idle), constant_values=-1), np.pad(positions, (0, idle), constant_values=-1)
        table_rows = np.pad(table_rows, (0, idle))
        write_places = np.pad(write_places, (0, pad_to - len(write_places)), constant_values=trash)
        write_blocks = np.pad(write_blocks, (0, pad_to - len(write_blocks)))
    return (
        np.asarray(token_ids, dtype=np.int32),
        source,
        positions,
        table_rows,
        np.asarray(logit_rows, dtype=np.int32),
        write_places,
        write_blocks,
        chunk_starts,
        tile_chunks,
        tile_starts,
    )


_NOTHING = np.zeros(0, dtype=np.int32)


def _pack_routing(plan: StepPlan, pad_to: int | None) -> tuple[np.ndarray, ...]:
    """Number of the request, 1 for rows that have to run every layer, 1 for rows of a prompt; 0 for padding."""
    chunks = plan.decodes + plan.prefills
    lengths = [c.num_tokens for c in chunks]
    idle = 0 if pad_to is None else pad_to - sum(lengths)
    columns = ([c.number for c in chunks], [not c.routed for c in chunks], [c.is_prompt for c in chunks])
    return tuple(np.pad(np.repeat(np.array(values, dtype=np.int32), lengths), (0, idle)) for values in columns)


def prefill_tiles(prefills: tuple[Chunk, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Query tiles of the prefill chunks: ``(chunk of each tile, first row within the chunk)``, most keys first.

    Tiles that read more keys take longer; starting them first keeps the last wave short.
    """
    tiles = [
        (chunk.start + row, number, row) for number, chunk in enumerate(prefills) for row in range(0, chunk.num_tokens, PREFILL_TILE_ROWS)
    ]
    tiles.sort(reverse=True)
    return np.array([t[1] for t in tiles], dtype=np.int32), np.array([t[2] for t in tiles], dtype=np.int32)
