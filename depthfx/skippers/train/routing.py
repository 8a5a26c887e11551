"""A model whose routed layers compute decision, layer and projector for all rows, with gradients, in the arithmetic that is served.

For a row with layer input h, w the policy's weight and RUN the policy's action (w > 0.5 for FlexiDepth's router):

    gate mlp:   run = h + attention + w * MLP branch      skipped = h + (1 - w) * projector(mlp_input)
    gate hard:  run = the layer as it is                  skipped = h + projector(mlp_input)

``mlp_input`` is what the MLP would read if attention gave nothing. Keys and values are made from every row. What leaves the layer:

    decision hard:              RUN ? run : skipped; the router learns through w and 1 - w alone (FlexiDepth as released)
    decision straight_through:  the same numbers; the gradient also reaches w as if the output were w * run + (1 - w) * skipped
    decision soft:              w * run + (1 - w) * skipped, which no served step computes

A loss is about quadratic in what skipping changes, so the gradient at a skipped row tells twice what skipping costs there, and at a row that runs
nothing: rows that skip are pushed up, others are not, and with fixed decisions all logits gather at the threshold. With ``noise`` decisions
are drawn, RUN with probability sigmoid(logit(w) / noise), and each row meets both. Served decisions never have noise.

Trained parameters may be wider than the model: they are rounded to its dtype first, as they will be when they are served.

Where something else sets how many rows skip, the loss still pushes every router towards running, step after step, and what a router can do
about it is to give all rows one large logit: rows that differ are lost. So routers may be kept apart: the graph ends at their weights, and
:meth:`Routing.send_gradients` hands on the weights' gradients less their mean. What is learnt then is only which rows are to run rather than
others, and nothing flows through a router's input.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from depthfx.contracts import Decision, Rows, Skipper
from depthfx.errors import SettingError, SkipperError
from depthfx.skippers.train.parts import LayerParts, decoder_layers, find_parts

Kind = Literal["hard", "straight_through", "soft"]
KINDS = ("hard", "straight_through", "soft")


class Routing:
    """What the routed layers decided in the last forward: for each, in order, ``weights`` (floating) and ``actions`` (bool), ``[B, S]``."""

    def __init__(self, skipper: Skipper, decision: Kind, recompute: bool) -> None:
        self.skipper, self.decision, self.recompute = skipper, decision, recompute
        self.enabled = True
        self.apart = False
        self.noise = 0.0  # of the logits by which rows are decided, in logistic units
        self.weights: list[torch.Tensor] = []
        self.actions: list[torch.Tensor] = []
        self.cuts: list[tuple[torch.Tensor, torch.Tensor]] = []  # where routers are apart: each one's weight [B * S], and the leaf for it

    def send_gradients(self, real: torch.Tensor) -> None:
        """After the backward pass of a loss, with routers ``apart``: the gradients of their weights, centred over all rows of ``real`` [B, S].

        Centred is with each row's slope of the sigmoid, so that the sum of the gradients of all logits is zero.
        """
        rows = real.flatten().float()
        leaves = [leaf for _, leaf in self.cuts]
        given = torch.stack([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]).float()
        slopes = torch.stack([leaf.detach().float() * (1 - leaf.detach().float()) for leaf in leaves]) * rows
        centred = (given - (given * slopes).sum() / slopes.sum().clamp(min=1e-20)) * rows
        torch.autograd.backward([weight for weight, _ in self.cuts], [g.to(leaf.dtype) for g, leaf in zip(centred, leaves, strict=True)])
        self.cuts = []

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside, the model is its own self."""
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True

    @contextmanager
    def served(self) -> Iterator[None]:
        """Inside, decisions are hard, as they are served."""
        kept = self.decision, self.noise
        self.decision, self.noise = "hard", 0.0
        try:
            yield
        finally:
            self.decision, self.noise = kept


