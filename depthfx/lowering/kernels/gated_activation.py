"""The gated activation of an MLP on the joined output of its gate and up projections.

``out[t, f] = round(act(gate_up[t, f])) * gate_up[t, F + f]``; gate_up [T, 2F], out [T, F].
Example with silu: gate_up = [0, 1, 5, 2] (F = 2): out = [0 * 5, 0.7311 * 2] = [0, 1.4621].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from depthfx.lowering import native
from depthfx.lowering.kernel_spec import Case, KernelSpec, inner_contiguous, pdl_options, register_kernel
from depthfx.lowering.kernels._cases import NORM_REASON, NORM_TOLERANCE, randn
from depthfx.lowering.kernels._device import ACTIVATIONS, activate, pdl_release, pdl_wait


@triton.jit
def _gated_activation_kernel(x_ptr, out_ptr, num_features, stride_x, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program for BLOCK features of one row."""
    row = tl.program_id(1).to(tl.int64)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < num_features
    pdl_release(PDL)
    pdl_wait(PDL)
    gate = tl.load(x_ptr + row * stride_x + offsets, mask=mask, other=0.0)
    up = tl.load(x_ptr + row * stride_x + num_features + offsets, mask=mask, other=0.0)
    activated = activate(gate.to(tl.float32), ACTIVATION).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + row * num_features + offsets, (activated * up.to(tl.float32)).to(gate.dtype), mask=mask)


def activation_code(activation: str) -> int:
    """Number of the activation inside kernels; an unknown name raises ``ValueError``."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not known; allowed: {', '.join(ACTIVATIONS)}; leave the MLP unfused")
    return ACTIVATIONS[activation]


def reference(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Plain PyTorch."""
    activation_code(activation)
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def cpu(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """The native kernel for fp32, the reference for the rest."""
    if native.usable(gate_up):
        return native.gated_activation(inner_contiguous(gate_up), activation)
    return reference(gate_up, activation)


def launch(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    code = activation_code(activation)
    rows = inner_contiguous(gate_up.reshape(-1, gate_up.shape[-1]))
    num_rows, num_features = rows.shape[0], rows.shape[1] // 2
    out = torch.empty((*gate_up.shape[:-1], num_features), dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(num_features))
    for start in range(0, num_rows, 65535):  # the second grid dimension ends there
        part = rows[start : start + 65535]
        _gated_activation_kernel[(triton.cdiv(num_features, block), part.shape[0])](
            part, out.view(-1, num_features)[start:], num_features, rows.stride(0),
            ACTIVATION=code, BLOCK=block, num_warps=4, **pdl_options(),
        )  # fmt: skip
    return out


def fake(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


def _case(rows: int, features: int, activation: str) -> Case:
    def make(g: torch.Generator, dtype: torch.dtype) -> tuple:
        return 2 * randn(g, dtype, rows, 2 * features), activation

    return Case(f"{rows}x{features}-{activation}", make, NORM_TOLERANCE, NORM_REASON)


register_kernel(
    KernelSpec(
        name="gated_activation",
        schema="(Tensor gate_up, str activation) -> Tensor",
        reference=reference,
        cpu=cpu,
        launch=launch,
        fake=fake,
        cases=(_case(3, 96, "silu"), _case(2, 1536, "gelu_tanh"), _case(1, 33, "gelu")),
    )
)
