"""What passes share: settings, target, report, recognised layers and where each weight input comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher

from depthfx.records import KvShape
from depthfx.report import CompileReport
from depthfx.settings import Settings

Target = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class LayerSpan:
    """One decoder layer in the graph: consecutive nodes around one attention node."""

    index: int
    path: str  # module path as captured, for messages
    class_name: str
    nodes: tuple[fx.Node, ...]
    attention: fx.Node
    hidden_in: fx.Node
    hidden_out: fx.Node
    num_project_nodes: int  # nodes of the backward slice of K and V


@dataclass
class PassContext:
    """State of one compilation; a pass is a function ``(graph_module, context) -> None``."""

    settings: Settings
    target: Target
    report: CompileReport
    fake_mode: Any
    row_symbol: Any  # sympy symbol of T
    # weight placeholder -> names of the model's tensors; several are concatenated along dim 0
    weights: dict[str, tuple[str, ...]] = field(default_factory=dict)
    layers: list[LayerSpan] = field(default_factory=list)
    # weight placeholder -> graph of (positions, its tensors) that fills it with one row for each position
    tables: dict[str, fx.GraphModule] = field(default_factory=dict)
    num_positions: int = 0  # longest context
    kv_shape: KvShape | None = None
    num_heads: int = 0  # query heads, the largest of any layer


Pass = Callable[[fx.GraphModule, PassContext], None]


def value_of(node: fx.Node) -> Any:
    """The fake tensor (or symbolic number) that ``node`` yields."""
    return node.meta.get("example_value")


def shape_of(node: Any) -> tuple[Any, ...] | None:
    """Shape of a tensor node, None for anything else."""
    value = value_of(node) if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def call(graph: fx.Graph, ctx: PassContext, like: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    """Insert ``target(*args, **kwargs)`` at the insertion point, with its fake value and the module stack of ``like``."""
    node = graph.call_function(target, args, kwargs)
    real = fx.map_arg((args, kwargs), value_of)
    # without the Python dispatcher, C++ ops would read symbolic sizes as numbers and fix them
    with ctx.fake_mode, enable_python_dispatcher(), torch.no_grad():
        node.meta["example_value"] = target(*real[0], **real[1])
    if "nn_module_stack" in like.meta:
        node.meta["nn_module_stack"] = like.meta["nn_module_stack"]
    return node


def refresh_values(gm: fx.GraphModule, ctx: PassContext) -> None:
    """Recompute every node's fake value from its inputs: a rewrite upstream may have changed strides."""
    for node in gm.graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
        with ctx.fake_mode, enable_python_dispatcher(), torch.no_grad():
            node.meta["example_value"] = (
                node.target(*args, **kwargs) if node.op == "call_function" else getattr(args[0], node.target)(*args[1:], **kwargs)
            )


def rows(gm: fx.GraphModule, ctx: PassContext, x: fx.Node) -> fx.Node:
    """``x`` without its batch dim: ``[1, T, ...]`` to ``[T, ...]``."""
    if x.target is torch.unsqueeze and x.args[1] == 0:
        return x.args[0]  # type: ignore[return-value]
    return call(gm.graph, ctx, x, torch.squeeze, x, 0)


def batched(gm: fx.GraphModule, ctx: PassContext, x: fx.Node) -> fx.Node:
    """``x`` with a batch dim of one in front."""
    return call(gm.graph, ctx, x, torch.unsqueeze, x, 0)


def module_path(captured: str) -> str:
    """``L['self'].model.model.layers.1`` as the model's own ``model.layers.1``."""
    return captured.removeprefix("L['self'].model.")


def layer_key(node: fx.Node) -> tuple[str, int] | None:
    """``(list path, index)`` of the outermost numbered module that ``node`` runs in, or None outside all lists."""
    for path, _ in node.meta.get("nn_module_stack", {}).values():
        head, _, last = path.rpartition(".")
        if last.isdigit():
            return module_path(head), int(last)
    return None
