"""Small skippers for the acceptance tests of routing, compiled models with them, and engines over these."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

import depthfx
from depthfx.contracts import Decision, Policy, Projector, Rows, Skipper
from tests.families.configs import build

# More than any policy's own opinion: every row runs with weight 1, or none does and the weight is 0.
ALWAYS, NEVER = 1e4, -1e4


class Dial(Policy):
    """RUN where :meth:`opinion` is above 0, with its sigmoid as weight; ``push`` is added to it, and may be set between steps."""

    push: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("push", torch.zeros(1))

    def forward(self, rows: Rows) -> Decision:
        """By opinion and push."""
        opinion = self.opinion(rows) + self.push
        return Decision(opinion > 0, torch.sigmoid(opinion))


class Router(Dial):
    """A random linear router with a sharp sigmoid."""

    def __init__(self, width: int, seed: int, monotone: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, generator=torch.Generator().manual_seed(seed)))
        self.monotone = monotone

    def opinion(self, rows: Rows) -> torch.Tensor:
        """Of what the keys are made from."""
        return (rows.normed * self.weight).sum(-1)


class Hashed(Dial):
    """By request and position."""

    def opinion(self, rows: Rows) -> torch.Tensor:
        """Runs two of three."""
        mixed = (rows.request_ids ^ (rows.positions + 1000 * rows.place) * 1000003) * 2654435761 >> 13
        return (mixed % 3 != 0).to(rows.hidden.dtype) * 2 - 0.5


class Flip(Dial):
    """The other way at every token and place."""

    def opinion(self, rows: Rows) -> torch.Tensor:
        """By parity of the position."""
        return ((rows.positions + rows.place) % 2).to(rows.hidden.dtype) * 3 - 1


class Decodes(Dial):
    """A prompt runs; an answer skips two of three layers."""

    def opinion(self, rows: Rows) -> torch.Tensor:
        """By phase."""
        return (rows.is_prompt | ((rows.positions + rows.place) % 3 == 0)).to(rows.hidden.dtype) * 3 - 1


class Adapter(Projector):
    """A narrow random MLP over the MLP's input and the hidden state."""

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        self.into, self.back = nn.Linear(width, 8, bias=False), nn.Linear(8, width, bias=False)
        draw = torch.Generator().manual_seed(seed)
        for linear in (self.into, self.back):
            linear.weight.data = torch.randn(linear.weight.shape, generator=draw) * 0.3

    def forward(self, hidden: torch.Tensor, mlp_input: torch.Tensor) -> torch.Tensor:
        """Both count."""
        update: torch.Tensor = self.back(nn.functional.silu(self.into(mlp_input)))
        return update - 0.1 * hidden


class Identity(Projector):
    """Nothing is added."""

    def forward(self, hidden: torch.Tensor, mlp_input: torch.Tensor) -> None:
        """Nothing."""
        return None


def make(gate: str, count: int, policy: str = "", width: int = 64) -> Skipper:
    """The first and the last of ``count`` layers with gate hard, the last two with gate mlp; policy and projector of another kind in each.

    ``policy``: ``hashed``, ``flip``, ``decodes`` or ``monotone``, for all layers.
    """
    adapter, layers = Adapter(width, 3), (0, count - 1) if gate == "hard" else (count - 2, count - 1)
    kinds: dict[str, Any] = {"hashed": Hashed(), "flip": Flip(), "decodes": Decodes()}
    if not policy:
        policies: Any = [Router(width, 1), Flip()] if gate == "hard" else [Flip(), Router(width, 2)]
        return Skipper(layers, policies, [adapter, Identity()] if gate == "hard" else [Identity(), adapter], gate)  # type: ignore[arg-type]
    policies = kinds.get(policy) or [Router(width, n + 1, monotone=True) for n in range(count)]
    return Skipper(range(count), policies, adapter, gate)  # type: ignore[arg-type]


@cache
def reference(name: str) -> Any:
    """Hugging Face's model of a family."""
    return build(name)


COMMON = {"inductor": False, "check": True, "kv_blocks": 64, "max_batch_size": 8}


@cache
def dense(name: str) -> Any:
    """The model compiled without a skipper."""
    return depthfx.compile(build(name), **COMMON)


@cache
def routed(name: str, gate: str, policy: str = "") -> tuple[Any, Skipper]:
    """A family's model compiled with a skipper of :func:`make`, and that skipper."""
    model = build(name)
    skipper = make(gate, model.config.num_hidden_layers, policy)
    return depthfx.compile(model, skipper=skipper, **COMMON), skipper


@contextmanager
def push(model: Any, skipper: Skipper, strength: float) -> Iterator[None]:
    """All policies of ``skipper``, with which ``model`` is compiled, lean by ``strength``."""
    _lean(model, skipper, strength)
    try:
        yield
    finally:
        _lean(model, skipper, 0.0)


def _lean(model: Any, skipper: Skipper, strength: float) -> None:
    for policy in skipper.policies:
        policy.push.fill_(strength)  # type: ignore[operator,union-attr]
    model.engine.follow_weights()  # as whoever adds requests does: tables of what follows from positions are filled anew
