"""Tiny Llama models with one layer part exchanged, to show what recognition and the row check refuse."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from depthfx.passes.capture import capture
from depthfx.passes.recognise_layers import recognise_layers
from depthfx.report import CompileReport
from depthfx.settings import Settings

CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}


def toy(**changes: Any) -> LlamaForCausalLM:
    """A Llama of three layers and 32 channels."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**CONFIG, **changes})).eval()


class Call(torch.nn.Module):
    """A layer part that is a plain function of its input."""

    def __init__(self, function: Any, width: int = CONFIG["hidden_size"]) -> None:
        super().__init__()
        self.function = function
        self.weight = torch.nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def with_mlp(function: Any) -> LlamaForCausalLM:
    """A toy whose second layer uses ``function(module, x)`` in place of its MLP."""
    model = toy()
    model.model.layers[1].mlp = Call(function)
    return model


def with_layer_forward(function: Any, index: int = 1) -> LlamaForCausalLM:
    """A toy whose layer ``index`` runs ``function(layer, hidden_states, **arguments)``."""
    model = toy()
    layer = model.model.layers[index]
    cls = type(layer)
    layer.__class__ = type(cls.__name__, (cls,), {"forward": lambda self, hidden_states, **kw: function(self, hidden_states, **kw)})
    return model


def captured(model: Any, recognise: bool = True) -> tuple[Any, Any]:
    """Graph and context after capture and, by default, recognition."""
    gm, ctx = capture(model, Settings(), "cpu", CompileReport())
    if recognise:
        recognise_layers(gm, ctx)
    return gm, ctx
