"""A linear layer: the streaming kernel for a few 16-bit rows, cuBLAS for the rest.

``out[t, n] = sum_k x[t, k] weight[n, k] + bias[n]``; x [T, K], weight [N, K], bias [N], out [T, N].
An optional ``bound`` (one int32) of 0 says that no row counts: the kernels for few rows then return at once, reading and writing nothing.
Example: x = [1, 2], weight = [[1, 0], [1, 1]], bias = [0, 5]: out = [1, 8].
"""

from __future__ import annotations

import torch

from depthfx.lowering import native
from depthfx.lowering.kernel_spec import Case, KernelSpec, inner_contiguous, register_kernel
from depthfx.lowering.kernels._cases import DOT_REASON, DOT_TOLERANCE, counted, randn
from depthfx.lowering.kernels._small_linear import LinearConfig, is_native, is_small, launch_small


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, bound: torch.Tensor | None = None) -> torch.Tensor:
    """Plain PyTorch."""
    return torch.nn.functional.linear(x, weight, bias)


def cpu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, bound: torch.Tensor | None = None) -> torch.Tensor:
    """The native kernel for few fp32 rows, MKL for the rest."""
    if is_native(x, weight, bias):
        return native.small_linear(inner_contiguous(x), weight, bias)
    return reference(x, weight, bias)


def launch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, bound: torch.Tensor | None = None, config: LinearConfig | None = None
) -> torch.Tensor:
    if is_small(x, weight):
        return launch_small(inner_contiguous(x), weight, bias=bias, bound=bound, config=config)
    return torch.nn.functional.linear(x, weight, bias)


def fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, bound: torch.Tensor | None = None) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


def _case(rows: int, outputs: int, inputs: int, bias: bool = False, extra: int = 0, bound: int | None = None) -> Case:
    def make(g: torch.Generator, dtype: torch.dtype) -> tuple:
        x = randn(g, dtype, rows, inputs + extra)[:, :inputs]
        weight = (torch.randn(outputs, inputs, generator=g) * inputs**-0.5).to(dtype)
        args = (x, weight, randn(g, dtype, outputs) if bias else None)
        return args if bound is None else (*args, counted(bound))

    return Case(f"{rows}x{outputs}x{inputs}-bias{bias:d}" + (f"-bound{bound}" if bound else ""), make, DOT_TOLERANCE, DOT_REASON)


register_kernel(
    KernelSpec(
        name="linear",
        schema="(Tensor x, Tensor weight, Tensor? bias, Tensor? bound=None) -> Tensor",
        reference=reference,
        cpu=cpu,
        launch=launch,
        fake=fake,
        cases=(
            _case(1, 72, 576, bias=True),
            _case(2, 33, 200, extra=8),
            _case(3, 128, 1024),
            _case(17, 70, 600, bias=True, extra=8),
            _case(33, 64, 512),
            _case(65, 48, 64, bias=True),
            _case(1, 72, 576, bound=1),
            _case(3, 128, 1024, bias=True, bound=2),
            _case(66, 48, 64, bound=7),
        ),
    )
)
