"""Ops that stand for routing in a captured graph, and the forward of a routed layer that emits them.

``depthfx::rows_of(hidden, name)`` is a step input by row, ``depthfx::layer_input(hidden, what)`` a value inside the layer for which
``hidden`` is the input, ``depthfx::route(out, skipped, actions, weight, place)`` the layer's output by decision. The pass `form_cohorts`
replaces all three; run as they stand, the last one is a plain choice by row and the others have no meaning.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from depthfx.contracts import Decision, Rows, Skipper
from depthfx.errors import SkipperError, UnsupportedModelError

_LIBRARY = torch.library.Library("depthfx", "FRAGMENT")
_LIBRARY.define("rows_of(Tensor hidden, str name) -> Tensor")
_LIBRARY.define("layer_input(Tensor hidden, str what) -> Tensor")
_LIBRARY.define("route(Tensor out, Tensor skipped, Tensor actions, Tensor? weight, int place) -> Tensor")

_DTYPES = {"request_ids": torch.int64, "positions": torch.int64, "is_prompt": torch.bool, "ran": torch.bool}


def _rows_of(hidden: torch.Tensor, name: str) -> torch.Tensor:
    return hidden.new_zeros(hidden.shape[:1], dtype=_DTYPES[name])


def _layer_input(hidden: torch.Tensor, what: str) -> torch.Tensor:
    return torch.empty_like(hidden)


def _route(out: torch.Tensor, skipped: torch.Tensor, actions: torch.Tensor, weight: torch.Tensor | None, place: int) -> torch.Tensor:
    return torch.where(actions.bool()[None, :, None], out, skipped)


for _key in ("CPU", "CUDA", "Meta"):
    _LIBRARY.impl("rows_of", _rows_of, _key)
    _LIBRARY.impl("layer_input", _layer_input, _key)
    _LIBRARY.impl("route", _route, _key)
ROWS_OF = torch.ops.depthfx.rows_of.default
LAYER_INPUT = torch.ops.depthfx.layer_input.default
ROUTE = torch.ops.depthfx.route.default


@contextmanager
def routed_layers(model: nn.Module, skipper: Skipper | None) -> Iterator[None]:
    """While tracing: the routed layers of ``model`` compute decision and projector beside their own output, and route between them.

    Raises :class:`SkipperError` for layers that the model does not have.
    """
    if skipper is None:
        yield
        return
    layers = decoder_layers(model)
    if skipper.layers[-1] >= len(layers):
        raise SkipperError(
            f"the skipper routes layer {skipper.layers[-1]}, but this {type(model).__name__} has {len(layers)} decoder layers"
        )
    own = {index: vars(layers[index]).get("forward") for index in skipper.layers}  # put there by somebody else
    try:
        for place, index in enumerate(skipper.layers):
            layers[index].forward = types.MethodType(_forward(layers[index].forward, skipper, place), layers[index])
        yield
    finally:
        for index, forward in own.items():
            vars(layers[index]).pop("forward", None)
            if forward is not None:
                vars(layers[index])["forward"] = forward


def decoder_layers(model: Any) -> Sequence[nn.Module]:
    """The list of decoder layers: the one module list as long as the config says."""
    count = model.config.get_text_config().num_hidden_layers
    found = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count and len({type(x) for x in m}) == 1]
    if len(found) != 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} has {len(found)} lists of {count} equal modules; a skipper needs the one of its layers"
        )
    return list(found[0])


def _forward(inner: Any, skipper: Skipper, place: int) -> Any:
    policy, projector = skipper.policies[place], skipper.projectors[place]
    num_places, scaled = len(skipper.layers), skipper.gate == "mlp"

    def forward(self: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = inner(hidden_states, *args, **kwargs)
        out = result[0] if isinstance(result, tuple) else result
        hidden = hidden_states.squeeze(0)
        ids, positions, is_prompt, ran = (ROWS_OF(hidden, name) for name in ("request_ids", "positions", "is_prompt", "ran"))
        normed = LAYER_INPUT(hidden, "normed")
        decision: Decision = policy(Rows(hidden, normed, ids, positions, is_prompt, ran, place, num_places))
        actions = decision.actions.bool()
        if policy.monotone:
            actions = actions & ran
        update = projector(hidden, LAYER_INPUT(hidden, "mlp"))
        if update is not None and scaled:
            left: torch.Tensor = 1 - decision.weight  # type: ignore[operator,assignment]
            if left.dtype != update.dtype:  # a weight in FP32, say, must not widen the hidden state
                left = left.to(update.dtype)
            update = update * left[:, None]
        skipped = hidden if update is None else hidden + update
        weight = decision.weight if scaled else None
        routed = ROUTE(out, skipped.unsqueeze(0), actions, weight, place)
        return (routed, *result[1:]) if isinstance(result, tuple) else routed

    return forward
