"""Small helpers to match chains of nodes in a Dynamo graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from depthfx.lowering import ops
from depthfx.passes.context import value_of


def is_op(node: Any, *names: str) -> bool:
    """Whether ``node`` calls a function or method of one of these names."""
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name in names


def is_cast(node: Any, dtype: torch.dtype | None = None) -> bool:
    """Whether ``node`` is ``x.to(dtype)`` (of any dtype if None) or ``x.float()``."""
    if is_op(node, "float"):
        return dtype in (None, torch.float32)
    if not is_op(node, "to"):
        return False
    given = [a for a in (*node.args[1:], *node.kwargs.values()) if isinstance(a, torch.dtype)]
    return len(given) == 1 and (dtype is None or given[0] is dtype)


def skip(node: Any, *names: str) -> Any:
    """Follow the first argument through ops of these names."""
    while is_op(node, *names):
        node = node.args[0]
    return node


def operands(node: fx.Node) -> tuple[Any, Any]:
    """The two operands of a binary op."""
    return node.args[0], node.args[1]


def other(node: fx.Node, known: Any) -> Any:
    """The operand of a binary op that is not ``known``; None if ``known`` is not one of them."""
    a, b = operands(node)
    return b if a is known else a if b is known else None


def dtype_of(node: Any) -> torch.dtype | None:
    """Element type of a tensor node, None for anything else."""
    value = value_of(node) if isinstance(node, fx.Node) else None
    return value.dtype if isinstance(value, torch.Tensor) else None


def is_append(node: fx.Node) -> bool:
    """Whether ``node`` writes keys and values of a layer; ``rotary_append`` may also rotate queries alone."""
    return node.target is ops.KV_APPEND or (node.target is ops.ROTARY_APPEND and node.args[-2] != 0)
