"""The verifier: each rule of a legal graph, broken once."""

from __future__ import annotations

import operator

import pytest
import torch

from depthfx.errors import GraphError
from depthfx.lowering import ops
from depthfx.passes.capture import capture
from depthfx.passes.check_graph import check_graph
from depthfx.passes.pipeline import run_passes
from depthfx.report import CompileReport
from depthfx.settings import Settings
from tests.passes.toys import toy


@pytest.fixture(scope="module")
def rewritten():
    gm, ctx = capture(toy(), Settings(fuse=False), "cpu", CompileReport())
    run_passes(gm, ctx)
    return gm, ctx


def nodes(gm, target):
    return [n for n in gm.graph.nodes if n.target is target]


def unknown_input(gm):
    with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        gm.graph.placeholder("stranger")


def attribute(gm):
    gm.register_buffer("hidden_state", torch.ones(1))
    with gm.graph.inserting_after([n for n in gm.graph.nodes if n.op == "placeholder"][-1]):
        gm.graph.get_attr("hidden_state")


def no_value(gm):
    del nodes(gm, ops.PAGED_ATTENTION)[0].meta["example_value"]


def lost_append(gm):
    gm.graph.erase_node(nodes(gm, ops.KV_APPEND)[1])


def wrong_layer(gm):
    node = nodes(gm, ops.KV_APPEND)[2]
    node.args = (*node.args[:3], 1, *node.args[4:])


def late_append(gm):
    nodes(gm, ops.PAGED_ATTENTION)[1].append(nodes(gm, ops.KV_APPEND)[1])


def attends_twice(gm):
    node = nodes(gm, ops.PAGED_ATTENTION)[1]
    with gm.graph.inserting_after(node):
        gm.graph.node_copy(node)


def wrong_output(gm):
    output = next(n for n in gm.graph.nodes if n.op == "output")
    output.args = (nodes(gm, ops.PAGED_ATTENTION)[2],)


def no_output(gm):
    output = next(n for n in gm.graph.nodes if n.op == "output")
    output.args = (None,)


BROKEN = {
    "unknown input": (unknown_input, "input stranger is neither a weight nor one of"),
    "attribute": (attribute, "get_attr hidden_state may not stand in a program"),
    "no fake value": (no_value, "carries no fake value"),
    "lost append": (lost_append, r"append KV as \[0, 2\] and attend as \[0, 1, 2\]"),
    "wrong layer": (wrong_layer, r"append KV as \[0, 1, 1\]"),
    "late append": (late_append, "reads the KV pool before .* wrote its rows"),
    "attends twice": (attends_twice, r"attend as \[0, 1, 1, 2\]"),
    "wrong output": (wrong_output, r"must yield logits \[R, vocabulary\]"),
    "no output": (no_output, r"must yield logits \[R, vocabulary\]"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_graph_names_the_pass(case, rewritten):
    gm, ctx = rewritten
    check_graph(gm, ctx, after="nothing")
    broken = torch.fx.GraphModule(gm, torch.fx.Graph())
    kept = {}
    result = broken.graph.graph_copy(gm.graph, kept)
    for old, new in kept.items():
        new.meta = dict(old.meta)
    broken.graph.output(result)
    check_graph(broken, ctx, after="a copy")
    damage, message = BROKEN[case]
    damage(broken)
    with pytest.raises(GraphError, match=f"after the damage: .*{message}"):
        check_graph(broken, ctx, after="the damage")


def test_a_malformed_graph_is_found(rewritten):
    _, ctx = rewritten
    graph = torch.fx.Graph()
    x = graph.placeholder("positions")
    late = graph.call_function(operator.neg, (x,))
    early = graph.call_function(operator.neg, (late,))
    late.prepend(early)
    graph.output(late)
    with pytest.raises(RuntimeError, match="was used before it has been defined"):
        check_graph(torch.fx.GraphModule(torch.nn.Module(), graph), ctx, after="the damage")
