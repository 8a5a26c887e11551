"""What a kernel must state about itself, and the one call that turns the statement into a ``depthfx::`` op."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton

from depthfx.registry import Registry

# True where Triton's interpreter runs the kernels on CPU tensors (TRITON_INTERPRET=1 before the first import).
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)

_LIBRARY = torch.library.Library("depthfx", "FRAGMENT")


class _Launches(threading.local):
    """How this thread launches kernels: other engines may serve, or be compiled, in other threads."""

    pdl = False
    settled = False
    collecting = False


_launches = _Launches()


@dataclass(frozen=True)
class Case:
    """One set of inputs on which the kernel must agree with its reference.

    ``make`` draws from the generator on the CPU, so one seed gives the same numbers on every device; the caller moves
    the result. Written tensors are compared too.
    """

    label: str
    make: Callable[[torch.Generator, torch.dtype], tuple[Any, ...]]
    tolerance: dict[torch.dtype, float]  # largest |a - b| / (1 + |b|), 0: equal bits; by dtype of the inputs, float8: of FP8 tensors
    reason: str  # why this tolerance

    def allowed(self, result: torch.Tensor, dtype: torch.dtype) -> float:
        """Tolerance of one result or written tensor of a call whose inputs are of ``dtype``."""
        own = self.tolerance.get(torch.float8_e4m3fn) if result.dtype is torch.float8_e4m3fn else None
        return self.tolerance[dtype] if own is None else own

    def inputs(self, device: torch.device, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
        """Arguments of the op on ``device``, floating tensors in ``dtype``."""
        args = self.make(torch.Generator().manual_seed(seed), dtype)
        return tuple(_move(a, device) if isinstance(a, torch.Tensor) else a for a in args)


@dataclass(frozen=True)
class KernelSpec:
    """One op: schema, plain PyTorch reference, Triton launch, fake result and test cases.

    All four functions take the arguments of the schema by position. ``cpu`` replaces the reference on CPU tensors where a
    faster plain PyTorch form exists; the tests hold it to the reference as well.
    """

    name: str
    schema: str  # without the name: "(Tensor x, ...) -> Tensor"; written tensors carry (a!)
    reference: Callable[..., Any]
    launch: Callable[..., Any]
    fake: Callable[..., Any]
    cases: tuple[Case, ...]
    cpu: Callable[..., Any] | None = None


KERNELS: Registry[KernelSpec] = Registry("kernel", "depthfx.lowering.kernels")


def register_kernel(spec: KernelSpec) -> KernelSpec:
    """Register ``spec`` and define ``depthfx::<name>``: reference (or ``cpu``) on CPU, ``launch`` on CUDA, fake for tracing.

    ``Library.define`` with plain implementations is used because ``custom_op`` adds several microseconds to each eager
    call. A second use of a name raises :class:`depthfx.errors.RegistryError` before anything is defined.
    """
    KERNELS.add(spec.name, spec)
    _LIBRARY.define(spec.name + spec.schema)
    _LIBRARY.impl(spec.name, spec.cpu or spec.reference, "CPU")
    _LIBRARY.impl(spec.name, spec.launch, "CUDA")
    torch.library.register_fake(f"depthfx::{spec.name}", spec.fake, lib=_LIBRARY)
    return spec


def set_collecting(collecting: bool) -> None:
    """Say that this thread only names kernels and runs none from here on; see :func:`depthfx.lowering.precompile.collected`."""
    _launches.collecting = collecting


def is_collecting() -> bool:
    """Whether this thread only names kernels: no value on the device means anything."""
    return _launches.collecting


def enable_pdl(enabled: bool) -> None:
    """Switch programmatic dependent launch for all later launches (and captures) of this thread; it needs compute capability 9.0.

    With it a kernel may start while the one before drains: it prefetches weights at once and waits before it touches
    anything that another kernel writes. The interpreter ignores the switch.
    """
    if enabled and torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0):
        raise ValueError(
            f"dependent launch needs compute capability 9.0, but {torch.cuda.get_device_name()} has "
            f"{torch.cuda.get_device_capability()}; leave it off on this device"
        )
    _launches.pdl = enabled


@contextmanager
def settled_bounds(settled: bool) -> Iterator[None]:
    """Say that bounds of products launched inside were written in front of a kernel that waits for all before it (one without dependent launch):
    they may be read before the wait, and weights asked for ahead.
    """
    before, _launches.settled = _launches.settled, settled
    try:
        yield
    finally:
        _launches.settled = before


def bound_kind(bound: torch.Tensor | None) -> int:
    """The constexpr ``BOUND`` of a product: 0 without one, 2 for one that is settled, else 1."""
    return 0 if bound is None else 2 if _launches.settled else 1


def pdl_options() -> dict[str, bool]:
    """Keyword arguments of a kernel launch for the present switch: the constexpr ``PDL`` and the launch attribute."""
    if _launches.pdl and not INTERPRETED:
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def device_sms(device: torch.device) -> int:
    """Multiprocessors of ``device``; off CUDA (interpreter, compile tests) the 132 of an H200."""
    if device.type != "cuda":
        return 132
    return _cuda_sms(device.index if device.index is not None else torch.cuda.current_device())


@cache
def is_hopper(index: int) -> bool:
    """Whether device ``index`` is of compute capability 9 and this Triton has the Gluon interface that the Hopper kernels are written in."""
    return torch.cuda.get_device_capability(index)[0] == 9 and triton.__version__.startswith("3.6.")


_SMS: dict[int, int] = {}


def _cuda_sms(index: int) -> int:
    if index not in _SMS:
        _SMS[index] = torch.cuda.get_device_properties(index).multi_processor_count
    return _SMS[index]


def inner_contiguous(x: torch.Tensor) -> torch.Tensor:
    """``x`` itself when its last dimension is contiguous, as the kernels need; else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def max_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest ``|a - b| / (1 + |b|)``; infinite where one holds a NaN or an infinity and the other does not."""
    if actual.shape != expected.shape:
        return float("inf")
    if actual.numel() == 0:
        return 0.0
    a, b = actual.double(), expected.double()
    same = (a == b) | (a.isnan() & b.isnan())
    error = ((a - b).abs() / (1 + b.abs())).nan_to_num(nan=float("inf"), posinf=float("inf"))
    return float(error.masked_fill(same, 0.0).max())


def _move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on ``device`` with the same strides (a case may be about strides)."""
    storage = torch.empty(tensor.untyped_storage().nbytes() // tensor.element_size(), dtype=tensor.dtype, device=device)
    flat = tensor.as_strided((storage.numel(),), (1,), 0)
    storage.copy_(flat)
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
