"""Cut the program into depthfx ops, called directly, and pieces of everything else, compiled once per distinct text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from depthfx.passes.context import PassContext, value_of
from depthfx.passes.match import is_op
from depthfx.passes.print_graph import print_graph

# Ops that move no data worth compiling; they join whatever stands around them.
_FREE = ("squeeze", "unsqueeze", "transpose", "view", "reshape", "contiguous", "getitem", "unbind", "sym_size", "sym_size.int")

# Ops that only look rows up or convert them: they start a run with others, but alone they are not worth compiling.
_LOOKUPS = ("clamp", "to", "embedding", "index_select")

PieceCompiler = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


def split_pieces(gm: fx.GraphModule, ctx: PassContext, compile_piece: PieceCompiler) -> None:
    """Outline each run of ordinary ops into a submodule and compile it; equal pieces share one compiled callable.

    The KV pool never enters a piece: all ops that touch it are called from the top level.
    """
    compiled: dict[str, Callable[..., Any]] = {}
    _inline_sizes(gm)
    _gather_parts(gm)
    runs = _runs(gm)
    for number, run in enumerate(runs):
        piece, inputs, outputs = _outline(gm, run)
        text = print_graph(piece, keep_weight_names=False)
        if text not in compiled:
            compiled[text] = compile_piece(piece, _apart([n.meta["example_value"] for n in inputs], ctx))
            ctx.report.add("compiled", f"piece {len(compiled)}: {sum(n.op.startswith('call') for n in piece.graph.nodes)} ops")
        _replace(gm, run, f"piece_{number}", compiled[text], inputs, outputs)
    gm.recompile()
    direct = sum(1 for n in gm.graph.nodes if _is_direct(n))
    rest = f"{len(runs)} pieces share {len(compiled)} compiled bodies" if runs else "nothing is left for Inductor"
    ctx.report.add("compiled", f"{direct} depthfx ops, called directly; {rest}")


def _is_direct(node: fx.Node) -> bool:
    """Whether ``node`` calls one of depthfx's own ops."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "depthfx"


def _inline_sizes(gm: fx.GraphModule) -> None:
    """What takes a ``torch.Size`` takes its numbers."""
    for node in [n for n in gm.graph.nodes if isinstance(value_of(n), torch.Size)]:
        numbers = tuple(node.args[0]) if node.target is torch.Size else _numbers(gm, node)
        for user in [u for u in node.users if not _is_part(u)]:
            user.args = map_arg(user.args, lambda n, node=node, numbers=numbers: numbers if n is node else n)
        if not node.users:
            gm.graph.erase_node(node)


def _numbers(gm: fx.GraphModule, size: fx.Node) -> tuple[Any, ...]:
    """The numbers of ``tensor.size()``: those that are open are asked for one by one."""
    numbers: list[Any] = list(value_of(size))
    with gm.graph.inserting_after(size):
        for dim, number in enumerate(numbers):
            if isinstance(number, torch.SymInt):
                numbers[dim] = gm.graph.call_function(torch.ops.aten.sym_size.int, (size.args[0], dim))
                numbers[dim].meta["example_value"] = number
    return tuple(numbers)


def _gather_parts(gm: fx.GraphModule) -> None:
    """The parts of every tuple come right behind it, and into its piece: a piece yields tensors, and no tuple of them."""
    for node in list(gm.graph.nodes):
        if not _is_direct(node):
            for part in reversed([u for u in node.users if _is_part(u)]):
                node.append(part)


def _is_part(node: fx.Node) -> bool:
    """Whether ``node`` takes a part of a tuple."""
    return is_op(node, "getitem") and isinstance(value_of(node.args[0]), (tuple, list))  # type: ignore[arg-type]


def _runs(gm: fx.GraphModule) -> list[list[fx.Node]]:
    """Maximal runs of compute nodes between depthfx ops; free nodes at the edges stay outside, but for parts of a tuple."""
    runs: list[list[fx.Node]] = []
    current: list[fx.Node] = []

    def close() -> None:
        behind: list[fx.Node] = []
        while current and is_op(current[-1], *_FREE):
            behind.append(current.pop())
        last = current[-1] if current else None
        while behind and _is_part(behind[-1]) and behind[-1].args[0] is last:
            current.append(behind.pop())
        if sum(not is_op(n, *_FREE, *_LOOKUPS) for n in current) > 1:  # one op alone leaves nothing to fuse
            runs.append(list(current))
        current.clear()

    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr", "call_module", "output") or _is_direct(node):
            close()
        elif current or not is_op(node, *_FREE):
            current.append(node)
    close()
    return runs


def _outline(gm: fx.GraphModule, run: list[fx.Node]) -> tuple[fx.GraphModule, list[fx.Node], list[fx.Node]]:
    inside = set(run)
    inputs = list(dict.fromkeys(i for n in run for i in n.all_input_nodes if i not in inside))
    outputs = [n for n in run if any(u not in inside for u in n.users)]
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for number, node in enumerate(inputs):
        weight = node.op == "get_attr" or (node.op == "placeholder" and node.name.startswith("w_"))
        env[node] = graph.placeholder(f"{'w' if weight else 'x'}_{number}")
        env[node].meta.update(node.meta)
    for node in run:
        env[node] = graph.node_copy(node, lambda n: env[n])
    graph.output(tuple(env[n] for n in outputs))
    return fx.GraphModule(torch.nn.Module(), graph), inputs, outputs


def _apart(values: list[Any], ctx: PassContext) -> list[Any]:
    """``values`` with no tensor object twice: compilers take a second appearance for one and the same input."""
    seen: set[int] = set()
    result = []
    for value in values:
        if isinstance(value, torch.Tensor) and id(value) in seen:
            with ctx.fake_mode:
                value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        seen.add(id(value))
        result.append(value)
    return result


def _replace(
    gm: fx.GraphModule, run: list[fx.Node], name: str, compiled: Callable[..., Any], inputs: list[fx.Node], outputs: list[fx.Node]
) -> None:
    gm.add_submodule(name, Piece(compiled))
    with gm.graph.inserting_before(run[0]):
        node = gm.graph.call_module(name, tuple(inputs))
    anchor = node
    for number, output in enumerate(outputs):
        with gm.graph.inserting_after(anchor):
            anchor = gm.graph.call_function(_item, (node, number))
        anchor.meta.update(output.meta)
        users_inside = set(run)
        output.replace_all_uses_with(anchor, delete_user_cb=lambda user, inside=users_inside: user not in inside)  # type: ignore[misc]
    for old in reversed(run):
        gm.graph.erase_node(old)


def _item(values: tuple[Any, ...], index: int) -> Any:
    return values[index]


class Piece(torch.nn.Module):
    """A compiled piece; equal pieces share ``compiled``."""

    def __init__(self, compiled: Callable[..., Any]) -> None:
        super().__init__()
        self.compiled = compiled

    def forward(self, *inputs: Any) -> Any:
        return self.compiled(*inputs)
