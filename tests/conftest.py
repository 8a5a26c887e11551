"""Environment of the test processes: no hub, a private cache, Triton's interpreter where there is no GPU."""

import gc
import os
import random

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel file is imported

SEED = 0

# Files that take longest, so that no process is left alone with one of them at the end. The first makes the copy of SmolLM2 that others read.
LONG = (
    "house/test_readme", "families/test_routed_families", "serving/test_smollm2_tokens", "kernels/test_every_kernel", "test_examples",
    "passes/test_program_store", "families/test_every_family", "families/test_nested_families", "families/test_routed_serving",
    "runtime/test_elastic_stress", "runtime/test_elastic.py", "skippers/test_train.py", "test_cli", "kernels/test_compiles_for_hopper",
    "passes/test_pieces", "passes/test_routed_programs", "benchmarks/", "families/test_fp8_kv", "kernels/test_native_cpu", "skippers/",
    "runtime/test_elastic_faults", "passes/test_bind_nested", "kernels/test_precompile", "runtime/test_model", "runtime/", "alloc/test_shared_model",
    "kernels/", "passes/",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    """Long files first, in the order of :data:`LONG`."""

    def place(item):
        return next((i for i, name in enumerate(LONG) if name in item.path.as_posix()), len(LONG))

    items.sort(key=place)


def pytest_report_header():
    return f"seed of every module and of every test: {SEED}"


@pytest.fixture(autouse=True, scope="module")
def module_starts_alike():
    """One seed, whatever ran before in this process. Old objects are left alone: a full collection takes a second once torch and the
    models of earlier files are on the heap, and much of what is tested asks for one.
    """
    seed_all()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def test_starts_alike(module_starts_alike):
    """One seed for a test run alone, among others or in another order."""
    seed_all()


def seed_all():
    # without a device torch.manual_seed spends a millisecond on taking down who asked, in case there will be one
    (torch.manual_seed if CUDA else torch.default_generator.manual_seed)(SEED)
    random.seed(SEED)
