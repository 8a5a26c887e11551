"""A linear layer whose output joins the residual stream.

``out = residual + round(x W^T)``; x [T, K], weight [N, K], residual [T, N], out [T, N]. The product is rounded to its dtype first, so
the bits are those of the two ops apart. ``bound`` as in ``linear``.
Example: x = [1, 2], weight = [[1, 0], [1, 1]], residual = [10, 20]: out = [11, 23].
"""

from __future__ import annotations

import torch

from depthfx.lowering import native
from depthfx.lowering.kernel_spec import Case, KernelSpec, inner_contiguous, register_kernel
from depthfx.lowering.kernels._cases import DOT_REASON, DOT_TOLERANCE, counted, randn
from depthfx.lowering.kernels._small_linear import LinearConfig, check_bound, is_native, is_small, launch_small


def reference(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, bound: torch.Tensor | None = None) -> torch.Tensor:
    """Plain PyTorch."""
    return residual + torch.nn.functional.linear(x, weight)


def cpu(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, bound: torch.Tensor | None = None) -> torch.Tensor:
    """The native kernel for few fp32 rows, MKL for the rest."""
    if is_native(x, weight, residual):
        return native.small_linear(inner_contiguous(x), weight, residual=inner_contiguous(residual))
    return reference(x, weight, residual)


def launch(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, bound: torch.Tensor | None = None, config: LinearConfig | None = None
) -> torch.Tensor:
    if is_small(x, weight):
        return launch_small(inner_contiguous(x), weight, residual=inner_contiguous(residual), bound=bound, config=config)
    check_bound(bound)
    return residual + torch.nn.functional.linear(x, weight)


def fake(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, bound: torch.Tensor | None = None) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


def _case(rows: int, outputs: int, inputs: int, bound: int | None = None) -> Case:
    def make(g: torch.Generator, dtype: torch.dtype) -> tuple:
        weight = (torch.randn(outputs, inputs, generator=g) * inputs**-0.5).to(dtype)
        args = randn(g, dtype, rows, inputs), weight, randn(g, dtype, rows, outputs)
        return args if bound is None else (*args, counted(bound))

    return Case(f"{rows}x{outputs}x{inputs}" + (f"-bound{bound}" if bound else ""), make, DOT_TOLERANCE, DOT_REASON)


register_kernel(
    KernelSpec(
        name="linear_add",
        schema="(Tensor x, Tensor weight, Tensor residual, Tensor? bound=None) -> Tensor",
        reference=reference,
        cpu=cpu,
        launch=launch,
        fake=fake,
        cases=(
            _case(1, 64, 1536), _case(2, 65, 192), _case(3, 64, 1536), _case(33, 72, 600), _case(65, 64, 96), _case(1, 72, 576, bound=1),
            _case(5, 64, 1024, bound=3), _case(66, 48, 64, bound=7),
        ),
    )
)  # fmt: skip
