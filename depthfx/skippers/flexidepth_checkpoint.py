"""FlexiDepth skippers in files: the tensors ``model.layers.{i}.router.*`` and ``.router_proj.*`` of each routed layer, and a config.

A folder in Hugging Face's layout may hold the base model's tensors as well; they are left alone. In its config count: ``model_type``,
the sizes, ``routing_layers`` (else the layers that have tensors), ``router_gate_mode``, ``router_reduction_factor`` and
``proj_reduction_factor`` (16 where absent), ``mlp_bias`` (all six linears have a bias), ``router_head_bias_init`` (the head has one) and
``base_identity`` (hashes of the base's weights, written here). ``training`` is a record for people.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

from depthfx.contracts import Skipper
from depthfx.errors import CheckpointError, SkipperError
from depthfx.lowering.tensor_files import SINGLE, TensorFiles, hf_files, open_file, read_json
from depthfx.skippers.base_identity import base_identity, is_same_base
from depthfx.skippers.model_shape import ModelShape, check_eps, check_layers, shape_of
from depthfx.skippers.policies.flexidepth import FlexiDepthRouter
from depthfx.skippers.projectors.adapter import Adapter

GATES = {"released": "mlp", "ste_hard": "hard"}
# Custom model type of a checkpoint -> model type of its base. `flexidepth` is written by `save_flexidepth`, for any base.
BASES = {"ddllama": "llama", "ddqwen3": "qwen3"}
SAVED = "flexidepth"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_NAME = re.compile(r"model\.layers\.(\d+)\.((?:router|router_proj)\..+)")


@dataclass(frozen=True)
class _Source:
    """Where tensors come from, and what the config says; ``config`` is None for a lone file."""

    path: Path
    files: TensorFiles
    config: dict[str, Any] | None
    found: dict[int, dict[str, str]] = field(default_factory=dict)  # layer -> name below the layer -> full name

    def say(self, key: str, default: Any) -> Any:
        value = (self.config or {}).get(key)
        return default if value is None else value


def load_flexidepth(path: Path, shape: ModelShape, gate_mode: str | None = None, model: Any = None) -> Skipper:
    """The skipper in ``path``, a folder or one safetensors file, in the model's dtype on its device; see :func:`load_skipper`."""
    source = _open(path)
    _check_config(source, shape)
    _check_base(source, model)
    mode = _gate_mode(source, gate_mode)
    layers = _layers(source, shape)
    eps = check_eps(f"{path}: rms_norm_eps", source.say("rms_norm_eps", shape.norm_eps))
    routers, adapters = zip(*(_load_layer(source, i, shape, eps) for i in layers))
    return Skipper(layers, routers, adapters, GATES[mode], SAVED)  # type: ignore[arg-type]


def stored_training(path: Path) -> tuple[dict[str, Any], torch.dtype]:
    """The record of training in ``path``'s config, empty where there is none, and the dtype of its first tensor."""
    source = _open(path)
    record = source.say("training", {})
    if not isinstance(record, dict):
        raise SkipperError(f"{path}: training is {record!r}; expected an object, or none")
    layer = min(source.found)
    return record, source.files.get(source.found[layer][min(source.found[layer])]).dtype


def check_flexidepth(skipper: Skipper) -> None:
    """Raises :class:`SkipperError` for a skipper of other parts than FlexiDepth's router and adapter, which no file can hold."""
    for i, router, adapter in zip(skipper.layers, skipper.policies, skipper.projectors, strict=True):
        if not isinstance(router, FlexiDepthRouter) or not isinstance(adapter, Adapter):
            raise SkipperError(
                f"layer {i} has {type(router).__name__} and {type(adapter).__name__}; only policy flexidepth with projector adapter can be saved"
            )


