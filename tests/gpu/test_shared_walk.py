"""The walk of `tests/alloc/test_shared_model.py` over CUDA's memory: real units, a pinned host copy, copies on a stream of their own.

Each of two seeds walks 10,000 operations and on until half of ``WALK_SECONDS`` (20) is over; for 100,000 and more: ``WALK_SECONDS=300``.
"""

from __future__ import annotations

import os
import time

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

pytest.importorskip("cuda.bindings.driver")

from tests.alloc.physical_cases import backends
from tests.alloc.shared_walk import check_reached, drive
from tests.alloc.walk_world import World

WALK_SECONDS = float(os.environ.get("WALK_SECONDS", "20"))
CASES = {name: kind for name, kind in backends().items() if name == "cuda_vmm"}


@pytest.mark.timeout(WALK_SECONDS + 100)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_manager_and_bytes_agree_with_the_model(name, seed):
    world = World(CASES[name], "cuda")
    end = time.monotonic() + WALK_SECONDS / 2
    seen = drive(world, seed, lambda done: done >= 10_000 and time.monotonic() > end)
    world.close()
    print(f"{name}, seed {seed}: {dict(seen)}")
    check_reached(seen)
