"""The decoder families that every acceptance test runs over, as tiny random models; a new family is one new entry."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf

VOCABULARY = 131
FULL, SLIDING = "full_attention", "sliding_attention"
# Two layers show that each has its own weights, KV and kind of attention; llama has one between the first and the last.
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Family:
    """One architecture: its config class and what the tiny config needs beyond :data:`SIZES`."""

    config: type
    options: dict[str, Any] = field(default_factory=dict)


FAMILIES: dict[str, Family] = {
    "llama": Family(hf.LlamaConfig, {"num_hidden_layers": 3}),
    "llama_yarn": Family(
        hf.LlamaConfig,
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}},
    ),
    "mistral": Family(hf.MistralConfig, {"sliding_window": 9}),
    "qwen2": Family(hf.Qwen2Config),
    "qwen3": Family(hf.Qwen3Config, {"head_dim": 16}),
    "phi3": Family(hf.Phi3Config),
    "gemma2": Family(hf.Gemma2Config, {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}),
    "gemma3_text": Family(
        hf.Gemma3TextConfig,
        {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16, "num_hidden_layers": 3, "layer_types": [FULL, SLIDING, FULL]},
    ),
    "olmo2": Family(hf.Olmo2Config),
    "granite": Family(
        hf.GraniteConfig, {"residual_multiplier": 0.5, "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "logits_scaling": 2.0}
    ),
    "smollm3": Family(hf.SmolLM3Config, {"no_rope_layer_interval": 2}),
    "glm4": Family(hf.Glm4Config, {"head_dim": 16}),
    "starcoder2": Family(hf.Starcoder2Config, {"sliding_window": None}),
    "gpt2": Family(hf.GPT2Config, {"n_inner": 96}),
    "gpt_neox": Family(hf.GPTNeoXConfig),
    "cohere2": Family(hf.Cohere2Config, {"sliding_window": 8, "layer_types": [SLIDING, FULL]}),
}

# One of each kind, for what depends on the graph's shape but hardly on the family: windows, fused and biased projections, sandwich norms,
# multipliers, parallel blocks, learned positions.
SOME_FAMILIES = ("llama", "mistral", "phi3", "gemma3_text", "granite", "gpt_neox", "cohere2", "gpt2")


def build(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu", **changes: Any) -> Any:
    """The tiny model of a family, always with the same weights; ``changes`` go to its config."""
    family = FAMILIES[name]
    return randomised(family.config(**{**SIZES, **family.options, **changes}), dtype, device)


def randomised(config: Any, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """A model with seeded weights: matrices large enough to tell tokens apart, norms and biases off their neutral values."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # "eager": scaled_dot_product_attention would leave out the soft cap of Gemma 2
        model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
                else:
                    parameter.mul_(6)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.to(device=device, dtype=dtype)
