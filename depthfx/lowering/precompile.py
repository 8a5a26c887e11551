"""Compile missing Triton kernels in several processes before the first launch needs them.

Triton compiles one kernel after another and holds the interpreter's lock meanwhile. So a dry run collects the variants that the
warm-up will launch, worker processes compile them into Triton's own disk cache, and the warm-up merely loads them.
A variant that no worker could compile is compiled by its first launch, as if this file did not exist.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any

import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.cache import get_cache_key, get_cache_manager

from depthfx.lowering.kernel_spec import is_collecting, set_collecting
from depthfx.report import CACHES, CompileReport

# Fewer missing variants than this are compiled faster than workers start.
MIN_VARIANTS = 4
_MAX_WORKERS = 14
_SECONDS = 180.0  # after this long the workers are ended, and the main process compiles what is left
_one_collects = threading.Lock()  # over Triton's hook


@dataclass(frozen=True)
class Variant:
    """One kernel with the types and constants of one kind of launch, as text."""

    module: str
    function: str
    specialization: str  # Triton's own JSON: signature, constants, attributes, options
    target: tuple[str, int, int]

    def source(self) -> tuple[ASTSource, dict[str, Any], GPUTarget]:
        """What ``triton.compile`` takes, equal to what the launch itself would hand over."""
        data = json.loads(self.specialization)
        kernel = getattr(importlib.import_module(self.module), self.function)
        constants = {tuple(k): _constant(v) for k, v in zip(data["constant_keys"], data["constant_vals"], strict=True)}
        attributes = {tuple(k): v for k, v in zip(data["attrs_keys"], data["attrs_vals"], strict=True)}
        signature = {k: _tuples(v) for k, v in data["signature"].items()}
        options = {k: tuple(v) if isinstance(v, list) else v for k, v in data["options"].items()}
        kind = GluonASTSource if kernel.is_gluon() else ASTSource
        return kind(kernel, signature, constants, attributes), options, GPUTarget(*self.target)

    def is_cached(self) -> bool:
        """Whether Triton's disk cache holds it."""
        source, options, target = self.source()
        backend = make_backend(target)
        key = get_cache_key(source, backend, backend.parse_options(options), env_vars=get_cache_invalidating_env_vars())
        metadata = f"{source.name[:150]}.json"
        return bool((get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).get_group(metadata) or {}).get(metadata))


def _constant(value: Any) -> Any:
    if isinstance(value, dict) and "constexpr" in value:
        return triton.language.constexpr(value["constexpr"])
    if isinstance(value, str) and triton.language.dtype.is_dtype(value):
        return triton.language.dtype(value)
    return value


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


class _NotLaunched:
    """Stands in Triton's table of loaded kernels for one that is only to be collected: repeated launches then cost little.

    The table is of all threads, and one that serves meanwhile means its launch: it gets the kernel.
    """

    function = packed_metadata = None

    def __init__(self, variant: Variant) -> None:
        self._variant = variant

    def run(self, x: int, y: int, z: int, stream: int, _function: None, _metadata: None, *args: Any) -> None:
        if not is_collecting():
            self._kernel.run(x, y, z, stream, self._kernel.function, self._kernel.packed_metadata, *args)

    @cached_property
    def _kernel(self) -> Any:
        source, options, target = self._variant.source()
        return triton.compile(source, target=target, options=options)

    def launch_metadata(self, *args: Any) -> None:
        pass


