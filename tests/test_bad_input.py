"""Every mistake a user can make gets an error that names the value, what is allowed and what to do."""

from __future__ import annotations

import copy
import pickle
import re
from functools import cache

import numpy as np
import pytest
import torch

import depthfx
from depthfx import ElasticMemory, Settings
from depthfx.errors import (
    InvalidRequestError,
    MemoryBudgetError,
    NonFiniteLogitsError,
    RequestTooLargeError,
    SettingError,
    SkipperError,
    UnsupportedModelError,
)
from depthfx.lowering.load_model import convert, load_nested
from depthfx.records import SamplingParams
from tests.families.configs import VOCABULARY, build
from tests.families.harness import alone, engine_over, prompts

GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
IDS = torch.tensor([[5, 6, 7, 8]])


def fresh(**settings):
    return depthfx.compile(build("llama"), inductor=False, check=True, **{"kv_blocks": 16, "max_batch_size": 4, **settings})


@cache
def compiled():
    return fresh()


def test_request_too_large_for_the_pool_while_others_finish():
    rows = prompts((20, 12), seed=4)
    engine = engine_over(compiled(), kv_blocks=4)
    streams = [engine.stream(row, SamplingParams(max_new_tokens=12)) for row in rows]
    with pytest.raises(
        RequestTooLargeError, match=r"needs KV for 79 tokens \(40 of prompt, 40 new\).*can have 64: shorten it, lower max_new"
    ):
        engine.add(prompts((40,))[0], SamplingParams(max_new_tokens=40))
    assert [list(s) for s in streams] == alone(build("llama"), rows)
    with pytest.raises(RequestTooLargeError, match="give more KV memory"):
        fresh(kv_blocks=1).generate(IDS, **{**GREEDY, "max_new_tokens": 20})


PROMPTS = {
    "empty": ([], "the prompt is empty; it must have at least one token id"),
    "too long": ([1] * 257, r"prompt of 257 tokens; at most max_model_len=256 are allowed: shorten it"),
    "float": ([1, 2.5], r"2\.5"),
    "text": ([1, "two"], "'two'"),
    "bool": ([1, True], "True"),
    "negative": ([1, -1], r"-1.*0"),
    "too high": ([1, VOCABULARY], rf"token 1 of the prompt is {VOCABULARY}; ids must be in \[0, {VOCABULARY}\)"),
    "nothing": (None, "the prompt is of type NoneType; it must be a list of token ids"),
    "one number": (5, "the prompt is of type int"),
    "bytes": (b"abc", "the prompt is of type bytes"),
    "one text": ("abc", "'a' of type str"),
    "a tensor of truth values": (torch.tensor([True, False]), r"tensor\(True\)"),
    "a tensor of rows": (torch.tensor([[1, 2], [3, 4]]), r"tensor\(\[1, 2\]\).*one flat list for each request"),
}


@pytest.mark.parametrize("case", PROMPTS)
def test_prompts(case):
    prompt, message = PROMPTS[case]
    for call in (compiled().engine.add, compiled().engine.stream):
        with pytest.raises(InvalidRequestError, match=message):
            call(prompt)
    assert not compiled().engine.has_unfinished()


def test_prompt_longer_than_all_kv():
    with pytest.raises(RequestTooLargeError, match=r"needs KV for .* tokens .*give more KV memory"):
        fresh(kv_blocks=2).engine.add([1] * 100)


