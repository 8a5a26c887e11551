"""What a policy or a projector must state about itself, and the registries that find them by folder."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from depthfx.contracts import Policy, Projector
from depthfx.registry import Registry
from depthfx.skippers.model_shape import ModelShape, last_half


def _default_layers(shape: ModelShape, **options: Any) -> tuple[int, ...]:
    return last_half(shape)


@dataclass(frozen=True)
class PolicySpec:
    """One policy: how to make it for the routed ``layers`` of a model, and on which options it is tested.

    ``make(shape, layers, *, option=default, ...)`` returns one module for each layer, or one that serves all; ``gates`` are the gates
    under which it can be used (`mlp` needs a weight); ``default_layers(shape, **options)`` are routed where the user names none.
    """

    name: str
    description: str
    make: Callable[..., Policy | list[Policy]]
    cases: tuple[dict[str, Any], ...] = ({},)
    gates: tuple[str, ...] = ("hard",)
    default_layers: Callable[..., tuple[int, ...]] = _default_layers


@dataclass(frozen=True)
class ProjectorSpec:
    """One projector; ``make`` and ``cases`` as in :class:`PolicySpec`."""

    name: str
    description: str
    make: Callable[..., Projector | list[Projector]]
    cases: tuple[dict[str, Any], ...] = ({},)


POLICIES: Registry[PolicySpec] = Registry("policy", "depthfx.skippers.policies")
PROJECTORS: Registry[ProjectorSpec] = Registry("projector", "depthfx.skippers.projectors")


def register_policy(spec: PolicySpec) -> PolicySpec:
    """Make ``spec`` known by its name; a second use of a name raises :class:`depthfx.errors.RegistryError`."""
    return POLICIES.add(spec.name, spec)


def register_projector(spec: ProjectorSpec) -> ProjectorSpec:
    """Make ``spec`` known by its name; a second use of a name raises :class:`depthfx.errors.RegistryError`."""
    return PROJECTORS.add(spec.name, spec)


def options_of(spec: PolicySpec | ProjectorSpec) -> set[str]:
    """Names of the options that ``spec.make`` takes: its keyword-only arguments."""
    return {p.name for p in inspect.signature(spec.make).parameters.values() if p.kind is p.KEYWORD_ONLY}


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Weights drawn inside depend on ``seed`` alone, and the caller's random numbers go on as if nothing had been drawn."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
