"""Watch over the weights of a compiled model: what was computed from old ones is dropped, replaced ones are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from depthfx.errors import UnsupportedOptionError
from depthfx.lowering.nested_linear import nested_linears


class WeightWatch:
    """Compares the parameters of a model and all tensors of its skipper with what they were; ``on_change`` is called where some were changed in place.

    It sees what torch counts (``copy_``, an optimiser's step, ``load_state_dict``), not writes through ``.data``.
    """

    def __init__(self, model: torch.nn.Module, on_change: Sequence[Callable[[], None]], skipper: torch.nn.Module | None = None) -> None:
        self._on_change, self._skipper = on_change, skipper
        self._seen = _state(model, skipper)

    def follow(self, model: torch.nn.Module) -> None:
        """Raises :class:`UnsupportedOptionError` naming a weight that is not the one the model was compiled with."""
        now = _state(model, self._skipper)
        if now == self._seen:
            return
        for name in sorted(now.keys() | self._seen.keys()):
            if now.get(name, ())[:1] != self._seen.get(name, ())[:1]:
                raise UnsupportedOptionError(
                    f"weight {name!r} was replaced, added or removed after depthfx.compile, and the engine computes with the old ones: "
                    "change weights in place (torch.no_grad and copy_, or load_state_dict), or load the model again and compile it as it shall be"
                )
        for react in self._on_change:  # what raises is called again next time
            react()
        self._seen = now


def _state(model: torch.nn.Module, skipper: torch.nn.Module | None) -> dict[str, tuple[int, ...]]:
    """Address and count of changes of each parameter, nested weight and tensor of the skipper; tensors made in inference mode count nothing."""
    watched: dict[str, torch.Tensor] = dict(model.named_parameters())
    for path, module in nested_linears(model).items():
        parts = {"": module.upper, ".lower": module.lower, ".shift": module.shift}
        watched |= {f"{path}.weight{part}": tensor for part, tensor in parts.items() if tensor is not None}
    if skipper is not None:
        watched |= {f"skipper.{name}": tensor for name, tensor in (*skipper.named_parameters(), *skipper.named_buffers())}
    return {name: (t.data_ptr(), 0 if t.is_inference() else t._version) for name, t in watched.items()}
