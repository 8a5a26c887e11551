"""SmolLM2 through the engine gives Hugging Face's greedy tokens in fp32, in every way that requests can come."""

from __future__ import annotations

import pytest
import torch

import depthfx
from tests.serving.prompts import fifty_prompts

NEW = 12


pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def served():
    """Compiled model, tokenizer, prompts and the engine's tokens for all prompts at once."""
    smollm2 = pytest.importorskip("depthfx.smollm2")
    model, tokenizer = smollm2.load_smollm2()
    prompts = fifty_prompts(tokenizer)
    assert len(prompts) == 50 and len(prompts[-1]) == 2000 and min(map(len, prompts)) == 1
    compiled((model,))
    outputs = model.engine.run([(p, params(model)) for p in prompts])
    return model, tokenizer, prompts, [list(o.new_token_ids) for o in outputs.values()]


def compiled(served, **settings):
    """The model compiled afresh with ``settings``; weights are shared between compilations."""
    model = served[0]
    if hasattr(model, "_depthfx"):
        model.__class__ = next(c for c in type(model).__mro__ if not hasattr(c, "engine"))
        del model._depthfx
    return depthfx.compile(model, check=True, inductor=False, **settings)


def params(model):
    return depthfx.SamplingParams(max_new_tokens=NEW, eos_token_ids=(model.generation_config.eos_token_id,))


def test_every_token_is_hugging_faces_choice(served):
    """Greedy decoding step by step: each token is the argmax of Hugging Face's logits after the prompt and the tokens before it."""
    model, _, prompts, expected = served
    for prompt, tokens in zip(prompts, expected, strict=True):
        ended = tokens[-1] == model.generation_config.eos_token_id
        assert len(tokens) == NEW or ended
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + tokens[:-1]]), logits_to_keep=len(tokens)).logits[0]
        assert logits.argmax(-1).tolist() == tokens


def test_hugging_faces_own_loop_agrees(served):
    """The same by Hugging Face's ``generate`` with its KV cache, for a few prompts."""
    model, _, prompts, expected = served
    plain = next(c for c in type(model).__mro__ if not hasattr(c, "engine"))
    for number in (0, 19, 40, 48):
        ids = torch.tensor([prompts[number]])
        model.__class__, ours = plain, model.__class__
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        model.__class__ = ours
        assert out[0, ids.shape[1] :].tolist() == expected[number]


def test_staggered_with_prefix_reuse(served):
    _, _, prompts, expected = served
    model = compiled(served, max_chunk_tokens=48, max_batch_size=6)
    order = [*range(0, 50, 2), *range(1, 50, 2), 49, 5]  # the long prompt and a chat come twice
    got: dict[str, list[int]] = {}
    asked: dict[str, int] = {}
    pending = list(order)
    while pending or model.engine.has_unfinished():
        for _ in range(2):
            if pending:
                number = pending.pop(0)
                asked[model.engine.add(prompts[number], params(model))] = number
        for output in model.engine.step():
            got.setdefault(output.request_id, []).extend(output.new_token_ids)
    assert {i: got[i] for i in asked} == {i: expected[n] for i, n in asked.items()}
    assert model.engine.stats().num_reused_tokens >= 1900


def test_kv_so_small_that_requests_are_preempted(served):
    _, _, prompts, expected = served
    short = [(p, e) for p, e in zip(prompts, expected, strict=True) if len(p) <= 48][::2]
    model = compiled(served, kv_blocks=16, max_batch_size=12, block_tokens=8, prefix_reuse=False)
    outputs = model.engine.run([(p, params(model)) for p, _ in short])
    assert [list(o.new_token_ids) for o in outputs.values()] == [e for _, e in short]
    assert model.engine.stats().num_preemptions > 0
    assert model.engine.stats().kv.num_held == 0


def test_generate_with_a_ragged_left_padded_batch(served):
    _, tokenizer, prompts, expected = served
    model = compiled(served)
    chosen = [0, 3, 16, 20, 40, 47]
    width = max(len(prompts[n]) for n in chosen)
    ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(prompts[n])) + prompts[n] for n in chosen])
    mask = torch.tensor([[0] * (width - len(prompts[n])) + [1] * len(prompts[n]) for n in chosen])
    out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)[:, width:]
    for row, number in zip(out.tolist(), chosen, strict=True):
        assert row[: len(expected[number])] == expected[number]
        assert set(row[len(expected[number]) :]) <= {tokenizer.pad_token_id}
