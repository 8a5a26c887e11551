"""Use the ops of the weight format that the settings ask for: two bytes with a switch (nested), or static FP8.

The bytes are inputs of the graph; which nested format they have follows from the weights, so `bind_weights` fills it in.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from depthfx.errors import UnsupportedModelError
from depthfx.lowering import ops
from depthfx.lowering.fp8_weight import fits_fp8
from depthfx.passes.context import SKIPPER, PassContext, call, layer_key, shape_of, value_of

# Stands for the format in a graph whose weights are not bound yet.
UNBOUND = "unbound"

_Size = tuple[int, ...]


def use_dual_linear(gm: fx.GraphModule, ctx: PassContext) -> None:
    """For ``weights="nested"``: every linear of a recognised layer reads an upper and a lower byte, by the precision of its layer.

    The LM head keeps its 16-bit weight unless ``nested_head``; it is the entry after the layers then. Raises
    :class:`UnsupportedModelError` where nothing can be nested, or the head shares its weight with the embedding.
    """
    if ctx.settings.weights != "nested":
        return
    nodes = {n.name: n for n in gm.graph.nodes if n.op == "placeholder"}
    flags = [nodes[name] for name in ("layer_precision", "precision")]
    count = 0
    for node, layer in _linears(gm, ctx):
        x, weight, last = node.args
        upper, lower = _bytes(gm, ctx, weight, ("upper", "lower"))  # type: ignore[arg-type]
        op = ops.DUAL_LINEAR if node.target is ops.LINEAR else ops.DUAL_GATED_LINEAR
        with gm.graph.inserting_before(node):
            out = call(gm.graph, ctx, node, op, x, upper, lower, None, flags[0], layer, flags[1], UNBOUND, last)
        _take_place(gm, ctx, node, out, weight)  # type: ignore[arg-type]
        count += 1
    if not count:
        raise UnsupportedModelError(
            "weights='nested': no layer of this model computes with the weight of a torch.nn.Linear (GPT-2's Conv1D is none); use weights='16bit'"
        )
    ctx.report.add("rewritten", f"{count} linears: two bytes a weight, precision by layer")


def use_fp8_linear(gm: fx.GraphModule, ctx: PassContext) -> None:
    """For ``weights="fp8"``: every linear of a recognised layer whose sides are multiples of 16 multiplies FP8 numbers."""
    if ctx.settings.weights != "fp8":
        return
    count = 0
    for node, _ in _linears(gm, ctx):
        x, weight, last = node.args
        outputs, inputs = shape_of(weight) or (0, 0)
        if not fits_fp8(int(outputs), int(inputs)):
            ctx.report.add(
                "weights kept as they are", f"{', '.join(ctx.weights[weight.name])}: {outputs} x {inputs}, sides must be multiples of 16"
            )  # type: ignore[union-attr]
            continue
        values, scale = _bytes(gm, ctx, weight, ("fp8", "scale"))  # type: ignore[arg-type]
        with gm.graph.inserting_before(node):
            bias = last if node.target is ops.LINEAR else None
            out = call(gm.graph, ctx, node, ops.FP8_LINEAR, x, values, scale, bias)
            if node.target is ops.GATED_LINEAR:
                out = call(gm.graph, ctx, node, ops.GATED_ACTIVATION, out, last)
        _take_place(gm, ctx, node, out, weight)  # type: ignore[arg-type]
        count += 1
    if not count:
        raise UnsupportedModelError("weights='fp8': no linear of a layer can be FP8 (sides must be multiples of 16); use weights='16bit'")
    ctx.report.add("rewritten", f"{count} linears: static FP8, one scale a row")


def _linears(gm: fx.GraphModule, ctx: PassContext) -> Iterable[tuple[fx.Node, int]]:
    """Linears to change and their place in `layer_precision`; says in the report which ones stay 16-bit and why."""
    places = {tuple(layer.path.rsplit(".", 1)): layer.index for layer in ctx.layers}
    vocabulary = (shape_of(next(n for n in gm.graph.nodes if n.op == "output").args[0]) or (0,))[-1]
    kept: list[str] = []
    found = []
    for node in gm.graph.nodes:
        if node.target not in (ops.LINEAR, ops.GATED_LINEAR):
            continue
        weight = node.args[1]
        names = ", ".join(ctx.weights[weight.name])
        path, index = layer_key(node) or ("", 0)
        layer = places.get((path, str(index)))
        head = layer is None and (shape_of(weight) or (0,))[0] == vocabulary
        if head and ctx.settings.nested_head:
            if len(weight.users) > 1:
                raise UnsupportedModelError(
                    f"nested_head=True: the embedding shares {names} and reads it in 16 bits; leave nested_head out"
                )
            layer = len(ctx.layers)
        if names.startswith(SKIPPER):
            continue
        if layer is None:
            kept.append(f"{names}: {'the LM head' if head else 'outside the layers'}")
        elif len(weight.users) > 1:
            kept.append(f"{names}: used {len(weight.users)} times")
        else:
            found.append((node, layer))
    for line in kept:
        ctx.report.add("weights kept as they are", line)
    return found


def _bytes(gm: fx.GraphModule, ctx: PassContext, weight: fx.Node, parts: tuple[str, str]) -> list[fx.Node]:
    """Inputs for the parts of a stored weight, under its name and theirs; the 16-bit input goes in :func:`_take_place`."""
    made = []
    outputs, inputs = value_of(weight).shape
    for part in parts:
        with gm.graph.inserting_before(weight):
            node = gm.graph.placeholder(f"{weight.name}_{part}")
        with ctx.fake_mode:
            size: _Size = (outputs,) if part == "scale" else (outputs, inputs)
            dtype = torch.float32 if part == "scale" else torch.uint8
            node.meta["example_value"] = torch.empty(size, dtype=dtype, device=value_of(weight).device)
        ctx.weights[node.name] = ctx.weights[weight.name]
        made.append(node)
    return made


def _take_place(gm: fx.GraphModule, ctx: PassContext, node: fx.Node, out: fx.Node, weight: fx.Node) -> None:
    node.replace_all_uses_with(out)
    gm.graph.erase_node(node)
    gm.graph.erase_node(weight)
    del ctx.weights[weight.name]