@contextmanager
def routed_training(model: nn.Module, skipper: Skipper, decision: Kind = "hard", recompute: bool = False) -> Iterator[Routing]:
    """While open, ``model(input_ids=..., use_cache=False)`` is routed by ``skipper``; the model is frozen and in evaluation mode.

    ``recompute`` trades time for memory: activations of routed layers are computed anew in the backward pass. Raises :class:`SkipperError`
    for a model that holds NaN or infinity or whose layers training cannot take hold of, and :class:`SettingError` for a decision that is not
    known or does not train.
    """
    if decision not in KINDS:
        raise SettingError(f"decision={decision!r} is not known; allowed: {', '.join(KINDS)}")
    if decision == "hard" and skipper.gate == "hard":
        raise SettingError(
            "decision='hard' with gate='hard' gives the router no gradient of the loss; use 'straight_through' or 'soft', or gate='mlp'"
        )
    _check_finite(model)
    routing = Routing(skipper, decision, recompute)
    trained, layers = model.training, decoder_layers(model)
    frozen = [p for p in model.parameters() if p.requires_grad]
    routed: list[_RoutedLayer] = []
    try:
        model.eval()
        for parameter in frozen:
            parameter.requires_grad_(False)
        for place, parts in enumerate(find_parts(model, skipper.layers)):
            routed.append(_RoutedLayer(layers[skipper.layers[place]], parts, routing, place))
        yield routing
    finally:
        for layer in routed:
            layer.remove()
        for parameter in frozen:
            parameter.requires_grad_()
        model.train(trained)


def _check_finite(model: nn.Module) -> None:
    """One number that is none, and every row depends on every other: what is then said of the layers would be wrong."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.numel():
            ends = torch.stack(torch.aminmax(parameter.detach()))
            if not bool(ends.isfinite().all()):
                found = f"numbers from {float(ends[0])} to {float(ends[1])}"
                raise SkipperError(
                    f"the model's {name} holds {found}; training needs finite ones: load the model anew, or in a wider dtype"
                )


class _Reached(BaseException):
    """The MLP's input is known; the rest of the layer need not be run."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.value = value


