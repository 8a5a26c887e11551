"""CUDA C++ to machine code at run time, by NVRTC through `cuda.bindings`, kept in the cache folder.

For what Triton cannot express: conditional nodes (`graph_switch`), tiles shared within a cluster (`kernels/_cluster_linear.py`).
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from depthfx.errors import DriverError
from depthfx.settings import cache_dir


@cache
def has_nvrtc() -> bool:
    """Whether `cuda.bindings` is there, and finds NVRTC."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return False
    try:
        _call(importlib.import_module("cuda.bindings.nvrtc"), "nvrtcVersion")
    except (DriverError, RuntimeError):  # the second where the library is missing
        return False
    return True


def machine_code(source: str, architecture: str, options: Sequence[str] = ()) -> bytes:
    """The cubin of ``source`` for ``architecture`` (``sm_90a``, say), from the cache folder or compiled and put there.

    Raises :class:`DriverError` with the compiler's words. Threads may compile at once: NVRTC works without the interpreter's lock.
    """
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    options = [f"--gpu-architecture={architecture}", *options]
    version = ".".join(map(str, _call(nvrtc, "nvrtcVersion")))
    key = hashlib.sha256("\n".join((source, version, *options)).encode()).hexdigest()[:32]
    path = cache_dir() / "cuda" / f"{key}.cubin"
    if path.exists():
        return path.read_bytes()
    (program,) = _call(nvrtc, "nvrtcCreateProgram", source.encode(), b"depthfx.cu", 0, [], [])
    code, *_ = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    if int(code) != 0:
        (size,) = _call(nvrtc, "nvrtcGetProgramLogSize", program)
        log = b" " * size
        _call(nvrtc, "nvrtcGetProgramLog", program, log)
        lines = [line for line in log.decode(errors="replace").splitlines() if "error" in line] or [code.name]
        raise DriverError("nvrtcCompileProgram", code.name, lines[0])
    (size,) = _call(nvrtc, "nvrtcGetCUBINSize", program)
    cubin = b" " * size
    _call(nvrtc, "nvrtcGetCUBIN", program, cubin)
    _call(nvrtc, "nvrtcDestroyProgram", program)
    with suppress(OSError):  # a cache that cannot be written costs the next process a second
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(cubin)
        os.replace(file.name, path)
    return cubin


def _call(nvrtc: Any, name: str, *args: Any) -> tuple[Any, ...]:
    code, *results = getattr(nvrtc, name)(*args)
    if int(code) != 0:
        raise DriverError(name, code.name, "a kernel could not be compiled")
    return tuple(results)
