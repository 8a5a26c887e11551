"""Weights in pinned host memory on a CUDA device: the same tokens, more free device memory, everything unpinned at the end."""

from __future__ import annotations

import gc

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import depthfx
from depthfx.errors import SettingError
from tests.families.configs import build

SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "head_dim": 64}
PROMPTS = [list(range(5, 5 + n)) for n in (1, 9, 70)]


def served(gib: float | None, **settings) -> tuple[list[list[int]], int, str]:
    """Tokens, bytes of PyTorch's allocator after compiling, the report."""
    model = build("llama", torch.float16, "cuda", **SIZES)
    model = depthfx.compile(model, inductor=False, kv_blocks=64, max_batch_size=4, weight_offload_gib=gib, **settings)
    tokens = model.engine.run([(p, depthfx.SamplingParams(max_new_tokens=8)) for p in PROMPTS])
    model.forward(torch.tensor([PROMPTS[1]], device="cuda"))
    return [list(o.new_token_ids) for o in tokens.values()], torch.cuda.memory_allocated(), model.explain()


@pytest.mark.parametrize("settings", [{}, {"weights": "nested"}], ids=["16bit", "nested"])
def test_tokens_are_the_same_and_memory_is_free(settings):
    expected, before, _ = served(None, **settings)
    gc.collect()
    tokens, after, text = served(0.02, **settings)
    assert tokens == expected
    # cuBLAS keeps a workspace of 8 MiB for each stream it met, also for that of the first model's captures
    assert before - after > 8e6 and "read from pinned host memory: 0.02 GiB" in text


def test_less_than_one_weight_is_refused():
    with pytest.raises(SettingError, match="smaller than every weight"):
        served(1e-6)