class _RoutedLayer:
    """One routed layer while it is open: its forward and that of its attention are replaced, and three of its modules have hooks."""

    def __init__(self, layer: nn.Module, parts: LayerParts, routing: Routing, place: int) -> None:
        self.layer, self.parts, self.routing, self.place = layer, parts, routing, place
        self.policy, self.projector = routing.skipper.policies[place], routing.skipper.projectors[place]
        self.own, self.own_attention = layer.forward, parts.attention.forward
        self.hidden: torch.Tensor | None = None
        self.decision: Decision | None = None
        self.seeking = False  # the MLP's input, with attention giving nothing
        self.others = -1  # values that attention returns beside its output; -1: it returns a tensor
        self.handles = [
            parts.key_input.register_forward_pre_hook(self._decide, with_kwargs=True),
            parts.mlp_input.register_forward_pre_hook(self._reach, with_kwargs=True),
            parts.branch_end.register_forward_hook(self._scale),
        ]
        layer.forward = types.MethodType(lambda _, hidden_states, *args, **kwargs: self._forward(hidden_states, args, kwargs), layer)
        parts.attention.forward = types.MethodType(lambda _, *args, **kwargs: self._attend(args, kwargs), parts.attention)

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        for module in (self.layer, self.parts.attention):
            module.__dict__.pop("forward", None)

    def _forward(self, hidden: torch.Tensor, args: Any, kwargs: Any) -> Any:
        routing = self.routing
        if not routing.enabled:
            return self.own(hidden, *args, **kwargs)
        if self.place == 0:
            routing.weights, routing.actions, routing.cuts = [], [], []
        ran = routing.actions[-1] if self.place else torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
        if routing.recompute and torch.is_grad_enabled():
            result, weight, actions = checkpoint(self._compute, hidden, ran, args, kwargs, use_reentrant=False)
        else:
            result, weight, actions = self._compute(hidden, ran, args, kwargs)
        routing.weights.append(weight)
        routing.actions.append(actions)
        return result

    def _compute(self, hidden: torch.Tensor, ran: torch.Tensor, args: Any, kwargs: Any) -> Any:
        self.hidden, self.ran, self.decision = hidden, ran, None
        result = self.own(hidden, *args, **kwargs)
        decision: Any = self.decision
        self.decision = None
        run = result[0] if isinstance(result, tuple) else result
        weight, actions = decision.weight.view(hidden.shape[:2]), decision.actions.bool().view(hidden.shape[:2])
        if self.routing.noise:
            logits = torch.logit(weight.detach().float(), eps=1e-6) / self.routing.noise
            actions = torch.rand_like(logits) < torch.sigmoid(logits)
        if self.policy.monotone:
            actions = actions & ran
        wide = weight.to(run.dtype)[..., None]
        mlp_input = self._mlp_input(hidden, args, kwargs)
        update = _in_dtype(self.projector, hidden.dtype, hidden.flatten(0, 1), mlp_input.flatten(0, 1))
        skipped = hidden
        if update is not None:
            update = update.view_as(hidden)
            skipped = hidden + (update * (1 - wide) if self.routing.skipper.gate == "mlp" else update)
        if self.routing.decision == "soft":
            out = wide * run + (1 - wide) * skipped
        else:
            out = torch.where(actions[..., None], run, skipped)
        if self.routing.decision == "straight_through":
            out = out + (wide - wide.detach()) * (run - skipped).detach()  # adds zero, and a gradient
        return ((out, *result[1:]) if isinstance(result, tuple) else out), weight, actions

    def _decide(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.routing.enabled or self.seeking:
            return
        normed, hidden = _read(args, kwargs), self.hidden
        assert hidden is not None
        apart = self.routing.apart and torch.is_grad_enabled()
        if apart:
            normed, hidden = normed.detach(), hidden.detach()
        batch, length = hidden.shape[:2]
        rows = Rows(
            hidden=hidden.flatten(0, 1),
            normed=normed.flatten(0, 1),
            request_ids=torch.arange(batch, device=hidden.device).repeat_interleave(length),
            positions=torch.arange(length, device=hidden.device).repeat(batch),
            is_prompt=torch.ones(batch * length, dtype=torch.bool, device=hidden.device),
            ran=self.ran.flatten(),
            place=self.place,
            num_places=len(self.routing.skipper.layers),
        )
        self.decision = _in_dtype(self.policy, hidden.dtype, rows)
        if self.decision.weight is None:
            raise SkipperError(
                f"policy {type(self.policy).__name__} gives no weight, so there is nothing to train; use policy 'flexidepth'"
            )
        if apart:
            leaf = self.decision.weight.detach().requires_grad_()
            self.routing.cuts.append((self.decision.weight, leaf))
            self.decision = Decision(self.decision.actions, leaf)

    def _scale(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self.routing.enabled or self.routing.skipper.gate != "mlp":
            return output
        branch = output[0] if isinstance(output, tuple) else output
        assert self.decision is not None and self.decision.weight is not None
        scaled = branch * self.decision.weight.view(branch.shape[:2]).to(branch.dtype)[..., None]
        return (scaled, *output[1:]) if isinstance(output, tuple) else scaled

    def _attend(self, args: Any, kwargs: Any) -> Any:
        if self.seeking:
            assert self.hidden is not None
            nothing = torch.zeros_like(self.hidden)
            return nothing if self.others < 0 else (nothing, *[None] * self.others)
        result = self.own_attention(*args, **kwargs)
        self.others = len(result) - 1 if isinstance(result, tuple) else -1
        return result

    def _reach(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.seeking:
            raise _Reached(_read(args, kwargs))

    def _mlp_input(self, hidden: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
        """The layer once more with attention giving nothing, up to where the MLP begins."""
        self.seeking = True
        try:
            self.own(hidden, *args, **kwargs)
        except _Reached as reached:
            return reached.value
        finally:
            self.seeking = False
        raise SkipperError(f"layer {self.routing.skipper.layers[self.place]} did not call its MLP; training a skipper needs one")


def _read(args: Any, kwargs: Any) -> torch.Tensor:
    return next(a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor))


def _in_dtype(module: nn.Module, dtype: torch.dtype, *args: Any) -> Any:
    """``module`` on ``args`` with its floating parameters and buffers in ``dtype``; gradients reach the parameters as they are."""
    state = {
        name: t.to(dtype) for name, t in (*module.named_parameters(), *module.named_buffers()) if t.is_floating_point() and t.dtype != dtype
    }
    return functional_call(module, state, args) if state else module(*args)
