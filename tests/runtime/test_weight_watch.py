"""Models that are changed after they were compiled: what the engine can follow it follows, wherever requests come from; the rest it refuses."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import depthfx
from depthfx.errors import UnsupportedOptionError
from tests.families.configs import build
from tests.families.harness import NEW_TOKENS, alone, prompts

PROMPT = prompts((40,), seed=3)[0]
SAMPLING = depthfx.SamplingParams(max_new_tokens=NEW_TOKENS)


def compiled(model):
    return depthfx.compile(model, inductor=False, kv_blocks=64)


def added(engine):
    engine.add(PROMPT, SAMPLING)
    tokens = []
    while engine.has_unfinished():
        tokens += [t for output in engine.step() for t in output.new_token_ids]
    return tokens


WAYS = {
    "add": added,
    "stream": lambda engine: list(engine.stream(PROMPT, SAMPLING)),
    "run": lambda engine: list(next(iter(engine.run([(PROMPT, SAMPLING)]).values())).new_token_ids),
    "collect": lambda engine: [t for _, output in engine.collect([(PROMPT, SAMPLING, None)]) for t in output.new_token_ids],
}


@pytest.mark.parametrize("way", WAYS)
def test_weights_that_change_in_place_reach_every_way_in(way):
    model, plain = compiled(build("llama")), build("llama")
    before = WAYS[way](model.engine)
    with torch.no_grad():
        for one in (model, plain):
            one.model.layers[1].self_attn.v_proj.weight.mul_(-2.0)
    expected = alone(plain, [PROMPT])[0]
    assert WAYS[way](model.engine) == expected != before
    assert WAYS[way](model.engine) == expected and model.engine.stats().num_reused_tokens > 0, "and the new KV is reused"


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_forget_prefixes_sees_what_was_written_through_data(family):
    """Positions of GPT-2 are weights that become tables, those of Llama follow from a buffer."""
    model, plain = compiled(build(family)), build(family)
    before = alone(model, [PROMPT])
    for one in (model, plain):
        (one.transformer.wpe.weight if family == "gpt2" else one.model.rotary_emb.inv_freq).data.mul_(-1.5)
    assert alone(model, [PROMPT]) == before
    model.engine.forget_prefixes()
    assert alone(model, [PROMPT]) == alone(plain, [PROMPT]) != before


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3_text"])
def test_buffers_that_change_in_place_are_followed(family):
    model, plain = compiled(build(family)), build(family)
    before = alone(model, [PROMPT])
    for one in (model, plain):
        for name, buffer in one.named_buffers():
            if "original" not in name:
                buffer.mul_(0.5)
    assert alone(model, [PROMPT]) == alone(plain, [PROMPT]) != before


def test_a_buffer_that_was_replaced_is_refused_before_anything_is_queued():
    model = compiled(build("llama"))
    rotary = model.model.rotary_emb
    old = rotary.inv_freq
    rotary.inv_freq = old * 2
    for way in WAYS.values():
        with pytest.raises(UnsupportedOptionError, match=r"'model.rotary_emb.inv_freq' was replaced.*in place"):
            way(model.engine)
    assert not model.engine.has_unfinished()
    rotary.inv_freq = old
    assert alone(model, [PROMPT]) == alone(build("llama"), [PROMPT])


def test_a_tensor_whose_memory_was_replaced_is_refused():
    model = compiled(build("llama"))
    norm = model.model.norm.weight
    norm.data = norm.data * 2
    with pytest.raises(UnsupportedOptionError, match=r"'model.norm.weight' was replaced"):
        model.engine.add(PROMPT)


def weaken(module, args, output):
    return (output[0] * 0.3, *output[1:]) if isinstance(output, tuple) else output * 0.3


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_that_came_after_compiling_are_refused_until_they_are_removed(register):
    model = compiled(build("llama"))
    handle = getattr(model.model.layers[1], register)(lambda *args: None)
    with pytest.raises(UnsupportedOptionError, match=r"hooks of 'model.layers.1' were added or removed.*remove\(\)"):
        alone(model, [PROMPT])
    with pytest.raises(UnsupportedOptionError, match=r"hooks of 'model\.layers\.1'"):
        model.engine.add(PROMPT)
    handle.remove()
    assert alone(model, [PROMPT]) == alone(build("llama"), [PROMPT])


def test_hooks_that_were_compiled_in_may_not_go():
    plain = build("llama")
    handle = plain.model.layers[1].register_forward_hook(weaken)
    expected = alone(plain, [PROMPT])
    assert expected != alone(build("llama"), [PROMPT])
    model = compiled(plain)
    assert alone(model, [PROMPT]) == expected
    handle.remove()
    with pytest.raises(UnsupportedOptionError, match=r"hooks of 'model\.layers\.1'"):
        alone(model, [PROMPT])


def test_hooks_with_which_hugging_face_records_outputs_are_let_alone():
    model = compiled(build("llama"))
    assert len(model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states) == 4
    assert any(m._forward_hooks for m in model.modules())
    assert alone(model, [PROMPT]) == alone(build("llama"), [PROMPT])


def test_the_watch_does_not_hold_the_model():
    model = compiled(build("llama"))
    alone(model, [PROMPT])
    gc.collect()
    gone, engine = weakref.ref(model), model.engine
    del model
    gc.collect()
    assert gone() is None and len(WAYS["stream"](engine)) == NEW_TOKENS
