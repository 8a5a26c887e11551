"""A linear layer whose weight is stored as two bytes: full precision reads both, fast only the first.

``out[t, n] = 2^shift[n] * sum_k x[t, k] w[n, k] + bias[n]``; x [T, K], out [T, N], bias [N]; upper and lower [N, K] uint8 in stored order.
Full: w is the joined float16 weight. Fast: w is the number that the upper byte is in FP8, times 2^-8 for E4M3; lower is not read.
``precision`` 1 or 0 says which; with -1 ``layer_precision[layer]`` on the device does (not 0: full). A hint must agree with the flags.
An optional ``bound`` (one int32) of 0 says that no row counts: the kernels for few rows then return at once, reading and writing nothing.
Example (nested_e5m2): upper 0x3D, lower 0x80: w is 1.125 in full and 1.25 in fast precision.
"""

from __future__ import annotations

import torch

from depthfx.lowering import native_stored
from depthfx.lowering.kernel_spec import Case, KernelSpec, inner_contiguous, register_kernel
from depthfx.lowering.kernels import linear
from depthfx.lowering.kernels._cases import DOT_REASON, counted, randn
from depthfx.lowering.kernels._cluster_linear import launch_cluster, uses_cluster
from depthfx.lowering.kernels._dual_linear import is_small_dual, launch_small_dual
from depthfx.lowering.kernels._dual_weight import (
    DUAL_TOLERANCE,
    FP8_REASON,
    FP8_TOLERANCE,
    SHAPES,
    DualShape,
    coding_of,
    draw_inputs,
    is_full,
    joined_weight,
    plain_weight,
    shape_label,
    takes_native,
)
from depthfx.lowering.kernels._fp8_linear import launch_fp8, uses_fp8
from depthfx.lowering.kernels._join_weight import launch_joined
from depthfx.lowering.kernels._stream_config import launch_streamed, uses_stream


def reference(
    x: torch.Tensor, upper: torch.Tensor, lower: torch.Tensor, shift: torch.Tensor | None, layer_precision: torch.Tensor,
    layer: int, precision: int, format: str, bias: torch.Tensor | None, bound: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Plain PyTorch."""
    weight = plain_weight(upper, lower, shift, format, is_full(layer_precision, layer, precision))
    return torch.nn.functional.linear(x, weight.to(x.dtype), bias)


def cpu(
    x: torch.Tensor, upper: torch.Tensor, lower: torch.Tensor, shift: torch.Tensor | None, layer_precision: torch.Tensor,
    layer: int, precision: int, format: str, bias: torch.Tensor | None, bound: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The native kernel for few fp32 rows; else the weight in plain order, then the CPU's linear."""
    full = is_full(layer_precision, layer, precision)
    if takes_native(upper, lower, shift, x):
        return native_stored.stored_linear(inner_contiguous(x), upper, lower, shift, coding_of(format, shift), full, bias)
    weight = joined_weight(upper, lower, shift, format, full, x.dtype)
    return linear.cpu(x, weight, bias)


def launch(
    x: torch.Tensor, upper: torch.Tensor, lower: torch.Tensor, shift: torch.Tensor | None, layer_precision: torch.Tensor,
    layer: int, precision: int, format: str, bias: torch.Tensor | None, bound: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    if uses_fp8(x, upper, precision):
        return launch_fp8(x, upper, shift, format, bias)
    if uses_cluster(x, upper, gated=False):
        return launch_cluster(x, upper, lower, shift, layer_precision, layer, format, bias=bias)
    if uses_stream(x, upper, gated=False):
        return launch_streamed(x, upper, lower, shift, layer_precision, layer, format, bias=bias, bound=bound)
    if is_small_dual(x):
        return launch_small_dual(inner_contiguous(x), upper, lower, shift, layer_precision, layer, format, bias=bias, bound=bound)
    return launch_joined(x, upper, lower, shift, layer_precision, layer, format, bias)


def fake(
    x: torch.Tensor, upper: torch.Tensor, lower: torch.Tensor, shift: torch.Tensor | None, layer_precision: torch.Tensor,
    layer: int, precision: int, format: str, bias: torch.Tensor | None, bound: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    return x.new_empty((x.shape[0], upper.shape[0]))


def _case(
    shape: DualShape, bias: bool = False, extra: int = 0, tolerance: dict = DUAL_TOLERANCE, reason: str = DOT_REASON,
    bound: int | None = None,
) -> Case:  # fmt: skip
    def make(g: torch.Generator, dtype: torch.dtype) -> tuple:
        args = (*draw_inputs(shape, extra)(g, dtype), randn(g, dtype, shape[1]) if bias else None)
        return args if bound is None else (*args, counted(bound))

    return Case(f"{shape_label(shape, shape[1])}-bias{bias:d}" + (f"-bound{bound}" if bound else ""), make, tolerance, reason)


register_kernel(
    KernelSpec(
        name="dual_linear",
        schema=(
            "(Tensor x, Tensor upper, Tensor lower, Tensor? shift, Tensor layer_precision, int layer, int precision, str format, "
            "Tensor? bias, Tensor? bound=None) -> Tensor"
        ),
        reference=reference,
        cpu=cpu,
        launch=launch,
        fake=fake,
        cases=(
            *(_case(shape, bias=index % 3 == 0, extra=8 * (index % 2)) for index, shape in enumerate(SHAPES)),
            _case((1, 33, 200, "nested_e4m3", 1, -1), bias=True, extra=8),
            _case((2, 33, 1024, "nested_e5m2", 0, -1)),
            _case((5, 33, 576, "nested_e4m3_scaled", 1, -1), bias=True),
            _case((80, 48, 128, "nested_e4m3_scaled", 0, 0), bias=True, tolerance=FP8_TOLERANCE, reason=FP8_REASON),
            _case((97, 32, 64, "nested_e5m2", 0, 0), tolerance=FP8_TOLERANCE, reason=FP8_REASON),
            _case((1, 66, 576, "nested_e4m3", 0, -1), bound=1),
            _case((3, 128, 1024, "nested_e4m3_scaled", 1, -1), bias=True, bound=2),
            _case((66, 48, 200, "nested_e5m2", 1, -1), bound=66),
        ),
    )
)
