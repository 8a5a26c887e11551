"""The text behind ``model.memory()``: who owns each byte now, which layers are full, and what has moved so far."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import torch
from torch import nn

from depthfx.alloc.units import SharedRegion
from depthfx.alloc.usage import BlockUsage
from depthfx.lowering.nested_linear import NestedLinear
from depthfx.runtime.elastic import ElasticControl
from depthfx.runtime.engine import Engine

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30


def memory_text(model: nn.Module, engine: Engine | None, kv_block_bytes: int) -> str:
    """Lines under headings. ``engine``: that of ``model``, None where it was not compiled; ``kv_block_bytes``: of one KV block.

    Everything is read under the engine's lock, so the lines agree with each other.
    """
    persistent, residual = weight_bytes(model)
    if engine is None:
        return _text({"weights": [f"{in_bytes(persistent + residual)}; the model is not compiled, so there is no KV cache"]})
    with engine._state:
        stats, modes = engine.stats(), engine.precision()
        control = engine.control if isinstance(engine.control, ElasticControl) else None
        if engine._released:
            lines = [f"{in_bytes(persistent + residual)}; the engine is closed, KV and shared memory were given back"]
            return _text({"weights": lines})
        sections = {
            "weights": [f"persistent {in_bytes(persistent)}", *_residuals(residual, control)],
            f"KV cache, blocks of {in_bytes(kv_block_bytes)}": _kv(stats.kv, kv_block_bytes),
            "lending": _lending(control, engine.control is not None),
        }
        if modes:
            sections["precision of the next step"] = [f"{mode}: {names}" for mode, names in ranges(modes)] or ["no layer can switch"]
        waiting = f"{stats.num_running} running, {stats.num_waiting} waiting, {stats.num_preemptions} preemptions so far"
        sections["requests"] = [waiting]
    if (device := next(model.parameters()).device).type == "cuda":
        sections["device"] = _device(device)
    return _text(sections)


def weight_bytes(model: nn.Module) -> tuple[int, int]:
    """Bytes of the model's weights and buffers: those that always stay, and residual bytes of nested weights (wherever they are now)."""
    residuals = [m.lower for m in model.modules() if isinstance(m, NestedLinear) and m.lower is not None]
    theirs = {t.data_ptr() for t in residuals}
    others = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in (*model.parameters(), *model.buffers())
        if t.data_ptr() not in theirs
    }
    return sum(others.values()), sum(t.numel() for t in residuals)


def in_bytes(count: float) -> str:
    """``count`` bytes in the largest unit that keeps it above 1."""
    for name, size in (("GiB", _GIB), ("MiB", _MIB), ("KiB", _KIB)):
        if count >= size:
            return f"{count / size:,.2f} {name}"
    return f"{count:.0f} bytes"


def ranges(modes: dict[int | str, str]) -> list[tuple[str, str]]:
    """Names under each mode, runs of layers as ``first-last``: ``[("full", "layers 0-11, 14; head")]``."""
    found = []
    for mode in dict.fromkeys(modes.values()):
        names = [name for name, m in modes.items() if m == mode]
        layers = [name for name in names if isinstance(name, int)]
        parts = [f"layer{'s' if len(layers) > 1 else ''} {', '.join(_runs(layers))}"] if layers else []
        found.append((mode, "; ".join(parts + [str(name) for name in names if not isinstance(name, int)])))
    return found


def residual_bytes(region: SharedRegion) -> dict[str, int]:
    """Residual bytes in place, coming back, and lent, by the state of their unit; spare bytes of units are left out."""
    found = {"in place": 0, "coming back": 0, "lent": 0}
    for unit in range(region.layout.num_units):
        first, end = region.layout.pieces_of(unit)
        state = region.state(unit)
        found["in place" if state == "BACKED" else "coming back" if state == "RESTORING" else "lent"] += end - first
    return found


def _runs(numbers: Sequence[int]) -> Iterable[str]:
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        yield str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"


def _residuals(total: int, control: ElasticControl | None) -> list[str]:
    if not total:
        return ["no residual bytes: the weights have one precision"]
    if control is None:
        return [f"residuals {in_bytes(total)}, in place"]
    owners = ", ".join(f"{in_bytes(size)} {where}" for where, size in residual_bytes(control.region).items())
    layout, host = control.shared.layout, control.shared.backup
    spare = layout.num_units * layout.unit_bytes - host.num_bytes
    wasted = f"{in_bytes(spare)} ({spare / (layout.num_units * layout.unit_bytes):.2%}) of them hold no residual"
    return [
        f"residuals {in_bytes(host.num_bytes)}: {owners}",
        f"units: {layout.num_units} of {in_bytes(layout.unit_bytes)}; {wasted}",
        f"host copy {in_bytes(host.num_bytes)}, {'pinned' if host.pinned else 'not pinned'}",
    ]


def _kv(kv: BlockUsage, block_bytes: int) -> list[str]:
    if kv.bytes is None:
        rows = {"all": (kv.num_held * block_bytes, kv.num_cached * block_bytes, kv.num_free * block_bytes)}
    else:
        u = kv.bytes
        rows = {"base": (u.base_held, u.base_cached, u.base_free), "lent": (u.lent_held, u.lent_cached, u.lent_free)}
    lines = [
        f"{name}: {in_bytes(sum(row))}; held {in_bytes(row[0])}, cached {in_bytes(row[1])}, free {in_bytes(row[2])}"
        for name, row in rows.items()
    ]
    return [*lines, f"blocks: {kv.num_held} held of {kv.num_open} open, {kv.num_blocks} at most"]


def _lending(control: ElasticControl | None, switched: bool) -> list[str]:
    if control is None:
        return ["none: precision follows load, memory does not move" if switched else "none: this model has no elastic memory"]
    moved = control.stats()
    rate = f"{moved.restored_bytes / moved.restore_seconds / 1e9:.2f} GB/s" if moved.restored_bytes else "no rate yet"
    backlog = residual_bytes(control.region)["coming back"]
    moves = f"{moved.num_lends} lends, {moved.num_restores} restores, {moved.num_cancels} cancels, {moved.num_failures} failures"
    return [
        f"policy {control.settings.policy}; {moves}",
        f"restored {in_bytes(moved.restored_bytes)} in {moved.restore_seconds:.3f} s of copying ({rate}); {in_bytes(backlog)} on their way",
        f"chunks in flight: up to {moved.chunks_in_flight}, halved {moved.num_slow} times for others on the link",
    ]


def _device(device: torch.device) -> list[str]:
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return [
        f"{in_bytes(free)} of {in_bytes(total)} free",
        f"PyTorch's allocator: {in_bytes(allocated)} in use of {in_bytes(reserved)} taken (units and their KV are not among them)",
    ]


def _text(sections: dict[str, list[str]]) -> str:
    return "\n".join(line for name, lines in sections.items() for line in (name, *(f"  {line}" for line in lines)))
