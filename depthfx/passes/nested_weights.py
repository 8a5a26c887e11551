"""Bind the linears of stored formats: nest or round their weights, and let the model's modules read the same bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import fx, nn

from depthfx.errors import FormatError
from depthfx.lowering import ops
from depthfx.lowering.fp8_weight import Fp8Linear, quantize_weight
from depthfx.lowering.nest import concatenate, nest_counted, rule
from depthfx.lowering.nested_format import NestedWeight
from depthfx.lowering.nested_linear import NestedLinear, place_linear
from depthfx.lowering.stored_weight import StoredWeight, joined_bytes, joined_view
from depthfx.passes.context import PassContext, value_of

Fill = tuple[torch.Tensor, Callable[[], torch.Tensor]]  # a copy that the program reads, and what it must hold

_DUAL = {ops.DUAL_LINEAR: ops.LINEAR, ops.DUAL_GATED_LINEAR: ops.GATED_LINEAR}


def bind_stored(gm: fx.GraphModule, ctx: PassContext, model: nn.Module, holder: nn.Module) -> list[Fill]:
    """Bind every dual and FP8 linear of ``gm`` to buffers of ``holder`` and put modules over the same bytes into ``model``.

    One weight after the other, and its 16-bit form is freed before the next: in memory beside the model is one joined weight. A
    weight that no format covers, or whose module is no plain linear or carries hooks, stays as it is, and its node becomes an ordinary
    linear. Returned are the copies in another dtype that were made of such weights.
    """
    tally = _Tally()
    for node in list(gm.graph.nodes):
        if node.target in _DUAL:
            _bind_dual(gm, ctx, model, holder, node, tally)
        elif node.target is ops.FP8_LINEAR:
            _bind_fp8(gm, ctx, model, holder, node, tally)
    tally.report(ctx)
    return tally.copies


def join_parameters(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor of ``parts`` along dim 0; each part becomes a view of it. Parts that are neighbours in memory, or one part, stay where they are."""
    if (there := joined_view([p.detach() for p in parts])) is not None:
        return there
    with torch.no_grad():
        joined = torch.cat([p.detach() for p in parts])
        for part, view in zip(parts, joined.split([p.shape[0] for p in parts]), strict=True):
            part.data = view
    return joined


class _Tally:
    """What was bound, for ``explain()``."""

    def __init__(self) -> None:
        self.layers: dict[int, Counter[str]] = {}
        self.persistent: Counter[str] = Counter()
        self.residual: Counter[str] = Counter()
        self.changed = self.elements = 0
        self.kept: list[str] = []
        self.copies: list[Fill] = []

    def add(self, layer: int, nested: NestedWeight, changed: int) -> None:
        """One bound weight."""
        self.layers.setdefault(layer, Counter())[nested.format] += 1
        self.persistent[nested.format] += nested.persistent_bytes
        self.residual[nested.format] += nested.residual_bytes
        self.changed += changed
        self.elements += nested.upper.numel()

    def report(self, ctx: PassContext) -> None:
        """Lines for layers of equal composition, then one for each format."""
        for line in self.kept:
            ctx.report.add("weights kept as they are", line)
        if not self.layers:
            return
        ctx.report.add("weights", f"rule: {rule()}")
        groups: dict[str, list[int]] = {}
        for layer, formats in sorted(self.layers.items()):
            groups.setdefault(", ".join(f"{n} x {name}" for name, n in sorted(formats.items())), []).append(layer)
        for text, layers in groups.items():
            ctx.report.add("weights", f"{_span(layers, len(ctx.layers) or _num_layers(ctx))}: {text}")
        for name in sorted(self.persistent):
            persistent, residual = self.persistent[name] / 2**20, self.residual[name] / 2**20
            ctx.report.add("weights", f"{name}: {persistent:,.2f} MiB persistent, {residual:,.2f} MiB residual")
        lost = (
            f"{self.changed:,} of {self.elements:,} values changed when they were cast to float16" if self.changed else "no value changed"
        )
        ctx.report.add("weights", f"full precision: {lost}")


