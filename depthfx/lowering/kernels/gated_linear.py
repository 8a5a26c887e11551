"""Gate and up projections of an MLP with their activation, in one pass over the joined weight for a few rows.

``out = round(act(round(x Wg^T))) * round(x Wu^T)``; weight [2F, K] holds the gate rows, then the up rows; x [T, K], out [T, F].
The products are rounded to the model dtype first, as separate layers would leave them.
An optional ``bound`` (one int32) of 0 says that no row counts: the kernels for few rows then return at once, reading and writing nothing.
Example with silu: x = [1], weight = [[0], [3]]: out = silu(0) * 3 = 0.
"""

from __future__ import annotations

import torch

from depthfx.lowering import native
from depthfx.lowering.kernel_spec import Case, KernelSpec, inner_contiguous, register_kernel
from depthfx.lowering.kernels import gated_activation
from depthfx.lowering.kernels._cases import DOT_REASON, DOT_TOLERANCE, counted, randn
from depthfx.lowering.kernels._small_linear import LinearConfig, is_native, is_small, launch_small


def reference(x: torch.Tensor, weight: torch.Tensor, activation: str, bound: torch.Tensor | None = None) -> torch.Tensor:
    """Plain PyTorch."""
    return gated_activation.reference(torch.nn.functional.linear(x, weight), activation)


def cpu(x: torch.Tensor, weight: torch.Tensor, activation: str, bound: torch.Tensor | None = None) -> torch.Tensor:
    """The native kernel for few fp32 rows, MKL for the rest."""
    if is_native(x, weight):
        return native.small_linear(inner_contiguous(x), weight, activation=activation)
    return gated_activation.cpu(torch.nn.functional.linear(x, weight), activation)


def launch(
    x: torch.Tensor, weight: torch.Tensor, activation: str, bound: torch.Tensor | None = None, config: LinearConfig | None = None
) -> torch.Tensor:
    code = gated_activation.activation_code(activation)
    if is_small(x, weight):
        return launch_small(inner_contiguous(x), weight, activation=code, bound=bound, config=config)
    return gated_activation.launch(torch.nn.functional.linear(x, weight), activation)


def fake(x: torch.Tensor, weight: torch.Tensor, activation: str, bound: torch.Tensor | None = None) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0] // 2))


def _case(rows: int, features: int, inputs: int, activation: str, bound: int | None = None) -> Case:
    def make(g: torch.Generator, dtype: torch.dtype) -> tuple:
        weight = (torch.randn(2 * features, inputs, generator=g) * inputs**-0.5).to(dtype)
        args = (randn(g, dtype, rows, inputs), weight, activation)
        return args if bound is None else (*args, counted(bound))

    return Case(f"{rows}x{features}x{inputs}-{activation}" + (f"-bound{bound}" if bound else ""), make, DOT_TOLERANCE, DOT_REASON)


register_kernel(
    KernelSpec(
        name="gated_linear",
        schema="(Tensor x, Tensor weight, str activation, Tensor? bound=None) -> Tensor",
        reference=reference,
        cpu=cpu,
        launch=launch,
        fake=fake,
        cases=(
            _case(1, 96, 576, "silu"),
            _case(2, 33, 200, "gelu"),
            _case(3, 64, 1024, "gelu_tanh"),
            _case(33, 40, 200, "silu"),
            _case(65, 48, 64, "silu"),
            _case(1, 96, 576, "gelu", bound=1),
            _case(3, 64, 1024, "silu", bound=3),
            _case(66, 48, 64, "silu", bound=1),
        ),
    )
)
