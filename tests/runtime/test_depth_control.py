"""Thresholds of depth control against values worked out by hand, and what it does with them, call by call."""

from __future__ import annotations

import random

import pytest

from depthfx.runtime.depth_control import (
    ENTER,
    ENTER_PRESSED,
    ENTER_STEPS,
    PROBE_STEPS,
    DepthControl,
    DepthCosts,
    StepCost,
    break_even,
    cost_at,
    explain_costs,
    prompt_pays,
)
from tests.runtime.load_simulator import COSTS

# tau 2.67 ms, 1.935 TB/s, 16 routed layers, 4,096 bytes, share 0.5: the paper's A100 profile, V* 157,677
PAPER = DepthCosts(1.935e12, 1.935e12, 4096, 16, (StepCost(1, 20e-3, 2.67e-3), StepCost(256, 20e-3, 2.67e-3)), COSTS.prefill)


def seen(control: DepthControl, share: float, pairs: int = 1000) -> DepthControl:
    """After a step that skipped ``share``, of both kinds."""
    control.observe((int(share * pairs), pairs), (int(share * pairs), pairs))
    return control


def decide(control: DepthControl, multiple: float, times: int = 1, pressed: bool = False) -> bool:
    """At ``multiple`` of V*, 32 rows that may all skip."""
    limit = break_even(control.costs, control.share("answer") or 0.0, 32)
    for _ in range(times):
        last = control.decide_answers(32, 32, round(multiple * limit), pressed)
    return last


def test_the_formula_gives_the_papers_band():
    assert break_even(PAPER, 0.5, 32) == pytest.approx(157_666, rel=1e-3)  # they use 160k and 1.25 times that, 200k
    assert break_even(PAPER, 0.25, 32) == pytest.approx(2 * break_even(PAPER, 0.5, 32))
    assert break_even(PAPER, 0.0, 32) == float("inf")


def test_what_is_saved_beside_kv_lowers_the_threshold():
    assert break_even(COSTS, 0.25, 1) == 0.0  # 0.25 of 0.8 ms is more than 0.16 ms
    assert break_even(COSTS, 0.1, 1) == pytest.approx((160e-6 / 0.1 - 0.8e-3) * 3.5e12 / (4 * 4096))
    assert break_even(COSTS, 0.1, 2, routable=1) > break_even(COSTS, 0.1, 2)


def test_costs_between_and_beyond_what_was_measured():
    between = cost_at(COSTS.decode, 144)
    assert between.dense == pytest.approx((5.0e-3 + 11.7e-3) / 2) and between.overhead == pytest.approx(175e-6)
    assert cost_at(COSTS.prefill, 2048).saved == pytest.approx(18e-3)
    few = cost_at(COSTS.prefill, 64)
    assert few.overhead == pytest.approx(1.5e-3) and few.saved == pytest.approx(2.5e-3 / 4)
    noise = cost_at((StepCost(8, 1e-3, -5e-6),), 8)
    assert noise.overhead == pytest.approx(5e-6), "a routed step that seems to cost nothing costs what cannot be told apart"


def test_entering_takes_a_while_and_leaving_does_not():
    control = seen(DepthControl(COSTS), 0.25)
    assert not decide(control, 2.0, ENTER_STEPS - 1)
    decide(control, 1.2)  # the count begins anew
    assert not decide(control, 2.0, ENTER_STEPS - 1) and decide(control, 2.0)
    assert decide(control, 1.01) and not decide(control, 0.99)
    assert (control.num_enters, control.num_leaves) == (1, 1)


@pytest.mark.parametrize(("low", "high"), [(1.01, ENTER - 0.01), (0.5, ENTER - 0.01), (1.01, 3.0)])
def test_a_sawtooth_within_the_band_changes_nothing(low, high):
    """From dense it stays dense below 1.25 V*, from routed it stays routed above V*."""
    control = seen(DepthControl(COSTS), 0.25)
    if high > ENTER:
        assert decide(control, high, ENTER_STEPS)
    before = control.num_enters + control.num_leaves
    for turn in range(2000):
        decide(control, low + (high - low) * (turn % 20) / 20)
    assert control.num_enters + control.num_leaves == before


def test_a_sawtooth_across_the_band_changes_once_a_tooth_at_most():
    control = seen(DepthControl(COSTS), 0.25)
    for turn in range(2000):
        decide(control, 0.9 + 1.1 * (turn % 40) / 40)
    assert 0 < control.num_enters <= 50 and control.num_leaves <= 50
    fast = seen(DepthControl(COSTS), 0.25)
    for turn in range(2000):
        decide(fast, 2.0 if turn % (ENTER_STEPS - 1) else 0.5)
    assert fast.num_enters == 0, "teeth shorter than the steps that entering takes"


