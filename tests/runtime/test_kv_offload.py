"""KV offload in the engine: random requests on far too few blocks, with every token the right one, and with failing steps."""

from __future__ import annotations

import random

import pytest
import torch

import depthfx
from depthfx.alloc import host_blocks
from depthfx.alloc.host_cache import HostCache
from depthfx.alloc.manager import MemoryManager
from depthfx.errors import HostMemoryError, SettingError
from depthfx.records import SamplingParams, StepPlan
from depthfx.runtime.engine import Engine
from depthfx.runtime.scheduler import Scheduler
from depthfx.settings import ElasticMemory
from tests.families.configs import build
from tests.families.test_nested_families import exact
from tests.runtime.fake_runner import FakeRunner, continuation

VOCAB, BLOCK, LENGTH, BATCH = 97, 4, 48, 10
BOTH = pytest.mark.parametrize("lookahead", [False, True], ids=["in turn", "lookahead"])


def fake(num_blocks: int, lookahead: bool = False, num_slots: int = 40, max_moves: int = 6) -> tuple[Engine, FakeRunner]:
    manager = MemoryManager(num_blocks, BLOCK, BATCH, LENGTH // BLOCK, host=HostCache(num_slots, num_blocks, max_moves))
    scheduler = Scheduler(manager, BATCH, 24, 8, LENGTH)
    runner = FakeRunner(num_blocks, BLOCK, BATCH, LENGTH // BLOCK, VOCAB, delayed=lookahead)
    return Engine(scheduler, runner, VOCAB, lookahead=lookahead, check=True), runner


def requests(rng: random.Random, count: int, vocabulary: range, longest: int) -> list[tuple[list[int], int]]:
    """Prompts, of which many begin alike, and numbers of new tokens."""
    prefixes = [rng.choices(vocabulary, k=24) for _ in range(4)]
    return [
        (rng.choice(prefixes)[: rng.randrange(25)] + rng.choices(vocabulary, k=rng.randint(1, 8)), rng.choice([1, 3, 10, longest]))
        for _ in range(count)
    ]


@BOTH
def test_no_token_is_wrong_on_a_tiny_pool(lookahead):
    """The fake runner finds every read of other KV; some steps fail at launch, some at the wait, one request meets NaN."""
    rng = random.Random(3)
    engine, runner = fake(18, lookahead)
    scheduler = engine._scheduler
    for step in rng.sample(range(30, 750), 12):
        rng.choice([runner.fail_launch, runner.fail_wait])[step] = RuntimeError("injected")
    runner.nan = lambda chunk: chunk.request_id == "r60" and chunk.sample_index == 0
    tokens: dict[str, list[int]] = {}
    ends: dict[str, str] = {}
    asked = requests(rng, 300, range(VOCAB), 16)
    while len(tokens) < len(asked) or engine.has_unfinished():
        if len(tokens) < len(asked) and rng.random() < 0.4 and scheduler.num_waiting < 20:
            name = f"r{len(tokens)}"
            prompt, new = asked[len(tokens)]
            runner.prompts[name], tokens[name] = prompt, []
            engine.add(prompt, SamplingParams(max_new_tokens=new), request_id=name)
        if rng.random() < 0.03 and tokens:
            engine.abort(rng.choice(list(tokens)[-10:]))
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
            if output.finished:
                ends[output.request_id] = output.finish_reason
    for (prompt, new), (name, found) in zip(asked, tokens.items(), strict=True):
        expected = continuation(prompt, new, VOCAB)
        assert found == (expected if ends[name] == "length" else expected[: len(found)]), name
    stats = engine.stats()
    print(stats)
    assert stats.num_preemptions > 8 and stats.num_saved_blocks > 200 and stats.num_reloaded_blocks > 100
    assert ends["r60"] == "error" and list(ends.values()).count("abort") > 3 and list(ends.values()).count("error") > 6
    assert stats.kv.num_held == 0


def compiled(**settings):
    common = {"inductor": False, "max_batch_size": 8, "max_batch_tokens": 64, "max_model_len": 96, "block_tokens": 8, "check": True}
    return depthfx.compile(settings.pop("model", None) or build("llama"), **{**common, **settings})


def serve(engine, asked: list[tuple[list[int], int]], seed: int = 0) -> dict[str, list[int]]:
    """Tokens by request; requests come one after another, and some are aborted."""
    rng, tokens, turn = random.Random(seed), {}, 0
    aborts = {f"r{i}": rng.randint(3, 30) for i in range(0, len(asked), 11)}
    while len(tokens) < len(asked) or engine.has_unfinished():
        while len(tokens) < len(asked) and engine.stats().num_waiting < 3:
            prompt, new = asked[len(tokens)]
            tokens[engine.add(prompt, SamplingParams(max_new_tokens=new), request_id=f"r{len(tokens)}")] = []
        for output in engine.step():
            assert output.error is None, output.error
            tokens[output.request_id] += output.new_token_ids
        turn += 1
        for name in [n for n in aborts if n in tokens and len(tokens[n]) >= 2]:
            engine.abort(name)
            del aborts[name]
    return tokens


def same(found: dict[str, list[int]], expected: dict[str, list[int]]) -> None:
    """Aborted requests may have got another number of tokens."""
    for name, tokens in expected.items():
        length = len(tokens) if int(name[1:]) % 11 else min(len(tokens), len(found[name]))
        assert found[name][:length] == tokens[:length], name


@BOTH
def test_tokens_equal_those_of_a_large_pool(lookahead):
    asked = requests(random.Random(5), 200, range(3, 90), 40)
    large = compiled(kv_blocks=400)
    small = compiled(kv_blocks=16, kv_offload_gib=0.001, lookahead=lookahead)
    assert "KV offload:" in small.explain() and "not pinned" in small.explain()
    same(serve(small.engine, asked), serve(large.engine, asked))
    stats, plain = small.engine.stats(), large.engine.stats()
    print(stats)
    assert stats.num_preemptions > 5 and stats.num_saved_blocks > 100 and stats.num_reloaded_tokens == 8 * stats.num_reloaded_blocks > 400
    assert (plain.num_saved_blocks, plain.num_reloaded_blocks, plain.num_reloaded_tokens) == (0, 0, 0)
    small.engine.close()


def test_preempted_requests_come_back_without_computing():
    engine, runner = fake(12, num_slots=64, max_moves=100)
    for i in range(3):
        runner.prompts[f"r{i}"] = [i] * 9
        engine.add([i] * 9, SamplingParams(max_new_tokens=30), request_id=f"r{i}")
    while engine.has_unfinished():
        engine.step()
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_prefill_tokens < 27 + (BLOCK + 1) * stats.num_preemptions  # at most what no whole block holds, each time
    assert stats.num_reloaded_tokens > 0


def test_precisions_are_kept_apart_on_the_host():
    asked = requests(random.Random(6), 40, range(3, 90), 20)
    model = compiled(model=exact("llama"), weights="nested", kv_blocks=16, kv_offload_gib=0.001)
    reference = compiled(model=exact("llama"), weights="nested", kv_blocks=400)
    for modes in ("full", "fast", "full"):
        model.engine.set_precision(modes)
        reference.engine.set_precision(modes)
        before = model.engine.stats().num_reloaded_blocks
        same(serve(model.engine, asked), serve(reference.engine, asked))
        assert model.engine.stats().num_reloaded_blocks > before
    full = serve(reference.engine, asked)
    reference.engine.set_precision("fast")
    assert serve(reference.engine, asked) != full


@BOTH
def test_beside_memory_that_is_lent(lookahead):
    """Blocks of lent units are evicted, saved and loaded like others; wanted precision is fast, so the tokens do not depend on lending."""
    asked = requests(random.Random(7), 120, range(3, 90), 40)
    memory = ElasticMemory(unit_mib=0.01, dwell_s=0.0, verify=True)
    common = {"weights": "nested", "max_batch_size": 12}
    model = compiled(model=exact("llama"), kv_blocks=8, kv_offload_gib=0.001, memory=memory, lookahead=lookahead, **common)
    reference = compiled(model=exact("llama"), kv_blocks=500, **common)
    model.engine.set_precision("fast")
    reference.engine.set_precision("fast")
    expected = serve(reference.engine, asked)
    same(serve(model.engine, asked[:3]), {name: expected[name] for name in ("r0", "r1", "r2")})
    model.engine.restore()
    same(serve(model.engine, asked), expected)
    stats, moved = model.engine.stats(), model.engine.control.stats()
    print(stats, moved)
    assert moved.num_lends > 0 and stats.num_saved_blocks > 100 and stats.num_reloaded_blocks > 50
    model.engine.restore()
    assert moved.num_restores + model.engine.control.stats().num_restores > 0
    model.engine.close()


def test_changed_weights_forget_what_the_host_has():
    model = compiled(kv_blocks=8, kv_offload_gib=0.001)
    prompt = list(range(5, 5 + 40))
    asked = [(prompt, 4), (list(range(50, 85)), 20), (prompt, 4)]
    serve(model.engine, asked)
    assert model.engine.stats().num_reloaded_blocks > 0
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(-1)
    fresh = build("llama")
    with torch.no_grad():
        fresh.model.embed_tokens.weight.mul_(-1)
    found = model.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False)
    assert torch.equal(found, fresh.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False))


