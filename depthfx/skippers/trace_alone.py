"""Running a policy or a projector on tensors without values, where whatever reads a value on the host fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from depthfx.contracts import Rows
from depthfx.errors import SkipperError

_ADVICE = "compute with tensors alone (torch.where instead of if, masks instead of lists of rows)"


class _LeavesDevice(RuntimeError):
    """An op took tensors of the rows' device to another one."""


class _WritesError(RuntimeError):
    """An op writes into a tensor that exists already."""


class _Watch(TorchDispatchMode):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            raise _WritesError(str(func))
        result = func(*args, **(kwargs or {}))
        if any(_on(t, self.device) for t in tree_leaves((args, kwargs))) and any(
            isinstance(t, torch.Tensor) and not _on(t, self.device) for t in tree_leaves(result)
        ):
            raise _LeavesDevice(str(func))
        return result


def _on(value: Any, device: torch.device) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == device.type


def trace_alone(module: nn.Module, args: tuple[Any, ...], device: torch.device, who: str) -> Any:
    """The result of ``module`` on ``args`` (tensors, or rows of them) as tensors without values on ``device``.

    Raises :class:`SkipperError` that begins with ``who`` for a host read, a result whose shape depends on values, a write into a tensor, one
    that is neither parameter nor buffer, and whatever fails on shapes or dtypes.
    """
    mode = FakeTensorMode()

    def fake(value: Any) -> Any:
        if isinstance(value, Rows):
            return replace(value, **{n: fake(v) for n, v in vars(value).items()})
        return torch.empty(value.shape, dtype=value.dtype, device=device) if isinstance(value, torch.Tensor) else value

    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    state: dict[str, torch.Tensor] = {name: mode.from_tensor(tensor.detach()) for name, tensor in own.items()}
    try:
        with torch.no_grad(), mode:
            fakes = tuple(fake(a) for a in args)
            with _Watch(device):
                return functional_call(module, state, fakes)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise SkipperError(
            f"{who} reads values of tensors on the host ({error}), which cannot be compiled into a step; {_ADVICE}"
        ) from error
    except _LeavesDevice as error:
        raise SkipperError(f"{who} copies rows to another device ({error}), which cannot be compiled into a step; {_ADVICE}") from error
    except _WritesError as error:
        raise SkipperError(
            f"{who} writes into a tensor in place ({error}), which gets lost when the step is cut into cohorts; compute new tensors"
        ) from error
    except AssertionError as error:
        if "FakeTensor" not in str(error):
            raise SkipperError(f"{who} cannot be traced: AssertionError: {error}") from error
        raise SkipperError(
            f"{who} uses a tensor that is neither parameter nor buffer; register it (register_buffer), so that it moves along"
        ) from error
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
        text = str(error).strip().splitlines()
        raise SkipperError(f"{who} cannot be traced: {type(error).__name__}: {text[0] if text else 'no text'}") from error
