"""Outline the two bodies of each routed layer, so that they can run on the rows of their cohort alone.

A body is what only its result needs; what partition, KV append or the layer's input need as well is computed for all rows. Every input
of a body that has a row dimension is gathered for it, whatever pass put it there, so no gather can come from an old row set (invariant 2).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher

from depthfx.errors import GraphError
from depthfx.lowering import ops
from depthfx.lowering.announce import Announce
from depthfx.lowering.routed_layer import BodyInput, RoutedLayer
from depthfx.passes.context import PassContext, call, refresh_values, value_of
from depthfx.passes.match import is_append
from depthfx.passes.order_decisions import CHOICE, choice_of, follows_from_tokens, partition_of

# Step inputs of attention that a cohort has of its own, beside those that are gathered.
_OWN = ("positions", "num_decode_rows", "chunk_starts")
_BOUND = "bound"
# Ops that do nothing where the number on the device is 0, by the place of that argument.
_BOUNDED = (ops.LINEAR, ops.LINEAR_ADD, ops.GATED_LINEAR, ops.DUAL_LINEAR, ops.DUAL_GATED_LINEAR)

_GIVEN = ("placeholder", "get_attr")

Body = tuple[fx.GraphModule, list[fx.Node], list[BodyInput]]


def outline_cohorts(gm: fx.GraphModule, ctx: PassContext, finish: Callable[[fx.GraphModule], None]) -> None:
    """Each ``select_rows`` becomes a :class:`RoutedLayer`; ``finish`` is called with each body as a graph module of its own."""
    inputs = {n.name: n for n in gm.graph.nodes if n.op == "placeholder"}
    merges = [n for n in gm.graph.nodes if n.target is ops.SELECT_ROWS]
    appends = [n for n in gm.graph.nodes if is_append(n)]
    done: set[fx.Node] = set()  # what all rows need, up to the layer at hand
    decisions = _Decisions(gm, ctx, inputs)
    for place, merge in enumerate(merges):
        run, spare, hidden, _ = merge.args
        choice = choice_of(merge)
        mine = [a for a in appends if a < merge and a not in done]
        _closure([hidden, choice, *mine], done)
        bodies = [_outline(gm, ctx, run, done), None if spare is hidden else _outline(gm, ctx, spare, done)]
        _replace(gm, merge, f"routed_{place}", bodies, inputs, decisions.of(merge, spare is not hidden), finish)
        done.add(merge)
    if merges:
        gm.graph.lint()
        gm.recompile()


class _Decisions:
    """What `partition_rows` yields for each layer, and the sizes of its cohorts as they were announced."""

    def __init__(self, gm: fx.GraphModule, ctx: PassContext, inputs: dict[str, fx.Node]) -> None:
        self._gm, self._ctx, self._inputs = gm, ctx, inputs
        self._parts: dict[fx.Node, tuple[list[fx.Node], fx.Node]] = {}  # by partition: its four results and what was announced

    def of(self, merge: fx.Node, projects: bool) -> tuple[list[fx.Node], int]:
        """``([order, counts, run_positions, choice, announced], row of the layer in the last one)``; to be asked in the order of layers."""
        partition, row = partition_of(choice_of(merge))
        if partition not in self._parts:
            self._parts[partition] = self._behind(partition, row is not None)
        parts, announced = self._parts[partition]
        announce = self._gm.get_submodule(str(announced.target))
        assert isinstance(announce, Announce) and len(announce.projects) == (row or 0)
        announce.projects.append(projects)
        if row is None:
            return [*parts, announced], 0
        with self._gm.graph.inserting_before(merge):
            mine = [call(self._gm.graph, self._ctx, partition, operator.getitem, part, row) for part in parts]
        return [*mine, announced], row

    def _behind(self, partition: fx.Node, several: bool) -> tuple[list[fx.Node], fx.Node]:
        """The results of ``partition``, in lists of layers for ``several``, right behind it."""
        graph, ctx, name = self._gm.graph, self._ctx, f"announce_{len(self._parts)}"
        self._gm.add_submodule(name, Announce())
        with graph.inserting_before(partition.next):
            parts = [call(graph, ctx, partition, operator.getitem, partition, i) for i in range(4)]
            flags = [self._inputs[n] for n in ("captured", "num_decode_rows")]
            announced = graph.call_module(name, (parts[1], parts[CHOICE], *flags))
            if several:
                parts = [call(graph, ctx, partition, torch.unbind, part) for part in parts]
        return parts, announced


def _closure(ends: Iterable[Any], found: set[fx.Node]) -> None:
    """Adds to ``found`` all compute nodes that ``ends`` follow from, and these."""
    pending = [n for n in ends if isinstance(n, fx.Node)]
    while pending:
        node = pending.pop()
        if node not in found and node.op not in _GIVEN:
            found.add(node)
            pending.extend(node.all_input_nodes)


def _outline(gm: fx.GraphModule, ctx: PassContext, end: Any, outside: set[fx.Node]) -> Body:
    """The body that ends in ``end``, the nodes it reads and how each is taken."""
    needed: set[fx.Node] = set(outside)
    _closure([end], needed)
    for node in [n for n in gm.graph.nodes if n in needed and n not in outside]:
        if node.target is operator.getitem and _is_tuple(node.args[0]) and node.args[0] not in needed - outside:
            outside.add(node)  # parts of a tuple are gathered one by one, and stand beside it: no piece may yield a tuple
            node.args[0].append(node)  # type: ignore[union-attr]
    needed -= outside
    nodes = [n for n in gm.graph.nodes if n in needed]
    if not nodes:
        raise GraphError(f"the cohort that ends in {end} computes nothing of its own")
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    given: list[fx.Node] = []
    specs: list[BodyInput] = []
    for node in dict.fromkeys(i for n in nodes for i in n.all_input_nodes if i not in needed):
        env[node] = graph.placeholder(f"{'w' if node.op == 'get_attr' else 'x'}_{len(given)}")
        env[node].meta.update(node.meta)
        given.append(node)
        specs.append(_taken(node, ctx))
        if value_of(node) is None and node.op == "get_attr":  # bytes of a stored weight
            env[node].meta["example_value"] = ctx.fake_mode.from_tensor(operator.attrgetter(str(node.target))(gm), static_shapes=True)
        if specs[-1].kind == "rows":  # gathered or not, a body reads contiguous rows: Inductor compiles it for one layout
            with ctx.fake_mode, enable_python_dispatcher():
                env[node].meta["example_value"] = value_of(node).contiguous()
    bound = graph.placeholder(_BOUND)
    with ctx.fake_mode:
        bound.meta["example_value"] = torch.empty(1, dtype=torch.int32, device=value_of(end).device)
    for node in nodes:
        env[node] = graph.node_copy(node, lambda n: env[n])
        if node.target in _BOUNDED:
            env[node].kwargs = {**env[node].kwargs, _BOUND: bound}
    graph.output(env[end])
    body = fx.GraphModule(torch.nn.Module(), graph)
    refresh_values(body, ctx)
    return body, given, [*specs, BodyInput("bound")]


def _is_tuple(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(value_of(node), (tuple, list))


def _taken(node: fx.Node, ctx: PassContext) -> BodyInput:
    value = value_of(node)
    if _is_tuple(node):
        raise GraphError(f"a cohort reads {node.name}, which is a tuple, in another way than part by part")
    if node.op == "placeholder" and node.name in _OWN:
        return BodyInput(node.name)  # type: ignore[arg-type]
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        if value.node.expr != ctx.row_symbol:
            raise GraphError(f"a cohort reads {node.name} = {value}, which follows from the number of rows in a way that it cannot have")
        return BodyInput("count")
    if isinstance(value, torch.Tensor):
        dims = [d for d, s in enumerate(value.shape) if isinstance(s, torch.SymInt) and ctx.row_symbol in s.node.expr.free_symbols]
        if len(dims) > 1 or any(value.shape[d].node.expr != ctx.row_symbol for d in dims):  # type: ignore[union-attr,attr-defined]
            raise GraphError(f"a cohort reads {node.name} of shape {list(value.shape)}, whose rows cannot be gathered")
        if dims:
            return BodyInput("rows", dims[0])
    return BodyInput("whole")


def _replace(
    gm: fx.GraphModule, merge: fx.Node, name: str, bodies: list[Body | None], inputs: dict[str, fx.Node],
    decision: tuple[list[fx.Node], int], finish: Callable[[fx.GraphModule], None],
) -> None:  # fmt: skip
    hidden = merge.args[2]
    modules: list[Any] = []
    given: list[Any] = []
    specs: list[list[BodyInput]] = []
    for body in bodies:
        modules.append(None if body is None else body[0])
        given += [] if body is None else [*body[1], None]  # the bound is made where it is known
        specs.append([] if body is None else body[2])
    for module in modules:
        if module is not None:
            finish(module)
    run, project = modules
    parts, row = decision
    early = not follows_from_tokens(partition_of(choice_of(merge))[0])
    gm.add_submodule(name, RoutedLayer(run, specs[0], project, specs[1], row, early))
    own = [inputs[n] for n in ("captured", "num_decode_rows", "chunk_starts")]
    with gm.graph.inserting_before(merge):
        node = gm.graph.call_module(name, (hidden, *parts, *own, *given))
    node.meta.update(merge.meta)
    choice = merge.args[3]
    merge.replace_all_uses_with(node)
    pending = [a for a in (*merge.args[:2], choice) if isinstance(a, fx.Node)]
    gm.graph.erase_node(merge)
    while pending:  # the bodies' nodes, whose ops of depthfx count as impure
        dead = pending.pop()
        if dead.op not in _GIVEN and not dead.users and not dead._erased and dead is not hidden:
            pending.extend(dead.all_input_nodes)
            gm.graph.erase_node(dead)
