"""The backends that the suites run over, and what both suites share."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import torch

from depthfx.alloc.physical_backend import PHYSICAL, PhysicalBackend
from tests.alloc.fake_cuda import CudaOverFake


def backends() -> dict[str, object]:
    """Name of a case -> a call that makes a fresh backend; backends that cannot work here are left out."""
    cases = {name: kind for name, kind in PHYSICAL.items() if kind.unavailable() is None}
    cases["memfd-2MiB"] = lambda **options: PHYSICAL.get("memfd")(granularity=2 << 20, **options)
    cases["cuda_vmm-fake"] = CudaOverFake
    return cases


def mapped(backend: PhysicalBackend, count: int = 1, spare: int = 0):
    """A range with ``count`` handles of one granule each mapped from 0 on, and ``spare`` granules behind them."""
    step = backend.granularity()
    at = backend.reserve((count + spare) * step)
    handles = backend.create_many(count, step)
    backend.map_many(at, 0, handles)
    return at, handles


def footprint() -> tuple[int, int]:
    """Open file descriptors and mappings of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(Path("/proc/self/maps").read_text().splitlines())


def protection(address: int) -> str:
    """The rights of the mapping at an address, as /proc/self/maps has them: ``rw-s``."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights = line.split()[:2]
        first, end = (int(x, 16) for x in span.split("-"))
        if first <= address < end:
            return rights
    return "unmapped"


def values(tensor: torch.Tensor) -> list[float]:
    return tensor.flatten()[:4].float().tolist()
