"""Local files of text or JSON lines, and their split into training and held-out files."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from depthfx.errors import SkipperError
from depthfx.skippers.options import check_share


def find_files(folder: str | Path, *patterns: str) -> list[Path]:
    """All files below ``folder`` that match one of the patterns (``*.txt`` and ``*.jsonl`` where none is given), in order of their paths.

    Raises :class:`SkipperError` where there is none.
    """
    wanted = patterns or ("*.txt", "*.jsonl")
    found = sorted({p for pattern in wanted for p in Path(folder).rglob(pattern) if p.is_file()})
    if not found:
        raise SkipperError(f"{folder} holds no file like {' or '.join(wanted)}; name a folder with text, or another pattern")
    return found


def split_files(files: Sequence[str | Path], held_out: float = 0.01, seed: int = 42) -> tuple[list[Path], list[Path]]:
    """Training and held-out files, no file in both: a share ``held_out`` of the files, drawn by ``seed``, at least one of each kind.

    Raises :class:`SkipperError` for fewer than two files.
    """
    check_share("held_out", held_out)
    paths = sorted(Path(f) for f in files)
    if len(set(paths)) < 2:
        raise SkipperError(f"{len(set(paths))} files cannot be split into training and held-out ones; give at least two")
    count = min(len(paths) - 1, max(1, round(held_out * len(paths))))
    chosen = set(random.Random(seed).sample(range(len(paths)), count))
    return [p for i, p in enumerate(paths) if i not in chosen], [p for i, p in enumerate(paths) if i in chosen]


def read_files(files: Iterable[str | Path]) -> Iterator[Any]:
    """What the files hold, for :func:`make_sequences`: each line of a ``.jsonl`` file as JSON, any other file as one text in UTF-8.

    Raises :class:`SkipperError` naming file and line.
    """
    for file in map(Path, files):
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SkipperError(f"{file} cannot be read as text in UTF-8 ({error}); convert it, or leave it out") from error
        if file.suffix != ".jsonl":
            yield text
            continue
        for number, line in enumerate(text.split("\n"), 1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except ValueError as error:
                raise SkipperError(f"{file}, line {number}, is no JSON ({error}); write one object or text in each line") from error
