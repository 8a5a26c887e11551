"""Graphs as plain data and back: operations by name from a closed list of places, no code, no pickle."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from depthfx.errors import DepthfxError

# The only places that a function of a stored graph may come from.
_PLACES: dict[str, Any] = {
    "operator": operator,
    "torch": torch,
    "torch.nn.functional": torch.nn.functional,
    "torch._C._nn": torch._C._nn,
    "math": math,
}
_NAMED = {str(v): v for v in vars(torch).values() if isinstance(v, (torch.dtype, torch.layout, torch.memory_format))}


class NotPlainError(DepthfxError):
    """A graph holds something that plain data cannot name; the message says what."""


def to_data(graph: fx.Graph) -> list[list[Any]]:
    """One ``[name, op, target, args, kwargs]`` for each node; nodes refer to earlier ones by number."""
    numbers: dict[fx.Node, int] = {}
    data = []
    for node in graph.nodes:
        target = node.target if isinstance(node.target, str) else _place_of(node.target)
        data.append([node.name, node.op, target, _encode(list(node.args), numbers), _encode(dict(node.kwargs), numbers)])
        numbers[node] = len(numbers)
    return data


def from_data(data: list[list[Any]]) -> fx.Graph:
    """The graph behind :func:`to_data`'s result; raises ValueError, KeyError, TypeError or AttributeError on foreign data."""
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    for name, op, target, args, kwargs in data:
        if op not in ("placeholder", "call_function", "call_method", "output"):
            raise ValueError(f"node {name} is a {op}")
        function = _find(target) if op == "call_function" else target
        nodes.append(graph.create_node(op, function, tuple(_decode(args, nodes)), _decode(kwargs, nodes), name=name))
        if nodes[-1].name != name:
            raise ValueError(f"the name {name} stands twice")
    return graph


def _place_of(function: Callable[..., Any]) -> str:
    if isinstance(function, torch._ops.OpOverload):
        return f"torch.ops:{function.namespace}.{function._schema.name.split('::')[1]}.{function._overloadname}"
    if isinstance(function, torch._ops.OpOverloadPacket):
        return f"torch.ops:{function._qualified_op_name.replace('::', '.')}"
    name = getattr(function, "__name__", "")
    for place, module in _PLACES.items():
        if getattr(module, name, None) is function:
            return f"{place}:{name}"
    raise NotPlainError(f"the function {getattr(function, '__module__', '')}.{name or function}")


def _find(target: str) -> Callable[..., Any]:
    place, _, name = target.partition(":")
    found: Any
    if place == "torch.ops":
        namespace, op, *overload = name.split(".")
        found = getattr(getattr(torch.ops, namespace), op)
        for part in overload:
            found = getattr(found, part)
    else:
        found = getattr(_PLACES[place], name)
    if not callable(found):
        raise ValueError(f"{target} is not a function")
    return found  # type: ignore[no-any-return]


def _encode(value: Any, numbers: dict[fx.Node, int]) -> Any:
    """JSON form: plain scalars as they are, everything else as ``{kind: ...}``."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, fx.Node):
        return {"node": numbers[value]}
    if isinstance(value, tuple):
        return {"tuple": [_encode(v, numbers) for v in value]}
    if isinstance(value, list):
        return [_encode(v, numbers) for v in value]
    if isinstance(value, dict):
        return {"dict": [[_encode(k, numbers), _encode(v, numbers)] for k, v in value.items()]}
    if isinstance(value, slice):
        return {"slice": [_encode(v, numbers) for v in (value.start, value.stop, value.step)]}
    if value is Ellipsis:
        return {"ellipsis": 0}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return {"torch": str(value)}
    raise NotPlainError(f"an argument of type {type(value).__name__}")


def _decode(value: Any, nodes: list[fx.Node]) -> Any:
    if isinstance(value, list):
        return [_decode(v, nodes) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "node":
        return nodes[held]
    if kind == "tuple":
        return tuple(_decode(v, nodes) for v in held)
    if kind == "dict":
        return {_decode(k, nodes): _decode(v, nodes) for k, v in held}
    if kind == "slice":
        return slice(*(_decode(v, nodes) for v in held))
    if kind == "ellipsis":
        return Ellipsis
    if kind == "device":
        return torch.device(held)
    if kind == "torch":
        return _NAMED[held]
    raise ValueError(f"unknown kind {kind}")
