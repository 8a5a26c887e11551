"""FlexiDepth checkpoints: the names and shapes of the published ones, a round trip, and every refusal."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from depthfx.errors import SkipperError
from depthfx.skippers import load_skipper, make_skipper, validate
from depthfx.skippers.flexidepth_checkpoint import save_flexidepth
from depthfx.skippers.model_shape import last_half, shape_of
from depthfx.skippers.plugins import POLICIES, PROJECTORS
from tests.skippers.toys import CPU, HIDDEN, LAYERS, config, model, rows

ROUTED = (4, 5, 6, 7)


def layer_shapes(hidden=HIDDEN, intermediate=192, factor=16):
    """Names below ``model.layers.{i}.`` and shapes, as published."""
    h, n, f = hidden, hidden // factor, intermediate // factor
    return {
        "router.router_enc.weight": (n, h), "router.router_norm.weight": (n,), "router.router_dec.weight": (h, n),
        "router.router_head.weight": (1, h), "router_proj.gate_proj.weight": (f, h), "router_proj.down_proj.weight": (f, h),
        "router_proj.up_proj.weight": (h, f),
    }  # fmt: skip


def tensors(layers=ROUTED, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    return {
        f"model.layers.{i}.{name}": (0.3 * torch.randn(*shape, generator=g)).to(dtype)
        for i in layers
        for name, shape in layer_shapes().items()
    }


def biases(layers=ROUTED, head_only=False):
    g = torch.Generator().manual_seed(1)
    return {
        f"model.layers.{i}.{name.replace('.weight', '.bias')}": torch.randn(shape[0], generator=g)
        for i in layers
        for name, shape in layer_shapes().items()
        if "norm" not in name and (not head_only or "head" in name)
    }


def base():
    """Some of the base model's own tensors, which lie in the same files."""
    return {"model.embed_tokens.weight": torch.zeros(5, HIDDEN), "model.layers.4.mlp.up_proj.weight": torch.zeros(192, HIDDEN),
            "model.layers.0.input_layernorm.weight": torch.zeros(HIDDEN), "lm_head.weight": torch.zeros(5, HIDDEN)}  # fmt: skip


def write(folder, state, shards=1, **changes):
    """A folder in Hugging Face's layout; ``changes`` of the config, None deletes a key."""
    folder.mkdir(exist_ok=True)
    stated = {
        "model_type": "ddllama", "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": 192, "rms_norm_eps": 1e-5,
        "routing_layers": list(ROUTED), "router_reduction_factor": 16, "proj_reduction_factor": 16, **changes,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({k: v for k, v in stated.items() if v is not None}))
    if shards == 1:
        save_file(state, folder / "model.safetensors")
        return folder
    places = {}
    for s in range(shards):
        file = f"model-{s + 1:05}-of-{shards:05}.safetensors"
        part = {name: t for k, (name, t) in enumerate(state.items()) if k % shards == s}
        save_file(part, folder / file)
        places.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def check_loaded(skipper, state, dtype=torch.float32):
    assert skipper.layers == ROUTED
    for i, router, adapter in zip(skipper.layers, skipper.policies, skipper.projectors, strict=True):
        own = {f"router.{k}": v for k, v in router.state_dict().items()} | {f"router_proj.{k}": v for k, v in adapter.state_dict().items()}
        there = {k.removeprefix(f"model.layers.{i}."): v for k, v in state.items() if k.startswith(f"model.layers.{i}.router")}
        assert own.keys() == there.keys()
        for name, tensor in own.items():
            assert tensor.dtype is dtype and torch.equal(tensor, there[name].to(dtype))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(("stored", "dtype"), [(torch.float32, torch.float32), (torch.bfloat16, torch.float16)])
def test_folder(tmp_path, shards, stored, dtype):
    state = tensors(dtype=stored)
    skipper = load_skipper(write(tmp_path, {**base(), **state}, shards), model(dtype))
    assert (skipper.gate, skipper.name) == ("mlp", "flexidepth")
    check_loaded(skipper, state, dtype)
    validate(skipper, HIDDEN, LAYERS, dtype, CPU)


def test_lone_file(tmp_path):
    state = tensors()
    save_file({**state, **base()}, tmp_path / "delta.safetensors")
    with pytest.raises(SkipperError, match=r"does not say its gate mode; give gate_mode='released'.*'ste_hard'"):
        load_skipper(tmp_path / "delta.safetensors", model())
    for mode, gate in (("released", "mlp"), ("ste_hard", "hard")):
        skipper = load_skipper(str(tmp_path / "delta.safetensors"), config(), mode)
        assert skipper.gate == gate
        check_loaded(skipper, state)


