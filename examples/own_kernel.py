"""A kernel outside the package: one record with the formula, the Triton kernel, the reference and the cases.

``y[i, :] = x[i, :] * scale[i]``; with x = [[1, 2], [3, 4]] and scale = [10, 0.5], y = [[10, 20], [1.5, 2]].
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported

import triton
import triton.language as tl

from depthfx.lowering.kernel_spec import Case, KernelSpec, max_error, register_kernel


@triton.jit
def _row_scale_kernel(x_ptr, scale_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + at, mask=at < columns).to(tl.float32)
    scale = tl.load(scale_ptr + row).to(tl.float32)
    tl.store(y_ptr + row * columns + at, (x * scale).to(y_ptr.dtype.element_ty), mask=at < columns)


def launch(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The Triton kernel, one program for each row."""
    x = x.contiguous()
    y = torch.empty_like(x)
    _row_scale_kernel[(x.shape[0],)](x, scale, y, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return y


def reference(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What is right, in plain PyTorch."""
    return (x.float() * scale.float()[:, None]).to(x.dtype)


def fake(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Shape and dtype only."""
    return torch.empty_like(x)


def _make(generator: torch.Generator, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(5, 70, generator=generator).to(dtype), torch.randn(5, generator=generator).to(dtype)


SPEC = register_kernel(
    KernelSpec(
        name="example_row_scale",
        schema="(Tensor x, Tensor scale) -> Tensor",
        reference=reference,
        launch=launch,
        fake=fake,
        cases=(Case("odd width", _make, {torch.float32: 0.0, torch.float16: 0.0}, "one product, one rounding"),),
    )
)


def main() -> float:
    """Run every case through the op and through the kernel (interpreted on a CPU); returns the largest error."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    worst = 0.0
    for case in SPEC.cases:
        for dtype in case.tolerance:
            args = case.inputs(device, dtype, seed=0)
            expected = reference(*args)
            worst = max(worst, max_error(torch.ops.depthfx.example_row_scale(*args), expected), max_error(launch(*args), expected))
    print(f"largest error over all cases: {worst}")
    return worst


if __name__ == "__main__":
    main()