def _num_layers(ctx: PassContext) -> int:
    assert ctx.kv_shape is not None
    return ctx.kv_shape.num_layers


def _span(layers: list[int], num_layers: int) -> str:
    own = [i for i in layers if i < num_layers]
    runs: list[list[int]] = []
    for i in own:
        if runs and runs[-1][-1] == i - 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    text = f"layers {', '.join(parts)}" if len(own) > 1 else f"layer {own[0]}" if own else ""
    return " and ".join(t for t in (text, "LM head" if len(own) < len(layers) else "") if t)


def _bind_dual(gm: fx.GraphModule, ctx: PassContext, model: nn.Module, holder: nn.Module, node: fx.Node, tally: _Tally) -> None:
    x, upper, lower, _, flags, layer, precision, _, last = node.args
    assert isinstance(upper, fx.Node) and isinstance(lower, fx.Node) and isinstance(layer, int)
    names = ctx.weights[upper.name]
    bound, changed, reason = _nest(model, names, ctx.skipper is None)
    nested = bound if isinstance(bound, NestedWeight) else NestedWeight("plain16", bound, None)
    tally.add(layer, nested, changed)
    if reason:
        tally.kept.append(f"{', '.join(names)}: {reason}")
    base = upper.name.removesuffix("_upper")
    with gm.graph.inserting_before(node):
        if nested.lower is None:
            weight = nested.upper.to(value_of(node).dtype)
            if weight is not nested.upper:
                tally.copies.append((weight, partial(nested.upper.to, weight.dtype)))
            new = gm.graph.call_function(_DUAL[node.target], (x, _attribute(gm, holder, base, weight), last))  # type: ignore[index]
        else:
            stored = [
                None if t is None else _attribute(gm, holder, f"{base}_{part}", t)
                for part, t in (("upper", nested.upper), ("lower", nested.lower), ("shift", nested.shift))
            ]
            new = gm.graph.call_function(node.target, (x, *stored, flags, layer, precision, nested.format, last))
            modules = tuple(model.get_submodule(name.rpartition(".")[0]) for name in names)
            ctx.stored.append(StoredWeight(layer, base, holder, modules))  # type: ignore[arg-type]
    _replace(gm, ctx, node, new, (upper, lower))


def _nest(model: nn.Module, names: Sequence[str], first: bool) -> tuple[NestedWeight | torch.Tensor, int, str]:
    """The stored weight of the parameters ``names`` joined, or (for what stays) the joined 16-bit tensor; lost values; the reason.

    The modules hold views of the result afterwards. ``first`` False: the dense program is bound, and what it left in 16 bits stays so.
    """
    paths = [name.rpartition(".")[0] for name in names]
    modules = [model.get_submodule(path) for path in paths]
    if all(isinstance(m, NestedLinear) for m in modules):
        return _joined_bytes(modules)  # type: ignore[arg-type]
    tensors = [getattr(m, name.rpartition(".")[2]) for m, name in zip(modules, names, strict=True)]
    joined = join_parameters(tensors)
    if reason := _why_kept(modules) if first else "dense steps read it in 16 bits":
        return joined, 0, reason
    try:
        nested, changed = nest_counted(joined)
    except FormatError as error:
        return joined, 0, str(error)
    if nested.lower is None:
        return joined, 0, "no nested format covers its values"
    _place_views(model, paths, modules, tensors, nested)
    return nested, changed, ""


def _why_kept(modules: Sequence[nn.Module]) -> str:
    """Why the weights of ``modules`` may not be stored otherwise; empty: they may."""
    for m in modules:
        if type(m) is not nn.Linear:
            return f"{type(m).__name__} is not a plain torch.nn.Linear"
        if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks:
            return "its module carries hooks, which would be dropped"
    return ""


