"""What cannot be compiled is refused with its reason, or left to Hugging Face's own code where the user allowed that."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

import depthfx
from depthfx.errors import UnsupportedModelError, UnsupportedOptionError
from tests.families.configs import SIZES, build, randomised
from tests.families.harness import GREEDY, left_padded, prompts
from tests.passes.toys import toy

BATCH = left_padded(prompts((9, 5)))


def mixture_of_experts():
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    return randomised(hf.Qwen3MoeConfig(**SIZES, **sizes))


def latent_attention():
    sizes = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    return randomised(hf.DeepseekV3Config(**{**SIZES, **heads, "first_k_dense_replace": 3, "n_group": 1, "topk_group": 1}, **sizes))


def hybrid():
    sizes = {"layer_types": ["conv", "full_attention", "conv"], "pad_token_id": 0, "conv_L_cache": 3}
    return randomised(hf.Lfm2Config(**{**SIZES, "num_hidden_layers": 3, **sizes}))


def bidirectional():
    return build("gemma3_text", use_bidirectional_attention=True)


def chunked():
    model = build("llama")
    model.config.layer_types = ["chunked_attention"] * 3
    return model


def quantised():
    model = build("llama")
    model.is_quantized = True
    return model


def hooked():
    from accelerate.hooks import ModelHook, add_hook_to_module

    model = build("llama")
    add_hook_to_module(model.model.layers[0].mlp, ModelHook())
    return model


def mixed_types():
    model = build("llama")
    model.lm_head.to(torch.bfloat16)
    return model


def rope_that_looks_at_the_step():
    return build("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})


def window_in_mask_only():
    model = build("llama")
    model.config.layer_types = ["sliding_attention"] * 3
    model.config.sliding_window = 8
    return model


REFUSED = {
    "experts": (mixture_of_experts, r"Qwen3MoeForCausalLM is a mixture of experts \(num_experts=4\).*dense decoders"),
    "latent attention": (latent_attention, r"latent attention \(MLA, kv_lora_rank=8\)"),
    "hybrid": (hybrid, "layers of kind conv; depthfx supports full and sliding attention"),
    "bidirectional": (bidirectional, "attends to later tokens too"),
    "chunked": (chunked, "layers of kind chunked_attention"),
    "window in the mask only": (window_in_mask_only, "gives its window to the mask alone"),
    "dynamic rope": (rope_that_looks_at_the_step, "is not one graph: Data-dependent branching"),
    "quantised": (quantised, "is quantised.*load the original"),
    "hooks": (hooked, "accelerate hooks.*without device_map"),
    "dtypes": (mixed_types, r"torch.bfloat16.*torch.float32.*depthfx needs one of"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_the_reason(case):
    make, reason = REFUSED[case]
    model = make()
    attention = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match=reason):
        depthfx.compile(model, inductor=False)
    assert model.config._attn_implementation == attention
    assert not hasattr(model, "explain")


@pytest.mark.parametrize("case", ["experts", "latent attention", "hybrid", "bidirectional", "hooks"])
def test_left_to_hugging_face_where_allowed(case):
    make, reason = REFUSED[case]
    expected = make().generate(**BATCH, **GREEDY)
    model = depthfx.compile(make(), inductor=False, on_unsupported="eager")
    assert torch.equal(model.generate(**BATCH, **GREEDY), expected)
    with pytest.raises(UnsupportedOptionError, match="has no engine"):
        _ = model.engine
    heading, line = model.explain().splitlines()[:2]
    assert "not compiled" in heading
    with pytest.raises(UnsupportedModelError, match=reason):
        raise UnsupportedModelError(line)


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("torch.compile", "is not one graph: specs differ; "),
        ("torch._inductor.compile_fx.compile_fx", "Inductor fails at .* AssertionError: specs d"),
    ],
)
def test_any_failure_of_a_compiler_is_a_refusal(place, reason, monkeypatch):
    def fail(*arguments, **options):
        raise AssertionError("specs differ\nhere and there")

    monkeypatch.setattr(place, fail)
    with pytest.raises(UnsupportedModelError, match=reason) as raised:
        depthfx.compile(build("gpt_neox"), kv_blocks=16, program_cache=False)
    assert isinstance(raised.value.__cause__, AssertionError)
    model = depthfx.compile(build("gpt_neox"), kv_blocks=16, program_cache=False, on_unsupported="eager")
    assert "specs differ" in model.explain()
    assert torch.equal(model.generate(**BATCH, **GREEDY), build("gpt_neox").generate(**BATCH, **GREEDY))


def encoder_decoder():
    torch.manual_seed(0)
    return hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=131, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
    )


def test_encoder_decoder():
    with pytest.raises(UnsupportedModelError, match="encoder-decoder; depthfx compiles decoder-only"):
        depthfx.compile(encoder_decoder())
    expected = encoder_decoder().eval().generate(BATCH["input_ids"], max_new_tokens=5)
    model = depthfx.compile(encoder_decoder(), on_unsupported="eager")
    assert torch.equal(model.generate(BATCH["input_ids"], max_new_tokens=5), expected)
    assert "encoder-decoder" in model.explain()


def test_no_generation_head():
    with pytest.raises(UnsupportedModelError, match="load it with AutoModelForCausalLM"):
        depthfx.compile(build("llama").model)


@pytest.mark.parametrize("setting", ["raise", "eager"])
def test_never_possible(setting):
    with torch.device("meta"):
        weightless = toy()
    with pytest.raises(UnsupportedModelError, match=r"meta device and has no weights.*from_pretrained"):
        depthfx.compile(weightless, on_unsupported=setting)
    with pytest.raises(UnsupportedModelError, match=r"takes a transformers PreTrainedModel; got torch.nn.modules.linear.Linear"):
        depthfx.compile(torch.nn.Linear(2, 2), on_unsupported=setting)
