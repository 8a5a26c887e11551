"""A product with a bound: 0 leaves memory alone, any other number changes no bit."""

from __future__ import annotations

import threading

import pytest
import torch

from depthfx.lowering import kernel_spec
from depthfx.lowering.kernel_spec import INTERPRETED, KERNELS, settled_bounds
from depthfx.lowering.kernels import _scratch, _small_linear
from depthfx.lowering.kernels._small_linear import MAX_SMALL_ROWS
from tests.kernels.checks import poisoned_empty

CPU = torch.device("cpu")
BOUNDED = [
    pytest.param(KERNELS.get(name), case, id=f"{name}-{case.label}")
    for name in ("linear", "linear_add", "gated_linear", "dual_linear", "dual_gated_linear")
    for case in KERNELS.get(name).cases
    if "bound" in case.label and case.inputs(CPU, torch.float16, 0)[0].shape[0] <= MAX_SMALL_ROWS
]

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="launches on CPU tensors")


@pytest.mark.parametrize(("spec", "case"), BOUNDED)
def test_a_bound_of_zero_writes_nothing(spec, case):
    *args, bound = case.inputs(CPU, torch.float16, 0)
    with poisoned_empty():
        expected = spec.launch(*args)
        skipped = spec.launch(*args, torch.zeros_like(bound))
        after = spec.launch(*args, bound)
    assert skipped.isnan().all() and skipped.shape == expected.shape
    assert torch.equal(after, expected)  # bit for bit, and the launch before left no counter behind
    assert not _scratch.scratch_of(CPU, 1, 1).counters.any()


@pytest.mark.parametrize(("rows", "outputs", "inputs", "tiles_of"), [(1, 46, 1536, 1), (2, 100, 520, 3), (1, 62, 64, 3)])
def test_many_tiles_in_a_program_change_no_bit(rows, outputs, inputs, tiles_of, monkeypatch):
    """Odd numbers of tiles and of steps, and a bound that is settled early."""
    monkeypatch.setattr(_small_linear, "device_sms", lambda device: 1)
    monkeypatch.setattr(_small_linear, "BOUNDED_PROGRAMS", tiles_of)
    g = torch.Generator().manual_seed(rows * outputs)
    x, weight, bias, residual = (
        torch.randn(*shape, generator=g).half() for shape in ((rows, inputs), (outputs, inputs), (outputs,), (rows, outputs))
    )
    some = torch.ones(1, dtype=torch.int32)
    with poisoned_empty(), settled_bounds(tiles_of == 3):
        for name, args in (("linear", (x, weight, bias)), ("linear_add", (x, weight, residual)), ("gated_linear", (x, weight, "silu"))):
            launch = KERNELS.get(name).launch
            assert torch.equal(launch(*args, some), launch(*args))
            assert launch(*args, some - 1).isnan().all()


@pytest.mark.parametrize(("spec", "case"), BOUNDED[:4])
def test_only_one_int32_is_a_bound(spec, case):
    args = case.inputs(CPU, torch.float16, 0)[:-1]
    with pytest.raises(ValueError, match=r"bound is torch\.int32 \[2\]; it must be one int32"):
        spec.launch(*args, torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"bound is torch\.int64"):
        spec.launch(*args, torch.zeros(1, dtype=torch.int64))


def test_products_of_every_kind_have_such_cases():
    assert {spec.values[0].name for spec in BOUNDED} == {"linear", "linear_add", "gated_linear", "dual_linear", "dual_gated_linear"}


@pytest.mark.parametrize("rows", [1, 2, 5, 33, 70])
def test_a_residual_inside_a_product_changes_no_bit(rows):
    """So that a routed layer in which every row runs is the dense one bit for bit. The interpreter rounds bfloat16 wrongly; the GPU tests have it."""
    g = torch.Generator().manual_seed(rows)
    x, weight, residual = (torch.randn(n, m, generator=g).half() for n, m in ((rows, 320), (96, 320), (rows, 96)))
    apart = residual + KERNELS.get("linear").launch(x, weight, None)
    assert torch.equal(KERNELS.get("linear_add").launch(x, weight, residual), apart)


def test_how_kernels_are_launched_is_a_threads_own_business():
    """An engine that serves in another thread must not take a dry run's, or a capture's, switches for its own."""
    seen = []
    kernel_spec.set_collecting(True)
    try:
        with settled_bounds(True):
            thread = threading.Thread(target=lambda: seen.append((kernel_spec.is_collecting(), kernel_spec.bound_kind(torch.ones(1)))))
            thread.start()
            thread.join()
            assert kernel_spec.is_collecting() and kernel_spec.bound_kind(torch.ones(1)) == 2
    finally:
        kernel_spec.set_collecting(False)
    assert seen == [(False, 1)]
