"""Order of the GPU tests: long ones first; those that need the device for themselves not beside others; one process for each compiled family."""

import os

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["DEPTHFX_PARALLEL_WARMUP"] = "0"  # each of a dozen processes would start a dozen compilers
    torch.set_num_threads(1)  # references run on the host, and a dozen processes have more threads than it has cores

LONG = ("test_elastic.py", "test_routed.py", "test_kv_offload.py", "test_weight_offload.py", "test_engine.py")


def pytest_collection_modifyitems(items):
    """Sorts by :data:`LONG`, groups the engine's tests by family and skips ``alone`` where several processes share the device."""
    items.sort(key=lambda item: next((i for i, name in enumerate(LONG) if item.path.name == name), len(LONG)))
    for item in items:
        if item.path.name == "test_engine.py":
            family = item.callspec.params.get("name", "llama") if hasattr(item, "callspec") else "llama"
            item.add_marker(pytest.mark.xdist_group(f"engine {family}"))
        if "PYTEST_XDIST_WORKER" in os.environ and item.get_closest_marker("alone"):
            item.add_marker(pytest.mark.skip(reason="needs the device for itself: run with -m alone in one process"))
