"""The state of a run in one file, which is either the old one or the new one, whatever happens while it is written."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch

from depthfx.errors import SkipperError

VERSION = 1


def write_whole(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Let ``write`` fill a new file beside ``path``, and put it in its place with one rename.

    Raises :class:`SkipperError` where that fails (no space, no permission); ``path`` is then as it was.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        with new.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except (OSError, RuntimeError) as error:  # torch.save turns a failed write into a RuntimeError
        new.unlink(missing_ok=True)
        kept = "the old one is kept" if path.exists() else "there is no old one"
        raise SkipperError(f"{path} cannot be written ({error}); {kept}: make room or name another folder, and start again") from error


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write ``state`` (tensors, numbers, texts, and lists and dicts of them) whole or not at all; raises :class:`SkipperError`."""
    write_whole(path, lambda file: torch.save({"version": VERSION, **state}, file))


def load_state(path: Path) -> dict[str, Any]:
    """What :func:`save_state` wrote, its tensors on the CPU; raises :class:`SkipperError` for anything else."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise SkipperError(
            f"{path} cannot be read ({str(error).splitlines()[0] if str(error) else type(error).__name__}); delete it to begin anew"
        ) from error
    if not isinstance(state, dict) or state.get("version") != VERSION:
        raise SkipperError(
            f"{path} is no state of training of version {VERSION}; delete it to begin anew, or use the depthfx that wrote it"
        )
    return state
