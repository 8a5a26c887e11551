"""A product with a bound: 0 leaves memory alone, any other number changes no bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from depthfx.lowering.kernel_spec import INTERPRETED, KERNELS
from depthfx.lowering.kernels import _scratch, _small_linear
from depthfx.lowering.kernels._small_linear import MAX_SMALL_ROWS, LinearConfig, launch_small
from tests.kernels.checks import poisoned_empty

CPU = torch.device("cpu")
BOUNDED = [
    pytest.param(KERNELS.get(name), case, id=f"{name}-{case.label}")
    for name in ("linear", "gated_linear", "dual_linear", "dual_gated_linear")
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


@pytest.mark.parametrize(("spec", "case"), BOUNDED[:4])
def test_only_one_int32_is_a_bound(spec, case):
    args = case.inputs(CPU, torch.float16, 0)[:-1]
    with pytest.raises(ValueError, match=r"bound is torch\.int32 \[2\]; it must be one int32"):
        spec.launch(*args, torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"bound is torch\.int64"):
        spec.launch(*args, torch.zeros(1, dtype=torch.int64))


def test_products_of_every_kind_have_such_cases():
    assert {spec.values[0].name for spec in BOUNDED} == {"linear", "gated_linear", "dual_linear", "dual_gated_linear"}


@pytest.mark.parametrize("activation", [0, 1])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_few_programs_take_all_tiles(monkeypatch, num_rows, activation):
    """More tiles than programs, as for one row of a large model; equal bit for bit to one program for each."""
    monkeypatch.setattr(_small_linear, "_BOUNDED_PROGRAMS", 3)
    monkeypatch.setattr(_small_linear, "device_sms", lambda device: 1)
    generator = torch.Generator().manual_seed(num_rows)
    x, w = (torch.randn(n, 256, generator=generator).half() for n in (num_rows, 2 * 70))
    config = LinearConfig(block_n=4, block_k=128, split_k=1, num_warps=4, num_stages=1, use_dot=num_rows > 2)
    config = replace(config, block_n=16) if config.use_dot else config
    each = launch_small(x, w, activation=activation, config=config)
    in_turn = launch_small(x, w, activation=activation, bound=torch.ones(1, dtype=torch.int32), config=config)
    assert torch.equal(in_turn, each) and each.abs().sum() > 0