def save_flexidepth(skipper: Skipper, folder: str | Path, model: Any, training: Mapping[str, Any] | None = None) -> None:
    """Write ``skipper`` into ``folder`` (made if missing) under the names above: model.safetensors and config.json.

    ``model`` is the Hugging Face model (or its config) that the skipper is for; of a model the config keeps the weights' identity, by which
    another is refused. ``training`` is a record that JSON can hold. Raises :class:`SkipperError` where it is no FlexiDepth.
    """
    shape, folder = shape_of(model), Path(folder)
    check_flexidepth(skipper)
    tensors: dict[str, torch.Tensor] = {}
    for i, router, adapter in zip(skipper.layers, skipper.policies, skipper.projectors, strict=True):
        for prefix, module in (("router", router), ("router_proj", adapter)):
            for name, tensor in module.state_dict().items():
                tensors[f"model.layers.{i}.{prefix}.{name}"] = tensor.detach().cpu().contiguous().clone()
    router, adapter = skipper.policies[0], skipper.projectors[0]
    assert isinstance(router, FlexiDepthRouter) and isinstance(adapter, Adapter)
    all_biased = router.router_enc.bias is not None
    config = {
        "model_type": SAVED, "base_model_type": shape.model_type, "num_hidden_layers": shape.num_layers, "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size, "rms_norm_eps": router.router_norm.eps, "routing_layers": list(skipper.layers),
        "router_gate_mode": next(mode for mode, gate in GATES.items() if gate == skipper.gate),
        "router_reduction_factor": router.reduction, "proj_reduction_factor": adapter.reduction, "mlp_bias": all_biased,
    }  # fmt: skip
    if not all_biased and router.router_head.bias is not None:
        config["router_head_bias_init"] = 0.0
    known = {"base_identity": base_identity(model), "training": training}
    config.update({key: value for key, value in known.items() if value is not None})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SINGLE).write_bytes(save(tensors, metadata={"format": "pt"}))  # `save_file` would let nobody else read it
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def _open(path: Path) -> _Source:
    try:
        if path.is_dir():
            source = _Source(path, hf_files(path), read_json(path / "config.json"))
        elif path.suffix == ".safetensors":
            source = _Source(path, TensorFiles(path.parent, dict.fromkeys(open_file(path).keys(), path.name)), None)
        elif not path.exists():
            raise SkipperError(f"{path} does not exist; give a skipper's folder or .safetensors file")
        else:
            raise SkipperError(f"{path} is neither a folder nor a .safetensors file; save other files as safetensors first")
    except CheckpointError as error:
        raise SkipperError(str(error)) from error
    for name in source.files.places:
        if match := _NAME.fullmatch(name):
            source.found.setdefault(int(match.group(1)), {})[match.group(2)] = name
    if not source.found:
        raise SkipperError(f"{path} has no tensor named model.layers.N.router.* or .router_proj.*; give a FlexiDepth checkpoint")
    return source


def _check_config(source: _Source, shape: ModelShape) -> None:
    """Sizes and model type against the model's."""
    if source.config is None:
        return
    kind = source.say("model_type", None)
    if kind not in (*BASES, SAVED):
        reason = "its experts have no place in the adapter's contract" if kind == "ddqwen3_moe" else "that is no FlexiDepth checkpoint"
        raise SkipperError(f"{source.path}: model_type {kind!r} is not supported ({reason}); allowed: {', '.join((*BASES, SAVED))}")
    expected = {
        "num_hidden_layers": shape.num_layers, "hidden_size": shape.hidden_size, "intermediate_size": shape.intermediate_size,
    }  # fmt: skip
    for key, value in expected.items():
        if source.say(key, value) != value:
            raise SkipperError(
                f"{source.path}: {key} is {source.config[key]!r}, but the model has {value!r}; load the skipper of this model"
            )
    base = BASES.get(kind, source.say("base_model_type", shape.model_type))
    if shape.model_type != base:
        raise SkipperError(f"{source.path} is a skipper for {base}, but the model is {shape.model_type or 'of no known type'}")
    force = source.say("router_force_mode", "dynamic")
    if force != "dynamic":
        raise SkipperError(
            f"{source.path}: router_force_mode {force!r} switches the router off; set it to dynamic, or make policy force_{force}"
        )


def _check_base(source: _Source, model: Any) -> None:
    """The model's weights against the identity of those that the skipper was trained on, where both are known."""
    stored = source.say("base_identity", None)
    if stored is None:
        return
    if not isinstance(stored, dict) or any(not isinstance(v, str) for v in stored.values()):
        raise SkipperError(f"{source.path}: base_identity is {stored!r}; expected an object of hashes, or none")
    if not is_same_base(stored, model):
        raise SkipperError(
            f"{source.path} was trained on other weights than this model's (base_identity does not fit, by name, shape or value); load it for "
            "its own base model, or delete base_identity from config.json to use it all the same"
        )


