"""Products with weights of two bytes on a CPU, and such a weight joined: the same library as :mod:`depthfx.lowering.native`, fp32 alone.

Letters as there; ``upper`` and ``lower`` [N, K] uint8 contiguous, in fragment order where K is a multiple of 64, ``shift`` [N] int8 or None.
``coding`` is 1 for E4M3 and 2 for E5M2; not ``full``: the upper byte alone. All raise ``ValueError`` for tensors they cannot read.
"""

from __future__ import annotations

import torch

from depthfx.lowering import native
from depthfx.lowering.fragment_order import is_fragment_order


def stored_linear(
    x: torch.Tensor, upper: torch.Tensor, lower: torch.Tensor, shift: torch.Tensor | None, coding: int, full: bool,
    bias: torch.Tensor | None = None, activation: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """``x W^T + bias`` for at most ``native.MAX_ROWS`` rows: x [M, K] -> [M, N]; bits are those of ``native.small_linear`` over the joined weight.

    With an ``activation`` N counts gates and ups, and the result [M, N / 2] is ``act(gate) * up``.
    """
    _check(upper, lower, shift, coding)
    (rows, inner), outputs, code = x.shape, upper.shape[0], 0
    if activation is not None:
        code, outputs = native._activation(activation), outputs // 2
    if rows > native.MAX_ROWS or upper.shape[1] != inner or (bias is not None and bias.shape != upper.shape[:1]):
        raise ValueError(
            f"x {tuple(x.shape)} and the bytes {tuple(upper.shape)} must be [M <= {native.MAX_ROWS}, K] and [N, K], a bias [N]"
        )
    native._check(x, bias)
    out = native._empty_strided_cpu((rows, outputs), (outputs, 1), torch.float32)
    if rows:
        native._loaded().stored_linear(
            x.data_ptr(), x.stride()[0], upper.data_ptr(), lower.data_ptr(), native._address(shift), coding, full, is_fragment_order(inner),
            native._address(bias), out.data_ptr(), outputs, rows, outputs, inner, code, torch.get_num_threads(),
        )  # fmt: skip
    return out


def join_weight(upper: torch.Tensor, lower: torch.Tensor, shift: torch.Tensor | None, coding: int, full: bool) -> torch.Tensor:
    """The weight [N, K] in fp32, columns in plain order."""
    _check(upper, lower, shift, coding)
    outputs, inner = upper.shape
    out = native._empty_strided_cpu((outputs, inner), (inner, 1), torch.float32)
    native._loaded().join_weight(
        upper.data_ptr(), lower.data_ptr(), native._address(shift), coding, full, is_fragment_order(inner), out.data_ptr(), outputs, inner,
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def _check(upper: torch.Tensor, lower: torch.Tensor, shift: torch.Tensor | None, coding: int) -> None:
    for plane in (upper, lower):
        if plane.dtype is not torch.uint8 or plane.dim() != 2 or plane.shape != upper.shape or not (plane.is_cpu and plane.is_contiguous()):
            raise ValueError(
                f"bytes are {plane.dtype} {tuple(plane.shape)} on {plane.device}; both planes must be contiguous [N, K] uint8 on the CPU"
            )
    if shift is not None and (shift.dtype is not torch.int8 or shift.shape != upper.shape[:1] or not shift.is_contiguous()):
        raise ValueError(f"shift is {shift.dtype} {tuple(shift.shape)}; it must be contiguous int8 [{upper.shape[0]}]")
    if coding not in (1, 2):
        raise ValueError(f"coding {coding} is not known; allowed: 1 (E4M3), 2 (E5M2)")
