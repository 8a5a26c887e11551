"""Dual-precision kernels on a CUDA device: every code through the compiled joins, model shapes, the FP8 product."""

from __future__ import annotations

import functools

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from depthfx.lowering import ops
from depthfx.lowering.fragment_order import to_fragment_order
from depthfx.lowering.kernel_spec import max_error
from depthfx.lowering.kernels import gated_activation
from depthfx.lowering.kernels._dual_linear import launch_small_dual
from depthfx.lowering.kernels._dual_weight import draw_weight, plain_weight
from depthfx.lowering.kernels._fp8_linear import launch_fp8, uses_fp8
from depthfx.lowering.kernels._join_weight import join_weight, launch_joined
from depthfx.lowering.nested_format import FORMATS

ALL = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.float16)
FORMATS_WITH_LIMITS = [("nested_e4m3", 1.875), ("nested_e5m2", float("inf"))]
SHAPES = [(6144, 4096), (1024, 14336), (960, 576), (16640, 576)]


def flags(full: bool) -> torch.Tensor:
    """Layer 1 has the asked precision, its neighbours the other."""
    return torch.tensor([1 - full, full, 1 - full], dtype=torch.int32, device="cuda")


@pytest.mark.parametrize(("name", "limit"), FORMATS_WITH_LIMITS)
@pytest.mark.parametrize("columns", [64, 8])
def test_compiled_join_gives_every_code(name, limit, columns):
    codes = ALL[ALL.abs() < limit]
    codes = codes[torch.randperm(len(codes), generator=torch.Generator().manual_seed(0))]
    codes = torch.cat((codes, torch.ones(-len(codes) % columns, dtype=torch.float16))).view(-1, columns)
    form = FORMATS.get(name)
    nested = form.split_any(codes) if name == "nested_e5m2" else form.split(codes)
    upper, lower = (to_fragment_order(t).contiguous().cuda() for t in (nested.upper, nested.lower))
    out = torch.full_like(codes, float("nan"), device="cuda")
    full = join_weight(upper, lower, None, flags(True), 1, name, out).cpu()
    assert torch.equal(full.view(torch.int16), codes.view(torch.int16))
    fast = join_weight(upper, lower, None, flags(False), 1, name, out).cpu()
    assert torch.equal(fast.float(), form.fast_values(nested))


@functools.cache
def stored(num_outputs: int, num_inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Upper and lower bytes of a random weight."""
    nested = draw_weight(torch.Generator().manual_seed(0), torch.float16, num_outputs, num_inputs, "nested_e4m3")
    return nested.upper.cuda(), nested.lower.cuda()


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 16, 33, 64, 65, 600])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
def test_products_on_model_shapes(num_outputs, num_inputs, num_rows, full):
    upper, lower = stored(num_outputs, num_inputs)
    x = torch.randn(num_rows, num_inputs, generator=torch.Generator().manual_seed(num_rows)).half().cuda()
    exact = x.double() @ plain_weight(upper, lower, None, "nested_e4m3", full).double().t()
    args = (upper, lower, None, flags(full), 1)
    small = num_rows <= 64
    out = launch_small_dual(x, *args, "nested_e4m3") if small else launch_joined(x, *args, "nested_e4m3")
    assert max_error(out, exact) < 4e-3  # one rounding of fp16 at magnitude 4, after fp32 sums
    assert max_error(ops.dual_linear(x, *args, -1, "nested_e4m3", None), exact) < 4e-3
    gated = gated_activation.reference(exact.float(), "silu")
    assert max_error(ops.dual_gated_linear(x, *args, -1, "nested_e4m3", "silu"), gated) < 8e-3  # three roundings


@pytest.mark.skipif(torch.cuda.get_device_capability()[0] != 9, reason="row-wise scales in cuBLAS need compute capability 9")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["nested_e4m3", "nested_e4m3_scaled", "nested_e5m2"])
def test_fp8_product_is_exact_but_for_its_activations(name, dtype):
    g = torch.Generator().manual_seed(0)
    nested = draw_weight(g, dtype, 960, 576, name)
    upper, lower = nested.upper.cuda(), nested.lower.cuda()
    shift = None if nested.shift is None else nested.shift.cuda()
    x, bias = torch.randn(512, 576, generator=g).to(dtype).cuda(), torch.randn(960, generator=g).to(dtype).cuda()
    assert uses_fp8(x, upper, 0) and not uses_fp8(x, upper, -1) and not uses_fp8(x[:64], upper, 0)
    quantized, scale = ops.quantize_rows(x)  # as the product has them: one more or less of a rounded number counts 48 times in a scaled row
    weight = to_fragment_order(plain_weight(upper, lower, shift, name, False))
    rows = quantized.double() * scale[:, None].double()
    exact = rows @ weight.double().t() + bias.double()
    rounding = 2 * (4e-3 if dtype is torch.float16 else 3e-2)  # of the product, and once more with the bias
    # The tensor cores align the 32 products of one instruction, and then the sum so far, to the largest and keep about 13 bits.
    kept = (rows.abs() @ weight.double().abs().t()) * (32 + x.shape[1] / 32) * 2.0**-13
    error = (launch_fp8(x, upper, shift, name, bias).double() - exact).abs()
    assert bool((error <= rounding * (1 + exact.abs()) + kept).all()), float((error / (rounding * (1 + exact.abs()) + kept)).max())
