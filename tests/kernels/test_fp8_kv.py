"""FP8 KV beyond the kernels' cases: every number and byte, the ops' contract over an FP8 pool, and which kernel serves it."""

from __future__ import annotations

import pytest
import torch

from depthfx.lowering.kernel_spec import INTERPRETED, KERNELS
from depthfx.lowering.kernels._e4m3 import stored_form
from tests.kernels.fp8_checks import FP8, check_every_byte_is_read, check_every_number_is_stored

CPU = torch.device("cpu")
FORMS = [
    pytest.param("launch", marks=pytest.mark.skipif(not INTERPRETED, reason="tests/gpu does the same on the device")),
    "cpu",
    "reference",
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_number_is_stored(form, dtype):
    check_every_number_is_stored(getattr(KERNELS.get("kv_append"), form), "cpu", dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_byte_is_read(form, dtype):
    check_every_byte_is_read(getattr(KERNELS.get("paged_attention"), form), "cpu", dtype)


@pytest.mark.parametrize("name", ["kv_append", "rotary_append", "paged_attention"])
def test_ops_over_an_fp8_pool_keep_their_contract(name):
    """Fake result and tracing with dynamic shapes; PyTorch's test of the schema, which every op has passed, cannot compare FP8."""
    spec = KERNELS.get(name)
    case = next(c for c in spec.cases if "fp8" in c.label)
    args = [torch.zeros_like(a) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in case.inputs(CPU, torch.float32, 0)]
    assert any(isinstance(a, torch.Tensor) and a.dtype is FP8 for a in args)
    utilities = ("test_faketensor", "test_aot_dispatch_dynamic", "test_autograd_registration")
    torch.library.opcheck(getattr(torch.ops.depthfx, name).default, tuple(args), test_utils=utilities)


def test_a_pool_reaches_kernels_as_its_own_bytes():
    pool = torch.zeros(5, 2, 2, 1, 16, 8).to(FP8)[:, 1:]
    stored, coding = stored_form(pool)
    assert stored.dtype is torch.uint8 and stored.data_ptr() == pool.data_ptr() and stored.stride() == pool.stride()
    assert coding == (2 if INTERPRETED else 1)
    half = pool.to(torch.float16)
    assert stored_form(half) == (half, 0)
