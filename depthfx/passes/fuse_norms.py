"""Use the RMS norm ops, with the residual addition before the norm taken in where there is one."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from depthfx.lowering import ops
from depthfx.passes.context import PassContext, batched, call, erase_unused, rows, shape_of, value_of
from depthfx.passes.match import dtype_of, is_cast, is_op, operands, other


@dataclass(frozen=True)
class RmsNorm:
    """A matched norm: ``out = weight * (x32 * rsqrt(mean(x32 ** 2) + eps)).to(dtype)``."""

    x: fx.Node
    weight: fx.Node
    eps: float
    out: fx.Node


def match_rms_norm(out: fx.Node, ctx: PassContext) -> RmsNorm | None:
    """Match the Llama form of RMS norm that ends in ``out``; None if it is anything else."""
    if not is_op(out, "mul"):
        return None
    weight = next((a for a in operands(out) if isinstance(a, fx.Node) and a.name in ctx.weights), None)
    if weight is None or len(shape_of(weight) or ()) != 1:
        return None
    scaled: Any = other(out, weight)
    if is_cast(scaled):
        scaled = scaled.args[0]
    if not is_op(scaled, "mul"):
        return None
    rsqrt: Any = next((a for a in operands(scaled) if is_op(a, "rsqrt")), None)
    wide: Any = other(scaled, rsqrt)
    added: Any = rsqrt.args[0] if rsqrt is not None else None
    if not is_op(added, "add") or not isinstance(added.args[1], float) or not is_cast(wide, torch.float32):
        return None
    mean = added.args[0]
    power: Any = mean.args[0] if is_op(mean, "mean") else None
    last = {mean.kwargs.get("dim"), *mean.args[1:]} if power is not None else set()
    if not (last & {-1, (-1,)}) or not is_op(power, "pow") or power.args[:2] != (wide, 2):
        return None
    x = wide.args[0]
    if dtype_of(x) is not dtype_of(out) or dtype_of(weight) is not dtype_of(out):
        return None
    return RmsNorm(x, weight, added.args[1], out)


def fuse_norms(gm: fx.GraphModule, ctx: PassContext) -> None:
    """RMS norms over the whole width become ``rms_norm``, or ``add_rms_norm`` after a residual addition."""
    plain = joined = 0
    for node in list(gm.graph.nodes):
        norm = match_rms_norm(node, ctx)
        if norm is None or len(shape_of(norm.x) or ()) != 3:  # per-head norms are 4-D and belong to the rotary pass
            continue
        with gm.graph.inserting_before(node):
            if is_op(norm.x, "add") and _same_shape(norm.x):
                left, right = operands(norm.x)
                pair = call(gm.graph, ctx, node, ops.ADD_RMS_NORM, rows(gm, ctx, right), rows(gm, ctx, left), norm.weight, norm.eps)
                new = batched(gm, ctx, call(gm.graph, ctx, node, operator.getitem, pair, 0))
                total = batched(gm, ctx, call(gm.graph, ctx, node, operator.getitem, pair, 1))
                norm.x.replace_all_uses_with(total, delete_user_cb=lambda user, total=total: total < user)  # type: ignore[misc]
                joined += 1
            else:
                new = batched(gm, ctx, call(gm.graph, ctx, node, ops.RMS_NORM, rows(gm, ctx, norm.x), norm.weight, norm.eps))
                plain += 1
        node.replace_all_uses_with(new)
        erase_unused(node)
    ctx.report.add("rewritten", f"RMS norms: {plain} alone, {joined} with the residual addition before them")


def _same_shape(add: fx.Node) -> bool:
    left, right = operands(add)
    if not all(isinstance(a, fx.Node) for a in (left, right)):
        return False
    return value_of(left).shape == value_of(right).shape and dtype_of(left) is dtype_of(right) is dtype_of(add) and not add.kwargs
