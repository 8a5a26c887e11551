"""The contract of ``generate``: every option gives what Hugging Face's own loop gives for the same tiny model."""

from __future__ import annotations

from functools import cache
from threading import Thread

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput
from transformers.generation import logits_process as lp
from transformers.generation.streamers import BaseStreamer

import depthfx
from depthfx.errors import InvalidRequestError
from tests.families.configs import build
from tests.families.harness import left_padded, prompts

ONE = left_padded(prompts((11,)))
BATCH = left_padded(prompts((14, 9, 3), seed=3))
NONE = {"eos_token_id": None, "pad_token_id": 0}


@cache
def reference():
    return build("llama")


@cache
def compiled():
    return depthfx.compile(build("llama"), inductor=False, check=True, kv_blocks=64, max_batch_size=8)


def frequent_tokens(batch, count):
    """Tokens that really come up in greedy continuations, to be used as ends of sequence."""
    out = reference().generate(**batch, max_new_tokens=12, do_sample=False, **NONE)[:, batch["input_ids"].shape[1] + 3 :]
    values, counts = out.flatten().unique(return_counts=True)
    return values[counts.argsort(descending=True)][:count].tolist()


class Ban(LogitsProcessor):
    """Forbids even ids."""

    def __call__(self, input_ids, scores):
        scores[:, ::2] = float("-inf")
        return scores


class AfterFive(StoppingCriteria):
    """Ends every row of an odd number after five tokens."""

    def __init__(self, width):
        self.width = width

    def __call__(self, input_ids, scores, **kwargs):
        odd = torch.arange(input_ids.shape[0]) % 2 == 1
        return odd & (input_ids.shape[1] - self.width >= 5)


def same(batch, **options):
    options = {"max_new_tokens": 10, "do_sample": False, **NONE, **options}
    expected, out = (model.generate(**batch, **options) for model in (reference(), compiled()))
    if isinstance(expected, torch.Tensor):
        assert torch.equal(out, expected)
    else:
        assert torch.equal(out.sequences, expected.sequences)
    return expected, out


GREEDY = {
    "plain": {},
    "max_length": {"max_new_tokens": None, "max_length": 19},
    "generation config": {"generation_config": GenerationConfig(max_new_tokens=7, do_sample=False, **NONE)},
    "repetition penalty": {"repetition_penalty": 1.7},
    "no repeat": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[4], [27]]},
    "prefix function": {"prefix_allowed_tokens_fn": lambda row, ids: list(range(row, 131, 3))},
    "custom processor": {"logits_processor": LogitsProcessorList([Ban()])},
    "custom length": {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(17)])},
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "guidance": {"guidance_scale": 1.5},
    "return dict": {"return_dict_in_generate": True},
}


@pytest.mark.parametrize("batch", [ONE, BATCH], ids=["one", "padded"])
@pytest.mark.parametrize("case", GREEDY)
def test_greedy(case, batch):
    same(batch, **GREEDY[case])


def test_a_penalty_sees_prompts_that_take_several_steps():
    small = depthfx.compile(build("llama"), inductor=False, check=True, kv_blocks=64, max_batch_size=8, max_batch_tokens=24)
    rows = prompts((60, 9, 40, 31), seed=4)
    options = {"max_new_tokens": 12, "do_sample": False, "repetition_penalty": 1.6, **NONE}
    expected = [reference().generate(torch.tensor([row]), **options)[0, len(row) :].tolist() for row in rows]
    assert small.generate(torch.tensor(rows[:1]), **options)[0, 60:].tolist() == expected[0]
    plain = [([*row, 5], depthfx.SamplingParams(max_new_tokens=20)) for row in rows[1:]]  # share steps, penalise nothing
    asked = [(row, depthfx.SamplingParams(max_new_tokens=12, repetition_penalty=1.6)) for row in rows]
    outputs = list(small.engine.run(plain + asked).values())
    assert [list(output.new_token_ids) for output in outputs[len(plain) :]] == expected


