"""What training has to know of a decoder layer, found by running it once: nothing depends on the model family.

The rules, for one layer with input ``hidden`` [B, S, H]:

* attention: the one direct child of the layer whose output at the last row depends on its input at the first row;
* key input: the first module with a weight matrix that is called inside attention. Of the others there, all read the same tensor but one
  at most, the output projection, so keys and values are made from that tensor (which refuses latent attention);
* MLP input: the first module with a weight matrix that is called outside attention;
* branch end: the last direct child with parameters that is called after attention (the MLP, its output norm where there is one).

Two checks refuse what these rules do not describe: with attention and branch end giving zero, the layer returns ``hidden`` bit for bit,
and its output is linear in the branch end's. Parallel blocks and norms after a branch pass where they keep this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from depthfx.errors import SkipperError

_PROBE_TOKENS = 4


@dataclass(frozen=True)
class LayerParts:
    """The modules of one decoder layer at which training takes hold; see the module's text."""

    attention: nn.Module
    key_input: nn.Module
    mlp_input: nn.Module
    branch_end: nn.Module


@dataclass
class _Call:
    module: nn.Module
    read: torch.Tensor | None  # the first tensor with H columns, else the first one
    gave: torch.Tensor | None = None


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of a Hugging Face model: the only list of ``num_hidden_layers`` modules of one class. Raises :class:`SkipperError`."""
    config: Any = model.config
    depth = config.get_text_config().num_hidden_layers
    lists = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == depth and all(type(x) is type(m[0]) for x in m)]
    if len(lists) != 1:
        raise SkipperError(f"{type(model).__name__} has {len(lists)} lists of {depth} modules of one class; training needs exactly one")
    return lists[0]


def find_parts(model: nn.Module, layers: Sequence[int]) -> list[LayerParts]:
    """The parts of the decoder layers ``layers``; ``model`` is run on four tokens. Raises :class:`SkipperError` with the reason."""
    stack = decoder_layers(model)
    outside = [i for i in layers if not 0 <= i < len(stack)]
    if outside:
        raise SkipperError(f"routed layers {outside} are none of the model's {len(stack)} layers; allowed: 0 to {len(stack) - 1}")
    inputs: dict[int, tuple[Any, Any]] = {}
    with _pre_hooks([stack[i] for i in layers], lambda m, args, kwargs: inputs.update({stack.index(m): (args, kwargs)})):
        device = next(model.parameters()).device
        with torch.no_grad():
            model(input_ids=torch.arange(_PROBE_TOKENS, device=device)[None], use_cache=False)
    return [_Probe(stack[i], i, *inputs[i]).parts() for i in layers]


class _Probe:
    """One layer and the arguments of one call of it."""

    def __init__(self, layer: nn.Module, index: int, args: Any, kwargs: Any) -> None:
        self.layer, self.who = layer, f"layer {index} ({type(layer).__name__})"
        named = dict(kwargs)
        hidden = args[0] if args else named.pop("hidden_states")
        self.hidden, self.args, self.kwargs = hidden.detach(), args[1:], named
        self.children = {child: name for name, child in layer.named_children()}

    def parts(self) -> LayerParts:
        calls, mixes = self._record()
        if len(mixes) != 1:
            raise SkipperError(f"{self.who} has {len(mixes)} children that mix tokens; training a skipper needs one, the attention")
        (attention,) = mixes
        inside = set(attention.modules())
        keys = [c for c in calls if c.module in inside and _has_matrix(c.module)]
        if not keys:
            raise SkipperError(f"{self.who}: no projection is called inside its attention, so a router has nothing to read")
        others = [c for c in keys if not _same(c.read, keys[0].read)]
        if len(others) > 1 or (keys[0].read is not None and keys[0].read.shape != self.hidden.shape):
            raise SkipperError(
                f"{self.who}: {len(others) + 1} tensors are projected inside its attention; training needs keys and values made from one "
                "tensor of the hidden size, and one output projection"
            )
        mlp = [c for c in calls if c.module not in inside and _has_matrix(c.module)]
        if not mlp or mlp[0].read is None or mlp[0].read.shape != self.hidden.shape:
            raise SkipperError(
                f"{self.who} has no MLP whose first projection reads rows [B, S, H] (none at all, experts, or rows that are joined first); "
                "training a skipper needs one"
            )
        order = [c.module for c in calls]
        ends = [c for c in calls if c.module in self.children and any(True for _ in c.module.parameters())]
        end = ends[-1].module
        if end is attention or order.index(end) < order.index(attention) or order.count(end) != 1 or order.count(attention) != 1:
            raise SkipperError(f"{self.who}: its MLP does not come after attention, once each, so it cannot be scaled by a router's weight")
        found = LayerParts(attention, keys[0].module, mlp[0].module, end)
        self._check(found)
        return found

    def _record(self) -> tuple[list[_Call], list[nn.Module]]:
        """All calls in the order in which they begin, and the direct children that mix tokens."""
        calls: list[_Call] = []

        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
            wide = [t for t in tensors if t.shape[-1:] == self.hidden.shape[-1:] and t.is_floating_point()]
            calls.append(_Call(module, next(iter(wide or tensors), None)))

        def end(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = _first(output)
            if isinstance(given, torch.Tensor):  # a clone: the layer may add to it in place
                next(c for c in reversed(calls) if c.module is module).gave = given.clone()

        inner = [m for m in self.layer.modules() if m is not self.layer]
        handles = [m.register_forward_hook(end, with_kwargs=True) for m in inner]
        try:
            with _pre_hooks(inner, begin), torch.enable_grad():
                self.layer.forward(self.hidden.clone().requires_grad_(), *self.args, **self.kwargs)
        finally:
            for handle in handles:
                handle.remove()
        return calls, [m for m in self.children if any(c.module is m and _mixes(c) for c in calls)]

    def _check(self, parts: LayerParts) -> None:
        if not torch.equal(self._output(parts, 0, 0), self.hidden):
            raise SkipperError(
                f"{self.who} does not return its input where attention and MLP give nothing (a norm with a bias after a branch, a norm on "
                "the residual stream, or a part that adds its input itself); training a skipper needs a residual stream that parts only add to"
            )
        zero, one, two = (self._output(parts, 1, factor).float() for factor in (0, 1, 2))
        limit = 64 * torch.finfo(self.hidden.dtype).eps * float(two.abs().max() + 1)
        if not float((two - 2 * one + zero).abs().max()) <= limit:
            raise SkipperError(f"{self.who}: what {self.children[parts.branch_end]} gives is not simply added to the hidden state")

    def _output(self, parts: LayerParts, attention: float, end: float) -> torch.Tensor:
        """The layer's output with the outputs of two of its parts multiplied."""
        handles = [
            module.register_forward_hook(lambda m, args, out, factor=factor: _with_first(out, _first(out) * factor))
            for module, factor in ((parts.attention, attention), (parts.branch_end, end))
        ]
        try:
            with torch.no_grad():
                return _first(self.layer.forward(self.hidden, *self.args, **self.kwargs))
        finally:
            for handle in handles:
                handle.remove()


def _mixes(call: _Call) -> bool:
    """Whether the last row of what a module gave depends on the first row of what it read."""
    if call.read is None or call.gave is None or not call.gave.requires_grad or call.gave.dim() != 3 or not call.read.requires_grad:
        return False
    weights = torch.linspace(-1, 1, call.gave.shape[-1], device=call.gave.device) + 0.3
    with torch.enable_grad():  # the caller may have switched gradients off
        last = (call.gave[:, -1].float() * weights).sum()
    (gradient,) = torch.autograd.grad(last, call.read, retain_graph=True, allow_unused=True)
    return gradient is not None and bool(gradient[:, 0].any())


def _has_matrix(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.dim() == 2 and not isinstance(module, nn.Embedding)


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is not None and b is not None and a.data_ptr() == b.data_ptr() and a.shape == b.shape


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def _with_first(result: Any, first: torch.Tensor) -> Any:
    return (first, *result[1:]) if isinstance(result, tuple) else first


@contextmanager
def _pre_hooks(modules: Sequence[nn.Module], hook: Any) -> Iterator[None]:
    handles = [m.register_forward_pre_hook(hook, with_kwargs=True) for m in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
