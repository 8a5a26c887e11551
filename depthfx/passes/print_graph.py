"""Stable text of a graph: one line for each node, values numbered in order, no addresses and no symbol names."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def print_graph(gm: fx.GraphModule, *, keep_weight_names: bool = True) -> str:
    """Text of ``gm`` for golden files, ``explain()`` and for finding equal pieces.

    With ``keep_weight_names=False`` two pieces print alike exactly if they compute the same function of their inputs.
    """
    symbols: dict[str, str] = {}
    names: dict[fx.Node, str] = {}
    lines = []
    for node in gm.graph.nodes:
        named = node.op == "placeholder" and (keep_weight_names or not str(node.target).startswith("w_"))
        names[node] = f"%{node.target}" if named else f"%{len(names)}"
        if node.op == "placeholder":
            lines.append(f"{names[node]} = input {_value(node.meta.get('example_value'), symbols)}")
        elif node.op == "output":
            lines.append(f"return {_argument(node.args[0], names)}")
        else:
            arguments = [_argument(a, names) for a in node.args] + [f"{k}={_argument(v, names)}" for k, v in node.kwargs.items()]
            value = _value(node.meta.get("example_value"), symbols)
            lines.append(f"{names[node]} = {_target(node)}({', '.join(arguments)}) -> {value}")
    return "\n".join(lines) + "\n"


def _target(node: fx.Node) -> str:
    if node.op in ("call_method", "call_module", "get_attr"):
        return f"{node.op.removeprefix('call_')}.{node.target}"
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    return str(getattr(node.target, "__name__", node.target))


def _argument(value: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(_argument(v, names) for v in value) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, slice):
        return ":".join("" if v is None else _argument(v, names) for v in (value.start, value.stop, value.step))
    return repr(value)


def _value(value: Any, symbols: dict[str, str]) -> str:
    if isinstance(value, torch.Tensor):
        dims = ", ".join(_size(s, symbols) for s in value.shape)
        return f"{str(value.dtype).removeprefix('torch.')}[{dims}]"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(_value(v, symbols) for v in value) + ")"
    if isinstance(value, torch.SymInt):
        return _size(value, symbols)
    return type(value).__name__ if value is not None else "none"


def _size(value: Any, symbols: dict[str, str]) -> str:
    if isinstance(value, int):
        return str(value)
    text = str(value)
    for symbol in sorted(map(str, value.node.expr.free_symbols)):
        symbols.setdefault(symbol, "TRUVWXYZ"[len(symbols)] if len(symbols) < 8 else f"N{len(symbols)}")
        text = text.replace(symbol, symbols[symbol])
    return text