def test_logits_of_an_external_request_may_be_written_to():
    engine = compiled().engine
    name = engine.add([5, 6, 7], depthfx.SamplingParams(max_new_tokens=2, external=True))
    (output,) = engine.step()
    best = int(output.logits.argmax())
    output.logits[best] = float("-inf")
    assert int(output.logits.argmax()) != best
    assert engine.abort(name)
    assert engine.step()[0].finish_reason == "abort"


def test_ids_of_32_bits():
    narrow = {name: value.int() for name, value in BATCH.items()}
    options = {"max_new_tokens": 5, "do_sample": False, **NONE}
    expected, found = reference().generate(**narrow, **options), compiled().generate(**narrow, **options)
    assert found.dtype is expected.dtype is torch.int64
    assert torch.equal(found, expected)


def test_top_p_of_zero_keeps_the_best_token():
    options = {"max_new_tokens": 5, "do_sample": True, "top_p": 0.0, **NONE}
    assert torch.equal(compiled().generate(**BATCH, **options), reference().generate(**BATCH, **options))


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.5}, {"do_sample": True, "top_k": 1}], ids=str)
def test_autocast_of_the_caller_is_left_aside(options):
    options = {"max_new_tokens": 5, "do_sample": False, **NONE, **options}
    expected = reference().generate(**BATCH, **options)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled().generate(**BATCH, **options), expected)


def test_modes_of_the_caller_are_not_compiled_in():
    expected = reference().generate(**BATCH, max_new_tokens=9, do_sample=False, **NONE)
    for mode in (torch.autocast("cpu", torch.bfloat16), torch.inference_mode(), torch.enable_grad()):
        model = build("llama")
        with mode:
            fresh = depthfx.compile(model, inductor=False, kv_blocks=64, max_batch_size=8, program_cache=False)
        assert torch.equal(fresh.generate(**BATCH, max_new_tokens=9, do_sample=False, **NONE), expected)


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.5}, {"do_sample": True, "top_k": 1}], ids=str)
def test_the_default_device_is_not_where_host_tensors_go(options):
    options = {"max_new_tokens": 5, "do_sample": False, **NONE, **options}
    expected, model = reference().generate(**ONE, **options), build("llama")
    with torch.device("meta"):
        fresh = depthfx.compile(model, inductor=False, kv_blocks=64, max_batch_size=8)
        found = fresh.generate(**ONE, **options)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("batch", [ONE, BATCH], ids=["one", "padded"])
def test_ends_of_sequence(batch):
    first, second, third = frequent_tokens(batch, 3)
    expected, _ = same(batch, eos_token_id=first)
    several, _ = same(batch, eos_token_id=[second, third])
    assert min(expected.shape[1], several.shape[1]) < batch["input_ids"].shape[1] + 10 or batch is BATCH
    same(batch, eos_token_id=[first, second], min_new_tokens=8)
    same(batch, eos_token_id=first, min_length=batch["input_ids"].shape[1] + 6)
    same(batch, eos_token_id=[first, second], repetition_penalty=1.2, min_new_tokens=4)
    same(batch, eos_token_id=first, logits_processor=LogitsProcessorList([Ban()]))


@pytest.mark.parametrize("batch", [ONE, BATCH], ids=["one", "padded"])
def test_a_least_length_forbids_the_ids_that_the_caller_named(batch):
    width = batch["input_ids"].shape[1]
    first, second = frequent_tokens(batch, 2)
    plain, _ = same(batch)
    least = lp.MinLengthLogitsProcessor(width + 7, first)
    forbidden, _ = same(batch, logits_processor=LogitsProcessorList([least]))
    assert not torch.equal(forbidden, plain)
    same(batch, logits_processor=LogitsProcessorList([least]), eos_token_id=[first, second])
    same(batch, eos_token_id=first, min_new_tokens=9, stopping_criteria=StoppingCriteriaList([EosTokenCriteria([second])]))
    for skipped in (width - 3, width, width + 3):
        counted = lp.MinNewTokensLengthLogitsProcessor(skipped, 5, first)
        same(batch, logits_processor=LogitsProcessorList([counted]), eos_token_id=first)


