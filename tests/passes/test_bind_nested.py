"""Binding nested weights: what they become, what stays as it is, memory, saving, loading, the program cache."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM

import depthfx
from depthfx.errors import MemoryBudgetError, UnsupportedModelError, UnsupportedOptionError
from depthfx.lowering.nested_linear import linears_to_nest, nested_linears, swap_linear
from tests.families.harness import GREEDY, alone, left_padded, prompts
from tests.families.test_nested_families import exact

ROWS = prompts((14, 9), seed=3)


def fresh(model=None, **settings):
    options = {"inductor": False, "kv_blocks": 64, "max_batch_size": 8, "weights": "nested", **settings}
    return depthfx.compile(exact("llama") if model is None else model, **options)


def storage(tensor):
    return tensor.untyped_storage().data_ptr()


def test_parts_are_views_of_one_pair_and_the_16_bit_weights_are_gone():
    model = exact("llama")
    old = [weakref.ref(model.get_submodule(path).weight.untyped_storage()) for path in linears_to_nest(model)]
    held = model.model.layers[0].self_attn.q_proj.weight  # somebody keeps the parameter
    fresh(model)
    gc.collect()
    assert held.untyped_storage().nbytes() == 0
    assert all(ref() is None or ref().nbytes() == 0 for ref in old)
    attention, mlp = model.model.layers[1].self_attn, model.model.layers[1].mlp
    for parts in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
        for name in ("upper", "lower"):
            assert len({storage(getattr(p, name)) for p in parts}) == 1
    program = model.engine._runner.program.module
    bound = {storage(b) for b in program.weights.buffers()}
    assert all(storage(m.upper) in bound and storage(m.lower) in bound for m in nested_linears(model).values())


def scaled(model):
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[5] *= 64  # beyond E4M3, but a power of two takes it there
        model.model.layers[1].mlp.up_proj.weight[0, 0] = 3.0  # its neighbour gate_proj is joined with it
        model.model.layers[1].mlp.up_proj.weight[0, 1:] = 2.0**-24  # what halving would lose
    return model


def test_formats_are_chosen_at_binding_and_explained():
    model, plain = fresh(scaled(exact("llama"))), fresh(scaled(exact("llama")), weights="16bit")
    formats = {path.removeprefix("model.layers."): m.format for path, m in nested_linears(model).items()}
    assert formats["0.mlp.down_proj"] == "nested_e4m3_scaled" and formats["0.self_attn.q_proj"] == "nested_e4m3"
    assert formats["1.mlp.up_proj"] == formats["1.mlp.gate_proj"] == "nested_e5m2"
    text = model.explain()
    assert "layer 0: 3 x nested_e4m3, 1 x nested_e4m3_scaled" in text and "layer 1: 3 x nested_e4m3, 1 x nested_e5m2" in text
    assert "layer 2: 4 x nested_e4m3" in text and "MiB persistent" in text
    assert alone(model, ROWS) == alone(plain, ROWS)


def infinite(model):
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[3, 3] = 65504.0  # an E5M2 byte would be infinite
        model.model.layers[0].self_attn.k_proj.weight[0, 0] = 65504.0
    return model


def test_what_no_format_covers_keeps_the_ordinary_linear():
    model, plain = fresh(infinite(exact("llama"))), fresh(infinite(exact("llama")), weights="16bit")
    assert type(model.model.layers[2].mlp.down_proj) is type(model.model.layers[0].self_attn.q_proj) is torch.nn.Linear
    assert "model.layers.2.mlp.down_proj.weight: no nested format covers its values" in model.explain()
    assert "layers 0, 2: 3 x nested_e4m3, 1 x plain16" in model.explain()
    assert alone(model, ROWS) == alone(plain, ROWS)
    for parameter in ("layers.2.mlp.down_proj.weight", "layers.0.self_attn.k_proj.weight"):
        assert torch.equal(model.model.state_dict()[parameter], plain.model.state_dict()[parameter])


def test_values_lost_by_the_cast_are_counted():
    model = exact("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, :7] = 0.1  # float32 beyond float16
    assert "7 of 92,160 values changed" in fresh(model).explain()


def test_the_program_cache_does_not_depend_on_the_values(tmp_path):
    cache = {"cache_dir": str(tmp_path)}
    expected = alone(fresh(**cache), ROWS)
    again = fresh(**cache)
    assert "program cache: hit" in again.explain() and alone(again, ROWS) == expected
    other = fresh(scaled(exact("llama")), **cache)
    assert "program cache: hit" in other.explain() and "nested_e5m2" in other.explain()
    loaded = exact("llama")
    for path in linears_to_nest(loaded):
        swap_linear(loaded, path)
    fast = fresh(loaded, **cache)
    assert "program cache: hit" in fast.explain() and alone(fast, ROWS) == expected
    for settings in ({"weights": "16bit"}, {"weights": "fp8"}, {"nested_head": True}):
        assert "program cache: miss" in fresh(**cache, **settings).explain()


def test_modules_that_are_nested_already_are_not_transcoded(monkeypatch):
    model = scaled(exact("llama"))
    for path in linears_to_nest(model):
        swap_linear(model, path)
    single = model.model.layers[0].mlp.down_proj.upper.data_ptr()

    def fail(*args):
        raise AssertionError("a weight was nested anew")

    monkeypatch.setattr("depthfx.passes.nested_weights.nest_counted", fail)
    compiled = fresh(model)
    assert compiled.model.layers[0].mlp.down_proj.upper.data_ptr() == single
    assert alone(compiled, ROWS) == alone(fresh(scaled(exact("llama")), weights="16bit"), ROWS)


def test_a_refused_attempt_leaves_a_model_that_can_be_compiled():
    model = exact("llama")
    with pytest.raises(MemoryBudgetError):
        fresh(model, kv_blocks=None, memory_budget_gib=1e-4)
    for weights in ("16bit", "fp8"):
        with pytest.raises(UnsupportedModelError, match=rf"has nested weights; compile it with weights='nested', or load.*{weights}"):
            fresh(model, weights=weights)
    assert alone(fresh(model), ROWS) == alone(fresh(weights="16bit"), ROWS)


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_saving_gives_the_original_weights(name, tmp_path):
    model, original = fresh(exact(name)), exact(name)
    model.set_precision("fast")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(loaded.state_dict()[k], v) for k, v in original.state_dict().items())


def test_loading_weights_reaches_the_program():
    model, other = fresh(), exact("llama")
    batch = left_padded(ROWS)
    model.generate(**batch, **GREEDY)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(parameter.flip(0))
    model.load_state_dict(other.state_dict())
    assert torch.equal(model.generate(**batch, **GREEDY), other.generate(**batch, **GREEDY))


def test_replaced_nested_weights_are_refused():
    model = fresh()
    module = model.model.layers[0].mlp.down_proj
    module.assign(module.nested.__class__(module.format, module.upper.clone(), module.lower, module.shift))
    with pytest.raises(UnsupportedOptionError, match=r"'model.layers.0.mlp.down_proj.upper' was replaced"):
        model.generate(**left_padded(ROWS), **GREEDY)


def test_a_tied_head():
    tied = fresh(exact("llama", tie_word_embeddings=True))
    assert "the LM head" in tied.explain()
    assert alone(tied, ROWS) == alone(fresh(exact("llama", tie_word_embeddings=True), weights="16bit"), ROWS)
    with pytest.raises(UnsupportedModelError, match=r"nested_head=True: the embedding shares .*leave nested_head out"):
        fresh(exact("llama", tie_word_embeddings=True), nested_head=True)


def test_fp8_weights_cannot_be_saved():
    model = fresh(weights="fp8")
    with pytest.raises(UnsupportedOptionError, match="rounded to FP8 by weights='fp8' and cannot be saved"):
        model.state_dict()


def test_sides_that_fp8_does_not_take_stay_16_bit():
    model = fresh(exact("llama", intermediate_size=88), weights="fp8")
    assert "down_proj.weight: 64 x 88, sides must be multiples of 16" in model.explain()


def reversed_in_place(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.flip(0))
    return model


def test_loading_reaches_copies_of_nested_modules():
    loaded = infinite(exact("llama"))  # float32: plain16 modules hold float16, the program a wider copy
    for path in linears_to_nest(loaded, head=True):
        swap_linear(loaded, path)
    model = fresh(loaded)  # the head is read in 16 bits, so the program holds a copy
    other = infinite(reversed_in_place(exact("llama")))
    with torch.no_grad():
        other.model.layers[2].mlp.down_proj.weight[3, 3] = -65504.0
    assert "lm_head.weight: the LM head" in model.explain() and "plain16" in model.explain()
    model.load_state_dict(other.state_dict())
    program = model.engine._runner.program.module.weights
    held = {tuple(b.shape): b for name, b in program.named_buffers() if b.dtype is torch.float32}
    assert torch.equal(held[131, 64], other.lm_head.weight)
    assert any(torch.equal(b, other.model.layers[2].mlp.down_proj.weight) for b in program.buffers() if b.shape == (64, 96))
    batch = left_padded(ROWS)
    assert torch.equal(model.generate(**batch, **GREEDY), other.generate(**batch, **GREEDY))


def test_a_refused_load_forgets_shared_kv():
    model, prompt = fresh(), prompts((40,))[0]
    model.engine.run([(prompt, None)])
    model.engine.run([(prompt, None)])
    assert model.engine.stats().num_reused_tokens == 32
    state = reversed_in_place(exact("llama")).state_dict()
    state["lm_head.weight"] = state["lm_head.weight"][:3]
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(state)
    model.engine.run([(prompt, None)])
    assert model.engine.stats().num_reused_tokens == 32


def test_fp8_weights_refuse_a_load_as_a_whole():
    model = fresh(weights="fp8")
    before = model.model.embed_tokens.weight.clone()
    with pytest.raises(UnsupportedOptionError, match="nothing was changed"):
        model.load_state_dict(reversed_in_place(exact("llama")).state_dict())
    assert torch.equal(model.model.embed_tokens.weight, before)


class Stranger(torch.nn.Linear):
    """A subclass may compute something else."""


@pytest.mark.parametrize("weights", ["nested", "fp8"])
def test_subclasses_and_hooked_linears_stay(weights):
    model, calls = exact("llama"), []
    model.model.layers[2].mlp.down_proj.__class__ = Stranger
    hooked = model.model.layers[1].self_attn.k_proj
    hooked.register_forward_hook(lambda *args: calls.append(1))
    fresh(model, weights=weights)
    assert type(model.model.layers[2].mlp.down_proj) is Stranger and model.model.layers[1].self_attn.k_proj is hooked
    text = model.explain()
    assert "layers.2.mlp.down_proj.weight: Stranger is not a plain" in text and "k_proj.weight, " in text and "carries hooks" in text
    model.generate(**left_padded(ROWS), **GREEDY)
    calls.clear()
    model(torch.tensor([ROWS[0]]))
    assert calls == [1]


def test_hugging_faces_loop_says_that_it_is_full():
    model, original = fresh(on_unsupported="eager"), exact("llama")
    beams = {**left_padded(ROWS), **GREEDY, "num_beams": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate(**beams)
    assert "in full precision" not in model.explain()
    model.set_precision({1: "fast"})
    with pytest.warns(UserWarning, match=r"beam search.*: in full precision, set_precision switches the engine alone"):
        out = model.generate(**beams)
    assert torch.equal(out, original.generate(**beams)) and "in full precision" in model.explain()


def test_guidance_says_which_half_of_it_is_full():
    model, guided = fresh(), {**left_padded(ROWS[:1]), **GREEDY, "guidance_scale": 1.5}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(model.generate(**guided), exact("llama").generate(**guided))
    assert "the unconditional pass of guidance_scale" in model.explain() and "in full precision" not in model.explain()
    model.set_precision("fast")
    with pytest.warns(
        UserWarning, match=r"unconditional pass of guidance_scale: in full precision, set_precision switches the engine alone"
    ):
        model.generate(**guided)


@pytest.mark.parametrize("change", [scaled, infinite])
def test_its_own_state_can_be_loaded(change):
    loaded = change(exact("llama"))
    for path in linears_to_nest(loaded):
        swap_linear(loaded, path)
    for model in (fresh(loaded), fresh(change(exact("llama")))):  # joined weights have wider formats than their parts would
        model.load_state_dict(model.state_dict())
        assert alone(model, ROWS) == alone(fresh(change(exact("llama")), weights="16bit"), ROWS)
