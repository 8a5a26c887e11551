"""Decide early: what a decision follows from comes as soon as it can, what else a layer computes for all rows as late as it can.

Outside of captured graphs the host needs the number of rows of each cohort before it can launch what they run. A decision that follows from
no token (a hash of the request, a fixed set of layers) is made at the start of the step, for all layers in one kernel. A router's is made
before the layer's keys and values, and its counts are on their way to the host while the device computes those.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import fx

from depthfx.lowering import ops
from depthfx.passes.context import PassContext, call, value_of
from depthfx.passes.match import is_append, is_op

CHOICE = 3  # what `partition_rows` yields fourth


def order_decisions(gm: fx.GraphModule, ctx: PassContext) -> None:
    """Reorder the graph, and join decisions of neighbouring layers that need not wait; nothing to do without routed layers."""
    if not any(n.target is ops.PARTITION_ROWS for n in gm.graph.nodes):
        return
    order = _Order(gm)
    early = order.early()
    order.put(n for n in order.closure(early) if not order.decided(n))
    order.put(order.closure(early))
    for merge in [n for n in gm.graph.nodes if n.target is ops.SELECT_ROWS]:
        order.put(order.closure([choice_of(merge).args[0]]))
        order.put(n for n in order.rest() if n < merge or n is merge)
    order.put(order.rest())
    order.apply()
    joined = sum(len(group) for group in _groups(early, order) if _join(gm, ctx, group))
    if early:
        ctx.report.add(
            "depth",
            f"{len(early)} decisions follow from no token: made at the start of a step" + (f", {joined} of them at once" if joined else ""),
        )


def choice_of(merge: fx.Node) -> fx.Node:
    """The node from which ``select_rows`` takes what was decided; `partition_of` leads from there."""
    choice = merge.args[3]
    assert isinstance(choice, fx.Node)
    return choice


def partition_of(choice: fx.Node) -> tuple[fx.Node, int | None]:
    """The ``partition_rows`` behind ``choice``, and the layer's row in its results; None: it serves one layer."""
    source, index = choice.args
    assert isinstance(source, fx.Node) and isinstance(index, int)
    if source.target is torch.unbind:
        inner = source.args[0]
        assert isinstance(inner, fx.Node) and isinstance(inner.args[0], fx.Node)
        return inner.args[0], index
    return source, None


class _Order:
    """A new order of a graph's nodes, in which none stands before what it needs."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.old = list(gm.graph.nodes)
        self.new: dict[fx.Node, None] = {n: None for n in self.old if n.op == "placeholder"}
        appends: list[fx.Node] = []
        self.needs: dict[fx.Node, list[fx.Node]] = {}
        for node in self.old:
            reads = node.target is ops.PAGED_ATTENTION  # what was appended before; no edge says so
            self.needs[node] = [*node.all_input_nodes, *(appends if reads else ())]
            if is_append(node):
                appends.append(node)

    def closure(self, ends: Iterable[fx.Node]) -> list[fx.Node]:
        """``ends`` and all they follow from, in the old order."""
        found: set[fx.Node] = set()
        pending = list(ends)
        while pending:
            node = pending.pop()
            if node not in found:
                found.add(node)
                pending.extend(self.needs[node])
        return [n for n in self.old if n in found]

    def early(self) -> list[fx.Node]:
        """Partitions that follow from no token."""
        return [n for n in self.old if n.target is ops.PARTITION_ROWS and not follows_from_tokens(n)]

    def decided(self, node: fx.Node) -> bool:
        """Whether a partition is among what ``node`` follows from, or ``node`` is one."""
        return any(n.target is ops.PARTITION_ROWS for n in self.closure([node]))

    def put(self, nodes: Iterable[fx.Node]) -> None:
        """``nodes`` come next, as far as they are not there yet."""
        for node in list(nodes):
            self.new.setdefault(node)

    def rest(self) -> list[fx.Node]:
        """What is not there yet."""
        return [n for n in self.old if n not in self.new]

    def apply(self) -> None:
        """Move the nodes."""
        output = self.old[-1]
        for node in self.new:
            if node is not output:
                output.prepend(node)
        self.gm.graph.lint()


def follows_from_tokens(node: fx.Node) -> bool:
    """From their values: their number is known at the start of a step."""
    pending, seen = [node], set()
    while pending:
        node = pending.pop()
        if node.op == "placeholder" and node.name == "token_ids":
            return True
        if node not in seen and not is_op(node, "sym_size", "sym_size.int"):
            seen.add(node)
            pending.extend(node.all_input_nodes)
    return False


def _groups(early: list[fx.Node], order: _Order) -> list[list[fx.Node]]:
    """Partitions of layers next to each other on the tape, none of which follows from another, with decisions of one type."""
    alone = [p for p in early if not any(n.target is ops.PARTITION_ROWS for n in order.closure([p])[:-1])]
    groups: list[list[fx.Node]] = [[p] for p in alone[:1]]
    for before, after in pairwise(alone):
        same = after.args[4] == before.args[4] + 1 and value_of(after.args[0]).dtype is value_of(before.args[0]).dtype  # type: ignore[operator]
        if same:
            groups[-1].append(after)
        else:
            groups.append([after])
    return groups


def _join(gm: fx.GraphModule, ctx: PassContext, group: list[fx.Node]) -> bool:
    """One partition in place of those of ``group``; whether there was anything to join."""
    if len(group) < 2:
        return False
    first, last = group[0], group[-1]
    with gm.graph.inserting_before(last):
        stacked = call(gm.graph, ctx, first, torch.stack, [p.args[0] for p in group])
        joined = call(gm.graph, ctx, first, ops.PARTITION_ROWS, stacked, *first.args[1:])
        choices = call(gm.graph, ctx, first, torch.unbind, call(gm.graph, ctx, first, operator.getitem, joined, CHOICE))
        for row, partition in enumerate(group):
            choice = call(gm.graph, ctx, first, operator.getitem, choices, row)
            for user in list(partition.users):
                assert user.target is operator.getitem and user.args[1] == CHOICE, "only the choice is read before cohorts are outlined"
                user.replace_all_uses_with(choice)
                gm.graph.erase_node(user)
    for partition in group:
        gm.graph.erase_node(partition)
    gm.graph.lint()
    return True