@contextmanager
def collected() -> Iterator[dict[Variant, None]]:
    """Within the block no kernel that this process has not loaded yet is compiled or launched; the dict names them, in order.

    That holds for this thread; other threads launch as ever, and wait where they want to collect too.
    """
    found: dict[Variant, None] = {}
    target = triton.runtime.driver.active.get_current_target()
    placed: list[tuple[dict[Any, Any], Any, _NotLaunched]] = []

    def note(*, fn: Any, key: Any, compile: dict[str, Any], **_: Any) -> bool:
        if not is_collecting():  # another thread's, which is to run
            return False
        variant = Variant(fn.module, fn.name, compile["specialization_data"], (target.backend, target.arch, target.warp_size))
        found[variant] = None
        loaded = fn.jit_function.device_caches[compile["device"]][0]
        loaded[key] = placeholder = _NotLaunched(variant)
        placed.append((loaded, key, placeholder))
        return True

    with _one_collects:
        before = triton.knobs.runtime.jit_cache_hook
        triton.knobs.runtime.jit_cache_hook = note
        set_collecting(True)
        try:
            yield found
        finally:
            set_collecting(False)
            triton.knobs.runtime.jit_cache_hook = before
            for loaded, key, placeholder in placed:
                if loaded.get(key) is placeholder:  # else another thread has loaded the kernel meanwhile
                    del loaded[key]


class KernelWorkers:
    """Worker processes that compile variants; a context manager that ends them whatever happens."""

    def __init__(self, report: CompileReport, enabled: bool) -> None:
        self._report, self._enabled = report, enabled
        # Said aloud, it stays. Inductor moves the folder for the whole process with the first kernel that it makes itself, where the
        # environment names none, and the workers would go on to fill the old one.
        triton.knobs.cache.dir = triton.knobs.cache.dir
        self._processes: list[subprocess.Popen[str]] = []
        self._errors: Any = None

    def start(self) -> None:
        """Start the processes, once; they import what they need while the caller does other things."""
        count = min(_MAX_WORKERS, (os.cpu_count() or 1) - 2)
        if not self._enabled or self._processes or count < 2:
            return
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the processes
        entry = str(Path(__file__).with_name("precompile_worker.py"))
        context = json.dumps({"path": sys.path, "cache": triton.knobs.cache.dir})
        for _ in range(count):
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, entry, context], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
                )
            )

    @property
    def started(self) -> bool:
        """Whether processes wait for work."""
        return bool(self._processes)

    def compile(self, variants: list[Variant], launchers: bool = True) -> None:
        """Compile those ``variants`` that Triton's disk cache lacks; returns when all are there or no worker is left."""
        missing = [v for v in variants if not v.is_cached()]
        if len(missing) >= MIN_VARIANTS:
            self.start()
        if not self._processes or len(missing) < MIN_VARIANTS:
            self._report.add(CACHES, f"kernels: {len(variants) - len(missing)} of {len(variants)} variants were in Triton's cache")
            return
        queue: SimpleQueue[Variant] = SimpleQueue()
        for variant in missing:
            queue.put(variant)
        with ThreadPoolExecutor(len(self._processes)) as pool:
            timer = self._end_after(_SECONDS)
            compiled = list(pool.map(lambda process: _feed(process, queue, launchers), self._processes))
            timer.cancel()
        self._report.add(CACHES, f"kernels: {sum(compiled)} of {len(variants)} variants compiled by {len(self._processes)} processes")
        if sum(compiled) < len(missing):
            self._report.add(CACHES, f"kernels: left to their first launch: {len(missing) - sum(compiled)} ({self._last_error()})")

    def __enter__(self) -> KernelWorkers:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._processes:
            if process.stdin is not None and process.poll() is None:
                process.stdin.close()  # tells it to end
        for process in self._processes:
            try:
                process.wait(timeout=2.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._processes = []
        if self._errors is not None:
            self._errors.close()

    def _end_after(self, seconds: float) -> threading.Timer:
        def end() -> None:
            for process in self._processes:
                process.kill()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        return timer

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        return lines[-1][:200] if lines else "the workers ended without a word"


def _feed(process: subprocess.Popen[str], queue: SimpleQueue[Variant], launchers: bool) -> int:
    """Hand variants to one worker, one at a time, until none is left or it has died; returns how many it compiled."""
    assert process.stdin is not None and process.stdout is not None
    count = 0
    while True:
        try:
            variant = queue.get_nowait()
        except Empty:
            return count
        try:
            process.stdin.write(json.dumps({**asdict(variant), "launcher": launchers}) + "\n")
            process.stdin.flush()
        except OSError:  # it died before
            queue.put(variant)
            return count
        if process.stdout.readline().strip() != "done":
            return count
        count += 1
