"""The rows of a routed layer put together again: each from the cohort that it belongs to.

``out[t] = run[t]`` where ``choice[t]`` is 1, ``project[t]`` where it is 0, ``hidden[t]`` where it is -1 (padding); run, project, hidden and
out [T, H], choice [T] int32. Only the chosen row is read, so the others may hold anything. The three may be one tensor.
Example: run = [[1], [2]], project = [[3], [4]], hidden = [[5], [6]], choice = [0, 1]: out = [[3], [2]].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from depthfx.lowering.kernel_spec import Case, KernelSpec, inner_contiguous, pdl_options, register_kernel
from depthfx.lowering.kernels._cases import COPY_REASON, COPY_TOLERANCE, randn
from depthfx.lowering.kernels._device import pdl_release, pdl_wait

MAX_BLOCK = 1024


@triton.jit(do_not_specialize_on_alignment=["choice_ptr"])  # it may be a row of several layers'
def _select_rows_kernel(
    run_ptr, project_ptr, hidden_ptr, choice_ptr, out_ptr, num_features, stride_run, stride_project, stride_hidden,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK features of one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num_features
    pdl_release(PDL)
    pdl_wait(PDL)
    choice = tl.load(choice_ptr + row)
    if choice == 1:
        x = tl.load(run_ptr + row * stride_run + at, mask=mask)
    elif choice == 0:
        x = tl.load(project_ptr + row * stride_project + at, mask=mask)
    else:
        x = tl.load(hidden_ptr + row * stride_hidden + at, mask=mask)
    tl.store(out_ptr + row * num_features + at, x, mask=mask)


def _check(run: torch.Tensor, project: torch.Tensor, hidden: torch.Tensor, choice: torch.Tensor) -> None:
    for name, x in (("run", run), ("project", project)):
        if x.shape != hidden.shape or x.dtype is not hidden.dtype or hidden.dim() != 2:
            raise ValueError(
                f"{name} is {x.dtype} {list(x.shape)} and hidden {hidden.dtype} {list(hidden.shape)}; all rows must be [T, H] of one dtype; "
                "scatter packed rows back to their places first"
            )
    if choice.shape != hidden.shape[:1] or choice.dtype is not torch.int32:
        raise ValueError(
            f"choice is {choice.dtype} {list(choice.shape)}; it must be int32 [{hidden.shape[0]}], as partition_rows returns it"
        )


def reference(run: torch.Tensor, project: torch.Tensor, hidden: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
    """Plain PyTorch."""
    _check(run, project, hidden, choice)
    at = choice[:, None]
    return torch.where(at == 1, run, torch.where(at == 0, project, hidden)).contiguous()


def launch(run: torch.Tensor, project: torch.Tensor, hidden: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
    _check(run, project, hidden, choice)
    run, project, hidden, choice = inner_contiguous(run), inner_contiguous(project), inner_contiguous(hidden), inner_contiguous(choice)
    num_rows, num_features = hidden.shape
    out = torch.empty((num_rows, num_features), dtype=hidden.dtype, device=hidden.device)
    block = min(MAX_BLOCK, max(64, triton.next_power_of_2(num_features)))
    if num_rows:
        _select_rows_kernel[(num_rows, triton.cdiv(num_features, block))](
            run, project, hidden, choice, out, num_features, run.stride(0), project.stride(0), hidden.stride(0),
            BLOCK=block, num_warps=max(1, block // 256), **pdl_options(),
        )  # fmt: skip
    return out


def fake(run: torch.Tensor, project: torch.Tensor, hidden: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
    return hidden.new_empty(hidden.shape)


def _case(rows: int, features: int, shares: tuple[float, float, float], extra: int = 0, aliased: bool = False) -> Case:
    """``shares``: chances of RUN, PROJECT and padding. What is not chosen is NaN. ``aliased``: all three are one tensor."""

    def make(g: torch.Generator, dtype: torch.dtype) -> tuple:
        choice = torch.tensor([1, 0, -1])[
            torch.multinomial(torch.tensor(shares, dtype=torch.float32), rows, replacement=True, generator=g)
        ].to(torch.int32)
        if aliased:
            x = randn(g, dtype, rows, features)
            return x, x, x, choice
        sources = []
        for chosen, more in ((1, extra), (0, 0), (-1, 2 * extra)):
            x = randn(g, dtype, rows, features + more)[:, :features]
            x[choice != chosen] = float("nan")
            sources.append(x)
        return (*sources, choice)

    label = f"{rows}x{features}-" + "-".join(f"{s:g}" for s in shares) + "-aliased" * aliased
    return Case(label, make, COPY_TOLERANCE, COPY_REASON)


register_kernel(
    KernelSpec(
        name="select_rows",
        schema="(Tensor run, Tensor project, Tensor hidden, Tensor choice) -> Tensor",
        reference=reference,
        launch=launch,
        fake=fake,
        cases=(
            _case(7, 576, (0.5, 0.3, 0.2)),
            _case(1, 64, (1, 0, 0)),
            _case(1, 4096, (0, 1, 0)),
            _case(33, 200, (1, 0, 0), extra=8),
            _case(9, 1100, (0, 1, 0), extra=3),
            _case(3, 80, (0, 0, 1)),
            _case(65, 1032, (0.4, 0.4, 0.2), extra=8),
            _case(6, 96, (0.4, 0.4, 0.2), aliased=True),
        ),
    )
)
