"""Scratch that kernels with joined partial results need: it exists before a graph is captured and never moves after."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from depthfx.errors import InternalError
from depthfx.lowering.kernel_spec import device_sms


@dataclass(frozen=True)
class Scratch:
    """Partial results (fp32) and arrival counters (int32, zero between launches) of one device.

    All kernels of a device share it, so launches that use it must follow one another on one stream.
    """

    values: torch.Tensor
    counters: torch.Tensor


# Captured graphs hold the addresses: what was handed out once is never freed.
_held: list[Scratch] = []
_current: dict[torch.device, Scratch] = {}


def reserve_scratch(device: torch.device, max_rows: int, num_heads: int, head_dim: int) -> None:
    """Make the scratch of ``device`` large enough for decode attention of up to ``max_rows`` rows and for split linears.

    Call it before any graph is captured. Ranges of keys are many only where rows are few, so the size follows
    ``max_rows`` gently: at most 3 programs for each multiprocessor, or 8 ranges a row.
    """
    width = max(128, 1 << (head_dim - 1).bit_length()) + 2
    most_partials = num_heads * max(8 * max_rows, 3 * device_sms(device) + max_rows)
    num_values = max(most_partials * width, 8 << 20)
    _ensure(_indexed(device), num_values, max(max_rows * num_heads, 65536))


def scratch_of(device: torch.device, num_values: int, num_counters: int) -> Scratch:
    """Scratch of at least this size. Outside a capture it grows; inside one it raises, since a graph must own no part of it."""
    device = _indexed(device)
    present = _current.get(device)
    if present is not None and present.values.numel() >= num_values and present.counters.numel() >= num_counters:
        return present
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        have = (present.values.numel(), present.counters.numel()) if present else (0, 0)
        raise InternalError(
            f"kernel scratch holds {have[0]} values and {have[1]} counters, but a captured launch needs {num_values} and "
            f"{num_counters}; call reserve_scratch with the largest number of rows before the capture"
        )
    return _ensure(device, num_values, num_counters)


def _ensure(device: torch.device, num_values: int, num_counters: int) -> Scratch:
    present = _current.get(device)
    if present is not None:
        if present.values.numel() >= num_values and present.counters.numel() >= num_counters:
            return present
        num_values = max(num_values, present.values.numel())
        num_counters = max(num_counters, present.counters.numel())
    grown = Scratch(
        torch.zeros(num_values, dtype=torch.float32, device=device),
        torch.zeros(num_counters, dtype=torch.int32, device=device),
    )
    _held.append(grown)
    _current[device] = grown
    return grown


def _indexed(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
