"""Dense prompts beside routed answers, where both are captured: two steps in one, the tokens, routes and KV of the whole."""

from __future__ import annotations

import random

import pytest

from depthfx.lowering.kernel_spec import max_error
from depthfx.records import SamplingParams
from tests.families.harness import engine_over, prompts
from tests.families.routed_cases import routed
from tests.families.test_every_family import TOLERANCE
from tests.families.test_routed_families import assert_greedy, serve
from tests.runtime.prompt_graphs import capture_prompts, small_forms

RAGGED = prompts((40, 33, 20, 7, 1, 26), shared=17)
BUCKETS = (1, 2, 4, 8)


def captured(model, **options):
    engine = engine_over(model, max_chunk_tokens=32, **options)
    engine._runner.last_tokens.fill_(1 << 40)  # what no step wrote must not be read
    engine._runner.kv_pool.fill_(float("nan"))
    return engine, capture_prompts(engine, small_forms(), BUCKETS)


@pytest.mark.parametrize("policy", ["hashed", "flip", "decodes"])
@pytest.mark.parametrize("lookahead", [False, True], ids=["in turn", "lookahead"])
def test_tokens_and_routes_are_those_of_whole_steps(policy, lookahead):
    model, skipper = routed("llama", "mlp", policy)
    engine, graphs = captured(model, lookahead=lookahead)
    plain = engine_over(model, max_chunk_tokens=32, lookahead=lookahead)
    asked = [(row, ("dense", "routed") if number % 3 else "dense") for number, row in enumerate(RAGGED * 2)]
    found, expected = serve(engine, asked, every=3), serve(plain, asked, every=3)
    assert found == expected and engine.routes.counts() == plain.routes.counts()
    for row, depth, (request_id, tokens) in zip(RAGGED * 2, (d for _, d in asked), found.items(), strict=True):
        assert_greedy("llama", skipper, row, tokens, request_id, (False, depth != "dense"))
    assert {form.max_chunks for form in graphs.used} == {0, 2} and not graphs.eager
    assert any(form.max_chunks and not form.decode_rows for form in graphs.used), "a step was run in two"


def test_routed_prompts_and_probes_stay_whole():
    model, skipper = routed("llama", "mlp", "flip")
    engine, graphs = captured(model)
    found = serve(engine, [(row, "routed") for row in RAGGED], every=3)
    for row, (request_id, tokens) in zip(RAGGED, found.items(), strict=True):
        assert_greedy("llama", skipper, row, tokens, request_id)
    assert graphs.eager and all(any(c.routed for c in plan.prefills) for plan in graphs.eager)


def test_sampled_tokens_and_writes_reach_their_half():
    model, _ = routed("llama", "mlp", "decodes")
    rng = random.Random(3)
    cases = [
        (row, SamplingParams(max_new_tokens=20, temperature=rng.choice([0.0, 0.8]), seed=seed, depth=("dense", "routed")))
        for seed, row in enumerate(RAGGED * 2)
    ]

    def answers(engine):
        return [output.new_token_ids for output in engine.run(cases).values()]

    plain = answers(engine_over(model, kv_blocks=9))
    engine, graphs = captured(model, kv_blocks=9, lookahead=True)
    assert answers(engine) == plain and engine.stats().num_preemptions > 0
    assert any(form.max_chunks and not form.decode_rows for form in graphs.used)


def test_external_requests_get_logits_of_their_own():
    model, _ = routed("llama", "mlp", "decodes")

    def logits(engine):
        found, waiting, turn = {}, list(RAGGED[:4]), 0
        while waiting or engine.has_unfinished():
            if waiting and turn % 3 == 0:
                found[engine.add(waiting.pop(), SamplingParams(max_new_tokens=9, external=True, depth=("dense", "routed")))] = []
            for output in engine.step():
                found[output.request_id].append(output.logits)
                engine.push_token(output.request_id, int(output.logits.argmax()))
            turn += 1
        return found.values()

    engine, graphs = captured(model)
    for mine, theirs in zip(logits(engine), logits(engine_over(model, max_chunk_tokens=32)), strict=True):
        assert len(mine) == 9 and all(max_error(a, b) < TOLERANCE for a, b in zip(mine, theirs, strict=True))
    assert any(form.max_chunks and not form.decode_rows for form in graphs.used)
