"""Checks of options that several plug-ins share."""

from __future__ import annotations

import math
from typing import Any

from depthfx.errors import SkipperError

PHASES = ("all", "decode")


def check_share(name: str, value: float) -> float:
    """``value`` as it is, if it lies in [0, 1]; else :class:`SkipperError`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise SkipperError(f"{name}={value!r} is not allowed; give a number from 0 to 1")
    return value


def check_number(name: str, value: float) -> float:
    """``value`` as it is, if it is a finite number; else :class:`SkipperError`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise SkipperError(f"{name}={value!r} is not allowed; give a finite number")
    return value


def check_count(name: str, value: int, least: int = 1) -> int:
    """``value`` as it is, if it is an integer of at least ``least``; else :class:`SkipperError`."""
    if type(value) is not int or value < least:
        raise SkipperError(f"{name}={value!r} is not allowed; give an integer of at least {least}")
    return value


def check_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    """``value`` as it is, if it is one of ``allowed``; else :class:`SkipperError`."""
    if value not in allowed:
        raise SkipperError(f"{name}={value!r} is not known; allowed: {', '.join(map(str, allowed))}")
    return value
