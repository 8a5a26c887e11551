"""Forms of captured steps: how many rows, how many of them for decodes, how many chunks of prompts; a step is padded to one that holds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from depthfx.records import PREFILL_TILE_ROWS, StepPlan

# Chunks of prompts in a captured step; one more costs a row of logits and an idle tile in every step of its form.
MAX_CHUNKS = 8
# Above, the device takes longer for a step than the host for its launches (31 ms of the slowest precision on an H200's host), and padding grows.
MAX_FORM_ROWS = 2048
_SHORT_ROWS = (256, 512)  # of steps that a short prompt, or the end of a long one, leaves
_DECODE_PLACES = (0, 64, 128, 256)


@dataclass(frozen=True)
class StepForm:
    """Sizes of a captured step; rows beyond those of the step are idle (position -1).

    Places for decodes come first, then the rows of up to ``max_chunks`` chunks of prompts. A form without chunks is a bucket of decodes.
    """

    rows: int
    decode_rows: int
    max_chunks: int = 0

    @property
    def num_tiles(self) -> int:
        """Query tiles that any cut of the prompt rows into ``max_chunks`` chunks fits in."""
        return (self.rows - self.decode_rows) // PREFILL_TILE_ROWS + self.max_chunks if self.max_chunks else 0

    @property
    def num_logits(self) -> int:
        """Rows of logits: every decode and every chunk may yield a token."""
        return self.decode_rows + self.max_chunks

    def holds(self, plan: StepPlan) -> bool:
        """Whether ``plan`` can be padded to this form. Decodes alone belong in a form without chunks."""
        num_decodes = len(plan.decodes)
        return (
            bool(plan.prefills) == bool(self.max_chunks)
            and num_decodes <= self.decode_rows
            and len(plan.prefills) <= self.max_chunks
            and plan.num_tokens - num_decodes <= self.rows - self.decode_rows
            and len(plan.table_writes) <= self.rows
        )


def decode_form(bucket: int) -> StepForm:
    """The form of ``bucket`` decodes."""
    return StepForm(bucket, bucket)


def decode_places(max_batch_size: int) -> tuple[int, ...]:
    """How many decodes forms with prompts have places for, fewest first."""
    return tuple(sorted({min(places, max_batch_size) for places in _DECODE_PLACES}))


def prompt_forms(max_batch_size: int, max_batch_tokens: int, chunk_tokens: Sequence[int]) -> tuple[StepForm, ...]:
    """Forms with prompts, smallest first: short ones, and those of the rows ``chunk_tokens`` that mixed steps are filled to."""
    sizes = {rows for rows in (*_SHORT_ROWS, *chunk_tokens) if rows <= min(MAX_FORM_ROWS, max_batch_tokens)}
    forms = (StepForm(rows, places, MAX_CHUNKS) for rows in sorted(sizes) for places in decode_places(max_batch_size))
    return tuple(form for form in forms if form.rows - form.decode_rows >= MAX_CHUNKS)
