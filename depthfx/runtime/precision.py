"""Modes of precision: names for users, one byte for each layer inside plans, the flags on the device.

A state is ``bytes`` ``[P]``: 1 full, 0 fast; P is the number of layers, and one more where the LM head is nested. It travels in
`StepPlan.precision`, so a step runs in one state, and heads the salt of the request's KV, so KV is shared under equal states only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from depthfx.errors import InvalidRequestError, UnsupportedOptionError
from depthfx.runtime.host_ring import HostRing

MODES = {"full": 1, "fast": 0}
_NAMES = {value: name for name, value in MODES.items()}
HEAD = "head"  # name of the entry after the layers

Modes = str | Mapping[int | str, str]


def entry_names(num_layers: int, nested_head: bool) -> tuple[int | str, ...]:
    """What the entries of a state stand for: layers by index, then perhaps :data:`HEAD`."""
    return (*range(num_layers), *((HEAD,) if nested_head else ()))


def changed(state: bytes, modes: Modes, names: Sequence[int | str]) -> bytes:
    """``state`` after ``modes``: one mode for all entries, or ``{layer: mode}`` for some of them.

    Raises :class:`UnsupportedOptionError` where there is nothing to switch and :class:`InvalidRequestError` for unknown layers or modes.
    """
    if not names:
        raise UnsupportedOptionError(
            "set_precision: the weights of this model have one precision; compile it with weights='nested' to switch between full and fast"
        )
    if isinstance(modes, str):
        return bytes([_flag(modes)] * len(names))
    if not isinstance(modes, Mapping):
        raise InvalidRequestError(f"set_precision: {modes!r} must be 'full', 'fast' or a mapping of layers to these")
    flags = bytearray(state)
    places = {name: place for place, name in enumerate(names)}
    for layer, mode in modes.items():
        if isinstance(layer, bool) or not isinstance(layer, (int, str)) or layer not in places:
            known = f"0 to {sum(isinstance(n, int) for n in names) - 1}" + (f" and {HEAD!r}" if HEAD in places else "")
            hint = "; the head is switched only if compiled with nested_head=True" if layer == HEAD else ""
            raise InvalidRequestError(f"set_precision: layer {layer!r} is not known; allowed: {known}{hint}")
        flags[places[layer]] = _flag(mode)
    return bytes(flags)


def named(state: bytes, names: Sequence[int | str]) -> dict[int | str, str]:
    """The mode of each entry by name."""
    return {name: _NAMES[flag] for name, flag in zip(names, state, strict=True)}


def summary(state: bytes) -> str:
    """``full``, ``fast`` or ``mixed``; weights of one precision count as full."""
    return "full" if all(state) else "mixed" if any(state) else "fast"


def hint(state: bytes) -> int:
    """`StepInputs.precision` of ``state``: 1 all full, 0 all fast, -1 mixed."""
    return {"full": 1, "fast": 0, "mixed": -1}[summary(state)]


class PrecisionFlags:
    """The flags ``tensor`` ``[P]`` int32 on the device, all full at first. Captured graphs hold its address."""

    def __init__(self, num_entries: int, device: torch.device) -> None:
        self.tensor = torch.ones(num_entries, dtype=torch.int32, device=device)
        self._full = self._sent = bytes([1] * num_entries)
        self._ring = HostRing(num_entries, device)

    def send(self, state: bytes) -> int:
        """Queue the flags of ``state`` (empty: all full) on the current stream, where they changed; returns the host's hint."""
        state = state or self._full
        if state != self._sent:
            host = self._ring.next()
            host.numpy()[:] = np.frombuffer(state, dtype=np.uint8)
            self._ring.send(host, self.tensor)
            self._sent = state
        return hint(state)


def _flag(mode: object) -> int:
    if not isinstance(mode, str) or mode not in MODES:
        raise InvalidRequestError(f"set_precision: mode {mode!r} is not known; allowed: 'full' and 'fast'")
    return MODES[mode]
