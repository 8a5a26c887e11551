"""Watch over a compiled model: what was computed from old weights is dropped, and changes that the engine cannot follow are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch

from depthfx.errors import UnsupportedOptionError

_version = attrgetter("_version")


class WeightWatch:
    """Compares tensors, modules and forward hooks of a model and its skipper with those that it was compiled with.

    It sees what torch counts (``copy_``, an optimiser's step, ``load_state_dict``), not writes through ``.data``. ``refills`` compute anew
    what programs derive from the tensors. A look takes some 0.1 ms for a model of 32 layers.
    """

    def __init__(self, model: torch.nn.Module, refills: Sequence[Callable[[], None]] = (), skipper: torch.nn.Module | None = None) -> None:
        self._refills = refills
        modules = list(model.named_modules())
        if skipper is not None:
            modules += skipper.named_modules(prefix="skipper")
        # The dictionaries of the modules, not the model: it is freed at once when it is dropped.
        self._members = [(name, d) for name, m in modules for d in (m._parameters, m._buffers, m._modules) if d]
        self._hooks = [(name, d) for name, m in modules for d in (m._forward_pre_hooks, m._forward_hooks)]
        self._values, self._hook_tables = [d.values() for _, d in self._members], [d for _, d in self._hooks]
        self._compiled, self._compiled_hooks = _named(self._members), _changing(self._hooks)
        self._tensors = [t for t in self._compiled.values() if isinstance(t, torch.Tensor)]
        self._counted = [t for t in self._tensors if not t.is_inference()]  # those made in inference mode count nothing
        self._seen, self._versions = self._look(), list(map(_version, self._counted))

    def follow(self, react: Callable[[], None]) -> None:
        """Calls ``react`` where tensors were changed in place since the last call. Raises :class:`UnsupportedOptionError` naming a tensor or
        module that is not the one the model was compiled with, or a module whose hooks are not."""
        seen = self._look()
        if seen != self._seen:
            self._check_members()
            self._check_hooks()
            self._seen = seen
        versions = list(map(_version, self._counted))
        if versions != self._versions:
            react()  # if it raises, it is called again next time
            self._versions = versions

    def refill(self) -> None:
        """What programs derive from the tensors is computed anew, in place."""
        for refill in self._refills:
            refill()

    def _look(self) -> tuple[list[int], ...]:
        """Which objects the modules have, where the tensors are, and the numbers that torch gave the hooks."""
        objects = list(map(id, chain.from_iterable(self._values)))
        hooks = list(chain.from_iterable(filter(None, self._hook_tables)))
        return objects, list(map(torch.Tensor.data_ptr, self._tensors)), hooks

    def _check_members(self) -> None:
        now = _named(self._members)
        moved = {id(t) for t, before, after in zip(self._tensors, self._seen[1], self._look()[1], strict=True) if before != after}
        for name in sorted(now.keys() | self._compiled.keys()):
            found = now.get(name)
            if found is not self._compiled.get(name) or id(found) in moved:
                raise UnsupportedOptionError(
                    f"{name!r} was replaced, added or removed after depthfx.compile, and the engine computes with the old one: change weights and "
                    "buffers in place (torch.no_grad and copy_, or load_state_dict), or load the model again and compile it as it shall be"
                )

    def _check_hooks(self) -> None:
        now = _changing(self._hooks)
        for name in sorted(now.keys() | self._compiled_hooks.keys()):
            if now.get(name) != self._compiled_hooks.get(name):
                raise UnsupportedOptionError(
                    f"forward hooks of {name!r} were added or removed after depthfx.compile, and the engine, which calls no modules, does not see "
                    "that: undo it (remove() of what the registration returned), or load the model again and register them before it is compiled"
                )


def _named(members: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    return {f"{module}.{name}".lstrip("."): value for module, d in members for name, value in d.items()}


def _changing(hooks: Sequence[tuple[str, Mapping[int, Any]]]) -> dict[str, list[Any]]:
    """The hooks of each module that has any; not those with which Hugging Face records outputs, for they stay once they were asked for."""
    found: dict[str, list[Any]] = {}
    for name, d in hooks:
        found.setdefault(name, []).extend(
            hook for hook in d.values() if not str(getattr(hook, "__module__", "")).startswith("transformers.")
        )
    return {name: own for name, own in found.items() if own}
