"""A folder that is either the old one or the new one, whatever happens while it is written."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from depthfx.errors import SkipperError

_HERE, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE


def write_folder(folder: Path, write: Callable[[Path], Any]) -> None:
    """Let ``write`` fill a new folder beside ``folder``, bring it to the disk, and put it in its place in one step.

    Other files that stood in ``folder`` are taken over. Raises :class:`SkipperError` where that fails (no space, no permission); ``folder`` is
    then as it was, and nothing is left beside it.
    """
    place = Path(os.path.realpath(folder))
    new, old = (place.with_name(f".{place.name}.{kind}") for kind in ("new", "old"))
    try:
        _clear(new, old, place)  # of a process that was killed while it wrote
        new.mkdir(parents=True)
        write(new)
        _take_over(place, new)
        for item in (*new.rglob("*"), new):
            if not item.is_symlink():
                _sync(item)
        if not place.exists():
            new.rename(place)
        elif not _exchange(new, place):
            place.rename(old)
            new.rename(place)
        _sync(place.parent)
    except OSError as error:
        kept = "the old one is kept" if place.exists() or old.exists() else "there is no old one"
        raise SkipperError(f"{folder} cannot be written ({error}); {kept}: make room or name another folder, and start again") from error
    finally:
        _clear(new, old, place)


def _take_over(place: Path, new: Path) -> None:
    """Copies of what ``place`` has beside the files that were written."""
    for item in place.iterdir() if place.exists() else ():
        if (new / item.name).exists():
            continue
        if item.is_dir():
            shutil.copytree(item, new / item.name, symlinks=True)
        else:
            shutil.copy2(item, new / item.name, follow_symlinks=False)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step; False where the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    return rename is not None and rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _clear(new: Path, old: Path, place: Path) -> None:
    """Nothing is left but ``place``, which is the old one again where it had been moved away and no other came."""
    if old.exists() and not place.exists():
        old.rename(place)
    for folder in (new, old):
        shutil.rmtree(folder, ignore_errors=True)
