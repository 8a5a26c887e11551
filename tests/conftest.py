"""Environment of the test processes: no hub, a private cache, Triton's interpreter where there is no GPU."""

import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel file is imported

torch.manual_seed(0)

# Files that take longest, so that no process is left alone with one of them at the end.
LONG = (
    "families/test_routed_families", "serving/test_smollm2_tokens", "families/test_routed_serving", "passes/test_program_store",
    "families/test_every_family", "runtime/test_elastic.py", "families/test_nested_families", "skippers/test_train", "runtime/test_elastic_faults",
    "families/test_fp8_kv", "passes/test_bind_nested", "kernels/test_native_cpu", "test_cli", "alloc/test_shared_model", "kernels/test_precompile",
    "runtime/test_model", "test_examples", "benchmarks/",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    """Long files first, in the order of :data:`LONG`."""

    def place(item):
        return next((i for i, name in enumerate(LONG) if name in item.path.as_posix()), len(LONG))

    items.sort(key=place)


@pytest.fixture(autouse=True, scope="module")
def old_objects_are_left_alone():
    """A full collection takes a second once torch and the models of earlier files are on the heap, and much of what is tested asks for one."""
    gc.collect()
    gc.freeze()
