"""Making a skipper by the names of its policy and projector, and loading one from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from depthfx.contracts import Gate, Policy, Projector, Skipper
from depthfx.errors import SkipperError
from depthfx.skippers.flexidepth_checkpoint import load_flexidepth
from depthfx.skippers.model_shape import check_layers, last_half, move_to, shape_of
from depthfx.skippers.plugins import POLICIES, PROJECTORS, options_of
from depthfx.skippers.validate import check_traces


def make_skipper(
    model_or_config: Any, policy: str | Policy = "random_skip", projector: str | Projector = "identity",
    layers: Iterable[int] | None = None, gate: Gate = "hard", **options: Any,
) -> Skipper:  # fmt: skip
    """A skipper for a Hugging Face model (or its config), in the model's dtype and on its device.

    ``policy`` and ``projector`` are registered names or modules of one's own, which then serve all layers. ``layers`` are indices of decoder
    layers; None leaves them to the policy, mostly the last half. ``options`` go to those of the two that know their name. Trained parts start
    with random weights. Raises :class:`SkipperError` for what does not fit, and :class:`RegistryError` for an unknown name.
    """
    shape = shape_of(model_or_config)
    deciding = POLICIES.get(policy) if isinstance(policy, str) else None
    adding = PROJECTORS.get(projector) if isinstance(projector, str) else None
    own = [options_of(spec) if spec else set() for spec in (deciding, adding)]
    strangers = sorted(set(options) - own[0] - own[1])
    if strangers:
        raise SkipperError(f"options {strangers} are not known; allowed here: {sorted(own[0] | own[1]) or 'none'}")
    for_policy, for_projector = ({k: v for k, v in options.items() if k in names} for names in own)
    if deciding and gate not in deciding.gates:
        raise SkipperError(f"policy {deciding.name!r} cannot be used with gate={gate!r}; allowed: {', '.join(deciding.gates)}")
    if layers is None:
        routed = deciding.default_layers(shape, **for_policy) if deciding else last_half(shape)
    else:
        routed = tuple(layers)
    policies = deciding.make(shape, routed, **for_policy) if deciding else policy
    projectors = adding.make(shape, routed, **for_projector) if adding else projector
    name = f"{policy if deciding else type(policy).__name__}+{projector if adding else type(projector).__name__}"
    skipper = Skipper(routed, policies, projectors, gate, name)  # type: ignore[arg-type]
    check_layers(skipper.layers, shape.num_layers)
    move_to(skipper, shape)
    check_traces(skipper, shape.hidden_size, shape.dtype, shape.device)
    return skipper


def load_skipper(path: str | Path, model: Any, gate_mode: str | None = None) -> Skipper:
    """The FlexiDepth skipper of a checkpoint, in the dtype and on the device of ``model`` (a Hugging Face model or its config).

    ``path`` is a folder in Hugging Face's layout or one safetensors file. ``gate_mode`` (released or ste_hard) is needed where no config
    states it. Raises :class:`SkipperError` for anything that is wrong with the checkpoint or does not fit the model, other weights than those
    it was trained on among it (where the checkpoint says which).
    """
    shape = shape_of(model)
    skipper = move_to(load_flexidepth(Path(path), shape, gate_mode, model), shape)
    check_traces(skipper, shape.hidden_size, shape.dtype, shape.device)
    return skipper
