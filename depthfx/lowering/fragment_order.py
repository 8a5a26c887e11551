"""The order in which nested weight bytes lie in memory: what one thread feeds to the tensor cores is 16 bytes in a row.

Inside every group of 64 columns the stored place ``p = c * 16 + s * 4 + h * 2 + j`` holds the weight of column
``k = s * 16 + h * 8 + c * 2 + j`` (c 0..3, s 0..3, h 0..1, j 0..1): for the first operand of a matrix instruction 16 deep, thread c
of a row needs columns c * 2 + j and 8 + c * 2 + j, and s counts four such steps. A weight whose number of columns is no multiple of
64 stays in plain order. Example: places 0 .. 5 hold columns 0, 1, 8, 9, 16, 17.
"""

from __future__ import annotations

import torch

GROUP = 64


def is_fragment_order(num_columns: int) -> bool:
    """Whether a stored weight of ``num_columns`` columns is in fragment order; else it is in plain order."""
    return num_columns > 0 and num_columns % GROUP == 0


def _pairs(t: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Two columns that stay neighbours as one number, where there is an integer of that size, and how many numbers two columns are."""
    wider = {1: torch.int16, 2: torch.int32}.get(t.element_size())
    return (t.contiguous().view(wider), 1) if wider is not None else (t, 2)


def to_fragment_order(t: torch.Tensor) -> torch.Tensor:
    """``t`` [N, K] of any dtype with its columns in the stored order; ``t`` itself where that is plain order."""
    num_rows, num_columns = t.shape
    if not is_fragment_order(num_columns):
        return t
    pairs, width = _pairs(t)
    ordered = pairs.reshape(num_rows, num_columns // GROUP, 4, 2, 4, width).permute(0, 1, 4, 2, 3, 5)
    return ordered.reshape(pairs.shape).view(t.dtype)


def from_fragment_order(t: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`to_fragment_order`: stored [N, K] to plain order."""
    num_rows, num_columns = t.shape
    if not is_fragment_order(num_columns):
        return t
    pairs, width = _pairs(t)
    ordered = pairs.reshape(num_rows, num_columns // GROUP, 4, 4, 2, width).permute(0, 1, 3, 4, 2, 5)
    return ordered.reshape(pairs.shape).view(t.dtype)


def fragment_columns(num_columns: int, device: torch.device | None = None) -> torch.Tensor:
    """``[K]`` int64: the column that each stored place holds, so ``stored = plain[:, fragment_columns(K)]``."""
    return to_fragment_order(torch.arange(num_columns, device=device)[None])[0]