GENERATE = {
    "outside the vocabulary": ({"inputs": torch.tensor([[5, VOCABULARY]])}, InvalidRequestError, rf"{VOCABULARY}"),
    "negative id": ({"inputs": torch.tensor([[5, -2]])}, InvalidRequestError, "-2"),
    "not integers": ({"inputs": torch.tensor([[5.5, 2.0]])}, InvalidRequestError, r"5\.5"),
    "nothing but padding": ({"inputs": IDS, "attention_mask": torch.zeros(1, 4)}, InvalidRequestError, "prompt is empty"),
    "longer than the context": (
        {"inputs": torch.ones(1, 300, dtype=torch.long)},
        InvalidRequestError,
        "prompt of 300 tokens; at most max_model_len=256",
    ),
    "no rows": ({"inputs": torch.ones(0, 4, dtype=torch.long)}, InvalidRequestError, "at least one row"),
    "no new tokens": ({"inputs": IDS, "max_new_tokens": 0}, ValueError, "max_new_tokens"),
    "max_length too small": ({"inputs": IDS, "max_new_tokens": None, "max_length": 3}, ValueError, "Input length of input_ids is 4"),
    "unknown argument": ({"inputs": IDS, "max_tokens": 3}, ValueError, "max_tokens"),
    "right padding": (
        {"inputs": IDS.repeat(2, 1), "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])},
        InvalidRequestError,
        "attention_mask of row 1 is 0 after its first 1; pad on the left only",
    ),
    "a hole": ({"inputs": IDS, "attention_mask": torch.tensor([[1, 0, 1, 1]])}, InvalidRequestError, "row 0 is 0 after its first 1"),
    "mask of another shape": ({"inputs": IDS, "attention_mask": torch.ones(1, 3)}, ValueError, "attention_mask|position_ids|shape"),
    "temperature": ({"inputs": IDS, "do_sample": True, "temperature": -1.0}, ValueError, "temperature"),
    "top_p": ({"inputs": IDS, "do_sample": True, "top_p": -0.5}, ValueError, "top_p"),
    "model argument": ({"inputs": IDS, "token_type_ids": IDS}, ValueError, "token_type_ids"),
}


@pytest.mark.parametrize("case", GENERATE)
def test_generate(case):
    options, error, message = GENERATE[case]
    with pytest.raises(error, match=message):
        compiled().generate(**{**GREEDY, **options})
    assert not compiled().engine.has_unfinished()
    assert compiled().engine.stats().kv.num_held == 0


def test_nan_ends_only_the_request_that_met_it():
    model = build("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[77] = float("nan")
    rows = [[5, 6, 7], [5, 77, 7], [9, 8]]
    expected = alone(build("llama"), [rows[0], rows[2]], max_new_tokens=8)
    broken = depthfx.compile(model, inductor=False, check=True, kv_blocks=16, max_batch_size=4)
    assert 77 not in [t for answer in expected for t in answer]
    outputs = list(broken.engine.run((row, SamplingParams(max_new_tokens=8)) for row in rows).values())
    assert [list(outputs[0].new_token_ids), list(outputs[2].new_token_ids)] == expected
    assert outputs[1].finish_reason == "error" and isinstance(outputs[1].error, NonFiniteLogitsError)
    assert "NaN logits for token 0 of its output" in str(outputs[1].error) and "check the weights" in str(outputs[1].error)
    for options in ({}, {"return_dict_in_generate": True, "output_logits": True}):
        with pytest.raises(NonFiniteLogitsError, match="NaN logits"):
            broken.generate(torch.tensor([rows[1]]), **GREEDY, **options)
    assert alone(broken, rows[:1], max_new_tokens=8) == expected[:1]


SETTINGS = {
    "unknown": ({"max_batchsize": 3}, r"unknown setting 'max_batchsize'=3; did you mean 'max_batch_size'"),
    "far from any": ({"zzz": 3}, "unknown setting 'zzz'=3; known settings: .*block_tokens"),
    "type": ({"max_batch_size": "8"}, r"max_batch_size='8' has type str; allowed: int or None"),
    "bool for int": ({"kv_blocks": True}, r"kv_blocks=True has type bool"),
    "not positive": ({"kv_blocks": 0}, "kv_blocks=0 must be positive"),
    "infinite": ({"memory_budget_gib": float("inf")}, "memory_budget_gib=inf must be positive and finite"),
    "block size": ({"block_tokens": 12}, "block_tokens=12 must be 8, 16, 32, 64 or 128"),
    "choice": ({"on_unsupported": "ignore"}, r"on_unsupported='ignore' must be one of \('raise', 'eager'\)"),
    "share": ({"gpu_memory_utilization": 1.5}, "must be above 0 and at most 1"),
    "context": ({"max_model_len": 1000}, "max_model_len=1000 .*256"),
    "graphs on a CPU": ({"cuda_graphs": True}, "cuda_graphs=True needs a model on CUDA; this one is on cpu"),
    "offload on a CPU": ({"weight_offload_gib": 0.5}, "weight_offload_gib=0.5 needs a model on CUDA; this one is on cpu"),
    "offload of nothing": ({"weight_offload_gib": 0.0}, "weight_offload_gib=0.0 must be positive"),
    "weights": ({"weights": "8bit"}, r"weights='8bit' must be one of \('16bit', 'nested', 'fp8'\)"),
    "kv_dtype": ({"kv_dtype": "int8"}, r"kv_dtype='int8' must be one of \('auto', 'fp8'\)"),
    "head without nested weights": ({"nested_head": True}, "nested_head=True needs weights='nested'; it is '16bit': set both"),
    "policy": ({"memory": "elastc", "weights": "nested"}, r"memory policy='elastc' must be one of \('elastic', "),
    "memory": ({"memory": 8, "weights": "nested"}, "memory=8 has type int; allowed: ElasticMemory or None"),
    "requests": ({"max_batch_size": 10**12}, r"max_batch_size=1000000000000, .* need .* GiB, and cpu has .* GiB: lower them"),
    "tokens": ({"max_batch_tokens": 10**15}, r"max_batch_tokens=1000000000000000 and .*: lower them"),
    "rows": ({"max_batch_size": 8, "max_batch_tokens": 4}, "max_batch_tokens=4 must be at least max_batch_size=8"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings(case):
    overrides, message = SETTINGS[case]
    model = build("llama")
    with pytest.raises(SettingError, match=message):
        depthfx.compile(model, **{"inductor": False, **overrides})
    assert not hasattr(model, "explain")
    with pytest.raises(SettingError, match=r"must be a depthfx.Settings"):
        depthfx.compile(model, {"kv_blocks": 3})


def test_a_policy_may_be_named_and_names_are_checked():
    expected = ElasticMemory(policy="nested_resident")
    assert Settings(memory="nested_resident", weights="nested").memory == expected
    assert Settings.build(memory="nested_resident", weights="nested").memory == expected
    model = depthfx.compile(build("llama", torch.float16), memory="elastic", weights="nested", inductor=False, kv_blocks=16)
    assert "shared with residuals" in str(model.explain())
    model.engine.close()
    with pytest.raises(SettingError, match="memory=8 has type int; allowed: ElasticMemory or None"):
        Settings(memory=8, weights="nested")  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="unknown memory setting 'budge_gib'=8; did you mean 'budget_gib'"):
        ElasticMemory(budge_gib=8)
    with pytest.raises(SettingError, match="unknown setting 'kv_block'=8; did you mean 'kv_blocks'"):
        Settings(kv_block=8)
    for made in (expected, Settings(kv_blocks=3)):
        assert copy.deepcopy(made) == made == pickle.loads(pickle.dumps(made))


@pytest.mark.parametrize("device", ["gpu", "cpu:x", 1.5, "mps", "cuda:99"])
def test_a_device_that_there_is_not(device, tmp_path):
    for call in (depthfx.load, load_nested, lambda path, device: convert(path, tmp_path / "out", device)):
        with pytest.raises(SettingError, match=rf"device={device!r} is .*allowed here: 'cpu'"):
            call(tmp_path, device=device)


VARIABLES = {
    "DEPTHFX_MAX_BATCH_SIZE": ("many", r"DEPTHFX_MAX_BATCH_SIZE='many' must be a number \(int\)"),
    "DEPTHFX_MEMORY_BUDGET_GIB": ("4g", r"'4g' must be a number \(float\)"),
    "DEPTHFX_CHECK": ("maybe", "must be 1/0, true/false, yes/no or on/off"),
    "DEPTHFX_ON_UNSUPPORTED": ("never", "on_unsupported='never' must be one of"),
    "DEPTHFX_WEIGHTS": ("fp4", "weights='fp4' must be one of"),
    "DEPTHFX_KV_DTYPE": ("fp4", "kv_dtype='fp4' must be one of"),
    "DEPTHFX_KV_BLOCK": ("3", "unknown environment variable DEPTHFX_KV_BLOCK='3'; did you mean DEPTHFX_KV_BLOCKS"),
}


@pytest.mark.parametrize("variable", VARIABLES)
def test_environment(variable, monkeypatch):
    value, message = VARIABLES[variable]
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingError, match=message):
        depthfx.compile(build("llama"))


def test_memory_budget_too_small():
    with pytest.raises(MemoryBudgetError, match=r"leaves 0.00 GiB for KV beside .* of weights.*one block needs .*raise memory_budget_gib"):
        depthfx.compile(build("llama"), inductor=False, memory_budget_gib=1e-4)


def test_more_kv_than_the_machine_has():
    with pytest.raises(MemoryBudgetError, match=r"a KV pool of .* GiB does not fit the .* GiB that are free on cpu.*lower .*kv_blocks"):
        depthfx.compile(build("llama"), inductor=False, kv_blocks=10**12)


def test_compiling_twice():
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM is compiled already; load it again"):
        depthfx.compile(compiled(), kv_blocks=32)
    model = build("llama")
    with pytest.raises(MemoryBudgetError):
        depthfx.compile(model, inductor=False, memory_budget_gib=1e-4)
    retried = depthfx.compile(model, inductor=False, kv_blocks=16)  # a refused attempt leaves a model that can be compiled
    assert alone(retried, [[5, 6]]) == alone(build("llama"), [[5, 6]])


@pytest.mark.parametrize("given", [5, torch.nn.Identity(), ["router"]], ids=str)
def test_a_skipper_is_a_skipper(given):
    with pytest.raises(SkipperError, match=r"skipper is .*give a depthfx Skipper or the path"):
        fresh(skipper=given)


@pytest.mark.parametrize("given", ["What is the capital of France?", [1, 2, 3], {"input_ids": [1]}])
def test_generate_takes_a_tensor_of_ids(given):
    with pytest.raises(InvalidRequestError, match=rf"generate got {type(given).__name__} as inputs; it takes token ids as a tensor"):
        compiled().generate(given, **GREEDY)


def test_sampling_is_an_object():
    with pytest.raises(InvalidRequestError, match=r"sampling is a dict; give depthfx.SamplingParams"):
        compiled().engine.add([1, 2], {"max_new_tokens": 3})


WRONG = {
    "max_new_tokens": ("3", 1.5, None, True, torch.tensor(1.5), 0),
    "min_new_tokens": (None, 0.5, -1),
    "temperature": ("0.5", None, True, 1j, float("nan"), -1, torch.ones(2)),
    "top_k": (2.5, "2", -1),
    "top_p": (None, "1", 0.0, False),
    "min_p": (None, 1.5),
    "repetition_penalty": (None, 0),
    "seed": (None, 1.5, 1 << 63),
    "eos_token_ids": (5, None, "5", b"5", (1.5,), (None,), torch.tensor(5)),
    "depth": (5, "all", ("dense",)),
    "min_precision": (None, "half"),
    "external": (None, 1),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values], ids=str)
def test_values_of_sampling(name, value):
    with pytest.raises(InvalidRequestError, match=rf"sampling parameter {name}={re.escape(repr(value))} must be .*; change it in"):
        compiled().engine.add([1, 2], SamplingParams(**{name: value}))
    assert not compiled().engine.has_unfinished()


def test_numbers_of_other_libraries_are_welcome():
    plain = {"max_new_tokens": 4, "temperature": 0.75, "top_k": 5, "top_p": 0.5, "min_p": 0.25, "seed": 3, "eos_token_ids": (7, 130)}
    (expected,) = compiled().engine.run([([5, 6, 7], SamplingParams(**plain))]).values()
    for make in (np.asarray, torch.tensor):
        other = {name: [*map(make, v)] if name == "eos_token_ids" else make(v)[()] for name, v in plain.items()}
        for prompt in (make([5, 6, 7]), [*make([5, 6, 7])]):
            (found,) = compiled().engine.run([(prompt, SamplingParams(**other))]).values()
            assert found.new_token_ids == expected.new_token_ids and found.error is None


@pytest.mark.parametrize("given", [{"request_id": v} for v in (5, [1], b"a", "a\ud800")] + [{"stop_check": 5}], ids=str)
def test_names_are_text_and_checks_are_functions(given):
    with pytest.raises(InvalidRequestError, match=r"request_id=.* must be text|stop_check=5 must be a function"):
        compiled().engine.add([1, 2], **given)
    assert not compiled().engine.has_unfinished()
