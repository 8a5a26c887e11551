"""The walk of `tests/alloc/test_shared_model.py` over CUDA's memory: real units, a pinned host copy, copies on a stream of their own.

Each of two seeds walks half of ``OPERATIONS`` (20,000) and on until half of ``WALK_SECONDS`` (20) is over, both from the environment:
``OPERATIONS=100000 WALK_SECONDS=0 python -m pytest tests/gpu/test_shared_walk.py -s`` walks 100,000 and no more, and prints how many and how long.
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
OPERATIONS = int(os.environ.get("OPERATIONS", "20000"))
SEEDS = (1, 2)
CASES = {name: kind for name, kind in backends().items() if name == "cuda_vmm"}


@pytest.mark.timeout(WALK_SECONDS + 100 + OPERATIONS // 100)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", CASES)
def test_manager_and_bytes_agree_with_the_model(name, seed):
    world = World(CASES[name], "cuda")
    start = time.monotonic()
    end, least = start + WALK_SECONDS / len(SEEDS), -(-OPERATIONS // len(SEEDS))
    seen = drive(world, seed, lambda done: done >= least and time.monotonic() > end)
    world.close()
    print(f"{name}, seed {seed}: {seen['operations']} operations in {time.monotonic() - start:.1f} s, {dict(seen)}")
    check_reached(seen)
