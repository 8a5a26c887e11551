"""CUDA C++ to machine code at run time, by NVRTC through `cuda.bindings`, kept in the cache folder.

For what Triton cannot express: conditional nodes (`graph_switch`), tiles shared within a cluster (`kernels/_cluster_linear.py`).
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from depthfx.errors import DriverError
from depthfx.settings import cache_dir
from depthfx.whole_file import write_whole


@cache
def has_nvrtc() -> bool:
    """Whether `cuda.bindings` is there and finds an NVRTC whose code the driver takes: a driver loads none of a later major version."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return False
    try:
        major, _ = _call(importlib.import_module("cuda.bindings.nvrtc"), "nvrtcVersion")
        (driver,) = _call(importlib.import_module("cuda.bindings.driver"), "cuDriverGetVersion")
    except (DriverError, ImportError, RuntimeError):  # the last where a library is missing
        return False
    return driver // 1000 >= major


def machine_code(source: str, architecture: str, options: Sequence[str] = ()) -> bytes:
    """The cubin of ``source`` for ``architecture`` (``sm_90a``, say), from the cache folder or compiled and put there.

    Raises :class:`DriverError` with the compiler's words. Threads may compile at once: NVRTC works without the interpreter's lock.
    """
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    options = [f"--gpu-architecture={architecture}", *options]
    version = ".".join(map(str, _call(nvrtc, "nvrtcVersion")))
    key = hashlib.sha256("\n".join((source, version, *options)).encode()).hexdigest()[:32]
    path = cache_dir() / "cuda" / f"{key}.cubin"
    if kept := _kept(path):
        return kept
    (program,) = _call(nvrtc, "nvrtcCreateProgram", source.encode(), b"depthfx.cu", 0, [], [])
    code, *_ = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    if int(code) != 0:
        (size,) = _call(nvrtc, "nvrtcGetProgramLogSize", program)
        log = bytes(size)  # a new object, which NVRTC writes into
        _call(nvrtc, "nvrtcGetProgramLog", program, log)
        lines = [line for line in log.decode(errors="replace").splitlines() if "error" in line] or [code.name]
        raise DriverError("nvrtcCompileProgram", code.name, lines[0])
    (size,) = _call(nvrtc, "nvrtcGetCUBINSize", program)
    cubin = bytes(size)
    _call(nvrtc, "nvrtcGetCUBIN", program, cubin)
    _call(nvrtc, "nvrtcDestroyProgram", program)
    with suppress(OSError):  # a cache that cannot be written costs the next process a second
        write_whole(path, cubin)
    return cubin


def _kept(path: Path) -> bytes:
    """What lies at ``path``; empty where nothing does, or nothing that may be read: another user may have put it there."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _call(nvrtc: Any, name: str, *args: Any) -> tuple[Any, ...]:
    code, *results = getattr(nvrtc, name)(*args)
    if int(code) != 0:
        raise DriverError(name, code.name, "a kernel could not be compiled")
    return tuple(results)
