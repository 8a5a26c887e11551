"""Order of the GPU tests: long ones first; those that need the device for themselves not beside others."""

import os

import pytest

LONG = ("test_elastic.py", "test_kv_offload.py", "test_weight_offload.py", "test_engine.py")


def pytest_collection_modifyitems(items):
    """Sorts by :data:`LONG` and skips ``alone`` where several processes share the device."""
    items.sort(key=lambda item: next((i for i, name in enumerate(LONG) if item.path.name == name), len(LONG)))
    if "PYTEST_XDIST_WORKER" in os.environ:
        for item in items:
            if item.get_closest_marker("alone"):
                item.add_marker(pytest.mark.skip(reason="needs the device for itself: run with -m alone in one process"))
