"""What a skipper has to know of the model it is for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from depthfx.contracts import Skipper
from depthfx.errors import SkipperError


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder, and where and in what dtype its weights are."""

    num_layers: int
    hidden_size: int
    intermediate_size: int | None  # width of the MLP; None where the config names none
    norm_eps: float  # of the model's norms
    dtype: torch.dtype
    device: torch.device
    model_type: str


def shape_of(model_or_config: Any) -> ModelShape:
    """The shape of a Hugging Face model or of its config alone (then for the CPU, in the config's dtype or FP32).

    Raises :class:`SkipperError` where the config does not name what every decoder has.
    """
    config = getattr(model_or_config, "config", model_or_config)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    sizes: dict[str, Any] = {name: getattr(config, name, None) for name in ("num_hidden_layers", "hidden_size")}
    for name, found in sizes.items():
        if type(found) is not int or found < 1:
            raise SkipperError(
                f"{type(model_or_config).__name__} has no config with {name} (found {found!r}); give a Hugging Face decoder or its config"
            )
    eps = {n: e for n in ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps") if (e := getattr(config, n, None))}
    dtype, device = getattr(model_or_config, "dtype", None), getattr(model_or_config, "device", None)
    return ModelShape(
        num_layers=sizes["num_hidden_layers"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=getattr(config, "intermediate_size", None),
        norm_eps=next((check_eps(f"the model's {name}", found) for name, found in eps.items()), 1e-5),
        dtype=dtype if isinstance(dtype, torch.dtype) else torch.float32,
        device=torch.device(device) if device is not None else torch.device("cpu"),
        model_type=getattr(config, "model_type", ""),
    )


def last_half(shape: ModelShape) -> tuple[int, ...]:
    """Indices of the decoder layers of the last half; of 3 layers, the last two."""
    return tuple(range(shape.num_layers // 2, shape.num_layers))


def check_eps(name: str, value: Any) -> float:
    """``value`` as a number, where a norm may have it; else :class:`SkipperError`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
        raise SkipperError(f"{name} is {value!r}; expected a number above 0 and below 1, as 1e-5")
    return float(value)


def check_layers(layers: tuple[int, ...], num_layers: int) -> None:
    """Raises :class:`SkipperError` where a routed layer is none of the model's ``num_layers``."""
    outside = [i for i in layers if not 0 <= i < num_layers]
    if outside:
        raise SkipperError(f"routed layers {outside} are none of the model's {num_layers} layers; allowed: 0 to {num_layers - 1}")


def move_to(skipper: Skipper, shape: ModelShape) -> Skipper:
    """``skipper`` in evaluation mode, its floating tensors in the model's dtype, all on the model's device."""
    return skipper.to(device=shape.device, dtype=shape.dtype).eval()
