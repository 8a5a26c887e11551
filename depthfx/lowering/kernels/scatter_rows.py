"""Packed rows back to their places in a step: row i of a cohort is row ``order[first + i]`` of the step.

``out[order[first + i]] = packed[i]`` for i below ``counts[cohort]``, with first = 0 for the RUN cohort (0) and ``counts[0]`` for the PROJECT
cohort (1); out [T, H], packed [n, H], order [T] and counts [2] int32 as ``partition_rows`` returns them. The other rows of out stay, and rows
of packed from the count on may hold anything: the host knows n alone, the count stands on the device. A count above n is the caller's fault:
rows n and up stay.
Example: packed = [[5], [6]], order = [2, 0, 1], counts = [1, 2], cohort 0: out[2] = [5].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from depthfx.lowering.kernel_spec import Case, KernelSpec, inner_contiguous, pdl_options, register_kernel
from depthfx.lowering.kernels._cases import COPY_REASON, COPY_TOLERANCE, randn
from depthfx.lowering.kernels._device import pdl_release, pdl_wait

MAX_BLOCK = 1024


# Order and counts may be a row of several layers', whose alignment would follow from the number of rows.
@triton.jit(do_not_specialize=["cohort"], do_not_specialize_on_alignment=["order_ptr", "counts_ptr"])
def _scatter_rows_kernel(
    out_ptr, packed_ptr, order_ptr, counts_ptr, cohort, num_features, stride_out, stride_packed, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """One program for BLOCK features of one packed row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num_features
    pdl_release(PDL)
    pdl_wait(PDL)
    first = tl.where(cohort == 0, 0, tl.load(counts_ptr))
    if row < tl.load(counts_ptr + cohort):
        target = tl.load(order_ptr + first + row).to(tl.int64)
        x = tl.load(packed_ptr + row * stride_packed + at, mask=mask)
        tl.store(out_ptr + target * stride_out + at, x, mask=mask)


def _check(out: torch.Tensor, packed: torch.Tensor, order: torch.Tensor, counts: torch.Tensor, cohort: int) -> None:
    if out.dim() != 2 or packed.dim() != 2 or packed.shape[1] != out.shape[1] or packed.dtype is not out.dtype or len(packed) > len(out):
        raise ValueError(
            f"packed is {packed.dtype} {list(packed.shape)} and out {out.dtype} {list(out.shape)}; both must be rows [n, H] of one dtype, "
            "and at most as many packed as there are in the step"
        )
    if order.shape != out.shape[:1] or order.dtype is not torch.int32 or counts.shape != (2,) or counts.dtype is not torch.int32:
        raise ValueError(
            f"order is {order.dtype} {list(order.shape)} and counts {counts.dtype} {list(counts.shape)}; they must be int32 "
            f"[{out.shape[0]}] and [2], as partition_rows returns them"
        )
    if cohort not in (0, 1):
        raise ValueError(f"cohort {cohort} is not allowed; 0 is RUN, 1 is PROJECT")


def reference(out: torch.Tensor, packed: torch.Tensor, order: torch.Tensor, counts: torch.Tensor, cohort: int) -> None:
    """Plain PyTorch."""
    _check(out, packed, order, counts, cohort)
    first, count = (0 if cohort == 0 else int(counts[0])), min(int(counts[cohort]), packed.shape[0])
    out[order[first : first + count].long()] = packed[:count]


def launch(out: torch.Tensor, packed: torch.Tensor, order: torch.Tensor, counts: torch.Tensor, cohort: int) -> None:
    _check(out, packed, order, counts, cohort)
    if out.stride(1) != 1:
        raise ValueError(f"out has strides {out.stride()}; its rows must be contiguous")
    packed, order, counts = inner_contiguous(packed), inner_contiguous(order), inner_contiguous(counts)
    num_rows, num_features = packed.shape
    block = min(MAX_BLOCK, max(64, triton.next_power_of_2(num_features)))
    if num_rows:
        _scatter_rows_kernel[(num_rows, triton.cdiv(num_features, block))](
            out, packed, order, counts, cohort, num_features, out.stride(0), packed.stride(0),
            BLOCK=block, num_warps=max(1, block // 256), **pdl_options(),
        )  # fmt: skip


def fake(out: torch.Tensor, packed: torch.Tensor, order: torch.Tensor, counts: torch.Tensor, cohort: int) -> None:
    return None


def _case(rows: int, features: int, run: int, project: int, cohort: int, size: int | None = None, extra: int = 0) -> Case:
    """``run`` and ``project`` rows of ``rows``; ``size``: packed rows, as many as the cohort has where None, those behind it NaN."""

    def make(g: torch.Generator, dtype: torch.dtype) -> tuple:
        count = (run, project)[cohort]
        order = torch.randperm(rows, generator=g).to(torch.int32)
        packed = randn(g, dtype, count if size is None else size, features + extra)[:, :features]
        packed[count:] = float("nan")
        out = randn(g, dtype, rows, features + 2 * extra)[:, :features]
        return out, packed, order, torch.tensor([run, project], dtype=torch.int32), cohort

    return Case(f"{rows}x{features}-{run}-{project}-of-{('run', 'project')[cohort]}-in-{size}", make, COPY_TOLERANCE, COPY_REASON)


register_kernel(
    KernelSpec(
        name="scatter_rows",
        schema="(Tensor(a!) out, Tensor packed, Tensor order, Tensor counts, int cohort) -> ()",
        reference=reference,
        launch=launch,
        fake=fake,
        cases=(
            _case(7, 576, 4, 2, 0),
            _case(7, 576, 4, 2, 1, size=5),
            _case(80, 200, 65, 15, 0, size=80, extra=8),
            _case(80, 1032, 3, 70, 1, size=80),
            _case(66, 64, 0, 66, 0, size=64),
            _case(66, 64, 0, 66, 1),
            _case(5, 64, 0, 5, 0),
            _case(1, 4096, 1, 0, 0),
        ),
    )
)
