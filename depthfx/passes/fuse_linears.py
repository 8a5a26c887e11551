"""Join the linears of a layer that read the same tensor into one linear over concatenated weights."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import fx

from depthfx.lowering import ops
from depthfx.passes.context import PassContext, call, shape_of


def fuse_linears(gm: fx.GraphModule, ctx: PassContext) -> None:
    """Q, K and V become one linear, gate and up become one; each user reads a slice of the result.

    The concatenated weight is one tensor, and the model's own parameters become views of it (no extra memory). What attention reads is
    joined apart from the rest, also where both read one tensor (a parallel block): a routed program joins keys and values, queries,
    gate and up by themselves, and each of these is a view of what the dense program has joined.
    """
    count = 0
    appends = [n for n in gm.graph.nodes if n.target is ops.KV_APPEND]
    attends = [n for n in gm.graph.nodes if n.target is ops.PAGED_ATTENTION]
    for layer, *attention in zip(ctx.layers, appends, attends, strict=True):
        read = _closure(attention, layer.hidden_in)
        by_input: dict[tuple[fx.Node, bool, str, bool], list[fx.Node]] = {}
        for node in layer.nodes:
            if node.op == "call_function" and node.target is F.linear and not node.kwargs:
                x, weight, *bias = node.args
                if _own(weight, ctx) and all(b is None or _own(b, ctx) for b in bias):
                    by_input.setdefault((x, bool(bias and bias[0] is not None), node.meta.get("group", ""), node in read), []).append(node)
        for (_, has_bias, *_), linears in by_input.items():
            if len(linears) > 1 and _movable(linears):
                _join(gm, ctx, linears, has_bias)
                count += 1
    gm.graph.eliminate_dead_code()
    ctx.report.add("rewritten", f"{count} groups of linears that share an input: one linear each")


def _closure(ends: Sequence[fx.Node], start: fx.Node) -> set[fx.Node]:
    """All nodes that ``ends`` follow from, as far back as ``start``."""
    found = {start}
    pending = list(ends)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending.extend(node.all_input_nodes)
    return found


def _own(weight: object, ctx: PassContext) -> bool:
    """A weight that this linear alone uses (a tied weight stays as it is)."""
    return isinstance(weight, fx.Node) and weight.name in ctx.weights and len(weight.users) == 1 and len(ctx.weights[weight.name]) == 1


def _movable(linears: list[fx.Node]) -> bool:
    dtypes = {n.args[1].meta["example_value"].dtype for n in linears}  # type: ignore[union-attr]
    return len(dtypes) == 1


def _join(gm: fx.GraphModule, ctx: PassContext, linears: list[fx.Node], has_bias: bool) -> None:
    first = linears[0]
    x = first.args[0]
    weight = _concatenate(gm, ctx, [n.args[1] for n in linears])  # type: ignore[misc]
    bias = _concatenate(gm, ctx, [n.args[2] for n in linears]) if has_bias else None  # type: ignore[misc]
    start = 0
    with gm.graph.inserting_before(first):
        joined = call(gm.graph, ctx, first, F.linear, x, weight, bias)
        for node in linears:
            width = int((shape_of(node) or ())[-1])
            part = call(gm.graph, ctx, node, operator.getitem, joined, (Ellipsis, slice(start, start + width)))
            start += width
            node.replace_all_uses_with(part)
    parts = [a for node in linears for a in node.args[1:] if isinstance(a, fx.Node)]
    for node in linears:
        gm.graph.erase_node(node)
    for part in parts:  # read through the joined weight from here on
        gm.graph.erase_node(part)
        del ctx.weights[part.name]


def _concatenate(gm: fx.GraphModule, ctx: PassContext, parts: list[fx.Node]) -> fx.Node:
    name = f"{parts[0].name}_joined"
    with gm.graph.inserting_before(parts[0]):
        node = gm.graph.placeholder(name)
    with ctx.fake_mode:
        node.meta["example_value"] = torch.cat([p.meta["example_value"] for p in parts])
    ctx.weights[node.name] = tuple(n for p in parts for n in ctx.weights[p.name])
    return node