@pytest.mark.parametrize(("kind", "stated", "given", "gate"), [
    ("ddllama", None, None, "mlp"), ("ddllama", "ste_hard", None, "hard"), ("ddqwen3", "ste_hard", None, "hard"),
    ("ddqwen3", "released", "released", "mlp"), ("ddqwen3", None, "ste_hard", "hard"),
])  # fmt: skip
def test_gate_mode(tmp_path, kind, stated, given, gate):
    folder = write(tmp_path, tensors(), model_type=kind, router_gate_mode=stated)
    assert load_skipper(folder, model(model_type=kind.removeprefix("dd")), given).gate == gate


def test_biases(tmp_path):
    state = {**tensors(), **biases()}
    skipper = load_skipper(write(tmp_path / "all", state, mlp_bias=True), model())
    check_loaded(skipper, state)
    plain = load_skipper(write(tmp_path / "none", tensors()), model())
    assert not torch.equal(skipper.policies[0](rows()).weight, plain.policies[0](rows()).weight)
    state = {**tensors(), **biases(head_only=True)}
    check_loaded(load_skipper(write(tmp_path / "head", state, router_head_bias_init=0.5), model()), state)
    for name, state in (("six", {**tensors(), **biases()}), ("one", {**tensors(), **biases(head_only=True)})):
        save_file(state, tmp_path / f"{name}.safetensors")
        check_loaded(load_skipper(tmp_path / f"{name}.safetensors", model(), "released"), state)
    with pytest.raises(SkipperError, match=r"model.layers.4.router.router_enc.bias is missing; expected \[4\]"):
        load_skipper(write(tmp_path / "bare", tensors(), mlp_bias=True), model())
    with pytest.raises(SkipperError, match=r"router_head.bias is not expected; a bias needs mlp_bias or router_head_bias_init"):
        load_skipper(write(tmp_path / "extra", {**tensors(), **biases(head_only=True)}), model())


def test_layers_come_from_the_names_without_a_list(tmp_path):
    skipper = load_skipper(write(tmp_path, tensors(layers=(5, 6, 7)), routing_layers=None), model())
    assert skipper.layers == (5, 6, 7)
    listed = load_skipper(write(tmp_path / "listed", tensors(layers=(2, 7)), routing_layers=[7, 2]), model())
    assert listed.layers == (2, 7)


def test_factors_and_eps(tmp_path):
    skipper = make_skipper(model(rms_norm_eps=1e-3), "flexidepth", "adapter", gate="mlp", reduction=8, proj_reduction=4)
    save_flexidepth(skipper, tmp_path, model())
    stated = json.loads((tmp_path / "config.json").read_text())
    assert (stated["router_reduction_factor"], stated["proj_reduction_factor"], stated["rms_norm_eps"]) == (8, 4, 1e-3)
    loaded = load_skipper(tmp_path, model(rms_norm_eps=1e-6))
    assert loaded.policies[0].router_norm.eps == 1e-3 and loaded.projectors[0].gate_proj.weight.shape == (48, HIDDEN)


@pytest.mark.parametrize("gate", ["mlp", "hard"])
@pytest.mark.parametrize("bias", ["none", "head", "all"])
def test_round_trip(tmp_path, gate, bias):
    state = {**tensors(), **({} if bias == "none" else biases(head_only=bias == "head"))}
    flags = {"mlp_bias": bias == "all", "router_head_bias_init": 0.5 if bias == "head" else None}
    first = load_skipper(write(tmp_path / "a", state, router_gate_mode="released" if gate == "mlp" else "ste_hard", **flags), model())
    save_flexidepth(first, tmp_path / "b", model())
    assert set(load_file(tmp_path / "b" / "model.safetensors")) == set(state)
    second = load_skipper(tmp_path / "b", model())
    assert (second.layers, second.gate, second.name) == (first.layers, gate, "flexidepth")
    check_loaded(second, state)
    for a, b in zip(first.policies, second.policies):
        assert torch.equal(a(rows()).weight, b(rows()).weight)


def test_only_flexidepth_is_saved(tmp_path):
    with pytest.raises(
        SkipperError, match="layer 4 has RandomSkip and Identity; only policy flexidepth with projector adapter can be saved"
    ):
        save_flexidepth(make_skipper(model()), tmp_path, model())


