"""Use depthfx's linear ops: gated linear where an activation multiplies two halves, linear elsewhere."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from depthfx.lowering import ops
from depthfx.passes.context import PassContext, batched, call, erase_unused, rows, shape_of
from depthfx.passes.match import dtype_of, is_op, operands, other


def use_gated_linear(gm: fx.GraphModule, ctx: PassContext) -> None:
    """``act(x Wg^T) * (x Wu^T)`` over one joined weight ``[2F, K]`` becomes ``gated_linear``."""
    count = 0
    for node in list(gm.graph.nodes):
        found = _match_gated(node)
        if found is None:
            continue
        linear, activation = found
        with gm.graph.inserting_before(node):
            out = call(gm.graph, ctx, node, ops.GATED_LINEAR, rows(gm, ctx, linear.args[0]), linear.args[1], activation)  # type: ignore[arg-type]
            node.replace_all_uses_with(batched(gm, ctx, out))
        erase_unused(node)
        count += 1
    ctx.report.add("rewritten", f"{count} gated MLPs: activation inside the linear")


def use_linear(gm: fx.GraphModule, ctx: PassContext) -> None:
    """Every other linear over a weight of the model becomes ``depthfx::linear``."""
    count = 0
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.target is not F.linear or node.kwargs:
            continue
        x, weight, *bias = node.args
        shape = shape_of(x) or ()
        if (
            not isinstance(weight, fx.Node)
            or weight.name not in ctx.weights
            or not (len(shape) == 2 or (len(shape) == 3 and shape[0] == 1))
        ):
            continue
        with gm.graph.inserting_before(node):
            packed = x if len(shape) == 2 else rows(gm, ctx, x)  # type: ignore[arg-type]
            out = call(gm.graph, ctx, node, ops.LINEAR, packed, weight, bias[0] if bias else None)
            node.replace_all_uses_with(out if len(shape) == 2 else batched(gm, ctx, out))
        gm.graph.erase_node(node)
        count += 1
    ctx.report.add("rewritten", f"{count} linears: depthfx::linear")


def use_linear_add(gm: fx.GraphModule, ctx: PassContext) -> None:
    """The residual addition that ends the run part of a routed layer goes into the product before it: a kernel less for few rows.

    Elsewhere the addition is part of the next norm. Weights that are stored in another form keep their own ops.
    """
    count = 0
    for node in list(gm.graph.nodes):
        if not str(node.meta.get("group", "")).startswith("run") or not is_op(node, "add") or node.kwargs or len(node.args) != 2:
            continue
        product = next((a for a in operands(node) if _lone_product(a)), None)
        residual = other(node, product)
        if product is None or shape_of(residual) != shape_of(product) or dtype_of(residual) is not dtype_of(product):
            continue
        linear = product.args[0]
        with gm.graph.inserting_before(node):
            out = call(gm.graph, ctx, node, ops.LINEAR_ADD, linear.args[0], linear.args[1], rows(gm, ctx, residual))
            node.replace_all_uses_with(batched(gm, ctx, out))
        gm.graph.erase_node(node)
        gm.graph.erase_node(product)
        gm.graph.erase_node(linear)
        count += 1
    if count:
        ctx.report.add("rewritten", f"{count} residual additions: inside the linear before them")


def _lone_product(node: Any) -> bool:
    """Whether ``node`` is a linear without bias, with a batch dim, that nothing else reads."""
    linear = node.args[0] if is_op(node, "unsqueeze") and node.args[1] == 0 and len(node.users) == 1 else None
    return linear is not None and linear.target is ops.LINEAR and linear.args[2] is None and len(linear.users) == 1


def drop_batch_dim(gm: fx.GraphModule, ctx: PassContext) -> None:
    """Remove ``squeeze(unsqueeze(x, 0), 0)`` pairs that the passes left between their ops."""
    for node in list(gm.graph.nodes):
        if node.target is torch.squeeze and node.args[1] == 0 and is_op(node.args[0], "unsqueeze") and node.args[0].args[1] == 0:
            node.replace_all_uses_with(node.args[0].args[0])
    gm.graph.eliminate_dead_code()


def _match_gated(node: fx.Node) -> tuple[fx.Node, str] | None:
    if not is_op(node, "mul") or not all(isinstance(a, fx.Node) for a in operands(node)):
        return None
    act = next((a for a in operands(node) if _activation(a) is not None), None)
    up = other(node, act)
    if act is None or not is_op(up, "getitem"):
        return None
    gate = act.args[0]
    if not is_op(gate, "getitem"):
        return None
    joined = _halves(gate, up)
    if joined is None or joined.target is not F.linear or joined.kwargs or (len(joined.args) > 2 and joined.args[2] is not None):
        return None
    shape = shape_of(joined.args[0]) or ()
    return (joined, _activation(act) or "") if len(shape) == 3 and shape[0] == 1 else None


def _activation(node: Any) -> str | None:
    if is_op(node, "silu"):
        return "silu"
    if is_op(node, "gelu"):
        return "gelu_tanh" if node.kwargs.get("approximate", "none") == "tanh" else "gelu"
    return None


def _halves(gate: fx.Node, up: fx.Node) -> Any:
    """The joined tensor whose first half is ``gate`` and second half ``up``; None if they are anything else."""
    source = gate.args[0]
    if up.args[0] is not source or not isinstance(source, fx.Node):
        return None
    if is_op(source, "chunk"):
        dim = source.kwargs.get("dim", source.args[2] if len(source.args) > 2 else 0)
        return source.args[0] if source.args[1] == 2 and dim == -1 and (gate.args[1], up.args[1]) == (0, 1) else None
    width = int((shape_of(source) or (0,))[-1])
    expected = ((Ellipsis, slice(0, width // 2)), (Ellipsis, slice(width // 2, width)))
    return source if gate.target is operator.getitem and (gate.args[1], up.args[1]) == expected else None