def test_without_the_setting_plans_move_nothing():
    model = compiled(kv_blocks=16)
    plans: list[StepPlan] = []
    launch = model.engine._runner.launch
    model.engine._runner.launch = lambda plan: plans.append(plan) or launch(plan)
    serve(model.engine, requests(random.Random(8), 20, range(3, 90), 20))
    assert plans and not any(plan.saves or plan.loads for plan in plans)
    assert model.engine._scheduler.manager.host is None and model.engine._runner.host_blocks is None


BAD = {
    "negative": ({"kv_offload_gib": -1.0}, "kv_offload_gib=-1.0 must be positive and finite; None switches KV offload off"),
    "nothing": ({"kv_offload_gib": 0}, "kv_offload_gib=0 must be positive"),
    "nan": ({"kv_offload_gib": float("nan")}, "kv_offload_gib=nan must be positive"),
    "infinite": ({"kv_offload_gib": float("inf")}, "kv_offload_gib=inf must be positive"),
    "type": ({"kv_offload_gib": "4"}, "kv_offload_gib='4' has type str"),
    "less than a block": ({"kv_offload_gib": 1e-6}, "kv_offload_gib=1e-06 is less than one KV block of .*raise it"),
    "no index": ({"kv_offload_gib": 1.0, "prefix_reuse": False}, "kv_offload_gib needs prefix_reuse=True"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings(case):
    settings, message = BAD[case]
    with pytest.raises(SettingError, match=message):
        compiled(kv_blocks=16, **settings)


def test_more_than_the_host_has():
    with pytest.raises(HostMemoryError, match=r"cannot hold .* of evicted KV blocks; lower kv_offload_gib"):
        compiled(kv_blocks=16, kv_offload_gib=1e6)


def test_memory_that_the_host_refuses(monkeypatch):
    def refuse(*args):
        raise HostMemoryError("refused")

    monkeypatch.setattr(host_blocks, "HostBackup", refuse)
    model = build("llama")
    with pytest.raises(HostMemoryError, match="refused"):
        compiled(model=model, kv_blocks=16, kv_offload_gib=0.001)
    assert not hasattr(model, "engine")
