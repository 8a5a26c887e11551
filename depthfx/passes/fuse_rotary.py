"""Join slicing of QKV, per-head norms, rotary embedding and KV append of a layer into one op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from depthfx.lowering import ops
from depthfx.passes.context import PassContext, call, erase_unused, rows, shape_of
from depthfx.passes.fuse_norms import RmsNorm, match_rms_norm
from depthfx.passes.match import is_op, operands, other, skip


@dataclass(frozen=True)
class _Slice:
    """Heads read from a joined QKV tensor: ``joined[..., start:stop]`` viewed as ``[1, T, H, D]``."""

    joined: fx.Node
    start: int
    stop: int


@dataclass(frozen=True)
class _Rotated:
    """``x`` rotated by ``cos`` and ``sin`` in the rotate-half form."""

    x: fx.Node
    cos: fx.Node
    sin: fx.Node


def fuse_rotary(gm: fx.GraphModule, ctx: PassContext) -> None:
    """Layers whose Q and K are slices of one tensor, optionally normalised, then rotated: ``rotary_append``.

    Any other layer keeps its own arithmetic (compiled by Inductor) and ``kv_append``.
    """
    count = 0
    appends = [n for n in gm.graph.nodes if n.target is ops.KV_APPEND]
    attends = [n for n in gm.graph.nodes if n.target is ops.PAGED_ATTENTION]
    for append, attend in zip(appends, attends, strict=True):
        count += _fuse(gm, ctx, append, attend)
    ctx.report.add("rewritten", f"rotary embedding and KV append: one op in {count} of {len(appends)} layers")


def _fuse(gm: fx.GraphModule, ctx: PassContext, append: fx.Node, attend: fx.Node) -> bool:
    k, v, pool, number, *tables = append.args
    query, key = _match_rotary(_heads(attend.args[0])), _match_rotary(_heads(k))
    if query is None or key is None or (query.cos, query.sin) != (key.cos, key.sin):
        return False
    q_part, q_norm = _match_slice(query.x, ctx)
    k_part, k_norm = _match_slice(key.x, ctx)
    v_part, v_norm = _match_slice(_heads(v), ctx)
    if q_part is None or k_part is None or v_part is None or v_norm is not None or not _neighbours(k_part, v_part):
        return False
    if v_part.stop != (shape_of(v_part.joined) or ())[-1]:
        return False
    num_heads, head_dim = (int(s) for s in (shape_of(attend.args[0]) or ())[1:])
    num_kv_heads = int((shape_of(k) or ())[1])
    layer = (pool, number, *tables)
    before = (attend.args[0], k, v)
    if _neighbours(q_part, k_part) and q_part.start == 0:
        if (q_norm is None) != (k_norm is None) or (q_norm and k_norm and q_norm.eps != k_norm.eps):
            return False
        norms = (q_norm.weight, k_norm.weight, q_norm.eps) if q_norm and k_norm else (None, None, 0.0)
        with gm.graph.inserting_before(append):
            cos, sin, joined = (rows(gm, ctx, x) for x in (query.cos, query.sin, q_part.joined))
            q = call(gm.graph, ctx, append, ops.ROTARY_APPEND, joined, cos, sin, *norms, *layer, num_heads, num_kv_heads, head_dim)
    elif _is_whole(q_part) and k_part.start == 0:  # a routed layer: keys and values of all rows, queries of some
        with gm.graph.inserting_before(append):
            cos, sin, joined = (rows(gm, ctx, x) for x in (key.cos, key.sin, k_part.joined))
            norms = (None, k_norm.weight, k_norm.eps) if k_norm else (None, None, 0.0)
            call(gm.graph, ctx, append, ops.ROTARY_APPEND, joined, cos, sin, *norms, *layer, 0, num_kv_heads, head_dim)
        with gm.graph.inserting_before(attend):
            norms = (q_norm.weight, None, q_norm.eps) if q_norm else (None, None, 0.0)
            packed = rows(gm, ctx, q_part.joined)
            q = call(gm.graph, ctx, attend, ops.ROTARY_APPEND, packed, cos, sin, *norms, *layer, num_heads, 0, head_dim)
    else:
        return False
    attend.replace_input_with(attend.args[0], q)  # type: ignore[arg-type]
    gm.graph.erase_node(append)
    for node in before:
        erase_unused(node)
    return True


def _neighbours(first: _Slice, second: _Slice) -> bool:
    """Whether ``second`` begins where ``first`` ends, in the same tensor."""
    return first.joined is second.joined and first.stop == second.start


def _is_whole(part: _Slice) -> bool:
    return part.start == 0 and part.stop == (shape_of(part.joined) or ())[-1]


def _heads(node: Any) -> Any:
    """Undo ``transpose(squeeze(x, 0), 0, 1)`` that the paged attention pass put around its inputs."""
    if is_op(node, "transpose") and node.args[1:] == (0, 1) and is_op(node.args[0], "squeeze"):
        return node.args[0].args[0]
    return None


def _match_rotary(node: Any) -> _Rotated | None:
    """``cat(rotated part, rest)`` or the rotated part alone."""
    if is_op(node, "cat") and len(node.args[0]) == 2:
        part, rest = node.args[0]
        inner = _match_rotated(part)
        if inner is None or not is_op(inner.x, "getitem") or not is_op(rest, "getitem"):
            return None
        width = int((shape_of(inner.cos) or ())[-1])
        whole = inner.x.args[0]
        if rest.args[0] is not whole or inner.x.args[1] != (Ellipsis, slice(None, width)) or rest.args[1] != (Ellipsis, slice(width, None)):
            return None
        return _Rotated(whole, inner.cos, inner.sin)  # type: ignore[arg-type]
    return _match_rotated(node)


def _match_rotated(node: Any) -> _Rotated | None:
    """``x * cos + rotate_half(x) * sin`` with ``cos`` and ``sin`` ``[1, T, R]`` broadcast over heads."""
    if not is_op(node, "add"):
        return None
    straight, turned = operands(node)
    if not is_op(straight, "mul") or not is_op(turned, "mul"):
        return None
    cos_wide = next((a for a in operands(straight) if is_op(a, "unsqueeze")), None)
    sin_wide = next((a for a in operands(turned) if is_op(a, "unsqueeze")), None)
    x, rotated = other(straight, cos_wide), other(turned, sin_wide)
    if cos_wide is None or sin_wide is None or cos_wide.args[1] != 1 or sin_wide.args[1] != 1 or not _is_half_turn(rotated, x):
        return None
    cos, sin = cos_wide.args[0], sin_wide.args[0]
    if len(shape_of(cos) or ()) != 3 or (shape_of(cos) or ())[0] != 1 or (shape_of(cos) or ())[-1] != (shape_of(x) or ())[-1]:
        return None
    return _Rotated(x, cos, sin)  # type: ignore[arg-type]


def _is_half_turn(node: Any, x: Any) -> bool:
    """``cat((-x[..., half:], x[..., :half]), -1)``."""
    if not is_op(node, "cat") or len(node.args[0]) != 2 or node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0) != -1:
        return False
    upper, lower = node.args[0]
    if not is_op(upper, "neg") or not is_op(upper.args[0], "getitem") or not is_op(lower, "getitem"):
        return False
    half = int((shape_of(x) or ())[-1]) // 2
    high = upper.args[0]
    return high.args == (x, (Ellipsis, slice(half, None))) and lower.args == (x, (Ellipsis, slice(None, half)))


def _match_slice(node: Any, ctx: PassContext) -> tuple[_Slice | None, RmsNorm | None]:
    """``transpose([norm](view(joined[..., a:b])), 1, 2)``."""
    if not is_op(node, "transpose") or set(node.args[1:]) != {1, 2}:
        return None, None
    inner = node.args[0]
    norm = match_rms_norm(inner, ctx)
    if norm is not None:
        inner = norm.x
    if not is_op(inner, "view", "reshape"):
        return None, None
    part = skip(inner, "view", "reshape")
    if is_op(part, "linear"):
        shape = shape_of(part) or ()
        return (_Slice(part, 0, int(shape[-1])), norm) if len(shape) == 3 else (None, None)
    if not is_op(part, "getitem") or not isinstance(part.args[1], tuple) or len(part.args[1]) != 2 or part.args[1][0] is not Ellipsis:
        return None, None
    joined, pick = part.args[0], part.args[1][1]
    width = int((shape_of(joined) or ())[-1])
    if not isinstance(pick, slice) or pick.step is not None or len(shape_of(joined) or ()) != 3:
        return None, None
    if not all(isinstance(b, (int, type(None))) for b in (pick.start, pick.stop)):
        return None, None
    return _Slice(joined, *pick.indices(width)[:2]), norm
