"""How much each layer suffers from fast precision, measured: the layer that suffers least gives its residual first (paper DPS, IV.C, leaves the order open)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from depthfx.errors import InvalidRequestError
from depthfx.runtime.lending_profile import Sensitivity
from depthfx.runtime.precision import named
from depthfx.runtime.prompt_logits import prompt_logits
from depthfx.runtime.request import check_prompt

if TYPE_CHECKING:
    from depthfx.runtime.model import DepthModel


def measure_sensitivity(model: DepthModel, prompts: Iterable[Sequence[int]]) -> Sensitivity:
    """The profile of ``model``, compiled with ``weights="nested"``, over ``prompts`` of token ids: one prefill a layer and prompt.

    The engine must be idle; residuals that are lent are restored first, and its precision is as before afterwards. Raises
    :class:`InvalidRequestError` without prompts, for ids outside the vocabulary or where a layer stays fast, and what `set_precision` raises
    for models of other weights.
    """
    engine = model.engine
    texts = [check_prompt(p, engine.vocab_size) for p in prompts]
    if not texts:
        raise InvalidRequestError("no prompts to measure with; give a few of the text that the model will serve")
    engine.follow_weights()
    before = named(engine._scheduler.wanted, engine.layers)
    engine.restore()
    engine.set_precision("full")
    try:
        modes = engine.precision()
        if stuck := [name for name, mode in modes.items() if mode != "full"]:
            raise InvalidRequestError(
                f"layer {stuck[0]} stays fast, so full precision cannot be compared with; see memory() and the memory policy"
            )
        num_layers = sum(name != "head" for name in modes)
        exact = [torch.log_softmax(prompt_logits(engine, ids), -1) for ids in texts]
        layers = []
        for layer in range(num_layers):
            engine.set_precision({**dict.fromkeys(range(num_layers), "full"), layer: "fast"})
            layers.append(_divergence(exact, [torch.log_softmax(prompt_logits(engine, ids), -1) for ids in texts]))
    finally:
        engine.set_precision(before)
    return Sensitivity(tuple(layers))


def _divergence(exact: list[torch.Tensor], found: list[torch.Tensor]) -> float:
    total = sum(float((p.double().exp() * (p - q).double()).sum()) for p, q in zip(exact, found, strict=True))
    return max(0.0, total / sum(len(p) for p in exact))  # below 0 by rounding alone
