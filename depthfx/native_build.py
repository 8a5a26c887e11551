"""Native code compiled at first use: a compiler found, its version asked, one shared library for each key in the cache folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from depthfx.settings import cache_dir

COMPILE_SECONDS = 300
_VERSION_SECONDS = 30


class BuildError(Exception):
    """Why a library cannot be built; the text names what is missing and what to do."""


def find_compiler(names: Sequence[str], purpose: str) -> str:
    """Path of the first compiler of ``names`` on PATH; raises :class:`BuildError` that says what it is needed for."""
    for name in names:
        found = shutil.which(name)
        if found is not None:
            return found
    raise BuildError(f"no {' or '.join(names)} on PATH; install it (Debian: apt install {names[-1]}) for {purpose}")


def build(
    compiler: str, sources: Sequence[Path], flags: Sequence[str], link: Sequence[str] = (), key: Sequence[str] = (), purpose: str = ""
) -> Path:
    """Path of the shared library made from ``sources[0]``, which may include the others; compiled where the cache has none.

    It belongs to the bytes of all sources, the flags, the compiler's version and the strings of ``key``. ``link`` is given to the linker
    alone, without ``flags``. Raises :class:`BuildError`; many processes may build the same library at once.
    """
    version = run([compiler, "-dumpfullversion", "-dumpmachine"], _VERSION_SECONDS)
    digest = hashlib.sha256()
    for part in (*(path.read_bytes() for path in sources), *(text.encode() for text in (" ".join(flags), version, *link, *key))):
        digest.update(hashlib.sha256(part).digest())
    target = cache_dir() / "native" / f"{digest.hexdigest()[:32]}.so"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            unit, linked = os.path.join(folder, "native.o"), os.path.join(folder, "native.so")
            run([compiler, *flags, "-c", str(sources[0]), "-o", unit], COMPILE_SECONDS)
            run([compiler, "-shared", unit, *link, "-o", linked], COMPILE_SECONDS)
            os.replace(linked, target)  # atomic: whoever comes last wins, with the same bytes
    except OSError as error:
        raise BuildError(f"{purpose} cannot be stored in {target.parent}: {error}; set DEPTHFX_CACHE") from error
    return target


def run(command: list[str], seconds: int) -> str:
    """What a command prints; raises :class:`BuildError` with the first line of its errors, or after ``seconds``."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not run: {error}") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["no message"]
        raise BuildError(f"{command[0]} failed with status {done.returncode}: {lines[0].strip()}")
    return done.stdout
