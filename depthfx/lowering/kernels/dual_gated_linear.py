"""Gate and up projections with their activation, from a weight that is stored as two bytes.

``out = round(act(round(x Wg^T))) * round(x Wu^T)``; upper and lower [2F, K] uint8 hold the gate rows, then the up rows; x [T, K],
out [T, F]. What W is in full and in fast precision, and who decides, and what an optional ``bound`` is for, stands in `dual_linear`.
Example with silu (nested_e5m2, fast): x = [1], upper = [[0x00], [0x42]] (0 and 3): out = silu(0) * 3 = 0.
"""

from __future__ import annotations

import torch

from depthfx.lowering import native_stored
from depthfx.lowering.kernel_spec import Case, KernelSpec, inner_contiguous, register_kernel
from depthfx.lowering.kernels import gated_activation, gated_linear
from depthfx.lowering.kernels._cases import DOT_REASON, counted
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
    layer: int, precision: int, format: str, activation: str, bound: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Plain PyTorch."""
    weight = plain_weight(upper, lower, shift, format, is_full(layer_precision, layer, precision))
    return gated_activation.reference(torch.nn.functional.linear(x, weight.to(x.dtype)), activation)


def cpu(
    x: torch.Tensor, upper: torch.Tensor, lower: torch.Tensor, shift: torch.Tensor | None, layer_precision: torch.Tensor,
    layer: int, precision: int, format: str, activation: str, bound: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The native kernel for few fp32 rows; else the weight in plain order, then the CPU's gated linear."""
    full = is_full(layer_precision, layer, precision)
    if takes_native(upper, lower, shift, x):
        return native_stored.stored_linear(inner_contiguous(x), upper, lower, shift, coding_of(format, shift), full, activation=activation)
    weight = joined_weight(upper, lower, shift, format, full, x.dtype)
    return gated_linear.cpu(x, weight, activation)


def launch(
    x: torch.Tensor, upper: torch.Tensor, lower: torch.Tensor, shift: torch.Tensor | None, layer_precision: torch.Tensor,
    layer: int, precision: int, format: str, activation: str, bound: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    code = gated_activation.activation_code(activation)
    if uses_fp8(x, upper, precision):
        return gated_activation.launch(launch_fp8(x, upper, shift, format), activation)
    if uses_cluster(x, upper, gated=True):
        return launch_cluster(x, upper, lower, shift, layer_precision, layer, format, activation=code)
    if uses_stream(x, upper, gated=True):
        return launch_streamed(x, upper, lower, shift, layer_precision, layer, format, activation=code, bound=bound)
    if is_small_dual(x):
        return launch_small_dual(inner_contiguous(x), upper, lower, shift, layer_precision, layer, format, activation=code, bound=bound)
    return gated_activation.launch(launch_joined(x, upper, lower, shift, layer_precision, layer, format), activation)


def fake(
    x: torch.Tensor, upper: torch.Tensor, lower: torch.Tensor, shift: torch.Tensor | None, layer_precision: torch.Tensor,
    layer: int, precision: int, format: str, activation: str, bound: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    return x.new_empty((x.shape[0], upper.shape[0] // 2))


def _case(
    shape: DualShape, activation: str, extra: int = 0, tolerance: dict = DUAL_TOLERANCE, reason: str = DOT_REASON,
    bound: int | None = None,
) -> Case:  # fmt: skip
    def make(g: torch.Generator, dtype: torch.dtype) -> tuple:
        args = (*draw_inputs(shape, extra)(g, dtype), activation)
        return args if bound is None else (*args, counted(bound))

    return Case(f"{shape_label(shape, shape[1] // 2)}-{activation}" + (f"-bound{bound}" if bound else ""), make, tolerance, reason)


register_kernel(
    KernelSpec(
        name="dual_gated_linear",
        schema=(
            "(Tensor x, Tensor upper, Tensor lower, Tensor? shift, Tensor layer_precision, int layer, int precision, str format, "
            "str activation, Tensor? bound=None) -> Tensor"
        ),
        reference=reference,
        cpu=cpu,
        launch=launch,
        fake=fake,
        cases=(
            *(_case(s, ("silu", "gelu", "gelu_tanh")[i % 3], extra=8 * (i % 2)) for i, s in enumerate(SHAPES)),
            _case((80, 64, 128, "nested_e4m3", 0, 0), "silu", tolerance=FP8_TOLERANCE, reason=FP8_REASON),
            _case((1, 66, 576, "nested_e4m3", 1, -1), "silu", bound=1),
            _case((3, 128, 1024, "nested_e5m2", 0, -1), "gelu", bound=3),
        ),
    )
)
