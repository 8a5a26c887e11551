"""How the linear weights of a model nest: one row for each weight, and the sums."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from depthfx.lowering.nested_format import choose_format, fast_error, to_float16


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


def weight_rows(model: torch.nn.Module, skip: tuple[torch.nn.Module | None, ...] = ()) -> list[WeightRow]:
    """A row for the weight of every linear module except those in ``skip`` (the LM head stays 16-bit)."""
    rows = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not any(module is s for s in skip):
            weight, changed = to_float16(module.weight.detach())
            form = choose_format(weight)
            nested = form.split(weight)
            rows.append(
                WeightRow(
                    f"{name}.weight",
                    tuple(weight.shape),
                    form.name,
                    fast_error(weight, nested),
                    changed,
                    nested.persistent_bytes,
                    nested.residual_bytes,
                )
            )
    return rows


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
    for name in sorted({r.format for r in rows}):
        own = [r for r in rows if r.format == name]
        persistent, residual = sum(r.persistent_bytes for r in own), sum(r.residual_bytes for r in own)
        lines.append(f"{len(own)} x {name}: {persistent / 2**20:,.1f} MiB persistent, {residual / 2**20:,.1f} MiB residual")
    return "\n".join(lines)
