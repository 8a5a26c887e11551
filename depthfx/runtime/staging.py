"""Packing of a step's integers into one buffer and one transfer to the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from depthfx.records import PREFILL_TILE_ROWS, Chunk, StepPlan
from depthfx.runtime.host_ring import TURNS, HostRing
from depthfx.runtime.step_form import MAX_CHUNKS, StepForm

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

    The device buffer is overwritten by each step; this is safe because all steps run on one stream. The views of steps
    padded to one form are the same memory, so that a captured graph may hold them.
    """

    def __init__(self, max_tokens: int, max_rows: int, blocks_per_row: int, device: torch.device) -> None:
        self.device = device
        self.max_writes = max(4096, max_tokens)
        self._columns, self._max_rows = blocks_per_row, max_rows
        tiles = max_tokens // PREFILL_TILE_ROWS + 2 * max_rows + 2
        capacity = 8 * max_tokens + 2 * self.max_writes + max_rows + 2 * tiles + 4 * MAX_CHUNKS + 16 * _ALIGN
        pin = device.type == "cuda"
        self._ring = HostRing(capacity, device, sends=2)  # a step may run in two halves
        self._tokens = [torch.zeros(max(max_rows, 1), dtype=torch.int64, device="cpu", pin_memory=pin) for _ in range(TURNS)]
        self._device = torch.zeros(capacity, dtype=torch.int32, device=device) if pin else None
        self._token_turn = 0

    def upload(self, plan: StepPlan, form: StepForm | None = None, routed: bool = False) -> Uploaded:
        """Pack ``plan`` and copy it to the device; padded to a ``form`` that holds it; ``routed`` adds what routing needs."""
        assert len(plan.table_writes) <= self.max_writes, "the runner applies larger sets of writes beforehand"
        fields = _pack(plan, form, self._columns, self._columns * self._max_rows)
        fields += _pack_routing(plan, form) if routed else (_NOTHING, _NOTHING, _NOTHING)
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
        return Uploaded(len(plan.decodes) if form is None else form.decode_rows, *views)

    def token_buffer(self) -> torch.Tensor:
        """Host buffer ``[rows]`` int64 for the tokens of one step; in rotation, apart from the uploads."""
        self._token_turn = (self._token_turn + 1) % TURNS
        return self._tokens[self._token_turn]

    def tape_buffer(self, shape: torch.Size) -> torch.Tensor:
        """Host buffer ``shape`` int8 for the tape of one step, the caller's own."""
        return torch.empty(shape, dtype=torch.int8, device="cpu", pin_memory=self._device is not None)


def _pack(plan: StepPlan, form: StepForm | None, columns: int, trash: int) -> tuple[np.ndarray, ...]:
    """The tensors of :class:`Uploaded` in order; padding writes of the block tables go to place ``trash``, past the end."""
    chunks, num_decodes = plan.decodes + plan.prefills, len(plan.decodes)
    lengths = [c.num_tokens for c in chunks]
    token_ids = np.array([t for c in chunks for t in (c.token_ids or (0,))], dtype=np.int32)
    source = np.full(len(token_ids), -1, dtype=np.int32)
    source[:num_decodes] = [c.source for c in plan.decodes]
    starts = np.array([c.start for c in chunks], dtype=np.int32)
    first_rows = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    positions = np.repeat(starts - first_rows[:-1], lengths) + np.arange(len(token_ids), dtype=np.int32)
    table_rows = np.repeat(np.array([c.table_row for c in chunks], dtype=np.int32), lengths)
    logit_rows = np.array([last - 1 for c, last in zip(chunks, first_rows[1:], strict=True) if c.samples], dtype=np.int32)
    writes = np.array(plan.table_writes, dtype=np.int64).reshape(-1, 3)
    write_places, write_blocks = writes[:, 0] * columns + writes[:, 1], writes[:, 2]
    chunk_starts = first_rows[num_decodes:] if plan.prefills else first_rows[:0]
    tile_chunks, tile_starts = prefill_tiles(plan.prefills)
    if form is not None:
        assert form.holds(plan) or not chunks, f"{form} does not hold {num_decodes} decodes and {len(plan.prefills)} chunks"
        token_ids, table_rows = _spread(token_ids, num_decodes, form), _spread(table_rows, num_decodes, form)
        source, positions = _spread(source, num_decodes, form, -1), _spread(positions, num_decodes, form, -1)
        moved = np.where(logit_rows < num_decodes, logit_rows, logit_rows + form.decode_rows - num_decodes)
        logit_rows = np.concatenate([moved, np.arange(len(moved), form.num_logits)])
        write_places = np.pad(write_places, (0, form.rows - len(write_places)), constant_values=trash)
        write_blocks = np.pad(write_blocks, (0, form.rows - len(write_blocks)))
        if form.max_chunks:  # chunks that are not there begin and end behind the last one, and no tile names them
            begun = first_rows[num_decodes:] + (form.decode_rows - num_decodes)
            chunk_starts = np.pad(begun, (0, form.max_chunks + 1 - len(begun)), mode="edge")
            tile_chunks = np.pad(tile_chunks, (0, form.num_tiles - len(tile_chunks)), constant_values=-1)
            tile_starts = np.pad(tile_starts, (0, form.num_tiles - len(tile_starts)))
    return (token_ids, source, positions, table_rows, logit_rows, write_places, write_blocks, chunk_starts, tile_chunks, tile_starts)


def _spread(rows: np.ndarray, num_decodes: int, form: StepForm, idle: int = 0) -> np.ndarray:
    """``rows`` [T] with those behind the decodes moved to where the form has its prompts; ``idle`` elsewhere."""
    spread = np.full(form.rows, idle, dtype=rows.dtype)
    spread[:num_decodes] = rows[:num_decodes]
    spread[form.decode_rows : form.decode_rows + len(rows) - num_decodes] = rows[num_decodes:]
    return spread


_NOTHING = np.zeros(0, dtype=np.int32)


def _pack_routing(plan: StepPlan, form: StepForm | None) -> tuple[np.ndarray, ...]:
    """Number of the request, 1 for rows that have to run every layer, 1 for rows of a prompt; 0 for padding."""
    chunks = plan.decodes + plan.prefills
    lengths = [c.num_tokens for c in chunks]
    columns = ([c.number for c in chunks], [not c.routed for c in chunks], [c.is_prompt for c in chunks])
    fields = (np.repeat(np.array(values, dtype=np.int32), lengths) for values in columns)
    return tuple(fields if form is None else (_spread(field, len(plan.decodes), form) for field in fields))


def prefill_tiles(prefills: tuple[Chunk, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Query tiles of the prefill chunks: ``(chunk of each tile, first row within the chunk)``, most keys first.

    Tiles that read more keys take longer; starting them first keeps the last wave short.
    """
    tiles = [
        (chunk.start + row, number, row) for number, chunk in enumerate(prefills) for row in range(0, chunk.num_tokens, PREFILL_TILE_ROWS)
    ]
    tiles.sort(reverse=True)
    return np.array([t[1] for t in tiles], dtype=np.int32), np.array([t[2] for t in tiles], dtype=np.int32)