def test_pressure_lowers_the_entry_and_not_the_exit():
    control, pressed = seen(DepthControl(COSTS), 0.25), seen(DepthControl(COSTS), 0.25)
    middle = (ENTER + ENTER_PRESSED) / 2
    assert not decide(control, middle, 3 * ENTER_STEPS)
    assert decide(pressed, middle, ENTER_STEPS, pressed=True)
    assert not decide(seen(DepthControl(COSTS), 0.25), 1.05, 3 * ENTER_STEPS, pressed=True)
    assert not decide(pressed, 0.99, pressed=True)


def test_nothing_is_routed_before_a_share_was_seen():
    control = DepthControl(COSTS)
    assert not control.decide_answers(1, 1, 10**9, True) and not control.decide_prompt(10**6, 10**6, 10**6)
    assert control.stats().answer_share is None


def test_larger_steps_weigh_more_and_old_ones_fade():
    control = DepthControl(COSTS)
    control.observe((0, 10), (0, 0))
    control.observe((990, 990), (0, 0))
    assert control.share("answer") == pytest.approx(990 / 998) and control.share("prompt") is None
    for _ in range(30):
        control.observe((0, 990), (5, 10))
    assert control.share("answer") < 0.01 and control.share("prompt") == pytest.approx(0.5)


def test_probes_come_first_and_then_every_64_steps():
    control = DepthControl(COSTS)
    asked = [turn for turn in range(30) if control.probe(3, 0, False)]
    assert asked == [0, 21], "sooner while little was seen, but for no more than 0.2 % of the time (164 us of 4 ms)"
    control = seen(DepthControl(COSTS), 0.5)
    asked = [turn for turn in range(5 * PROBE_STEPS) if control.probe(3, 0, False)]
    assert asked == [0, PROBE_STEPS + 1, 2 * (PROBE_STEPS + 1), 3 * (PROBE_STEPS + 1), 4 * (PROBE_STEPS + 1)]
    assert control.probe(0, 40, False), "prompts have a count of their own"
    assert not any(control.probe(0, 0, False) for _ in range(1000)), "nobody leaves it open"
    routed = DepthControl(COSTS)
    assert not routed.probe(3, 0, True) and not routed.probe(3, 0, False), "a routed step shows as much"
    halves = seen(DepthControl(COSTS, halves=True), 0.5)
    assert not halves.probe(3, 0, True) and halves.probe(3, 40, True), "of steps in two halves only answers are seen"
    assert 1 < sum(halves.probe(3, 40, True) for _ in range(10000)) < 10000 // PROBE_STEPS, "prompts now and then"
    whole = seen(DepthControl(COSTS), 0.5)
    assert not any(whole.probe(3, 40, True) for _ in range(1000))


def test_prompts_pay_by_what_they_save():
    def pays(share, rows, dense=1000, routed=1000, rule="measured", costs=COSTS):
        return prompt_pays(costs, rule, share, rows, dense, routed)

    # 1,024 rows: 1.25 x 1.8 ms against 9 ms: from a share of 0.25 on
    assert pays(0.26, 1024) and not pays(0.24, 1024)
    assert not pays(0.5, 256) and pays(0.5, 512), "the fixed part is shared by the rows of a step"
    assert not pays(0.5, 1024, dense=100), "a prefix that only dense requests have is worth more"
    assert pays(0.1, 1024, routed=100), "and the other way round"
    assert pays(0.36, 1536, rule="paper") and not pays(0.34, 1536, rule="paper") and not pays(0.9, 1535, rule="paper")
    unknown = DepthCosts(1.0, 1.0, 1, 1, COSTS.decode, (StepCost(256, 8e-3, 0.0),))
    assert pays(0.36, 1536, costs=unknown) and not pays(0.9, 1535, costs=unknown)


def test_equal_calls_give_equal_decisions():
    def drive():
        draw, control, said = random.Random(3), DepthControl(COSTS), []
        for _ in range(3000):
            said.append(
                control.decide_answers(
                    rows := draw.randrange(1, 200), draw.randrange(rows + 1), draw.randrange(300_000), draw.random() < 0.1
                )
            )
            said.append(control.decide_prompt(draw.randrange(1, 3000), draw.randrange(1, 3000), draw.randrange(1, 3000)))
            said.append(control.probe(draw.randrange(3), draw.randrange(3), draw.random() < 0.2))
            control.observe((draw.randrange(100), 100), (draw.randrange(100), 100))
        return said, control.stats()

    first, second = drive(), drive()
    assert first == second and any(first[0]) and first[1].num_enters > 3


def test_what_a_person_is_told():
    text = "\n".join(explain_costs(PAPER, "measured"))
    assert "157,6" in text and "V* = (overhead / share - saved)" in text and "166.9 a routed layer" in text
    assert "1536 rows and more above share 0.35 (as set)" in "\n".join(explain_costs(PAPER, "paper"))
    assert "steps of 1024 rows: routed from share 0.25 on" in text
