"""What passes share: settings, target, report, recognised layers and where each weight input comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import disable_fake_tensor_cache

from depthfx.contracts import Skipper
from depthfx.lowering.stored_weight import StoredWeight
from depthfx.records import KvShape
from depthfx.report import CompileReport
from depthfx.settings import Settings

Target = Literal["cpu", "cuda"]
SKIPPER = "skipper."  # begins the names of weights that are the skipper's, not the model's


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
    stored: list[StoredWeight] = field(default_factory=list)  # nested weights, once they are bound
    skipper: Skipper | None = None  # None: the dense program
    # results of `fake_value`: layers repeat the same calls on values of the same shape
    fake_values: dict[Any, Any] = field(default_factory=dict)


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
    with _evaluation(ctx):
        node.meta["example_value"] = _fake_value(node, ctx)
    for key in ("nn_module_stack", "group"):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    return node


def refresh_values(gm: fx.GraphModule, ctx: PassContext, known: Mapping[fx.Node, Any] = MappingProxyType({})) -> None:
    """Recompute every node's fake value from its inputs, for a rewrite upstream may have changed strides; but take those of ``known``."""
    with _evaluation(ctx):
        for node in gm.graph.nodes:
            if node.op in ("call_function", "call_method"):
                node.meta["example_value"] = known[node] if node in known else _fake_value(node, ctx)


@contextmanager
def _evaluation(ctx: PassContext) -> Iterator[None]:
    """Ops yield fake values. The fake mode's own cache is off: equal calls are in ``fake_values``, and an entry there costs as much as an op."""
    # without the Python dispatcher, C++ ops would read symbolic sizes as numbers and fix them
    with disable_fake_tensor_cache(ctx.fake_mode), ctx.fake_mode, enable_python_dispatcher(), torch.no_grad():
        yield


def _fake_value(node: fx.Node, ctx: PassContext) -> Any:
    """What ``node`` yields for its inputs' fake values; nodes of equal calls share one object."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
    key = (node.target, _key(args), _key(kwargs))
    if key not in ctx.fake_values:
        function = node.target if callable(node.target) else getattr(args[0], str(node.target))
        ctx.fake_values[key] = function(*(args if callable(node.target) else args[1:]), **kwargs)
    return ctx.fake_values[key]


def _key(value: Any) -> Any:
    """A hashable form of an argument in which a tensor counts by its layout alone."""
    if isinstance(value, torch.Tensor):
        layout = (*value.shape, None, *value.stride(), value.storage_offset())
        return (value.dtype, value.device, *map(_key, layout))
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return (type(value), value.node.expr)
    if isinstance(value, (tuple, list)):
        return (type(value), *map(_key, value))
    if isinstance(value, dict):
        return tuple((k, _key(v)) for k, v in value.items())
    if isinstance(value, slice):
        return (slice, _key(value.start), _key(value.stop), _key(value.step))
    return (type(value), value)


def erase_unused(node: fx.Node) -> None:
    """Erase ``node`` if nothing uses it, then its inputs likewise: dead code elimination that touches one chain alone."""
    pending = [node]
    while pending:
        current = pending.pop()
        if current.op in ("call_function", "call_method") and not current.users and not current._erased and not current.is_impure():
            inputs = current.all_input_nodes
            current.graph.erase_node(current)
            pending.extend(inputs)


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
