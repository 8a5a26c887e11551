"""Depth left open in the whole engine on a CPU: promoted once, dense rows untouched, prefixes apart; costs measured, kept and read again."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import depthfx
from depthfx.api import _costs_key
from depthfx.errors import InvalidRequestError, SettingError
from depthfx.records import SamplingParams
from depthfx.runtime import calibration
from depthfx.runtime.calibration import calibrate_again, doubt, load_costs, measure, save_costs
from depthfx.runtime.depth_control import DepthControl, DepthCosts, StepCost
from tests.families.configs import build
from tests.families.harness import alone, engine_over, prompts
from tests.families.routed_cases import COMMON, make, reference
from tests.families.routed_reference import routed_answer

ROWS = prompts((20, 9, 33, 14, 26, 40), seed=4)
CHEAP = DepthCosts(1e9, 1e9, 256, 3, (StepCost(1, 1e-3, 1e-6, 1e-3),), (StepCost(16, 1e-3, 1e-6, 1e-3),))  # routing always pays
DEAR = replace(CHEAP, decode=(StepCost(1, 1e-3, 1.0),), prefill=(StepCost(16, 1e-3, 1.0, 1e-6),))  # and never


@cache
def compiled(policy: str = "flip") -> Any:
    """A llama whose rows skip by ``policy``, compiled with depth left open; and its skipper."""
    model = build("llama")
    skipper = make("hard", model.config.num_hidden_layers, policy)
    return depthfx.compile(model, skipper=skipper, depth="auto", program_cache=False, **COMMON), skipper


def auto_engine(model: Any, costs: DepthCosts, **options: Any) -> Any:
    """An engine over ``model`` that was told ``costs``."""
    engine = engine_over(model, **options)
    engine._scheduler.depth = DepthControl(costs)
    engine.routes.observer = engine._scheduler.depth.observe
    return engine


def serve(engine: Any, rows: list[list[int]], every: int = 2, new: int = 30, depth: Any = None) -> tuple[dict[str, list[int]], list[Any]]:
    """Tokens of each request and all plans."""
    tokens: dict[str, list[int]] = {}
    plans, own, waiting, turn = [], engine._scheduler.plan, list(rows), 0

    def plan():
        made = own()
        plans.extend([made] if made is not None else [])
        return made

    engine._scheduler.plan = plan
    while waiting or engine.has_unfinished():
        if waiting and turn % every == 0:
            name = f"r{len(tokens)}"
            tokens[engine.add(waiting.pop(0), SamplingParams(max_new_tokens=new, depth=depth), request_id=name)] = []
        for output in engine.step():
            assert output.error is None, output.error
            tokens[output.request_id] += output.new_token_ids
        turn += 1
    engine._scheduler.plan = own
    return tokens, plans


def promoted_at(plans: list[Any]) -> dict[str, int]:
    """Position from which each answer is routed, after making sure that it stays so; requests that never are are left out."""
    found: dict[str, int] = {}
    for plan in plans:
        for chunk in plan.decodes:
            if chunk.routed:
                found.setdefault(chunk.request_id, chunk.start)
            assert chunk.routed or chunk.request_id not in found, f"{chunk.request_id} went back to dense"
    return found


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("policy", ["flip", "hashed"])
def test_answers_are_promoted_once(policy, lookahead):
    """The tokens are those of a run that is dense up to the promotion and routed from there on."""
    model, skipper = compiled(policy)
    engine = auto_engine(model, replace(CHEAP, prefill=DEAR.prefill), lookahead=lookahead)
    tokens, plans = serve(engine, ROWS)
    starts = promoted_at(plans)
    stats = engine.stats().depth
    assert stats.num_promotions == len(starts) == len(ROWS) and stats.num_enters >= 1 and stats.num_probes >= 1
    assert any(starts[name] > len(row) for name, row in zip(tokens, ROWS)), "in the middle of an answer too"
    for row, (name, answer) in zip(ROWS, tokens.items(), strict=True):
        wanted = routed_answer(reference("llama"), "llama", skipper, row + answer[:-1], starts[name], name, (False, True))
        assert wanted.logits[len(row) - 1 :].argmax(-1).tolist() == answer, name


def test_an_answer_is_computed_anew_in_the_depths_that_it_had():
    """A preemption after the promotion: what was dense is dense again, what was routed is routed."""
    model, skipper = compiled()
    engine = auto_engine(model, replace(CHEAP, prefill=DEAR.prefill), kv_blocks=5, prefix_reuse=False)
    tokens, plans = serve(engine, ROWS[:2], every=1)
    starts = promoted_at(plans)
    again = [c for plan in plans for c in plan.prefills if c.request_id == "r1" and not c.is_prompt]
    assert engine.stats().num_preemptions and len(ROWS[1]) < starts["r1"] and {c.routed for c in again} == {False, True}
    for row, (name, answer) in zip(ROWS[:2], tokens.items(), strict=True):
        wanted = routed_answer(reference("llama"), "llama", skipper, row + answer[:-1], starts[name], name, (False, True))
        assert wanted.logits[len(row) - 1 :].argmax(-1).tolist() == answer, name


def test_what_cannot_pay_stays_dense_and_probes_change_nothing():
    model, _ = compiled()
    engine = auto_engine(model, replace(DEAR, decode=(StepCost(1, 1.0, 1e-3),)))
    tokens, plans = serve(engine, ROWS)
    assert list(tokens.values()) == [answer[:30] for answer in alone(reference("llama"), ROWS, max_new_tokens=30)]
    assert engine.stats().depth.num_probes >= 1 and not promoted_at(plans)
    assert engine.stats().depth.answer_share == pytest.approx(0.5, abs=0.2), "though nothing was skipped"
    assert engine.routes.counts().skipped_share == 0.0 and sum(engine.routes.counts().run) == 0


def test_dense_requests_stay_the_base_model_beside_routed_ones():
    model, _ = compiled()
    engine = auto_engine(model, CHEAP)
    serve(engine, ROWS[:2])  # routing is on from here
    asked = [(row, "dense" if number % 2 else "auto") for number, row in enumerate(ROWS * 2)]
    names = [engine.add(row, SamplingParams(max_new_tokens=30, depth=depth)) for row, depth in asked]
    answers = {name: [] for name in names}
    while engine.has_unfinished():
        for output in engine.step():
            answers[output.request_id] += output.new_token_ids
    base = dict(zip(map(tuple, ROWS), alone(reference("llama"), ROWS, max_new_tokens=30)))
    for name, (row, depth) in zip(names, asked):
        assert depth == "auto" or answers[name] == base[tuple(row)]
    assert engine.stats().depth.num_promotions > 6


def test_prefixes_stay_apart():
    """A prompt that was computed dense, then routed: neither finds the other's KV, each finds its own, and no answer's KV is taken for either."""
    model, _ = compiled()
    row = prompts((40,), seed=6)[0]
    engine = auto_engine(model, replace(CHEAP, prefill=DEAR.prefill))
    (first,) = serve(engine, [row], new=40)[0].values()
    assert engine.stats().depth.num_promotions == 1
    before = engine.stats().num_reused_tokens
    again = row + first[:38] + [3]
    serve(engine, [again], depth="dense", new=2)
    reused = engine.stats().num_reused_tokens - before
    starts = engine.stats().depth
    assert 32 <= reused < len(again) - 1 - 16, (reused, starts)  # the prompt's and no block of the routed answer
    before = engine.stats().num_reused_tokens
    serve(engine, [row], depth="routed", new=2)
    assert engine.stats().num_reused_tokens == before


def test_prompts_are_routed_where_that_pays_and_keep_their_depth_after_a_preemption():
    model, skipper = compiled()
    engine = auto_engine(model, CHEAP, kv_blocks=6)
    tokens, plans = serve(engine, ROWS[:2] * 3, every=1, new=30)
    assert engine.stats().num_preemptions
    prompts_by: dict[str, set[bool]] = {}
    for plan in plans:
        for chunk in plan.prefills:
            if chunk.is_prompt:
                prompts_by.setdefault(chunk.request_id, set()).add(chunk.routed)
    assert all(len(depths) == 1 for depths in prompts_by.values()) and {True} in prompts_by.values()
    starts = promoted_at(plans)
    for name, answer in tokens.items():
        row = (ROWS[:2] * 3)[int(name[1:])]
        if prompts_by[name] == {True} and starts.get(name) == len(row):
            wanted = routed_answer(reference("llama"), "llama", skipper, row + answer[:-1], len(row), name)
            assert wanted.logits[len(row) - 1 :].argmax(-1).tolist() == answer, name


def test_depth_is_asked_by_request():
    model, _ = compiled()
    engine = auto_engine(model, CHEAP)
    serve(engine, ROWS[:2])
    _, plans = serve(engine, [ROWS[2]], depth=("dense", "auto"))
    assert not any(c.routed for p in plans for c in p.prefills) and any(c.routed for p in plans for c in p.decodes)
    _, plans = serve(engine, [ROWS[3]], depth=("auto", "dense"))
    assert all(c.routed for p in plans for c in p.prefills) and not any(c.routed for p in plans for c in p.decodes)
    with pytest.raises(SettingError, match="depth='deep'"):
        depthfx.Settings(depth="deep")
    with pytest.raises(SettingError, match="depth_rule='guess'"):
        depthfx.Settings(depth_rule="guess")
    with pytest.raises(InvalidRequestError, match="was not measured; compile the model with depth='auto'"):
        engine_over(model).add([5, 6], SamplingParams(depth="auto"))
    for depth in ("auto", "routed"):
        with pytest.raises(SettingError, match=f"depth='{depth}' needs a skipper.*leave depth out"):
            depthfx.compile(build("llama"), depth=depth, **COMMON)
    assert depthfx.compile(build("llama"), depth="dense", **COMMON).engine.routes is None
    plain = depthfx.compile(build("llama"), depthfx.Settings(depth="auto"), **COMMON).engine
    assert plain._scheduler.depth is None
    with pytest.raises(InvalidRequestError, match="depth='auto': this model was compiled without a skipper"):
        plain.add([5, 6], SamplingParams(depth="auto"))


# -- what is measured


def test_explain_says_what_was_measured():
    text = compiled()[0].explain()
    assert "measured: decode of 8 rows: dense" in text and "decode of 1 rows: V* is" in text and "prompts" in text
    assert compiled()[0].engine._scheduler.depth.costs.kv_bytes * 3 == compiled()[0].engine._runner.shape.kv.token_bytes


def test_measuring_leaves_nothing_behind():
    model, _ = compiled()
    engine = engine_over(model)
    runner = engine._runner
    costs = measure(runner, 60)
    assert not runner.kv_pool.any() and not runner.block_tables.any() and not runner.last_tokens.any()
    assert [c.rows for c in costs.decode] == [1, 8] and costs.decode[1].dense > 0 and costs.bandwidth > 1e8
    assert engine.run([(ROWS[0], SamplingParams(max_new_tokens=5, depth="dense"))])


def test_calibrating_again_is_a_fresh_start():
    """Costs are measured, what was seen and what was cached is gone, and the tables are right for whoever comes next."""
    model, _ = compiled()
    engine = auto_engine(model, CHEAP)
    serve(engine, ROWS[:3])
    assert engine.stats().depth.answer_share is not None and engine.stats().depth.num_promotions
    costs = calibrate_again(engine)
    stats = engine.stats()
    assert stats.depth.answer_share is stats.depth.prompt_share is None and stats.depth.num_promotions == stats.depth.num_probes == 0
    assert engine._scheduler.depth.costs is costs and costs.bandwidth > 1e8 and not engine._scheduler.depth.routing
    tokens, _ = serve(engine, ROWS[:3], depth="dense", new=12)
    assert list(tokens.values()) == alone(reference("llama"), ROWS[:3], max_new_tokens=12)
    assert engine.stats().num_reused_tokens == stats.num_reused_tokens
    serve(engine, ROWS[3:])
    assert engine.stats().depth.num_probes > 0 and engine.stats().depth.prompt_share is not None
    engine.add(ROWS[0], SamplingParams(max_new_tokens=2))
    with pytest.raises(InvalidRequestError, match="1 requests are unfinished"):
        calibrate_again(engine)
    with pytest.raises(InvalidRequestError, match="compile the model with a skipper and depth='auto'"):
        calibrate_again(engine_over(model))


def test_costs_are_kept_and_nothing_else_is_believed(tmp_path):
    path = tmp_path / "depth" / "costs.json"
    assert load_costs(path, "me") == (None, "depth costs: nothing is kept under costs.json")
    assert save_costs(path, "me", CHEAP) == ""
    assert load_costs(path, "me")[0] == CHEAP
    assert load_costs(path, "somebody else")[0] is None
    good = path.read_text()
    body = json.loads(good)
    body["costs"]["bandwidth"] *= 2  # the digest does not fit
    digestless = json.dumps({k: v for k, v in json.loads(good).items() if k != "digest"})
    for text in (json.dumps(body), digestless, good[:-40], "[]", "", "[" * 100_000, good.replace('"format": 1', '"format": 2')):
        path.write_text(text)
        found, line = load_costs(path, "me")
        assert found is None and "is not used" in line, text
    for wrong in (replace(CHEAP, bandwidth=0.0), replace(CHEAP, decode=()), replace(CHEAP, prefill=(StepCost(4, float("nan"), 0.0),)),
                  replace(CHEAP, decode=CHEAP.decode * 2), replace(CHEAP, decode=(StepCost(1, 1.0, 0.0, -1.0),))):  # fmt: skip
        save_costs(path, "me", wrong)
        assert load_costs(path, "me")[0] is None, wrong


def test_costs_that_a_busy_host_made_are_not_kept():
    """In proportion to the rows is the most that more rows can take, with room for noise."""
    fine = DepthCosts(
        1e11, 1e11, 1000, 8, (StepCost(1, 0.02, 0.001), StepCost(4, 0.07, 0.004)), (StepCost(32, 0.1, 0.0), StepCost(128, 0.5, 0.2))
    )
    assert doubt(fine) is None
    late = replace(fine, decode=(StepCost(1, 0.02823, 0.0), StepCost(4, 0.539, 0.0)))
    assert doubt(late) == "4 rows took 539.0 ms where 1 took 28.2: something else was at work"
    routed = replace(fine, prefill=(StepCost(32, 0.1, 0.247),))
    assert doubt(routed) == "routing 32 rows took 247.0 ms more than 100.0: something else was at work"


def test_a_second_compilation_reads_them(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "doubt", lambda costs: None)  # a busy host must not keep them from being kept

    def again():
        model = build("llama")
        skipper = make("hard", model.config.num_hidden_layers, "flip")
        return depthfx.compile(model, skipper=skipper, depth="auto", cache_dir=str(tmp_path), **COMMON)

    first, second = again(), again()
    assert "measured in" in first.explain() and "depth costs: from" in second.explain()
    assert first.engine._scheduler.depth.costs == second.engine._scheduler.depth.costs
    (file,) = (tmp_path / "depth").iterdir()
    file.write_text(file.read_text()[:50])
    third = again()
    assert "is not used" in third.explain() and "measured in" in third.explain()
    assert torch.equal(first.model.embed_tokens.weight, third.model.embed_tokens.weight)


def test_steps_that_are_run_otherwise_have_other_costs():
    """One program: with and without Inductor, or with weights that are read over the link."""
    model = build("llama")
    ways = ({}, {"inductor": False}, {"weight_offload_gib": 1.0})
    keys = [_costs_key(model, depthfx.Settings(**way), "cpu", None) for way in (*ways, {"depth_rule": "paper"}, {"check": True})]
    assert len(set(keys[:3])) == 3 and keys[3] == keys[4] == keys[0]