def test_a_least_length_in_a_batch_without_padding():
    row = BATCH["input_ids"][0].tolist()
    first = frequent_tokens(BATCH, 1)[0]
    for least in ({"min_new_tokens": 8}, {"min_length": len(row) + 8}):
        options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "eos_token_id": first, **least}
        expected = reference().generate(BATCH["input_ids"][:1], **options)[0, len(row) :].tolist()
        assert compiled().generate_batch([row], **options)["req_0"].generated_tokens == expected


def test_custom_criterion_ends_rows_alone():
    width = BATCH["input_ids"].shape[1]
    expected, _ = same(BATCH, eos_token_id=130, stopping_criteria=StoppingCriteriaList([AfterFive(width)]))
    assert (expected[1, width + 5 :] == 0).all() and (expected[0, width + 5 :] != 0).any()


def test_without_a_mask():
    same({"input_ids": ONE["input_ids"]})
    same({"inputs": BATCH["input_ids"]})


def test_num_return_sequences():
    _, out = same(BATCH, do_sample=True, top_k=1, num_return_sequences=3)
    assert out.shape[0] == 9
    drawn = compiled().generate(**ONE, max_new_tokens=10, do_sample=True, num_return_sequences=4, **NONE)
    assert len({tuple(row) for row in drawn.tolist()}) > 1, "each row draws with a seed of its own"


@pytest.mark.parametrize("batch", [ONE, BATCH], ids=["one", "padded"])
def test_scores_and_logits(batch):
    expected, out = same(batch, return_dict_in_generate=True, output_scores=True, output_logits=True, repetition_penalty=1.3)
    assert isinstance(out, GenerateDecoderOnlyOutput)
    for name in ("scores", "logits"):
        ours, theirs = getattr(out, name), getattr(expected, name)
        assert len(ours) == len(theirs) == 10
        for a, b in zip(ours, theirs, strict=True):
            assert a.dtype == b.dtype == torch.float32
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)  # fp32 sums in another order
    a, b = (compiled().compute_transition_scores(o.sequences, o.scores, normalize_logits=True) for o in (out, expected))
    torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)


