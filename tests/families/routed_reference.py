"""Routing as it is meant, slow and plain: Hugging Face's own layers over one whole sequence, every row through everything, then a choice by row.

Nothing of the compiler is used: a table says where each family keeps its parts.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache

from depthfx.contracts import Rows, Skipper


@dataclass(frozen=True)
class Names:
    """Where a family keeps its parts; all but ``layers`` are names inside a layer."""

    layers: str = "model.layers"
    attention: str = "self_attn"
    keys: str = "self_attn.k_proj"  # the projection that keys come from
    mlp: str = "mlp"
    added: str = "mlp"  # whose output, times a fixed multiplier at most, is added to the residual stream for the MLP


PLAIN = Names()
NAMES: dict[str, Names] = {
    "phi3": Names(keys="self_attn.qkv_proj"),
    "gemma2": Names(added="post_feedforward_layernorm"),
    "gemma3_text": Names(added="post_feedforward_layernorm"),
    "olmo2": Names(added="post_feedforward_layernorm"),
    "glm4": Names(added="post_mlp_layernorm"),
    "gpt2": Names("transformer.h", "attn", "attn.c_attn"),
    "gpt_neox": Names("gpt_neox.layers", "attention", "attention.query_key_value"),
}


@dataclass(frozen=True)
class Answer:
    """What one sequence of T tokens gives."""

    logits: torch.Tensor  # [T, V]
    actions: torch.Tensor  # int8 [places, T], 1 RUN, 0 Project-Only
    kv: torch.Tensor  # [L, 2, Hkv, T, D]


def number_of(request_id: str) -> int:
    """The number that policies see of a request."""
    return zlib.crc32(request_id.encode()) & 0x7FFFFFFF


def routed_answer(
    model: Any, name: str, skipper: Skipper, token_ids: list[int], num_prompt: int, request_id: str = "", routed: tuple[bool, bool] = (True, True),
) -> Answer:  # fmt: skip
    """``token_ids`` through ``model`` of family ``name`` without a cache; ``routed``: whether prompt and answer ask the skipper."""
    names, cached = NAMES.get(name, PLAIN), DynamicCache()
    layers = model.get_submodule(names.layers)
    with model.device, ExitStack() as stack, torch.no_grad():
        is_prompt = torch.arange(len(token_ids)) < num_prompt
        forced = ~torch.where(is_prompt, torch.tensor(routed[0]), torch.tensor(routed[1]))
        sequence = _Sequence(skipper, names, number_of(request_id), is_prompt, forced)
        for place, index in enumerate(skipper.layers):
            stack.enter_context(_replaced_forward(layers[index], sequence.layer(layers[index], place)))
        logits = model(torch.tensor([token_ids]), past_key_values=cached, use_cache=True).logits[0]
    kv = torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in cached.layers])
    return Answer(logits, torch.stack(sequence.actions).to(torch.int8), kv)


@dataclass
class _Sequence:
    skipper: Skipper
    names: Names
    number: int
    is_prompt: torch.Tensor
    forced: torch.Tensor

    def __post_init__(self) -> None:
        self.actions: list[torch.Tensor] = []

    def layer(self, layer: nn.Module, place: int) -> Callable[..., Any]:
        """The forward that takes the place of ``layer``'s own."""
        own, names = layer.forward, self.names
        policy, projector = self.skipper.policies[place], self.skipper.projectors[place]
        keys, attention, mlp, added = (layer.get_submodule(n) for n in (names.keys, names.attention, names.mlp, names.added))

        def again(hidden: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
            """The layer once more, without writing to the cache."""
            args = [None if isinstance(a, Cache) else a for a in args]
            return _first(own(hidden, *args, **{k: None if isinstance(v, Cache) else v for k, v in kwargs.items()}))

        def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            with _input_of(keys) as normed:
                result = own(hidden_states, *args, **kwargs)
            with _input_of(mlp) as mlp_input, _output_of(attention, torch.zeros_like):
                again(hidden_states, args, kwargs)
            decision = policy(self.rows(hidden_states[0], normed[0], place))
            ran = self.actions[-1] if self.actions else torch.ones_like(self.is_prompt)
            actions = decision.actions.bool()
            actions = (actions & ran if policy.monotone else actions) | self.forced
            self.actions.append(actions)
            update = projector(hidden_states[0], mlp_input[0])
            update = torch.zeros_like(hidden_states[0]) if update is None else update
            out = _first(result)
            if self.skipper.gate == "mlp":
                weight = torch.where(self.forced, 1.0, decision.weight)[:, None]
                with _output_of(added, lambda x: x * weight):
                    out = again(hidden_states, args, kwargs)
                update = update * (1 - weight)
            out = torch.where(actions[:, None], out, hidden_states + update)
            return (out, *result[1:]) if isinstance(result, tuple) else out

        return forward

    def rows(self, hidden: torch.Tensor, normed: torch.Tensor, place: int) -> Rows:
        """What the policy of ``place`` sees."""
        count = hidden.shape[0]
        ran = self.actions[-1] if self.actions else torch.ones(count, dtype=torch.bool)
        numbers, positions = torch.full((count,), self.number), torch.arange(count)
        return Rows(hidden, normed, numbers, positions, self.is_prompt, ran, place, len(self.skipper.layers))


def _first(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


@contextmanager
def _replaced_forward(layer: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward


@contextmanager
def _input_of(module: nn.Module) -> Iterator[list[torch.Tensor]]:
    """A list that holds the rows which ``module`` reads first, without their batch dim."""
    seen: list[torch.Tensor] = []

    def keep(_: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append((args[0] if args else kwargs["hidden_states"])[0])

    handle = module.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


@contextmanager
def _output_of(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """``module`` gives ``change`` of its (first) result."""
    handle = module.register_forward_hook(lambda m, args, out: (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out))
    try:
        yield
    finally:
        handle.remove()
