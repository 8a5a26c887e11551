"""Rules of a legal graph, run after every pass; a broken rule names the pass and the node."""

from __future__ import annotations

import torch
from torch import fx

from depthfx.errors import GraphError
from depthfx.lowering import ops
from depthfx.passes.context import PassContext, value_of
from depthfx.passes.match import is_append
from depthfx.records import StepInputs


def check_graph(gm: fx.GraphModule, ctx: PassContext, after: str) -> None:
    """Raise :class:`GraphError` if the graph breaks a rule after the pass called ``after``."""
    gm.graph.lint()
    for node in gm.graph.nodes:
        if node.op == "placeholder" and node.name not in ctx.weights and node.name not in StepInputs.names():
            raise GraphError(f"after {after}: input {node.name} is neither a weight nor one of {StepInputs.names()}")
        if node.op in ("get_attr", "call_module"):
            raise GraphError(f"after {after}: {node.op} {node.target} may not stand in a program before it is split")
        if node.op in ("call_function", "call_method") and "example_value" not in node.meta:
            raise GraphError(f"after {after}: node {node.name} ({node.target}) carries no fake value")
    attends = [n for n in gm.graph.nodes if n.target is ops.PAGED_ATTENTION]
    appends = [n for n in gm.graph.nodes if is_append(n)]
    if attends:
        _check_layers(after, ctx, appends, attends)
    output = next(n for n in gm.graph.nodes if n.op == "output")
    logits = output.args[0]
    if not isinstance(logits, fx.Node) or not isinstance(value_of(logits), torch.Tensor) or value_of(logits).dim() != 2:
        raise GraphError(f"after {after}: the program must yield logits [R, vocabulary], it yields {logits}")


def _check_layers(after: str, ctx: PassContext, appends: list[fx.Node], attends: list[fx.Node]) -> None:
    """Invariant 1: every layer appends its own K and V, to its own slot of the pool, before it attends."""

    def layer_of(node: fx.Node) -> int:
        pool = next(i for i, a in enumerate(node.args) if isinstance(a, fx.Node) and a.name == "kv_pool")
        return node.args[pool + 1]  # type: ignore[return-value]

    expected = list(range(ctx.kv_shape.num_layers)) if ctx.kv_shape is not None else []
    if [layer_of(n) for n in appends] != expected or [layer_of(n) for n in attends] != expected:
        raise GraphError(
            f"after {after}: layers append KV as {[layer_of(n) for n in appends]} and attend as {[layer_of(n) for n in attends]}; "
            f"every layer of {expected} must do both once, in order"
        )
    for append, attend in zip(appends, attends, strict=True):
        if not append < attend:
            raise GraphError(f"after {after}: {attend.name} reads the KV pool before {append.name} wrote its rows")
