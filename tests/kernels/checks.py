"""What every kernel test does: run a case on poisoned memory and compare all results and written tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from depthfx.lowering.kernel_spec import KERNELS, Case, KernelSpec, max_error

CASES = [pytest.param(spec, case, id=f"{name}-{case.label}") for name, spec in KERNELS.items() for case in spec.cases]


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """Inside, ``torch.empty`` gives NaN (or the largest integer): an element that no kernel wrote cannot pass."""
    plain = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = plain(*args, **kwargs)
        if tensor.is_floating_point():
            return tensor.fill_(float("nan"))
        return tensor.fill_(torch.iinfo(tensor.dtype).max)

    torch.empty = poisoned
    try:
        yield
    finally:
        torch.empty = plain


def outputs(function: Callable[..., Any], args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Results of ``function``, then all its tensor arguments as it left them."""
    result = function(*args)
    results = [] if result is None else list(result) if isinstance(result, tuple) else [result]
    return results + [a for a in args if isinstance(a, torch.Tensor)]


def check_case(spec: KernelSpec, case: Case, function: Callable[..., Any], device: str, dtype: torch.dtype, seed: int = 0) -> None:
    """``function`` (launch, cpu or the op) must agree with the reference on the CPU within the case's tolerance."""
    expected = outputs(spec.reference, case.inputs(torch.device("cpu"), dtype, seed))
    args = case.inputs(torch.device(device), dtype, seed)
    with poisoned_empty():
        actual = outputs(function, args)
    assert len(actual) == len(expected)
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert a.dtype == b.dtype
        error, allowed = max_error(a.cpu(), b), case.allowed(b, dtype)
        assert error <= allowed, f"tensor {index} is off by {error:.2e}; {allowed}: {case.reason}"