@pytest.mark.parametrize(("hidden", "intermediate", "count", "kind", "expected"), [
    (4096, 14336, 32, "llama", {"router_enc": (256, 4096), "router_dec": (4096, 256), "gate_proj": (896, 4096), "up_proj": (4096, 896)}),
    (4096, 12288, 36, "qwen3", {"router_enc": (256, 4096), "router_head": (1, 4096), "down_proj": (768, 4096), "up_proj": (4096, 768)}),
    (2560, 9728, 36, "qwen3", {"router_norm": (160,), "router_dec": (2560, 160), "gate_proj": (608, 2560), "up_proj": (2560, 608)}),
])  # fmt: skip
def test_published_shapes(hidden, intermediate, count, kind, expected):
    shape = shape_of(model(torch.float16, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=count, model_type=kind))
    assert last_half(shape) == tuple(range(count // 2, count))
    with torch.device("meta"):
        router = POLICIES.get("flexidepth").make(shape, (count - 1,))[0]
        adapter = PROJECTORS.get("adapter").make(shape, (count - 1,))[0]
    both = {**dict(router.named_parameters()), **dict(adapter.named_parameters())}
    shapes = {name.removesuffix(".weight"): tuple(t.shape) for name, t in both.items()}
    assert shapes.items() >= expected.items()
    names = {f"router.{n}" for n, _ in router.named_parameters()} | {f"router_proj.{n}" for n, _ in adapter.named_parameters()}
    assert names == set(layer_shapes())


def test_a_checkpoint_of_published_size_loads(tmp_path):
    """Llama-3-8B's own widths, one routed layer of two: 25 MiB on disk."""
    g = torch.Generator().manual_seed(0)
    state = {
        f"model.layers.1.{name}": torch.randn(*size, generator=g, dtype=torch.float32).to(torch.bfloat16)
        for name, size in layer_shapes(4096, 14336).items()
    }
    stated = {"num_hidden_layers": 2, "hidden_size": 4096, "intermediate_size": 14336, "routing_layers": [1]}
    wide = model(torch.float16, hidden_size=4096, intermediate_size=14336, num_hidden_layers=2)
    skipper = load_skipper(write(tmp_path, state, **stated), wide)
    assert skipper.layers == (1,)
    loaded = {**skipper.policies[0].state_dict(prefix="router."), **skipper.projectors[0].state_dict(prefix="router_proj.")}
    assert {f"model.layers.1.{name}" for name in loaded} == set(state)
    for name, tensor in loaded.items():
        assert torch.equal(tensor, state[f"model.layers.1.{name}"].to(torch.float16)), name


# ---- Refusals


def without(name):
    return {k: v for k, v in tensors().items() if k != name}


def changed(name, tensor):
    return {**tensors(), name: tensor}


ENC = "model.layers.5.router.router_enc.weight"
UP = "model.layers.5.router_proj.up_proj.weight"


@pytest.mark.parametrize(("state", "reason"), [
    (without(ENC), rf"{ENC} is missing; expected \[4, 64\]"),
    (without(UP), rf"{UP} is missing; expected \[64, 12\]"),
    (changed(ENC, torch.zeros(8, 64)), rf"{ENC} has shape \[8, 64\]; expected \[4, 64\]"),
    (changed(UP, torch.zeros(12, 64)), rf"{UP} has shape \[12, 64\]; expected \[64, 12\]"),
    (changed(ENC, torch.zeros(4, 64, dtype=torch.int8)), rf"{ENC} is torch.int8; expected torch.float32"),
    (changed(ENC, torch.zeros(4, 64, dtype=torch.float8_e4m3fn)), rf"{ENC} is torch.float8_e4m3fn; expected"),
    (changed(ENC, torch.full((4, 64), float("nan"))), rf"{ENC} is not finite in torch.float16"),
    (changed(ENC, torch.full((4, 64), 1e6)), rf"{ENC} is not finite in torch.float16 \(found torch.float32\)"),
    (changed("model.layers.5.router.router_gate.weight", torch.zeros(1)), "model.layers.5.router.router_gate.weight is not expected"),
    (tensors((4, 5, 7)), r"the layers \[6\] have no router tensors; found \[4, 5, 7\], expected \[4, 5, 6, 7\]"),
    (tensors((3, 4, 5, 6, 7)), r"the layers \[3\] have router tensors but are not in routing_layers"),
    (tensors((4, 5, 6, 7, 8)), r"routed layers \[8\] are none of the model's 8 layers"),
    (base(), "no tensor named model.layers.N.router"),
])  # fmt: skip
def test_tensors_are_refused(tmp_path, state, reason):
    with pytest.raises(SkipperError, match=reason):
        load_skipper(write(tmp_path, state), model(torch.float16))


@pytest.mark.parametrize(("changes", "reason"), [
    ({"model_type": "ddqwen3_moe"}, "model_type 'ddqwen3_moe' is not supported .*experts.*allowed: ddllama, ddqwen3, flexidepth"),
    ({"model_type": "llama"}, "model_type 'llama' is not supported"),
    ({"model_type": None}, "model_type None is not supported"),
    ({"model_type": "ddqwen3", "router_gate_mode": "released"}, "is a skipper for qwen3, but the model is llama"),
    ({"model_type": "flexidepth", "base_model_type": "gpt_neox"}, "is a skipper for gpt_neox, but the model is llama"),
    ({"hidden_size": 128}, "hidden_size is 128, but the model has 64"),
    ({"intermediate_size": 128}, "intermediate_size is 128, but the model has 192"),
    ({"num_hidden_layers": 9}, "num_hidden_layers is 9, but the model has 8"),
    ({"router_gate_mode": "soft"}, "gate mode 'soft' is not known; allowed: released, ste_hard"),
    ({"router_force_mode": "run"}, "router_force_mode 'run' switches the router off; set it to dynamic, or make policy force_run"),
    ({"routing_layers": []}, r"routing_layers is \[\]; expected a list of layer indices"),
    ({"routing_layers": "4-7"}, "routing_layers is '4-7'; expected a list"),
    ({"routing_layers": [4, 5, 6, 7, 11]}, r"routed layers \[11\] are none of the model's 8 layers"),
    ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x'; expected a number above 0 and below 1, as 1e-5"),
    ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0; expected a number above 0"),
    ({"router_reduction_factor": 0}, "router_reduction_factor is 0; expected an integer of at least 1"),
    ({"router_reduction_factor": 8}, r"model.layers.4.router.router_enc.weight has shape \[4, 64\]; expected \[8, 64\]"),
    ({"proj_reduction_factor": 8}, r"model.layers.4.router_proj.gate_proj.weight has shape \[12, 64\]; expected \[24, 64\]"),
])  # fmt: skip
def test_config_is_refused(tmp_path, changes, reason):
    with pytest.raises(SkipperError, match=reason):
        load_skipper(write(tmp_path, tensors(), **changes), model())


def test_models_with_other_norms_are_refused():
    with pytest.raises(SkipperError, match="the model's rms_norm_eps is 'x'; expected a number above 0"):
        shape_of(model(rms_norm_eps="x"))


def test_gate_mode_is_refused(tmp_path):
    folder = write(tmp_path, tensors(), router_gate_mode="released")
    with pytest.raises(SkipperError, match=r"its gate mode is released, not ste_hard: .*silently wrong"):
        load_skipper(folder, model(), "ste_hard")
    with pytest.raises(SkipperError, match="gate mode 'best' is not known"):
        load_skipper(folder, model(), "best")
    with pytest.raises(SkipperError, match="does not say its gate mode"):
        load_skipper(write(tmp_path / "qwen", tensors(), model_type="ddqwen3"), model(model_type="qwen3"))


def test_files_are_refused(tmp_path):
    with pytest.raises(SkipperError, match=r"router.pt does not exist; give a skipper's folder"):
        load_skipper(tmp_path / "router.pt", model())
    (tmp_path / "router.pt").touch()
    with pytest.raises(SkipperError, match=r"neither a folder nor a .safetensors file"):
        load_skipper(tmp_path / "router.pt", model())
    with pytest.raises(SkipperError, match="missing or cannot be read"):
        load_skipper(tmp_path / "none.safetensors", model())
    (tmp_path / "cut.safetensors").write_bytes(b"123")
    with pytest.raises(SkipperError, match="cut off or is no safetensors file"):
        load_skipper(tmp_path / "cut.safetensors", model())
    with pytest.raises(SkipperError, match=r"holds neither model.safetensors nor"):
        load_skipper(tmp_path, model())
    folder = write(tmp_path / "a", tensors(), shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(SkipperError, match=r"model-00002-of-00002.safetensors is missing"):
        load_skipper(folder, model())
    folder = write(tmp_path / "b", tensors())
    (folder / "config.json").unlink()
    with pytest.raises(SkipperError, match=r"config.json cannot be read as JSON"):
        load_skipper(folder, model())
    save_file(tensors((4, 6)), tmp_path / "gap.safetensors")
    with pytest.raises(SkipperError, match=r"the layers \[5\] have no router tensors"):
        load_skipper(tmp_path / "gap.safetensors", model(), "released")
