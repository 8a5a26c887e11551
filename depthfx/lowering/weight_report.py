"""How the linear weights of a folder nest: one row for each weight, and the sums."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from depthfx.lowering.load_model import checked_tensor, open_folder
from depthfx.lowering.nest import fast_error_of, nest_counted, rule
from depthfx.lowering.nested_checkpoint import TensorEntry, is_nested_checkpoint, read_manifest


@dataclass(frozen=True)
class WeightRow:
    """One linear weight and the format that its content asks for."""

    name: str
    shape: tuple[int, ...]
    format: str
    fast_error: float  # relative error of fast mode
    changed_by_cast: int  # elements that FP16 does not hold exactly
    persistent_bytes: int
    residual_bytes: int


def folder_rows(folder: Path) -> list[WeightRow]:
    """A row for every linear weight that nests in ``folder``: a nested checkpoint, which is not read beyond its list, or an ordinary
    folder, which is read tensor by tensor.

    Raises :class:`~depthfx.errors.CheckpointError` for a folder that cannot be loaded.
    """
    if is_nested_checkpoint(folder):
        return [_stored_row(name, entry) for name, entry in read_manifest(folder).tensors.items() if entry.format is not None]
    files, model, names, nestable = open_folder(folder, None)
    return [weight_row(n, checked_tensor(model, files, name, folder).to(model.dtype)) for name, n in names.items() if n in nestable]


def weight_row(name: str, weight: torch.Tensor) -> WeightRow:
    """The row of one ``weight`` ``[N, K]`` in float16, bfloat16 or float32, which is nested to see."""
    nested, changed = nest_counted(weight)
    return WeightRow(
        name, tuple(weight.shape), nested.format, fast_error_of(nested), changed, nested.persistent_bytes, nested.residual_bytes
    )


def _stored_row(name: str, entry: TensorEntry) -> WeightRow:
    count = entry.shape[0] * entry.shape[1]
    shift = entry.shape[0] if "shift" in entry.parts else 0
    persistent, residual = (count + shift, count) if "lower" in entry.parts else (2 * count, 0)
    return WeightRow(name, entry.shape, str(entry.format), entry.fast_error, entry.changed_by_cast, persistent, residual)


def weight_table(rows: list[WeightRow]) -> str:
    """The rows and the sums of each format as text."""
    width = max((len(r.name) for r in rows), default=6)
    lines = [f"{'tensor':<{width}}  {'shape':>14}  {'format':<18}  {'FP8 error':>9}  {'cast':>7}  {'persistent':>11}  {'residual':>11}"]
    for r in rows:
        shape = " x ".join(map(str, r.shape))
        changed = f"{r.changed_by_cast}" if r.changed_by_cast else "exact"
        lines.append(
            f"{r.name:<{width}}  {shape:>14}  {r.format:<18}  {r.fast_error:>8.2%}  {changed:>7}  {r.persistent_bytes:>11,}  {r.residual_bytes:>11,}"
        )
    return "\n".join([*lines, *sum_lines(rows), f"rule: {rule()}"])


def sum_lines(rows: list[WeightRow]) -> list[str]:
    """One line for each format: how many weights, and their bytes."""
    lines = []
    for name in sorted({r.format for r in rows}):
        own = [r for r in rows if r.format == name]
        persistent, residual = sum(r.persistent_bytes for r in own), sum(r.residual_bytes for r in own)
        lines.append(f"{len(own)} x {name}: {persistent / 2**20:,.1f} MiB persistent, {residual / 2**20:,.1f} MiB residual")
    return lines
