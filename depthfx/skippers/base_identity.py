"""Whether a model is the one that a skipper was trained on: hashes over a sample of all its weights.

64 evenly spaced elements of each weight count, with the weight's name and shape, as they are and rounded to BF16, to FP16, and to one after
the other; one equal hash is enough. So a base that is loaded in another dtype, or nested (which keeps of BF16 what FP16 holds), is known.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from depthfx.lowering.nested_linear import NestedLinear

_SAMPLES = 64
_ROUNDINGS = {
    "float32": (torch.float32,),
    "bfloat16": (torch.bfloat16,),
    "float16": (torch.float16,),
    "bfloat16, float16": (torch.bfloat16, torch.float16),
}


def base_identity(model: Any) -> dict[str, str] | None:
    """``dtype`` of the model and a hash for each rounding; None for a config alone, or for weights without values."""
    if not isinstance(model, nn.Module):
        return None
    found = {name: hashlib.sha256() for name in _ROUNDINGS}
    samples: list[torch.Tensor] = []
    for name, weight in sorted(_weights(model).items()):
        if weight.is_meta:
            return None
        for digest in found.values():
            digest.update(f"{name} {tuple(weight.shape)};".encode())
        places = torch.linspace(0, weight.numel() - 1, min(_SAMPLES, weight.numel()), dtype=torch.float64).long()
        samples.append(weight.detach().flatten()[places.to(weight.device)].float())
    if not samples:
        return None
    values = torch.cat([s.to(samples[0].device) for s in samples]).cpu()
    for name, dtypes in _ROUNDINGS.items():
        rounded = values
        for dtype in dtypes:
            rounded = rounded.to(dtype)
        found[name].update(rounded.float().numpy().tobytes())
    return {
        "dtype": str(getattr(model, "dtype", None)).removeprefix("torch."),
        **{name: digest.hexdigest() for name, digest in found.items()},
    }


def is_same_base(stored: Mapping[str, str], model: Any) -> bool:
    """Whether ``model`` has the weights of which ``stored`` is the identity; True where either cannot tell."""
    mine = base_identity(model)
    if mine is None:
        return True
    return any(mine[name] == stored.get(name) for name in _ROUNDINGS)


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for name, module in model.named_modules():
        if isinstance(module, NestedLinear):
            found[f"{name}.weight"] = module.weight
    return found