DRAWS = {
    "plain": {},
    "warped": {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "min_p": {"min_p": 0.1, "top_k": 0},
    "typical": {"typical_p": 0.8},
}


@pytest.mark.parametrize("case", DRAWS)
@pytest.mark.parametrize("batch", [ONE, BATCH], ids=["one", "padded"])
def test_lockstep_draws_what_hugging_face_draws(case, batch):
    options = {"max_new_tokens": 10, "do_sample": True, "return_dict_in_generate": True, "output_scores": True, **NONE, **DRAWS[case]}
    torch.manual_seed(7)
    expected = reference().generate(**batch, **options)
    torch.manual_seed(7)
    assert torch.equal(compiled().generate(**batch, **options).sequences, expected.sequences)


@pytest.mark.parametrize("warper", [lp.TopKLogitsWarper, lp.TopPLogitsWarper, lp.MinPLogitsWarper])
def test_what_a_warper_leaves_out_may_be_drawn_all_the_same(warper):
    """With a finite filter value."""
    own = LogitsProcessorList([warper(5 if warper is lp.TopKLogitsWarper else 0.5, filter_value=3.0)])
    options = {"max_new_tokens": 10, "do_sample": True, "top_k": 0, "logits_processor": own, **NONE}
    torch.manual_seed(7)
    expected = reference().generate(**BATCH, **options)
    torch.manual_seed(7)
    assert torch.equal(compiled().generate(**BATCH, **options), expected)


@pytest.mark.parametrize("case", ["plain", "warped", "min_p"])
@pytest.mark.parametrize("lockstep", [False, True])
def test_sampling_is_reproducible(case, lockstep):
    options = {"max_new_tokens": 12, "do_sample": True, **NONE, **DRAWS[case]}
    options.update({"return_dict_in_generate": True, "output_scores": True} if lockstep else {})

    def draw(**seed):
        out = compiled().generate(**BATCH, **options, **seed)
        return out.sequences.tolist() if lockstep else out.tolist()

    seeded = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        seeded.append(draw())
    assert seeded[0] == seeded[1] != seeded[2]
    state = torch.random.get_rng_state()
    given = [draw(generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert given[0] == given[1] != given[2]
    assert torch.equal(torch.random.get_rng_state(), state), "a generator leaves torch's own alone"


def test_sampled_tokens_respect_the_warpers():
    logits = reference()(**ONE).logits[0, -1]
    best = set(logits.topk(3).indices.tolist())
    out = compiled().generate(**ONE, max_new_tokens=1, do_sample=True, top_k=3, num_return_sequences=8, **NONE)
    assert set(out[:, -1].tolist()) <= best


class Record(BaseStreamer):
    """Keeps what it gets."""

    def __init__(self):
        self.values, self.ended = [], 0

    def put(self, value):
        self.values.append(value.tolist())

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("options", [{}, {"logits_processor": LogitsProcessorList([Ban()])}], ids=["engine", "lockstep"])
@pytest.mark.parametrize("batch", [ONE, BATCH], ids=["one", "padded"])
def test_streamer_gets_what_hugging_face_gives(batch, options):
    end = frequent_tokens(batch, 1)
    streamers = []
    for model in (reference(), compiled()):
        streamers.append(Record())
        model.generate(**batch, max_new_tokens=8, do_sample=False, eos_token_id=end, pad_token_id=0, streamer=streamers[-1], **options)
    assert streamers[1].values == streamers[0].values
    assert streamers[1].ended == streamers[0].ended == 1


def test_several_threads_generate_at_once():
    rows = prompts((5, 17, 9), seed=5)
    expected = [reference().generate(**left_padded([r]), max_new_tokens=10, do_sample=False, **NONE) for r in rows]
    out = [None] * len(rows)

    def work(i):
        out[i] = compiled().generate(**left_padded([rows[i]]), max_new_tokens=10, do_sample=False, **NONE)

    threads = [Thread(target=work, args=(i,)) for i in range(len(rows))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))


def test_a_full_context_is_said():
    model = depthfx.compile(build("llama"), inductor=False, max_model_len=20, kv_blocks=16)
    expected = reference().generate(**BATCH, max_new_tokens=17, do_sample=False, **NONE)
    for options in ({}, {"output_scores": True, "return_dict_in_generate": True}):
        with pytest.warns(UserWarning, match="row 0 ended at 20 tokens: the context is full"):
            out = model.generate(**BATCH, max_new_tokens=17, do_sample=False, **NONE, **options)
        rows = out.sequences if options else out
        assert rows[0].tolist() == expected[0, :20].tolist() + [0] * 11
        assert torch.equal(rows[2], expected[2])


class Call(StoppingCriteria, BaseStreamer):
    """As a streamer (the engine's pace) or a criterion (in lockstep): calls ``act`` once three tokens have come."""

    def __init__(self, act):
        self.act, self.seen = act, 0

    def put(self, value):
        self.seen += 1
        if self.seen == 4:  # the prompt comes first
            self.act()

    def end(self):
        pass

    def __call__(self, input_ids, scores, **kwargs):
        self.seen += 1
        if self.seen == 3:
            self.act()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@pytest.mark.parametrize("how", ["abort", "close"])
@pytest.mark.parametrize("place", ["streamer", "stopping_criteria"])
def test_an_answer_that_others_cut_short_is_no_answer(place, how):
    model = compiled() if how == "abort" else depthfx.compile(build("llama"), inductor=False, kv_blocks=64, max_batch_size=8)
    engine = model.engine
    call = Call(engine.close if how == "close" else lambda: engine.abort(engine._scheduler.unfinished()[0]))
    why = "engine was closed" if how == "close" else r"request 'request-\d+' .row 0.*engine.abort"
    with pytest.raises(InvalidRequestError, match=why):
        model.generate(**ONE, max_new_tokens=12, do_sample=False, **NONE, **{place: call if place == "streamer" else [call]})
    assert not engine.has_unfinished()
