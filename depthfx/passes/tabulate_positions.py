"""Compute what depends on positions alone (rotary cosines and sines) once, as tables, and look its rows up."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from depthfx.passes.context import PassContext, call, shape_of, value_of
from depthfx.passes.match import is_op
from depthfx.passes.print_graph import print_graph

# Wider values than this are cheaper to compute than to keep for every position.
_MAX_ROW_ELEMENTS = 2048


def tabulate_positions(gm: fx.GraphModule, ctx: PassContext) -> None:
    """Each float value that follows from ``positions`` and weights becomes ``table.index_select(row dim, position)``.

    The table ``[..., ctx.num_positions, ...]`` is filled at bind time by the captured arithmetic itself, so its rows
    have the same bits. Rows of padding read position 0. Works for every kind of rotary embedding.
    """
    inputs = {n.name: n for n in gm.graph.nodes if n.op == "placeholder"}
    inside = _follows_from_positions(gm, ctx)
    edge = [n for n in gm.graph.nodes if n in inside and _worth_a_table(n, ctx) and any(u not in inside for u in n.users)]
    if not edge:
        return
    first = next(n for n in gm.graph.nodes if n.op != "placeholder")
    with gm.graph.inserting_before(first):
        places = call(gm.graph, ctx, inputs["positions"], torch.clamp, inputs["positions"], min=0)
    tables: dict[str, fx.Node] = {}
    for node in edge:
        recipe, arguments = _recipe(node, inside)
        key = print_graph(recipe) + str([a.name for a in arguments])
        if key not in tables:
            tables[key] = _look_up(gm, ctx, node, recipe, arguments, places, len(tables))
        node.replace_all_uses_with(tables[key], delete_user_cb=lambda user: user not in inside)
    gm.graph.eliminate_dead_code()
    ctx.report.add("rewritten", f"{len(tables)} functions of the position: tables of {ctx.num_positions} rows")


def _follows_from_positions(gm: fx.GraphModule, ctx: PassContext) -> set[fx.Node]:
    """Nodes whose inputs are all positions, weights, sizes or each other."""
    inside: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if (
            (node.op == "placeholder" and (node.name == "positions" or node.name in ctx.weights))
            or is_op(node, "sym_size", "sym_size.int")
            or (node.op in ("call_function", "call_method") and set(node.all_input_nodes) <= inside)
        ):
            inside.add(node)
    return inside


def _worth_a_table(node: fx.Node, ctx: PassContext) -> bool:
    value = value_of(node)
    if node.op == "placeholder" or not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    dims: list[Any] = [d for d in value.shape if isinstance(d, torch.SymInt)]
    elements = math.prod(d for d in value.shape if isinstance(d, int))
    return len(dims) == 1 and dims[0].node.expr == ctx.row_symbol and elements <= _MAX_ROW_ELEMENTS


def _recipe(node: fx.Node, inside: set[fx.Node]) -> tuple[fx.GraphModule, list[fx.Node]]:
    """The arithmetic of ``node`` as a graph of ``positions`` first, then the weights that it reads."""
    needed: set[fx.Node] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        if current not in needed:
            needed.add(current)
            pending.extend([] if _is_size(current) else current.all_input_nodes)
    ordered = [n for n in node.graph.nodes if n in needed]
    weights = [n for n in ordered if n.op == "placeholder" and n.name != "positions"]
    graph = fx.Graph()
    positions = graph.placeholder("positions")
    env: dict[fx.Node, fx.Node] = {n: graph.placeholder(n.name) for n in weights}
    for n in ordered:
        if n.op == "placeholder":
            env.setdefault(n, positions)
        elif _is_size(n):
            env[n] = graph.call_function(torch.ops.aten.sym_size.int, (positions, 0))
        else:
            env[n] = graph.node_copy(n, lambda x: env[x])
    graph.output(env[node])
    return fx.GraphModule(torch.nn.Module(), graph), weights


def _is_size(node: fx.Node) -> bool:
    return is_op(node, "sym_size", "sym_size.int")


def _look_up(
    gm: fx.GraphModule, ctx: PassContext, node: fx.Node, recipe: fx.GraphModule, weights: list[fx.Node], places: fx.Node, number: int
) -> fx.Node:
    shape: list[Any] = list(shape_of(node) or ())
    dim = next(i for i, d in enumerate(shape) if isinstance(d, torch.SymInt))
    shape[dim] = ctx.num_positions
    last = [n for n in gm.graph.nodes if n.op == "placeholder"][-1]
    with gm.graph.inserting_after(last):
        table = gm.graph.placeholder(f"w_position_table_{number}")
    with ctx.fake_mode:
        table.meta["example_value"] = value_of(node).new_empty(shape)
    ctx.weights[table.name] = tuple(name for w in weights for name in ctx.weights[w.name])
    ctx.tables[table.name] = recipe
    with gm.graph.inserting_after(places):
        return call(gm.graph, ctx, node, torch.index_select, table, dim, places)
