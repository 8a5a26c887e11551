"""Check that every op treats rows independently: the row dimension is never reduced, mixed, permuted or merged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from depthfx.errors import UnsupportedModelError
from depthfx.passes.context import PassContext, module_path, shape_of, value_of
from depthfx.passes.route_markers import LAYER_INPUT, ROUTE, ROWS_OF

# Ops that work element by element (with broadcasting).
_POINTWISE = frozenset(
    "add sub mul div truediv floordiv pow neg rsqrt sqrt reciprocal exp log tanh sigmoid silu gelu relu relu_ softplus softsign mish erf sin cos "
    "to float half bfloat16 type_as type clamp clamp_ clip abs sign where masked_fill maximum minimum square add_ mul_ sub_ div_ iadd imul isub "
    "itruediv contiguous clone detach dropout eq ne lt gt le ge logical_and logical_or logical_not bitwise_not hardtanh threshold "
    "leaky_relu elu relu6 zeros_like ones_like full_like empty_like alias identity copy nan_to_num square_ floor ceil round trunc and_ or_ "
    "rsub rmul radd rtruediv rpow xor invert bool long "
    "int remainder fmod mod bitwise_xor bitwise_and bitwise_or rshift lshift bitwise_right_shift bitwise_left_shift".split()
)
_REDUCTIONS = frozenset("mean sum amax amin max min var std norm softmax log_softmax cumsum prod logsumexp argmax argmin all any".split())
_RESHAPES = frozenset("view reshape flatten unflatten squeeze unsqueeze view_as _unsafe_view".split())
_MOVES = frozenset(
    "transpose permute expand expand_as movedim swapaxes t repeat_interleave split chunk unbind split_with_sizes narrow repeat".split()
)
# Ops that make one value for all rows out of nothing but sizes and constants.
_CONSTANTS = frozenset("zeros ones full empty expand broadcast_to new_zeros new_ones new_full new_empty".split())
_SIZES = frozenset("sym_size size sym_size.int floordiv getattr".split())


def check_rows(gm: fx.GraphModule, ctx: PassContext) -> None:
    """Prove row independence of every node that depends on the rows; attention is the one exception.

    Raises :class:`UnsupportedModelError` naming the op, its module and the reason. Rows may be selected (by
    ``logit_rows``) only after the last layer.
    """
    after_layers = False
    for node in gm.graph.nodes:
        after_layers = after_layers or node is ctx.layers[-1].hidden_out
        if node.op in ("placeholder", "output"):
            continue
        from_rows = any(_has_rows(value_of(i), ctx) for i in node.all_input_nodes)
        reason = _reason(node, ctx, after_layers) if from_rows else _check_made(node, ctx)
        if reason:
            stack = list(node.meta.get("nn_module_stack", {}).values())
            where = f"{module_path(stack[-1][0])} ({getattr(stack[-1][1], '__name__', stack[-1][1])})" if stack else "the model"
            raise UnsupportedModelError(
                f"{_name(node)} ({node.name}) in {where} {reason}; depthfx needs layers that treat each token alone outside attention"
            )
    ctx.report.add("checked", "every op outside attention treats rows independently")


def _name(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._opname
    name = str(getattr(node.target, "__name__", node.target))
    return name[2:-2] if name.startswith("__") and name.endswith("__") else name  # some versions call operators by their methods


def _row_dims(node: Any, ctx: PassContext) -> list[int]:
    shape = shape_of(node)
    return (
        []
        if shape is None
        else [i for i, s in enumerate(shape) if isinstance(s, torch.SymInt) and ctx.row_symbol in s.node.expr.free_symbols]
    )


def _has_rows(value: Any, ctx: PassContext) -> bool:
    """Whether a tensor, or any tensor of a tuple, has a dimension that depends on T."""
    if isinstance(value, (tuple, list)):
        return any(_has_rows(v, ctx) for v in value)
    return isinstance(value, torch.Tensor) and any(
        isinstance(s, torch.SymInt) and ctx.row_symbol in s.node.expr.free_symbols for s in value.shape
    )


def _is_row_count(node: fx.Node, ctx: PassContext) -> bool:
    """Whether ``node`` is a number computed from T, the number of rows in a step."""
    value = value_of(node)
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and ctx.row_symbol in value.node.expr.free_symbols


def _check_made(node: fx.Node, ctx: PassContext) -> str | None:
    """A tensor with a row dimension that was made without reading rows: it must be the same for every row."""
    if not _row_dims(node, ctx):
        return None
    if _name(node) not in _CONSTANTS:
        return "numbers or draws rows by their place in the step"
    filled = _name(node) in ("full", "new_full") and any(isinstance(a, fx.Node) and _is_row_count(a, ctx) for a in node.args[1:])
    return "uses the number of rows as a value" if filled else None


def _reason(node: fx.Node, ctx: PassContext, after_layers: bool) -> str | None:
    name = _name(node)
    if name in _SIZES:
        return None
    if str(node.target).startswith("depthfx.attention") or node.target in (ROUTE, ROWS_OF, LAYER_INPUT):
        return None
    if name == "getitem":
        return _check_getitem(node, ctx, after_layers)
    rule = _RULES.get(name)
    if rule is None:
        return "is not known to treat rows independently"
    dims = _row_dims(node, ctx)
    if shape_of(node) is not None and (len(dims) != 1 or shape_of(node)[dims[0]].node.expr != ctx.row_symbol):  # type: ignore[index]
        return "drops the row dimension or merges it with another"
    return rule(node, ctx)


def _check_pointwise(node: fx.Node, ctx: PassContext) -> str | None:
    out = len(shape_of(node) or ()) - _row_dims(node, ctx)[0]
    for i in node.all_input_nodes:
        if _is_row_count(i, ctx):
            return "uses the number of rows as a value"
        dims = _row_dims(i, ctx)
        if dims and len(shape_of(i) or ()) - dims[0] != out:
            return "broadcasts rows against another dimension"
    return None


def _check_reduction(node: fx.Node, ctx: PassContext) -> str | None:
    x = node.args[0] if node.args else node.kwargs["input"]
    dim = node.kwargs.get("dim", node.kwargs.get("axis", node.args[1] if len(node.args) > 1 else None))
    rank = len(shape_of(x) or ())
    reduced = [dim] if isinstance(dim, int) else list(dim) if isinstance(dim, (tuple, list)) else list(range(rank))
    return "reduces over rows" if any(d % rank in _row_dims(x, ctx) for d in reduced) else None


def _check_norm(node: fx.Node, ctx: PassContext) -> str | None:
    x, shape = node.args[0], node.args[1] if len(node.args) > 1 else node.kwargs["normalized_shape"]
    width = 1 if isinstance(shape, int) else len(shape)  # type: ignore[arg-type]
    return "normalises over rows" if _row_dims(x, ctx)[0] >= len(shape_of(x) or ()) - width else None


def _check_linear(node: fx.Node, ctx: PassContext) -> str | None:
    x = node.args[0]
    if any(_row_dims(a, ctx) for a in node.args[1:]):
        return "uses a weight that depends on rows"
    return "contracts over rows" if _row_dims(x, ctx)[0] == len(shape_of(x) or ()) - 1 else None


def _check_matmul(node: fx.Node, ctx: PassContext) -> str | None:
    a, b = node.args[:2]
    rank_a, rank_b = len(shape_of(a) or ()), len(shape_of(b) or ())
    if any(d == rank_a - 1 for d in _row_dims(a, ctx)) or any(d == rank_b - 2 for d in _row_dims(b, ctx)):
        return "contracts over rows"
    return "multiplies rows with rows" if _row_dims(a, ctx) and _row_dims(b, ctx) else None


def _check_addmm(node: fx.Node, ctx: PassContext) -> str | None:
    added, a, b = node.args[:3]
    if _row_dims(added, ctx) or _row_dims(b, ctx):
        return "uses a weight that depends on rows"
    return "contracts over rows" if _row_dims(a, ctx) == [1] else None


def _check_reshape(node: fx.Node, ctx: PassContext) -> str | None:
    x = node.args[0]

    def before(item: Any) -> int:
        sizes = (shape_of(item) or ())[: _row_dims(item, ctx)[0]]
        product = 1
        for s in sizes:
            product *= int(s)
        return product

    return "mixes rows with another dimension" if before(x) != before(node) else None


def _check_getitem(node: fx.Node, ctx: PassContext, after_layers: bool) -> str | None:
    x, index = node.args
    if not isinstance(x, fx.Node) or shape_of(x) is None:
        return None  # picks one of several results; each was checked where it was made
    rank, row = len(shape_of(x) or ()), _row_dims(x, ctx)
    items = list(index) if isinstance(index, (tuple, list)) else [index]
    real = [i for i in items if i is not None and i is not Ellipsis]
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (rank - len(real))
    picks = [i for i in items if i is not None]
    for dim, pick in enumerate(picks):
        if dim in row and pick != slice(None, None, None):
            return None if after_layers and isinstance(pick, fx.Node) else "selects rows"
    return None


def _check_cat(node: fx.Node, ctx: PassContext) -> str | None:
    dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
    rank = len(shape_of(node) or ())
    return "concatenates along rows" if int(dim) % rank in _row_dims(node, ctx) else None  # type: ignore[arg-type]


def _check_move(node: fx.Node, ctx: PassContext) -> str | None:
    return None  # the row dimension survives as one whole dimension, which the caller has checked


def _check_embedding(node: fx.Node, ctx: PassContext) -> str | None:
    return "looks rows up in a table that depends on rows" if _row_dims(node.args[1], ctx) else None


_RULES: dict[str, Callable[[fx.Node, PassContext], str | None]] = {
    **dict.fromkeys(_POINTWISE, _check_pointwise),
    **dict.fromkeys(_REDUCTIONS, _check_reduction),
    **dict.fromkeys(_RESHAPES, _check_reshape),
    **dict.fromkeys(_MOVES, _check_move),
    "linear": _check_linear,
    "layer_norm": _check_norm,
    "rms_norm": _check_norm,
    "matmul": _check_matmul,
    "bmm": _check_matmul,
    "addmm": _check_addmm,
    "cat": _check_cat,
    "stack": _check_cat,
    "embedding": _check_embedding,
}
