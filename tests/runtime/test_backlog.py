"""Prompts that wait too long make steps fast, with hysteresis, and never against a request that asks for full precision."""

from __future__ import annotations

import time

import pytest

import depthfx
from depthfx.errors import SettingError
from depthfx.records import SamplingParams
from depthfx.runtime.backlog import Backlog
from depthfx.settings import ElasticMemory
from tests.runtime.load_simulator import Ask, Simulation, decisions
from tests.runtime.test_elastic import elastic


def watched(patience=0.25, calm=0.2):
    now = [0.0]
    backlog = Backlog(patience, calm, lambda: now[0])

    def at(time, since):
        now[0] = time
        backlog.look(since)
        return backlog.hurried

    return backlog, at


def test_a_long_wait_makes_steps_fast_and_calm_ends_it():
    _, at = watched()
    assert not at(1.0, None) and not at(1.25, 1.0) and at(1.26, 1.0)
    assert at(1.3, None) and at(1.49, None), "calm has to last"
    assert at(1.50, 1.30), "half of the patience is not calm"
    assert at(1.55, None) and at(1.74, 1.70) and not at(1.76, 1.70)
    assert not at(1.82, 1.70)


def test_a_wait_for_nobody_does_not_count():
    """Nobody was served until the caller came to it: what has waited begins now, and no step before could have been faster."""
    now = [0.0]
    backlog = Backlog(0.25, 0.2, lambda: now[0])
    for at, since, idle, hurried in ((5.0, 1.0, True, False), (5.2, 1.0, False, False), (5.26, 1.0, False, True)):
        now[0] = at
        backlog.look(since, idle)
        assert backlog.hurried == hurried


@pytest.mark.parametrize("policy", ["elastic", "nested_resident"])
def test_a_stream_that_is_read_late_is_full(policy):
    engine = elastic(memory={"policy": policy, "patience_s": 0.001}, kv_blocks=26).engine
    for _ in range(2):
        late = engine.stream([5, 6, 7], SamplingParams(max_new_tokens=4))
        time.sleep(0.01)
        assert len(list(late)) == 4
    assert engine.stats().steps_by_precision == {"full": 8, "mixed": 0, "fast": 0}
    engine.close()


def test_rest_ends_it_at_once_and_infinite_patience_never_hurries():
    backlog, at = watched()
    assert at(1.0, 0.0)
    backlog.rest()
    assert not backlog.hurried and not at(1.1, 1.0)
    _, at = watched(patience=float("inf"))
    assert not at(1e9, 0.0)


@pytest.mark.parametrize("value", [-0.1, float("nan"), "0.2"])
def test_patience_is_checked(value):
    with pytest.raises(SettingError, match="patience_s"):
        ElasticMemory(patience_s=value)
    assert depthfx.ElasticMemory(patience_s=float("inf")).patience_s == float("inf")


def prompts_of(rate, count=200, **options):
    """Long prompts and short answers: arithmetic is what they lack, not memory."""
    return [Ask(i / rate, 1500 + i * 377 % 1000, 20, options) for i in range(count)]


def served(asks, **memory):
    return Simulation(num_blocks=6000, units=64, memory=ElasticMemory(**memory), batch=256, fast=0.5).run(asks)


def test_too_many_prompts_are_met_by_fast_steps():
    """At 22 prompts a second full precision alone falls behind; no memory is lent for it."""
    asks = prompts_of(22, 320)
    patient, hurried = served(asks, patience_s=float("inf")), served(asks)
    assert patient.longest_wait() > 1.5 > 4 * 0.25 > hurried.longest_wait()
    assert hurried.control.region.num_lends == patient.control.region.num_lends == 0
    states = [bool(any(plan.precision)) for _, plan in hurried.plans]
    assert all(len(set(plan.precision)) == 1 for _, plan in hurried.plans), "all layers or none"
    assert 0.1 < sum(states) / len(states) < 0.9, "full again where load allows"
    changes = [now for (now, _), before, after in zip(hurried.plans[1:], states, states[1:]) if before != after]
    assert len(changes) <= 2 * (hurried.now / 0.45) + 2, "each turn takes patience and calm"
    assert decisions(served(asks)) == decisions(hurried)


def test_light_load_and_a_lone_long_prompt_stay_full():
    for asks in (prompts_of(8, 60), [Ask(0.0, 16_000, 40)]):
        assert all(all(plan.precision) for _, plan in served(asks).plans)


def test_who_asks_for_full_precision_gets_it_in_a_hurry():
    asks = prompts_of(32, 150)
    asks[60:60] = [Ask(asks[60].at, 1500, 20, {"min_precision": "full"})]
    simulation = served(asks)
    mine = [plan.precision for _, plan in simulation.plans if any(c.request_id == "r60" for c in plan.decodes + plan.prefills)]
    assert mine and all(all(precision) for precision in mine)
    assert any(not any(plan.precision) for _, plan in simulation.plans), "or there was no hurry"
    assert len(simulation.ends) == len(asks)


def test_after_a_pause_nothing_is_left_of_the_hurry():
    asks = prompts_of(40, 60)
    late = Ask(asks[-1].at + 10, 600, 5)
    simulation = served([*asks, late])
    assert any(not any(plan.precision) for _, plan in simulation.plans)
    assert all(all(plan.precision) for now, plan in simulation.plans if now >= late.at)
