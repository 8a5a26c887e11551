"""Find the decoder layers by data flow: consecutive nodes of one numbered module around one attention node."""

from __future__ import annotations

import torch
from torch import fx

from depthfx.errors import UnsupportedModelError
from depthfx.passes.context import LayerSpan, PassContext, layer_key, module_path, value_of


def recognise_layers(gm: fx.GraphModule, ctx: PassContext) -> None:
    """Fill ``ctx.layers``; raises :class:`UnsupportedModelError` naming the layer that does not fit.

    A layer must be one run of nodes, hold exactly one attention node, take one tensor from the layer before it and
    hand one tensor on. Layers are found by list index, never by family or by the path's prefix.
    """
    attentions = [n for n in gm.graph.nodes if _is_marker(n)]
    if not attentions:
        raise UnsupportedModelError("the captured graph holds no attention call; the model does not use transformers' AttentionInterface")
    groups: dict[tuple[str, int], list[fx.Node]] = {}
    for node in gm.graph.nodes:
        key = layer_key(node)
        if key is not None and node.op != "placeholder":
            groups.setdefault(key, []).append(node)
    order = {n: i for i, n in enumerate(gm.graph.nodes)}
    from_tokens = _depending_on("token_ids", gm)
    spans = []
    for attention in attentions:
        key = layer_key(attention)
        if key is None:
            raise UnsupportedModelError(f"attention node {attention.name} is not inside a numbered list of layers")
        spans.append(_span(key, groups[key], attention, order, from_tokens))
    indices = [s.index for s in spans]
    if indices != list(range(len(spans))) or len({s.path.rpartition(".")[0] for s in spans}) != 1:
        raise UnsupportedModelError(
            f"decoder layers are numbered {indices}; expected one list 0..{len(spans) - 1} with one attention call each"
        )
    for before, after in zip(spans, spans[1:], strict=False):
        if after.hidden_in is not before.hidden_out:
            raise UnsupportedModelError(f"layer {after.index} reads {after.hidden_in.name}, not the output of layer {before.index}")
    ctx.layers = spans
    ctx.report.add("recognised", f"{len(spans)} x {spans[0].class_name} at {spans[0].path.rpartition('.')[0]}")


def _is_marker(node: fx.Node) -> bool:
    return node.op == "call_function" and str(node.target) in ("depthfx.attention", "depthfx.attention.default")


def _span(
    key: tuple[str, int], nodes: list[fx.Node], attention: fx.Node, order: dict[fx.Node, int], from_tokens: set[fx.Node]
) -> LayerSpan:
    path, index = f"{key[0]}.{key[1]}", key[1]
    stack = list(attention.meta["nn_module_stack"].values())
    class_name = next(getattr(c, "__name__", str(c)) for p, c in stack if module_path(p) == path)
    first, last = order[nodes[0]], order[nodes[-1]]
    inside = set(nodes)
    if last - first + 1 != len(nodes):
        stranger = next(n for n in order if first <= order[n] <= last and n not in inside)
        raise UnsupportedModelError(f"the nodes of layer {path} ({class_name}) are not consecutive: {stranger.name} stands between them")
    if sum(_is_marker(n) for n in nodes) != 1:
        raise UnsupportedModelError(f"layer {path} ({class_name}) calls attention {sum(_is_marker(n) for n in nodes)} times; expected once")
    numbers = (torch.SymInt, torch.SymFloat)  # of rows, say, which later layers may need as well
    outputs = [n for n in nodes if any(u not in inside for u in n.users) and not isinstance(value_of(n), numbers)]
    if len(outputs) != 1:
        raise UnsupportedModelError(
            f"layer {path} ({class_name}) hands on {len(outputs)} tensors ({', '.join(o.name for o in outputs)}); expected one"
        )
    shape = value_of(outputs[0]).shape
    inputs = dict.fromkeys(i for n in nodes for i in n.all_input_nodes if i not in inside)
    # cos and sin may have this shape as well, but they come from positions alone
    hidden = [i for i in inputs if i in from_tokens and getattr(value_of(i), "shape", None) == shape]
    if len(hidden) != 1:
        names = ", ".join(h.name for h in hidden)
        raise UnsupportedModelError(
            f"layer {path} ({class_name}) reads {len(hidden)} hidden states ({names}); expected the layer before it alone"
        )
    _, k, v = attention.args[:3]
    if value_of(k).shape[-1] != value_of(v).shape[-1]:
        raise UnsupportedModelError(
            f"layer {path} ({class_name}) has key width {value_of(k).shape[-1]} and value width {value_of(v).shape[-1]} "
            "(latent attention, MLA); depthfx supports equal widths only"
        )
    return LayerSpan(index, path, class_name, tuple(nodes), attention, hidden[0], outputs[0])


def _depending_on(name: str, gm: fx.GraphModule) -> set[fx.Node]:
    """All nodes that the input ``name`` flows into."""
    found: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.name == name or any(i in found for i in node.all_input_nodes):
            found.add(node)
    return found
