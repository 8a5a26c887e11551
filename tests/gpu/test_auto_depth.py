"""Depth left open on a CUDA device: costs from captured graphs, probes that change nothing, promotions in captured steps."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from dataclasses import replace

import depthfx
from depthfx.records import SamplingParams
from depthfx.runtime.calibration import measure
from depthfx.runtime.depth_control import DepthControl, StepCost
from depthfx.skippers import make_skipper
from tests.families.configs import build
from tests.families.harness import prompts

ROWS = prompts((40, 33, 20, 7))


@pytest.fixture(scope="module")
def model():
    """A small llama compiled with depth left open."""
    plain = build("llama", torch.float16, "cuda", num_hidden_layers=3)
    skipper = make_skipper(plain, "random_skip", "identity", layers=(1, 2), rate=0.5, depth=1.0)
    return depthfx.compile(plain, skipper=skipper, inductor=False, kv_blocks=96, max_batch_size=9, max_batch_tokens=128, depth="auto")


def serve(engine, control, depth):
    """Tokens of all rows and the plans, under another control."""
    engine._scheduler.depth, engine.routes.observer = control, control.observe
    engine.forget_prefixes()
    plans, own = [], engine._scheduler.plan

    def plan():
        made = own()
        plans.extend([] if made is None else [made])
        return made

    engine._scheduler.plan = plan
    answers = engine.run([(row, SamplingParams(max_new_tokens=40, depth=depth)) for row in ROWS])
    engine._scheduler.plan = own
    assert all(output.error is None for output in answers.values())
    return [output.new_token_ids for output in answers.values()], plans


def test_costs_are_measured_in_half_a_second_and_leave_nothing_behind(model):
    costs, report = model.engine._scheduler.depth.costs, model._depthfx.report
    buckets = model.engine._runner.graphs.buckets
    assert {costs.decode[0].rows, costs.decode[-1].rows} == {buckets[0], buckets[-1]}
    assert costs.bandwidth > 1e11 and 0 < costs.decode[0].dense < 0.1
    assert report.seconds["measure depth"] < 2.0  # a tiny model; the key and the file are in it
    assert not model.engine._runner.kv_pool.any() or model.engine.stats().num_steps
    again = measure(model.engine._runner, 96)
    assert not model.engine._runner.kv_pool.any() and not model.engine._runner.block_tables.any()
    assert again.kv_bytes == costs.kv_bytes


def test_probes_change_nothing_and_promotions_last(model):
    engine, costs = model.engine, model.engine._scheduler.depth.costs
    dear = replace(costs, decode=(StepCost(1, 1.0, 1e-3),), prefill=(StepCost(16, 1.0, 1e-3, 1e-9),))
    never = replace(dear, kv_rate=1e30)
    base, _ = serve(engine, DepthControl(never), "dense")
    probed, plans = serve(engine, DepthControl(never), "auto")
    assert any(plan.probe for plan in plans) and not any(c.routed for p in plans for c in p.decodes)
    assert sum(a == b for a, b in zip(base, probed, strict=True)) >= len(ROWS) - 1, "but for a tie, which rounding may decide"
    cheap = replace(costs, decode=(StepCost(1, 1e-3, 1e-6, 1e-3),), prefill=dear.prefill)
    control = DepthControl(cheap)
    _, plans = serve(engine, control, "auto")
    routed = {}
    for plan in plans:
        for chunk in plan.decodes:
            assert chunk.routed >= routed.get(chunk.request_id, False)
            routed[chunk.request_id] = chunk.routed
    assert control.num_promotions == len(ROWS) == sum(routed.values())
    assert 0.2 < control.share("answer") < 0.8