def _gate_mode(source: _Source, given: str | None) -> str:
    """The mode by the config or by the caller. The original model type ddllama knows only one."""
    stated = source.say("router_gate_mode", "released" if source.say("model_type", None) == "ddllama" else None)
    for mode in (stated, given):
        if mode is not None and mode not in GATES:
            raise SkipperError(f"{source.path}: gate mode {mode!r} is not known; allowed: {', '.join(GATES)}")
    if stated and given and stated != given:
        raise SkipperError(
            f"{source.path}: its gate mode is {stated}, not {given}: other arithmetic than it was trained with is silently wrong"
        )
    if not stated and not given:
        raise SkipperError(
            f"{source.path} does not say its gate mode; give gate_mode='released' (w and 1 - w scale) or 'ste_hard' (w only decides)"
        )
    return str(stated or given)


def _layers(source: _Source, shape: ModelShape) -> tuple[int, ...]:
    found = tuple(sorted(source.found))
    named = source.say("routing_layers", None)
    if named is not None and (not isinstance(named, list) or not named or any(type(i) is not int for i in named)):
        raise SkipperError(f"{source.path}: routing_layers is {named!r}; expected a list of layer indices")
    layers = tuple(range(found[0], found[-1] + 1)) if named is None else tuple(sorted(named))
    check_layers(tuple(sorted({*layers, *found})), shape.num_layers)
    missing, extra = [i for i in layers if i not in found], [i for i in found if i not in layers]
    if missing:
        raise SkipperError(f"{source.path}: the layers {missing} have no router tensors; found {list(found)}, expected {list(layers)}")
    if extra:
        raise SkipperError(f"{source.path}: the layers {extra} have router tensors but are not in routing_layers {list(layers)}")
    return layers


def _load_layer(source: _Source, layer: int, shape: ModelShape, eps: float) -> tuple[FlexiDepthRouter, Adapter]:
    bias, head_bias = _biases(source, layer)
    if shape.intermediate_size is None:
        raise SkipperError(f"the config of {shape.model_type or 'the model'} has no intermediate_size, which the adapter divides")
    reductions = {key: source.say(key, 16) for key in ("router_reduction_factor", "proj_reduction_factor")}
    for key, value in reductions.items():
        if type(value) is not int or value < 1:
            raise SkipperError(f"{source.path}: {key} is {value!r}; expected an integer of at least 1")
    with torch.device("meta"):
        router = FlexiDepthRouter(shape.hidden_size, reductions["router_reduction_factor"], eps, bias, head_bias)
        adapter = Adapter(shape.hidden_size, shape.intermediate_size, reductions["proj_reduction_factor"], bias)
    expected = {f"{prefix}.{name}" for prefix, m in (("router", router), ("router_proj", adapter)) for name in m.state_dict()}
    strangers = sorted(set(source.found[layer]) - expected)
    if strangers:
        raise SkipperError(
            f"{source.path}: model.layers.{layer}.{strangers[0]} is not expected; a bias needs mlp_bias or router_head_bias_init in the config"
        )
    _fill(router, source, layer, "router", shape)
    _fill(adapter, source, layer, "router_proj", shape)
    return router, adapter


def _biases(source: _Source, layer: int) -> tuple[bool, bool]:
    """Whether all linears and whether the head has a bias: by the config, or for a lone file by what is there."""
    if source.config is not None:
        return bool(source.say("mlp_bias", False)), source.say("router_head_bias_init", None) is not None
    return "router.router_enc.bias" in source.found[layer], "router.router_head.bias" in source.found[layer]


def _fill(module: nn.Module, source: _Source, layer: int, prefix: str, shape: ModelShape) -> None:
    """Give the module, which is on the meta device, the tensors of the checkpoint."""
    state = {}
    for name, expected in module.state_dict().items():
        full = f"model.layers.{layer}.{prefix}.{name}"
        if f"{prefix}.{name}" not in source.found[layer]:
            raise SkipperError(f"{source.path}: {full} is missing; expected {list(expected.shape)}")
        try:
            tensor = source.files.get(full)
        except CheckpointError as error:
            raise SkipperError(str(error)) from error
        if tensor.shape != expected.shape:
            raise SkipperError(f"{source.path}: {full} has shape {list(tensor.shape)}; expected {list(expected.shape)}")
        if tensor.dtype not in DTYPES:
            raise SkipperError(f"{source.path}: {full} is {tensor.dtype}; expected {', '.join(map(str, DTYPES))}")
        state[name] = tensor.to(shape.device, shape.dtype)
        if not bool(state[name].isfinite().all()):
            raise SkipperError(f"{source.path}: {full} is not finite in {shape.dtype} (found {tensor.dtype}); expected finite numbers")
    module.load_state_dict(state, assign=True)
