"""The contract of a skipper: what a policy sees of the rows of a layer, what it decides, and what a skipped row gets instead.

A skipper is a policy and a projector for each routed layer. Both are ordinary modules that are traced into the compiled step, so they
compute with tensors alone: no host read, no branch on a value, no state that changes. Letters: T rows of a step, H width of the hidden
state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from depthfx.errors import SkipperError

# Actions of a row in a routed layer. PROJECT_ONLY: the layer's K and V are written, attention and MLP are left out (paper vSkipper, 3.1).
PROJECT_ONLY, RUN = 0, 1
ACTIONS = (PROJECT_ONLY, RUN)

# What a decision may depend on, from least to most; `token` allows everything.
Scope = Literal["static", "request", "phase", "token"]
# hard: a RUN row gets the layer as it is, a skipped one its projector's update.
# mlp: a RUN row's MLP branch is multiplied by the weight w, a skipped row's update by 1 - w (FlexiDepth as released).
Gate = Literal["hard", "mlp"]


@dataclass(frozen=True)
class Rows:
    """The rows of one routed layer, in the order of the step. Padding rows have position -1; what is decided for them is ignored."""

    hidden: torch.Tensor  # [T, H], the layer's input
    normed: torch.Tensor  # [T, H], what the layer's key and value projections read (after its input norm, where it has one)
    request_ids: torch.Tensor  # [T] int64, a number of the row's request that is the same in every step
    positions: torch.Tensor  # [T] int64, place of the token in its request
    is_prompt: torch.Tensor  # [T] bool, the row is a token of a prompt (else of a decode)
    ran: torch.Tensor  # [T] bool, the action of the row in the routed layer before was RUN (True in the first)
    place: int  # of this layer among the routed ones, from 0
    num_places: int  # how many layers are routed


@dataclass(frozen=True)
class Decision:
    """What a policy says of one layer's rows."""

    actions: torch.Tensor  # [T] bool or integer, each RUN or PROJECT_ONLY
    weight: torch.Tensor | None = None  # [T] in [0, 1], for the gate `mlp`


class Policy(nn.Module):
    """Decides for each row of one routed layer. Subclasses implement ``forward(rows: Rows) -> Decision``.

    ``scope`` says what the decision depends on at most, ``monotone`` that a row once skipped stays skipped in later layers (early exit);
    the compiled step enforces the second.
    """

    scope: Scope = "token"
    monotone: bool = False


class Projector(nn.Module):
    """What is added to a skipped row's hidden state in one routed layer: ``forward(hidden, mlp_input) -> update``, all ``[T, H]``.

    ``mlp_input`` is what the layer's MLP would read if its attention gave nothing. ``forward`` may return None where nothing is added.
    """


class Skipper(nn.Module):
    """Policies and projectors of the routed layers, and how weights enter.

    ``layers`` are indices of decoder layers, rising; ``policies`` and ``projectors`` hold one module for each (a single module serves all).
    Raises :class:`SkipperError`.
    """

    def __init__(
        self, layers: Iterable[int], policies: Policy | Sequence[Policy], projectors: Projector | Sequence[Projector], gate: Gate = "hard",
        name: str = "custom",
    ) -> None:  # fmt: skip
        super().__init__()
        self.layers = tuple(layers)
        self.gate, self.name = gate, name
        if any(type(i) is not int or i < 0 for i in self.layers) or any(a >= b for a, b in zip(self.layers, self.layers[1:])):
            raise SkipperError(f"routed layers {self.layers} are not allowed; give indices of decoder layers, from 0, rising")
        if not self.layers:
            raise SkipperError("a skipper that routes no layer is not allowed; name at least one decoder layer, or leave the skipper out")
        if gate not in get_args(Gate):
            raise SkipperError(f"gate={gate!r} is not known; allowed: {', '.join(get_args(Gate))}")
        self.policies = nn.ModuleList(_one_each(policies, Policy, "policies", len(self.layers)))
        self.projectors = nn.ModuleList(_one_each(projectors, Projector, "projectors", len(self.layers)))
        for policy in self.policies:
            if policy.scope not in get_args(Scope):
                raise SkipperError(f"{type(policy).__name__}.scope={policy.scope!r} is not known; allowed: {', '.join(get_args(Scope))}")


def _one_each(given: Any, kind: type, what: str, count: int) -> list[Any]:
    modules = [given] * count if isinstance(given, kind) else list(given)
    for module in modules:
        if not isinstance(module, kind):
            raise SkipperError(f"{what}: {type(module).__name__} is no {kind.__name__}; derive it from depthfx.contracts.{kind.__name__}")
    if len(modules) != count:
        raise SkipperError(f"{len(modules)} {what} do not fit {count} routed layers; give one for each, or one for all")
    return modules
