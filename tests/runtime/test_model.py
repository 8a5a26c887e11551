"""A compiled model is still the Hugging Face model: identity, weights, saving, text tools, batches, and what it refuses."""

from __future__ import annotations

import copy
from functools import cache
from threading import Event, Thread

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

import depthfx
from depthfx.errors import InvalidRequestError, UnsupportedModelError, UnsupportedOptionError
from tests.families.configs import VOCABULARY, build
from tests.families.harness import alone, left_padded, prompts

BATCH = left_padded(prompts((14, 9), seed=3))
GREEDY = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@cache
def reference():
    return build("llama")


def fresh(**settings):
    return depthfx.compile(build("llama"), inductor=False, kv_blocks=64, max_batch_size=8, **settings)


@cache
def compiled():
    return fresh()


@cache
def permissive():
    return fresh(on_unsupported="eager")


@cache
def tokenizer():
    words = {"<pad>": 0, **{f"w{i}": i for i in range(1, VOCABULARY - 1)}, "abcdef": VOCABULARY - 1}  # StopStringCriteria probes with it
    core = Tokenizer(models.WordLevel(words, unk_token="w1"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", unk_token="w1", padding_side="left")
    fast.chat_template = "{% for m in messages %}w2 {{ m['content'] }} {% endfor %}w3"
    return fast


def test_identity():
    model, original = compiled(), reference()
    assert isinstance(model, LlamaForCausalLM) and isinstance(model, PreTrainedModel)
    assert (type(model).__name__, type(model).__module__) == (type(original).__name__, type(original).__module__)
    assert model.config.to_dict() == original.config.to_dict()
    assert model.device == original.device and model.dtype == original.dtype and model.can_generate()
    assert not model.training
    logits = model(**BATCH).logits
    torch.testing.assert_close(logits, original(**BATCH).logits, atol=1e-5, rtol=1e-5)  # the joined weights are views: same numbers


def test_state_dict_and_saving(tmp_path):
    model, original = fresh(), reference()
    saved = model.state_dict()
    assert saved.keys() == original.state_dict().keys()
    assert all(torch.equal(saved[k], v) for k, v in original.state_dict().items())
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(loaded.state_dict()[k], v) for k, v in original.state_dict().items())
    assert torch.equal(loaded.generate(**BATCH, **GREEDY), original.generate(**BATCH, **GREEDY))
    again = depthfx.compile(loaded, inductor=False, kv_blocks=32)
    assert torch.equal(again.generate(**BATCH, **GREEDY), original.generate(**BATCH, **GREEDY))


def test_loading_weights_reaches_the_program():
    model, other = fresh(prefix_reuse=False), build("llama", rms_norm_eps=1e-5)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(parameter.flip(0))
    model.load_state_dict(other.state_dict())
    assert torch.equal(model.generate(**BATCH, **GREEDY), other.generate(**BATCH, **GREEDY))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("how", ["load_state_dict", "copy_", "engine"])
def test_nothing_computed_from_old_weights_is_used_again(family, how):
    model, other = depthfx.compile(build(family), inductor=False, kv_blocks=64), build(family)
    batch = left_padded(prompts((40, 25), seed=3))
    model.generate(**batch, **GREEDY)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(parameter.flip(0))
        if how == "copy_":
            for old, new in zip(model.parameters(), other.parameters(), strict=True):
                old.copy_(new)
        else:
            model.load_state_dict(other.state_dict())
    if how == "engine":
        prompt = prompts((40,), seed=3)[0]
        found = list(model.engine.stream(prompt, depthfx.SamplingParams(max_new_tokens=10)))
        assert [found] == alone(other, [prompt], max_new_tokens=10)
    else:
        assert torch.equal(model.generate(**batch, **GREEDY), other.generate(**batch, **GREEDY))


def _new_head(model):
    model.lm_head = torch.nn.Linear(64, VOCABULARY, bias=False)


def _new_parameter(model):
    linear = model.model.layers[1].mlp.down_proj
    linear.weight = torch.nn.Parameter(-linear.weight.detach())


@pytest.mark.parametrize("replace", [_new_head, _new_parameter, lambda m: m.resize_token_embeddings(140)])
def test_replaced_weights_are_refused(replace):
    model = fresh()
    replace(model)
    with pytest.raises(UnsupportedOptionError, match=r"'.*' was replaced.*change weights and buffers in place.*or load the model again"):
        model.generate(**BATCH, **GREEDY)
    with pytest.raises(UnsupportedOptionError, match="was replaced"):
        model.generate_batch([[1, 2]])


def test_assigning_a_state_dict_is_refused():
    model = fresh()
    with pytest.raises(UnsupportedOptionError, match=r"assign=True.*leave it out"):
        model.load_state_dict(reference().state_dict(), assign=True)
    assert torch.equal(model.generate(**BATCH, **GREEDY), reference().generate(**BATCH, **GREEDY))


def test_moves_and_copies():
    model = compiled()
    assert model.to("cpu") is model and model.float() is model and model.eval() is model
    for move in (lambda: model.half(), lambda: model.to(torch.bfloat16), lambda: model.to("meta")):
        with pytest.raises(UnsupportedOptionError, match=r"stays on cpu in torch.float32.*before depthfx.compile"):
            move()
    with pytest.raises(UnsupportedOptionError, match=r"cannot be copied or pickled.*save_pretrained"):
        copy.deepcopy(model)
    with pytest.raises(UnsupportedModelError, match="is compiled already; load it again"):
        depthfx.compile(model)
    assert torch.equal(model.generate(**BATCH, **GREEDY), reference().generate(**BATCH, **GREEDY))


def test_text_streamers(capsys):
    ids = tokenizer()("w5 w6 w7", return_tensors="pt")["input_ids"]
    printed = []
    for model in (reference(), compiled()):
        model.generate(ids, **GREEDY, streamer=TextStreamer(tokenizer(), skip_prompt=True))
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != ""
    streamer = TextIteratorStreamer(tokenizer(), timeout=60)
    thread = Thread(target=compiled().generate, args=(ids,), kwargs={**GREEDY, "streamer": streamer})
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer().decode(reference().generate(ids, **GREEDY)[0])


@pytest.mark.parametrize("eos", [None, 130])
def test_stop_strings(eos):
    ids = tokenizer()("w9 w17 w30 w8 w77", return_tensors="pt")["input_ids"]
    free = reference().generate(ids, **GREEDY)[0].tolist()
    stop = tokenizer().decode(free[8:10])  # two words that come up after three others
    options = {**GREEDY, "eos_token_id": eos, "stop_strings": [stop, "never"], "tokenizer": tokenizer()}
    expected, out = (model.generate(ids, **options) for model in (reference(), compiled()))
    assert torch.equal(out, expected)
    assert out.shape[1] < len(free)


def test_pipeline():
    chat = [{"role": "user", "content": "w4 w5"}]
    texts = ["w4 w5 w6", "w9"]
    answers = []
    for model in (reference(), compiled()):
        pipe = pipeline("text-generation", model=model, tokenizer=tokenizer())
        config = GenerationConfig(**GREEDY)
        answers.append([pipe(texts, generation_config=config), pipe(chat, generation_config=config)])
    assert answers[0] == answers[1]
    assert answers[1][1][0]["generated_text"][-1]["role"] == "assistant"


def test_generate_batch():
    rows = prompts((21, 4, 13), seed=8)
    expected = alone(reference(), rows, max_new_tokens=10)
    end = expected[0][4]
    out = compiled().generate_batch(rows, GenerationConfig(max_new_tokens=10, do_sample=False, eos_token_id=end, pad_token_id=0))
    assert list(out) == ["req_0", "req_1", "req_2"]
    for row, answer, result in zip(rows, expected, out.values(), strict=True):
        assert isinstance(result, GenerationOutput) and result.is_finished() and result.error is None
        stop = answer.index(end) + 1 if end in answer else 10
        assert (result.prompt_ids, result.generated_tokens) == (row, answer[:stop])
        assert 0 < result.created_time <= result.lifespan[0] <= result.lifespan[1]
    timed = compiled().generate_batch(rows[:1], max_new_tokens=3, record_timestamps=True)
    assert len(timed["req_0"].timestamps) == len(timed["req_0"].generated_tokens) == 3
    assert compiled().generate_batch([]) == {}
    drawn = compiled().generate_batch(rows[:1], GenerationConfig(max_new_tokens=8, do_sample=True, num_return_sequences=3, top_k=0))
    assert len({tuple(r.generated_tokens) for r in drawn.values()}) > 1


def test_generate_batch_with_one_bad_prompt():
    out = compiled().generate_batch([[5, 6], [], [7, VOCABULARY]], max_new_tokens=4)
    assert [r.status for r in out.values()] == [RequestStatus.FINISHED, RequestStatus.FAILED, RequestStatus.FAILED]
    assert "empty" in out["req_1"].error and str(VOCABULARY) in out["req_2"].error
    with pytest.raises(InvalidRequestError, match=r"inputs holds 5 of type int; it must be a list of prompts"):
        compiled().generate_batch([5, 6, 7], max_new_tokens=4)
    with pytest.raises(InvalidRequestError, match=r"unknown arguments.*max_tokens"):
        compiled().generate_batch([[5]], max_tokens=4)
    for option in (
        {"no_repeat_ngram_size": 2},
        {"stop_strings": ["a"]},
        {"num_beams": 2},
        {"max_time": 1.0},
        {"prompt_lookup_num_tokens": 3},
    ):
        with pytest.raises(UnsupportedOptionError, match=r"in generate_batch|beam search"):
            compiled().generate_batch([[5]], max_new_tokens=2, **option)


def cache_of(model, ids):
    cached = DynamicCache()
    model(ids[:, :-1], past_key_values=cached, use_cache=True)
    return cached


IDS = BATCH["input_ids"][:1]
UNSUPPORTED = {
    "beam search": lambda m: {"input_ids": IDS, "num_beams": 2},
    "assisted decoding": lambda m: {"input_ids": IDS, "assistant_model": m},
    "prompt_lookup_num_tokens": lambda m: {"input_ids": IDS, "prompt_lookup_num_tokens": 2},
    "past_key_values": lambda m: {"input_ids": IDS, "past_key_values": cache_of(m, IDS)},
    "inputs_embeds": lambda m: {"inputs_embeds": m.get_input_embeddings()(IDS)},
    "output_attentions": lambda m: {"input_ids": IDS, "output_attentions": True, "return_dict_in_generate": True},
    "output_hidden_states": lambda m: {"input_ids": IDS, "output_hidden_states": True, "return_dict_in_generate": True},
    "position_ids": lambda m: {"input_ids": IDS, "position_ids": torch.arange(3, 3 + IDS.shape[1])[None]},
    "custom_generate": lambda m: {"input_ids": IDS, "custom_generate": lambda model, input_ids, **rest: input_ids},
}


@pytest.mark.parametrize("option", UNSUPPORTED)
@torch.no_grad()
def test_unsupported_options(option):
    with pytest.raises(UnsupportedOptionError, match=rf"{option}.*on_unsupported='eager'"):
        compiled().generate(**UNSUPPORTED[option](reference()), **GREEDY)
    expected = reference().generate(**UNSUPPORTED[option](reference()), **GREEDY)
    for _ in range(2):
        out = permissive().generate(**UNSUPPORTED[option](reference()), **GREEDY)
        pair = (out, expected) if isinstance(out, torch.Tensor) else (out.sequences, expected.sequences)
        assert torch.equal(*pair)
    text = permissive().explain()
    assert sum(option in line for line in text.splitlines()) == 1, "listed once, however often it is called"
    with pytest.raises(UnsupportedOptionError, match="generator is not supported with"):
        permissive().generate(**UNSUPPORTED[option](reference()), **GREEDY, generator=torch.Generator())


class Pause(StoppingCriteria):
    """Holds Hugging Face's loop up in the middle of a call until ``go_on`` is set."""

    def __init__(self):
        self.reached, self.go_on = Event(), Event()

    def __call__(self, input_ids, scores, **kwargs):
        self.reached.set()
        assert self.go_on.wait(60)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def test_hugging_faces_loop_in_one_thread_leaves_the_engine_to_others():
    model, pause, found = permissive(), Pause(), []
    options = {"inputs_embeds": model.get_input_embeddings()(IDS).detach(), "stopping_criteria": [pause], **GREEDY}
    thread = Thread(target=lambda: found.append(model.generate(**options)))
    thread.start()
    try:
        assert pause.reached.wait(60)
        before = model.engine.stats().num_steps
        assert torch.equal(model.generate(**BATCH, **GREEDY), reference().generate(**BATCH, **GREEDY))
        assert model.engine.stats().num_steps > before, "the other thread's loop ran this call"
        with pytest.raises(UnsupportedOptionError, match="generator is not supported with"):
            model.generate(IDS, num_beams=2, generator=torch.Generator(), **GREEDY)
        num_steps = model.engine.stats().num_steps
    finally:
        pause.go_on.set()
        thread.join()
    assert torch.equal(found[0], reference().generate(IDS, **GREEDY)[:, IDS.shape[1] :])
    assert model.engine.stats().num_steps == num_steps, "the engine ran what was not its own"


@pytest.mark.slow
@torch.no_grad()
def test_torch_compile_backend():
    torch._dynamo.reset()
    model = build("llama", num_hidden_layers=1)
    expected = model(**BATCH).logits
    fast = torch.compile(model, backend="depthfx")
    torch.testing.assert_close(fast(**BATCH).logits, expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="modes belong to the backend 'inductor'"):
        torch.compile(lambda x: x + 1, backend="depthfx", mode="max-autotune")(torch.ones(2))
    assert torch.compile(lambda x: x + 1, backend="depthfx", options={"max_autotune": False})(torch.ones(2)).tolist() == [2, 2]
