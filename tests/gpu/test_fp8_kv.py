"""FP8 KV end to end on a CUDA device in float16: near Hugging Face over a cache of rounded keys and values, graphs as eager launches."""

from __future__ import annotations

from functools import cache

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from transformers import DynamicCache

import depthfx
from tests.families.configs import build
from tests.families.harness import GREEDY, engine_over, left_padded, prompts, run_staggered
from tests.families.test_fp8_kv import LEAST, MOST, SLACK, RoundedCache

RAGGED = prompts((40, 33, 20, 7))
families = pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt_neox", "gpt2"])
# Against the rounded cache, relative to all logits of an answer: 0.036 was seen in float16 on a CPU. Roundings of float16 put one or two
# in a hundred numbers on the other side of a tie, which moves them by a step of E4M3; the kernels' own cases have no such slack.
NEAR = 0.06


@cache
def compiled(name, kv_dtype="fp8"):
    return depthfx.compile(
        build(name, torch.float16, "cuda"), inductor=False, check=True, kv_blocks=96, max_batch_size=9, kv_dtype=kv_dtype
    )


@torch.no_grad()
def forced(name, prompt, answer, cached):
    """Logits that Hugging Face's model gives in fp32 for each token of ``answer``, in one forward over ``cached``."""
    model = build(name, torch.float16, "cuda").float()
    out = model(torch.tensor([prompt + answer], device="cuda"), past_key_values=cached, use_cache=True)
    return out.logits[0, len(prompt) - 1 : -1]


def distance(a, b):
    return float((a - b).norm() / b.norm())


def check_near_greedy(name, prompt, answer):
    """Every token is a largest logit of the exact model, up to what FP8 KV costs."""
    logits = forced(name, prompt, answer, DynamicCache())
    chosen = logits.gather(1, torch.tensor(answer, device="cuda")[:, None])[:, 0]
    assert float(((logits.amax(1) - chosen) / (1 + logits.amax(1).abs())).max()) < SLACK


@families
def test_generates_near_hugging_face(name):
    model = compiled(name)
    assert model.engine._runner.kv_pool.dtype is torch.float8_e4m3fn and model.engine._runner.graphs.buckets
    out = model.generate(**left_padded(RAGGED, "cuda"), **GREEDY, return_dict_in_generate=True, output_logits=True)
    for row, prompt in enumerate(RAGGED):
        answer = out.sequences[row, max(map(len, RAGGED)) :].tolist()
        ours = torch.stack([step[row] for step in out.logits]).float()
        assert distance(ours, forced(name, prompt, answer, RoundedCache())) < NEAR
        assert LEAST < distance(ours, forced(name, prompt, answer, DynamicCache())) < MOST
        check_near_greedy(name, prompt, answer)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_graphs_equal_eager_launches(name):
    rows = prompts(tuple(5 + 3 * i for i in range(8)), seed=8)
    tokens = [run_staggered(engine_over(compiled(name), buckets=buckets), rows, every=1) for buckets in ((1, 2, 4, 8), ())]
    assert tokens[0] == tokens[1]
    for row, answer in zip(rows, tokens[0], strict=True):
        check_near_greedy(name, row, answer)


def test_preemption_and_prefix_reuse():
    rows = prompts((36, 52, 36), seed=1, shared=33)
    engine = engine_over(compiled("llama"), buckets=(1, 2, 4), lookahead=True)
    answers = run_staggered(engine, rows + rows, every=6)
    assert engine.stats().num_reused_tokens >= 4 * 32
    short = prompts((14, 9, 15), seed=2)
    engine = engine_over(compiled("llama"), kv_blocks=5, buckets=(1, 2, 4), lookahead=True)
    answers += run_staggered(engine, short, every=1, new_tokens=26)
    assert engine.stats().num_preemptions > 0
    for row, answer in zip(rows + rows + short, answers, strict=True):
        check_near_greedy("llama", row, answer)


def test_explain_names_the_prefill_kernel():
    assert "prefill takes the Triton kernel" in compiled("llama").explain()
    assert "prefill takes the Triton kernel" not in compiled("llama", "auto").explain()