def _joined_bytes(modules: Sequence[NestedLinear]) -> tuple[NestedWeight | torch.Tensor, int, str]:
    """Modules made by a loader: their bytes joined, nothing transcoded where the formats go together."""
    nested = joined_bytes([m.nested for m in modules]) or concatenate([m.nested for m in modules])
    if len(modules) > 1:
        for module, part in zip(modules, _split(nested, [m.out_features for m in modules]), strict=True):
            module.assign(part)
    if nested.lower is None:
        return nested.upper, 0, "no nested format covers its values"
    return nested, 0, ""


def _place_views(
    model: nn.Module, paths: Sequence[str], modules: Sequence[nn.Module], tensors: Sequence[torch.Tensor], nested: NestedWeight
) -> None:
    parts = _split(nested, [t.shape[0] for t in tensors])
    for path, module, tensor, part in zip(paths, modules, tensors, parts, strict=True):
        made = NestedLinear(part, module.bias, tensor.dtype).train(module.training)  # type: ignore[arg-type]
        place_linear(model, path, made)
        tensor.data = tensor.new_empty(0)  # whoever still holds the parameter holds no memory by it


def _split(nested: NestedWeight, sizes: list[int]) -> list[NestedWeight]:
    """Views of the rows of ``nested``, part by part."""
    uppers = nested.upper.split(sizes)
    lowers = [None] * len(sizes) if nested.lower is None else nested.lower.split(sizes)
    shifts = [None] * len(sizes) if nested.shift is None else nested.shift.split(sizes)
    return [NestedWeight(nested.format, u, lo, s) for u, lo, s in zip(uppers, lowers, shifts, strict=True)]


def _bind_fp8(gm: fx.GraphModule, ctx: PassContext, model: nn.Module, holder: nn.Module, node: fx.Node, tally: _Tally) -> None:
    x, values, scale, bias = node.args
    assert isinstance(values, fx.Node) and isinstance(scale, fx.Node)
    names = ctx.weights[values.name]
    paths = [name.rpartition(".")[0] for name in names]
    modules = [model.get_submodule(path) for path in paths]
    tensors: list[torch.Tensor] = [getattr(m, name.rpartition(".")[2]) for m, name in zip(modules, names, strict=True)]
    joined = join_parameters(tensors)
    if reason := _why_kept(modules):
        tally.kept.append(f"{', '.join(names)}: {reason}")
        with gm.graph.inserting_before(node):
            plain = gm.graph.call_function(ops.LINEAR, (x, _attribute(gm, holder, values.name, joined), bias))
        _replace(gm, ctx, node, plain, (values, scale))
        return
    quantized = quantize_weight(joined)
    sizes = [t.shape[0] for t in tensors]
    for path, module, tensor, v, s in zip(paths, modules, tensors, quantized[0].split(sizes), quantized[1].split(sizes), strict=True):
        place_linear(model, path, Fp8Linear(v, s, module.bias, tensor.dtype).train(module.training))  # type: ignore[arg-type]
        tensor.data = tensor.new_empty(0)
    with gm.graph.inserting_before(node):
        stored = [_attribute(gm, holder, n.name, t) for n, t in ((values, quantized[0]), (scale, quantized[1]))]
        new = gm.graph.call_function(node.target, (x, *stored, bias))
    _replace(gm, ctx, node, new, (values, scale))


def _attribute(gm: fx.GraphModule, holder: nn.Module, name: str, value: torch.Tensor) -> fx.Node:
    holder.register_buffer(name, value, persistent=False)
    return gm.graph.get_attr(f"weights.{name}")


def _replace(gm: fx.GraphModule, ctx: PassContext, node: fx.Node, new: fx.Node, inputs: Sequence[fx.Node]) -> None:
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    gm.graph.erase_node(node)
    for placeholder in inputs:
        gm.graph.erase_node(placeholder)
        del ctx.weights[placeholder.name]
