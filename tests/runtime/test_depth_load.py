"""Depth and memory under simulated load: steps, teeth, bursts, a trace; what is routed, lent, restored and preempted, and when."""

from __future__ import annotations

import csv
import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from depthfx.runtime.depth_control import DepthCosts, StepCost, break_even
from depthfx.settings import ElasticMemory
from tests.runtime.load_simulator import BLOCK, COSTS, Ask, Simulation, decisions

ROOT = Path(__file__).resolve().parents[2]
TRACE = "data/traces/azure_llm_2023_conv_2000.csv"
# A policy that cannot pay: routing costs a quarter of a step, and a tenth of the layers is skipped.
BAD = DepthCosts(
    4.2e12, 3.5e12, 4096, 4, (StepCost(1, 4e-3, 1e-3), StepCost(256, 11.7e-3, 3e-3)), (StepCost(256, 8e-3, 4e-3, 1e-3), StepCost(1024, 23e-3, 6e-3, 3e-3))
)  # fmt: skip


def steady(rate: float, start: float, end: float, prompt: int = 200, new: int = 60, seed: int = 0) -> list[Ask]:
    """Poisson arrivals."""
    draw, now, asks = random.Random(seed), start, []
    while (now := now + draw.expovariate(rate)) < end:
        asks.append(Ask(now, draw.randrange(prompt // 2, prompt * 3 // 2), draw.randrange(new // 2, new * 3 // 2)))
    return asks


def latencies(simulation: Simulation, asks: list[Ask]) -> list[float]:
    """From arrival to end, of all."""
    return [simulation.ends[f"r{number}"] - ask.at for number, ask in enumerate(sorted(asks, key=lambda ask: ask.at))]


def test_a_step_of_load_is_routed_once_and_pays():
    asks = steady(6, 0, 1, 100) + [Ask(1 + n / 100, 600, 250) for n in range(120)]
    runs = {depth: Simulation(depth, 0.75, num_blocks=16384, batch=256).run(asks) for depth in ("dense", "auto")}
    stats = runs["auto"].scheduler.depth.stats()
    assert stats.num_promotions > 80 and stats.num_enters <= 4, stats
    means = {depth: statistics.fmean(latencies(run, asks)) for depth, run in runs.items()}
    assert means["auto"] < 0.98 * means["dense"], means
    late = [c for now, plan in runs["auto"].plans if 3.5 < now < 4.5 for c in plan.decodes]
    assert statistics.fmean(c.routed for c in late) > 0.9
    assert_promoted_once(runs["auto"])


def assert_promoted_once(simulation: Simulation) -> None:
    """No answer is dense again after it was routed, and a prompt is of one depth."""
    answers, prompts = {}, {}
    for _, plan in simulation.plans:
        for chunk in plan.decodes + plan.prefills:
            if chunk.is_prompt:
                assert prompts.setdefault(chunk.request_id, chunk.routed) == chunk.routed
            elif chunk in plan.decodes:
                assert chunk.routed >= answers.get(chunk.request_id, False), f"{chunk.request_id} was routed and is dense"
                answers[chunk.request_id] = chunk.routed


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_a_sawtooth_at_the_threshold_does_not_flap(share):
    """Requests come in waves whose KV is around V*."""
    costs = replace(COSTS, decode=(StepCost(1, 4e-3, 20e-6), StepCost(256, 11.7e-3, 20e-6)))
    tokens = round(break_even(costs, share, 16) / 16)
    waves = [Ask(2.0 * wave + 0.01 * n, tokens, 100) for wave in range(8) for n in range(20)]
    run = Simulation("auto", share, num_blocks=30 * tokens // BLOCK, costs=costs).run(waves)
    stats = run.scheduler.depth.stats()
    assert 4 <= stats.num_enters <= 8 and stats.num_leaves <= 8, stats
    assert len(run.ends) == 160
    assert_promoted_once(run)


@pytest.mark.parametrize("load", [2, 30, 80])
def test_a_policy_that_cannot_pay_stays_dense(load):
    asks = [Ask(0.0, 150, 60), *steady(load, 1.0, 1.0 + min(3.0, 200 / load), 150, 60)]  # the first probes are over when load comes
    dense, auto, routed = (Simulation(depth, 0.1, num_blocks=16384, costs=BAD).run(asks) for depth in ("dense", "auto", "routed"))
    probes = [plan for _, plan in auto.plans if plan.probe]
    assert probes and not any(c.routed for _, plan in auto.plans for c in plan.decodes + plan.prefills)
    assert len(probes) <= 2 + 2 * len(auto.plans) // 64
    assert auto.busy <= 1.005 * dense.busy
    assert statistics.fmean(latencies(auto, asks)) <= 1.01 * statistics.fmean(latencies(dense, asks))
    assert statistics.fmean(latencies(routed, asks)) > 1.05 * statistics.fmean(latencies(dense, asks)), "or it would show nothing"


def test_kv_pressure_is_met_by_routing_then_lending_then_preemption():
    asks = [Ask(0.02 * n, 600, 300) for n in range(110)]
    run = Simulation("auto", 0.5, num_blocks=1200, units=120, batch=128).run(asks)
    routed = next(now for now, plan in run.plans if any(c.routed for c in plan.decodes))
    lent = next(now for now, plan in run.plans if not all(plan.precision))
    preempted = next(now for now, count in run.waits if count)
    assert routed < lent < preempted
    assert run.control.stats().num_lends >= 120 and len(run.ends) == 110
    first = next(index for index, (now, _) in enumerate(run.plans) if now >= lent)
    assert run.manager.num_lent_units == 0 and all(run.scheduler.precision), "all is back at the end"
    assert first > 0 and run.manager.held_blocks == 0


@pytest.mark.parametrize("dwell", [0.0, 0.2])
def test_a_burst_shorter_than_a_restore(dwell):
    """The second burst takes back units whose copies are on their way; a dwell time longer than the pause leaves them where they are."""
    bursts = [Ask(0.8 * burst, 300, 30) for burst in range(6) for _ in range(20)] + [Ask(0.0, 50, 2500)]
    run = Simulation("dense", num_blocks=100, units=40, unit_seconds=0.02, memory=ElasticMemory(dwell_s=dwell)).run(bursts)
    stats = run.control.stats()
    assert len(run.ends) == 121 and all(run.scheduler.precision) and run.manager.num_lent_units == 0
    assert stats.num_lends == stats.num_restores + stats.num_cancels
    assert stats.num_lends <= 6 * 40 * (1.0 if dwell else 1.1), "every unit once a burst, and few twice without any dwell time"
    if dwell == 0.0:
        assert stats.num_cancels > 0
    changes = sum(a.precision != b.precision for (_, a), (_, b) in zip(run.plans, run.plans[1:]))
    assert changes <= 2 * 6 * 8, "each of 8 layers goes and comes once a burst at most"


def trace() -> list[Ask]:
    """The first rows of a recorded hour, or rows like these."""
    for folder in (ROOT / "shared", ROOT.parent / "shared"):
        if (path := folder / TRACE).is_file():
            with path.open() as file:
                rows = [(float(r["arrival_s"]), int(r["input_tokens"]), int(r["output_tokens"])) for r in csv.DictReader(file)]
            break
    else:
        draw, now, rows = random.Random(23), 0.0, []
        for _ in range(300):
            rows.append((now := now + draw.expovariate(6.0), round(draw.lognormvariate(6.7, 0.9)), round(draw.lognormvariate(5.0, 0.8))))
    return [Ask(at, max(1, prompt // 2), min(max(1, new), 120)) for at, prompt, new in rows[:70]]


def test_replay_of_a_trace():
    asks = trace()
    runs = {depth: Simulation(depth, 0.5, num_blocks=2000, units=200, batch=128).run(asks) for depth in ("dense", "auto")}
    means = {depth: statistics.fmean(latencies(run, asks)) for depth, run in runs.items()}
    assert means["auto"] <= 1.01 * min(means.values()), means
    assert all(len(run.ends) == 70 and run.manager.held_blocks == 0 for run in runs.values())
    again = Simulation("auto", 0.5, num_blocks=2000, units=200, batch=128).run(asks)
    assert decisions(again) == decisions(runs["auto"])
    assert_promoted_once(again)


def test_requests_for_full_precision_wait_and_are_served_in_turn():
    """Others lend, run and come all the time; nothing is lent while one of them runs, and none waits for a request that came later."""
    draw, asks = random.Random(5), []
    for n in range(160):
        full = n % 9 == 4
        asks.append(Ask(0.01 * n, draw.randrange(50, 500), draw.randrange(20, 120), {"min_precision": "full"} if full else {}))
    run = Simulation("dense", num_blocks=160, units=60, unit_seconds=5e-3).run(asks)
    full = {f"r{n}" for n in range(160) if n % 9 == 4}
    assert len(run.ends) == 160 and len(full) == 18
    steps = [plan.precision for _, plan in run.plans if full & {c.request_id for c in plan.decodes + plan.prefills}]
    assert steps and all(all(precision) for precision in steps)
    assert any(not all(plan.precision) for _, plan in run.plans) and run.control.stats().num_lends > 60
    firsts = [run.begins[f"r{n}"] for n in range(160)]
    assert firsts == sorted(firsts), "in the order of their arrival"


def test_an_old_request_that_needs_lent_memory_ends_before_full_precision_is_given():
    """The first one needs more than the base blocks, alone; the second waits for it and is not forgotten."""
    asks = [Ask(0.0, 200, 1200), Ask(3.0, 20, 10, {"min_precision": "full"}), Ask(3.0, 20, 10)]
    run = Simulation("dense", num_blocks=40, units=20).run(asks)
    assert run.begins["r1"] > run.ends["r0"] and run.begins["r2"] >= run.begins["r1"]
    assert all(all(plan.precision) for now, plan in run.plans if now >= run.begins["r1"])


def test_a_preempted_request_for_full_precision_goes_on_in_full():
    asks = [Ask(0.0, 300, 300), Ask(0.0, 200, 200, {"min_precision": "full"}), Ask(0.0, 100, 100), Ask(0.5, 300, 300)]
    run = Simulation("dense", num_blocks=40, units=20).run(asks)
    assert run.scheduler.num_preemptions > 0 and len(run.ends) == 4
    mine = [plan.precision for _, plan in run.plans if "r1" in {c.request_id for c in plan.decodes + plan.prefills}]
    assert all(map(all, mine))
