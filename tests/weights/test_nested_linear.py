"""NestedLinear in Hugging Face models: the same logits, the same files, and what it refuses."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM

from depthfx.errors import UnsupportedModelError, UnsupportedOptionError
from depthfx.lowering import nest as nest_module
from depthfx.lowering.nested_linear import NestedLinear, linears_to_nest, nested_linears, plain_linears, swap_linear
from tests.weights.exact import check_bits, check_states, exact_model, logits

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
Q = "model.layers.0.self_attn.q_proj"


def swapped(family: str, dtype: torch.dtype = torch.float32, **changes):
    model = exact_model(family, dtype, **changes)
    for path in linears_to_nest(model):
        swap_linear(model, path)
    return model


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("family", "changes"), [("llama", {}), ("granite", {}), ("llama", {"tie_word_embeddings": True}), ("qwen2", {})])
def test_logits_and_state_are_those_of_the_original(family, changes, dtype):
    model, nested = exact_model(family, dtype, **changes), swapped(family, dtype, **changes)
    found = nested_linears(nested)
    assert len(found) == 7 * 3 and {m.format for m in found.values()} >= {"nested_e4m3", "nested_e4m3_scaled"}
    check_bits(logits(nested), logits(model))
    check_states(nested.state_dict(), model.state_dict())
    names = {name for name, _ in nested.named_parameters()}
    assert not any(f"{path}.weight" in names for path in found) and "model.embed_tokens.weight" in names
    assert ("model.layers.0.self_attn.q_proj.bias" in names) == (family == "qwen2")


def test_saves_and_loads_as_an_ordinary_model(tmp_path):
    nested = swapped("llama", torch.float16, tie_word_embeddings=True)
    nested.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto", attn_implementation="eager")
    check_states(loaded.state_dict(), exact_model("llama", torch.float16, tie_word_embeddings=True).state_dict())


def test_the_head_stays_unless_asked_for():
    model = exact_model("llama")
    assert "lm_head" not in linears_to_nest(model) and "lm_head" in linears_to_nest(model, head=True)
    tied = exact_model("llama", tie_word_embeddings=True)
    assert "lm_head" not in linears_to_nest(tied, head=True)
    with pytest.raises(UnsupportedModelError, match=r"'model.embed_tokens' is a torch.nn.*Embedding, which shares the weight of 'lm_head'"):
        swap_linear(tied, "lm_head")
    before = logits(model)
    swap_linear(model, "lm_head")
    check_bits(logits(model), before)


def test_the_old_weight_is_freed_and_reading_gives_a_protected_one():
    model = exact_model("llama")
    old = weakref.ref(model.get_submodule(Q).weight)
    module = swap_linear(model, Q)
    assert swap_linear(model, Q) is module is model.get_submodule(Q)
    gc.collect()
    assert old() is None
    with pytest.raises(RuntimeError, match=r"[Ii]nference"):
        module.weight.copy_(torch.ones_like(module.weight))
    for value in (torch.nn.Parameter(torch.ones(64, 64)), torch.ones(64, 64)):
        with pytest.raises(UnsupportedOptionError, match="load_state_dict"):
            module.weight = value
    with pytest.raises(UnsupportedOptionError, match="swap_linear"):
        module.reset_parameters()
    assert "in_features=64, out_features=64, bias=False, format=nested_e4m3_scaled" in repr(module)


def test_shared_weights_are_nested_once():
    model = torch.nn.Module()
    model.a, model.b = torch.nn.Linear(64, 8), torch.nn.Linear(64, 8)
    model.b.weight, model.c = model.a.weight, model.a
    biases = model.a.bias, model.b.bias
    swap_linear(model, "b")
    assert isinstance(model.a, NestedLinear) and model.c is model.a and model.b is not model.a
    assert model.a.upper.data_ptr() == model.b.upper.data_ptr()
    assert (model.a.bias, model.b.bias) == biases


def test_refused_modules():
    model = exact_model("llama")
    with pytest.raises(UnsupportedModelError, match=r"'model.norm' is a .*LlamaRMSNorm; only the weight of plain torch.nn.Linear"):
        swap_linear(model, "model.norm")
    model.get_submodule(Q).register_forward_hook(lambda *a: None)
    with pytest.raises(UnsupportedModelError, match="carries hooks"):
        swap_linear(model, Q)


def test_state_loads_in_place():
    source = exact_model("llama")
    target = swapped("llama")
    with torch.no_grad():
        for p in source.parameters():
            p.copy_(p.flip(0).neg())
    source.get_submodule(Q).weight.data.clamp_(-1, 1)  # e4m3 content for a module that is laid out for scaled rows
    addresses = {n: m.upper.data_ptr() for n, m in nested_linears(target).items()}
    assert target.load_state_dict(source.state_dict()).missing_keys == []
    assert addresses == {n: m.upper.data_ptr() for n, m in nested_linears(target).items()}
    assert target.get_submodule(Q).format == "nested_e4m3_scaled" and not target.get_submodule(Q).shift.any()
    check_states(target.state_dict(), source.state_dict())
    check_bits(logits(target), logits(source))


def test_state_that_does_not_fit_is_refused():
    target = swapped("llama")
    state = exact_model("llama").state_dict()
    name = "model.layers.1.mlp.up_proj.weight"
    state[name] = state[name].clone()
    state[name][0, 0] = 5.0
    with pytest.raises(
        RuntimeError, match=f"{name} needs the format nested_e4m3_scaled, .* laid out for nested_e4m3: load with assign=True"
    ):
        target.load_state_dict(state)
    target.load_state_dict(state, assign=True)
    check_bits(target.state_dict()[name], state[name])
    state[name] = torch.ones(3, 3)
    with pytest.raises(RuntimeError, match=f"size mismatch for {name}"):
        target.load_state_dict(state)
    del state[name]
    with pytest.raises(RuntimeError, match=f"Missing key.*{name}"):
        target.load_state_dict(state)
    state[name], state["extra"] = torch.zeros(96, 64), torch.ones(1)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*extra"):
        target.load_state_dict(state)


def test_dtype_and_copies_follow_the_model():
    model = swapped("llama", torch.float32)
    twin = copy.deepcopy(model).to(torch.bfloat16)
    assert twin.get_submodule(Q).weight.dtype is torch.bfloat16 and model.get_submodule(Q).weight.dtype is torch.float32
    assert twin.get_submodule(Q).upper.dtype is torch.uint8
    check_bits(logits(twin), logits(exact_model("llama", torch.bfloat16)))


def test_plain_linears_for_tracing():
    model = swapped("qwen2", torch.float16)
    original = exact_model("qwen2", torch.float16)
    with plain_linears(model):
        shapes = {n: (p.shape, p.dtype) for n, p in model.named_parameters()}
        assert shapes == {n: (p.shape, p.dtype) for n, p in original.named_parameters()}
        assert len({p.untyped_storage().data_ptr() for n, p in model.named_parameters() if "proj.weight" in n}) == 1
    assert len(nested_linears(model)) == 21
    check_bits(logits(model), logits(original))


def test_a_compiled_forward_does_not_unroll_slices(monkeypatch):
    monkeypatch.setitem(nest_module._SLICE, "cpu", 128)  # 96 slices of a weight
    linear = torch.nn.Linear(64, 192)
    nested = NestedLinear(nest_module.nest(linear.weight.half()), linear.bias, torch.float32)
    sizes = []

    def count(gm, inputs):
        sizes.append(len(gm.graph.nodes))
        return gm.forward

    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    torch._dynamo.reset()
    out = torch.compile(nested, backend=count, fullgraph=True)(x)
    assert torch.equal(out, nested(x)) and len(sizes) == 1 and sizes[0] < 200


def test_a_wider_format_takes_what_a_narrower_one_would():
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).half()
    wide = torch.full((16, 64), 65504.0, dtype=torch.float16)
    wide[0, 0] = 2.0**-24
    e5m2 = weight.clone()
    e5m2[0, 0], e5m2[0, 1] = 3.0, 2.0**-24
    for start, form in ((e5m2, "nested_e5m2"), (wide.clone(), "plain16")):
        module = NestedLinear(nest_module.nest(start), None, torch.float16)
        assert module.format == form
        module.load_state_dict({"weight": weight})
        assert module.format == form and torch.equal(module.weight, weight)
    module = NestedLinear(nest_module.nest(wide.clone()), None, torch.bfloat16)  # a float16 folder that reads as bfloat16
    module.load_state_dict({"weight": weight.bfloat16()})
    assert torch.equal(module.weight, weight.bfloat16())
    with pytest.raises(RuntimeError, match=r"plain16 in torch.bfloat16, and .* laid out for plain16 in torch.float16"):
        module.load_state_dict({"weight": torch.full((16, 64), 1e6).bfloat16()})
    module = NestedLinear(nest_module.nest(wide.float()), None, torch.float32)
    with pytest.raises(RuntimeError, match=r"weight cannot be nested: a float32 weight of 1e\+06"):
        module.load_state_dict({"weight": torch.full((16, 64), 1e6)})
