"""Cut each routed layer, by data flow, into what every row needs and what only RUN or only Project-Only rows need.

Keys and values are needed of every row (invariant 1), so what flows into the KV append is computed for all of them; the rest of the
layer is the group "run", the projector the group "project", the policy the group "policy" (all rows as well). The groups are tags on
nodes (``node.meta["group"]``): later passes fuse inside a group, and `outline_cohorts` makes the first two run on chosen rows only.
Source: paper vSkipper, 3.1; research on FlexiDepth for the gate `mlp`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import fx

from depthfx.errors import SkipperError
from depthfx.lowering import ops
from depthfx.passes.context import LayerSpan, PassContext, batched, call, erase_unused, layer_key, rows, shape_of, value_of
from depthfx.passes.match import is_op, skip
from depthfx.passes.route_markers import LAYER_INPUT, ROUTE, ROWS_OF


def form_cohorts(gm: fx.GraphModule, ctx: PassContext) -> None:
    """Put partition and merge into the routed layers and tag their nodes; nothing to do without a skipper.

    Raises :class:`SkipperError` where the gate `mlp` or the projector needs an MLP branch and the layer has none of its own.
    """
    if ctx.skipper is None:
        return
    inputs = {n.name: n for n in gm.graph.nodes if n.op == "placeholder"}
    partition: fx.Node | None = None
    fused = 0
    for place, index in enumerate(ctx.skipper.layers):
        layer = _Layer(gm, ctx, ctx.layers[index], inputs, place)
        partition, result = layer.form(partition)
        fused += layer.queries_are_shared
        ctx.layers = [replace(s, hidden_in=result) if s.hidden_in is layer.route else s for s in ctx.layers]
    _share_decisions(gm)
    names = {type(p).__name__ for p in ctx.skipper.policies}, {type(p).__name__ for p in ctx.skipper.projectors}
    ctx.report.add(
        "depth",
        f"layers {', '.join(map(str, ctx.skipper.layers))} are routed by {' and '.join(sorted(names[0]))}; skipped rows get their K and V and "
        f"{' or '.join(sorted(names[1]))}, gate {ctx.skipper.gate}",
    )
    if fused:
        ctx.report.add("depth", f"{fused} routed layers compute queries of all rows: one weight holds them with keys and values")


class _Layer:
    """One routed layer while it is cut."""

    def __init__(self, gm: fx.GraphModule, ctx: PassContext, span: LayerSpan, inputs: dict[str, fx.Node], place: int) -> None:
        self.gm, self.ctx, self.span, self.inputs, self.place = gm, ctx, span, inputs, place
        key = tuple(span.path.rsplit(".", 1))
        self.nodes = [n for n in gm.graph.nodes if n.op != "placeholder" and _key(n) == key]
        self.inside = set(self.nodes)
        self.route = next(n for n in self.nodes if n.target is ROUTE)
        self.append = next(n for n in self.nodes if n.target is ops.KV_APPEND)
        self.attend = next(n for n in self.nodes if n.target is ops.PAGED_ATTENTION)

    def form(self, before: fx.Node | None) -> tuple[fx.Node, fx.Node]:
        """Resolve the markers, put partition and merge in, tag the groups.

        ``before`` is the partition of the routed layer before; returned are this one's and the layer's output.
        """
        self._resolve_markers(before)
        out, skipped, actions, weight, _ = self.route.args
        assert isinstance(out, fx.Node) and isinstance(skipped, fx.Node) and isinstance(actions, fx.Node)
        shared = self._needed([self.append])
        self.queries_are_shared = any(n.target is F.linear for n in self._needed([self.attend.args[0]]) & shared)
        if isinstance(weight, fx.Node):
            out, weight = self._scale_mlp(out, weight)
        policy = self._needed([n for n in (actions, weight) if isinstance(n, fx.Node)]) - shared
        graph, ctx, known = self.gm.graph, self.ctx, set(self.gm.graph.nodes)
        with graph.inserting_before(self.route):
            flags = [self.inputs[name] for name in ("forced_run", "positions", "route_tape")]
            partition = call(graph, ctx, self.append, ops.PARTITION_ROWS, actions, *flags, self.place)
            choice = call(graph, ctx, self.append, operator.getitem, partition, 3)
            hidden, run = rows(self.gm, ctx, self.span.hidden_in), rows(self.gm, ctx, out)
            spare = hidden if _bare(skipped) is _bare(self.span.hidden_in) else rows(self.gm, ctx, skipped)
            merge = call(graph, ctx, self.append, ops.SELECT_ROWS, run, spare, hidden, choice)
            result = batched(self.gm, ctx, merge)
        self.route.replace_all_uses_with(result)
        graph.erase_node(self.route)
        for end in (out, skipped):  # what only the route read would stay behind when the rest moves
            erase_unused(end)
        self.inside |= {n for n in (run, spare) if n not in known}
        all_rows = shared | policy | ({hidden} if hidden not in known else set())
        in_run = self._needed([run]) - all_rows
        in_project = self._needed([spare]) - all_rows - in_run
        for name, group in (("policy", policy), ("run", in_run), ("project", in_project)):
            for node in group:
                node.meta["group"] = f"{name} {self.place}"
        self._order(merge, [all_rows - policy, policy, {partition, choice}, in_run, in_project])
        return partition, result

    def _needed(self, ends: Iterable[object]) -> set[fx.Node]:
        """All nodes of the layer that ``ends`` follow from, and these."""
        found: set[fx.Node] = set()
        pending = list(ends)
        while pending:
            node = pending.pop()
            if isinstance(node, fx.Node) and node in self.inside and node not in found:
                found.add(node)
                pending.extend(node.all_input_nodes)
        return found

    def _resolve_markers(self, before: fx.Node | None) -> None:
        graph, known = self.gm.graph, set(self.gm.graph.nodes)  # what is known is not the layer's to move, unless it is inside already
        for marker in [n for n in self.nodes if n.target in (ROWS_OF, LAYER_INPUT)]:
            name = marker.args[1]
            if not marker.users:
                new = None
            elif name == "normed":
                normed = self._read_by(self.append.args[0])
                with graph.inserting_before(marker):
                    new = self._rows(normed)
            elif name == "mlp":
                new = self._mlp_input(marker)
            else:
                new = self._row_input(marker, str(name), before)
            if new is not None:
                self.inside |= {new} - known
                marker.replace_all_uses_with(new)
            graph.erase_node(marker)
            self.inside.discard(marker)
        self.nodes = [n for n in self.nodes if n in self.inside]

    def _row_input(self, marker: fx.Node, name: str, before: fx.Node | None) -> fx.Node:
        graph, ctx = self.gm.graph, self.ctx
        with graph.inserting_before(marker):
            if name == "positions":
                return call(graph, ctx, marker, torch.ops.aten.to.dtype, self.inputs["positions"], torch.int64)
            if name != "ran":
                return self.inputs[name]
            if before is None:
                return call(graph, ctx, marker, torch.ge, call(graph, ctx, marker, torch.abs, self.inputs["positions"]), 0)
            choice = call(graph, ctx, marker, operator.getitem, before, 3)
            return call(graph, ctx, marker, torch.gt, choice, 0)

    def _read_by(self, x: object) -> fx.Node:
        """What the first linear on the way back from ``x`` reads."""
        pending, seen = [x], set()
        while pending:
            node = pending.pop(0)
            if not isinstance(node, fx.Node) or node not in self.inside or node in seen:
                continue
            seen.add(node)
            factor = _factor(node)
            if factor is not None:
                return factor
            pending.extend(node.all_input_nodes)
        raise SkipperError(f"layer {self.span.path} ({self.span.class_name}): its keys come from no linear that a skipper could look at")

    def _mlp(self, out: fx.Node) -> tuple[fx.Node, fx.Node, set[fx.Node]]:
        """The MLP branch: what is added to the residual stream on the way to ``out`` without attention in it; the stream's value that it
        starts from; its nodes."""
        path = _stream(out, self.span.hidden_in)
        if path is None:
            raise SkipperError(
                f"layer {self.span.path} ({self.span.class_name}) does not add its parts to its input, as a skipper that looks at its MLP needs"
            )
        stream = {add for add, _ in path} | {self.span.hidden_in}
        pending = [branch for _, branch in path]
        leaves: list[fx.Node] = []
        while pending:
            branch = pending.pop()
            parts = [a for a in branch.args if isinstance(a, fx.Node)] if is_op(branch, "add") else []
            if len(parts) == 2 and len({self.attend in self._blocked(p, stream) for p in parts}) == 2:
                pending.extend(parts)
            else:
                leaves.append(branch)
        mlps = [leaf for leaf in leaves if self.attend not in self._blocked(leaf, stream)]
        if len(mlps) != 1:
            raise SkipperError(
                f"layer {self.span.path} ({self.span.class_name}) has {len(mlps)} branches beside attention; this skipper needs one, the MLP"
            )
        nodes = self._blocked(mlps[0], stream)
        start = next((s for s in stream if any(s in n.all_input_nodes for n in nodes)), out)
        return mlps[0], start, nodes

    def _blocked(self, end: fx.Node, stream: set[fx.Node]) -> set[fx.Node]:
        """Nodes of the layer that ``end`` follows from without passing through the stream."""
        found: set[fx.Node] = set()
        pending = [end]
        while pending:
            node = pending.pop()
            if node in self.inside and node not in found and node not in stream:
                found.add(node)
                pending.extend(node.all_input_nodes)
        return found

    def _mlp_input(self, marker: fx.Node) -> fx.Node:
        """What the MLP's first linear reads where attention gave nothing: its nodes once more, over the layer's input."""
        out = self.route.args[0]
        assert isinstance(out, fx.Node)
        _, start, branch = self._mlp(out)
        linears = [n for n in branch if _factor(n) is not None]
        first = {_factor(n) for n in linears if not any(m in linears for m in self._needed([n]) & branch - {n})}
        if len(first) != 1:
            raise SkipperError(
                f"layer {self.span.path} ({self.span.class_name}): its MLP reads {len(first)} tensors; this skipper needs one"
            )
        (read,) = first
        assert isinstance(read, fx.Node)
        copies: dict[fx.Node, fx.Node] = {start: self.span.hidden_in}
        needed = self._needed([read]) & branch
        with self.gm.graph.inserting_before(marker):
            for node in [n for n in self.nodes if n in needed]:
                copies[node] = self.gm.graph.node_copy(node, lambda n: copies.get(n, n))
                self.inside.add(copies[node])
            new = self._rows(copies.get(read, read))
        return new

    def _rows(self, x: fx.Node) -> fx.Node:
        return x if len(shape_of(x) or ()) == 2 else rows(self.gm, self.ctx, x)

    def _scale_mlp(self, out: fx.Node, weight: fx.Node) -> tuple[fx.Node, fx.Node]:
        """The MLP branch times the weight of each row; rows that have to RUN count as weight 1."""
        branch, _, _ = self._mlp(out)
        users = [u for u in branch.users if u in self.inside]
        graph, ctx = self.gm.graph, self.ctx
        with graph.inserting_before(self.route):
            forced = call(graph, ctx, weight, torch.ne, self.inputs["forced_run"], 0)
            kept = call(graph, ctx, weight, torch.masked_fill, weight, forced, 1.0)
            spread = call(graph, ctx, weight, operator.getitem, kept, (None, slice(None), None))
            wide = call(graph, ctx, weight, torch.ops.aten.to.dtype, spread, value_of(branch).dtype)
            scaled = call(graph, ctx, branch, torch.mul, branch, wide)
            self.inside |= {forced, kept, spread, wide, scaled}
        for user in users:
            user.replace_input_with(branch, scaled)
        moved = [u for u in self.nodes if u in self._above(users)]
        for node in moved:  # they follow the weight now
            self.route.prepend(node)
        return (scaled if out is branch else out), wide

    def _above(self, users: list[fx.Node]) -> set[fx.Node]:
        """``users`` and the nodes of the layer that follow from them, up to the route."""
        found: set[fx.Node] = set()
        pending = list(users)
        while pending:
            node = pending.pop()
            if node in self.inside and node not in found and node is not self.route:
                found.add(node)
                pending.extend(node.users)
        return found

    def _order(self, merge: fx.Node, groups: list[set[fx.Node]]) -> None:
        """Group after group in front of ``merge``, each in its present order."""
        place = {n: i for i, n in enumerate(self.gm.graph.nodes)}
        for group in groups:
            for node in sorted(group, key=place.__getitem__):
                merge.prepend(node)


def _key(node: fx.Node) -> tuple[str, str]:
    path, index = layer_key(node) or ("", -1)
    return path, str(index)


def _factor(node: fx.Node) -> fx.Node | None:
    """What a product with a weight reads, ``[1, T, in]`` or ``[T, in]``; None for any other node."""
    place = {F.linear: 0, torch.addmm: 1}.get(node.target)  # type: ignore[call-overload]
    factor = None if place is None else node.args[place]
    return factor if isinstance(factor, fx.Node) else None


def _stream(node: fx.Node, start: fx.Node) -> list[tuple[fx.Node, fx.Node]] | None:
    """``(addition, what is added)`` on the way from ``start`` to ``node`` through additions alone; None if there is none."""
    if node is start:
        return []
    if not is_op(node, "add") or len(node.args) != 2:
        return None
    for mine, added in (node.args, node.args[::-1]):
        if isinstance(mine, fx.Node) and isinstance(added, fx.Node):
            path = _stream(mine, start)
            if path is not None:
                return [*path, (node, added)]
    return None


def _share_decisions(gm: fx.GraphModule) -> None:
    """What policies of several layers compute alike, a hash of the request say, is computed in the first of them alone."""
    known: dict[str, fx.Node] = {}
    for node in list(gm.graph.nodes):
        if str(node.meta.get("group", "")).startswith("policy") and node.op in ("call_function", "call_method") and not node.is_impure():
            first = known.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
            if first is not node:
                node.replace_all_uses_with(first)
                gm.graph.erase_node(node)


def _bare(node: fx.Node) -> object:
    """``node`` without the batch dims that were put around it."""
    return skip(node, "squeeze", "unsqueeze")
