"""Latencies, windows, SLO, capacity and intervals against values worked out by hand or by NumPy."""

import math

import numpy as np
import pytest
from load_metrics import (
    Capacity,
    RequestTimes,
    Slo,
    aggregate,
    attainment,
    completion_rate,
    find_capacity,
    find_capacity_from,
    interval,
    paired_change,
    percentile,
    summarise,
    t_quantile,
)


def times(arrival, *tokens, finished=True, number=0):
    return RequestTimes(number, arrival, len(tokens), arrival, list(tokens), finished)


def test_latencies_of_one_request():
    one = times(1.0, 1.5, 1.75, 2.5)
    assert (one.ttft, one.e2e, one.tpot, one.largest_gap) == (0.5, 1.5, 0.5, 0.75)
    single = times(1.0, 1.5)
    assert (single.ttft, single.e2e, single.tpot, single.largest_gap) == (0.5, 0.5, None, None)
    cut = times(1.0, 1.5, 2.0, finished=False)
    assert (cut.ttft, cut.e2e, cut.tpot, cut.largest_gap) == (0.5, None, None, 0.5)
    assert times(1.0, finished=False).ttft is None


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.99, 1.0])
def test_percentile_is_numpys(share):
    values = np.random.default_rng(0).exponential(size=37).tolist()
    assert percentile(values, share) == pytest.approx(np.percentile(values, share * 100))
    assert percentile([3.0], share) == 3.0


def test_percentile_refuses():
    with pytest.raises(ValueError, match="0 values"):
        percentile([], 0.5)
    with pytest.raises(ValueError, match="share in"):
        percentile([1.0], 1.5)


def test_slo_is_inclusive_and_joint():
    slo = Slo(ttft_s=2.0, gap_s=0.5)
    assert slo.attained(times(0.0, 2.0, 2.5, 3.0))
    assert not slo.attained(times(0.0, 2.25, 2.5))
    assert not slo.attained(times(0.0, 1.0, 1.75, 2.0))
    assert slo.attained(times(0.0, 1.0))
    assert not slo.attained(times(0.0, 1.0, 1.25, finished=False))
    assert not slo.attained(times(0.0, finished=False))
    assert attainment([times(0.0, 1.0), times(0.0, 5.0)], slo) == 0.5
    with pytest.raises(ValueError, match="no requests"):
        attainment([], slo)


def test_window_counts_what_comes_out_inside_and_latencies_of_what_arrives_inside():
    requests = [times(0.0, 0.5, 1.5), times(1.0, 2.0, 3.0), times(3.0, 4.0, 6.0)]
    row = summarise(requests, (1.0, 3.0), Slo(1.0, 1.0))
    assert row["requests"] == row["finished"] == 2  # the first arrived in the lead-in
    assert row["window s"] == 2.0
    assert row["tokens/s"] == 1.5  # at 1.5, 2.0 and 3.0; not at 0.5, 4.0 and 6.0
    assert row["requests/s"] == 1.0  # the first and the second end inside
    assert row["offered/s"] == 0.5
    assert (row["makespan s"], row["drain s"], row["output tokens"]) == (6.0, 3.0, 6)
    assert row["SLO %"] == 50.0
    assert (row["mean E2E s"], row["mean TTFT s"], row["mean TPOT ms"]) == (2.5, 1.0, 1500.0)
    assert row["p50 largest gap ms"] == 1500.0
    assert row["p90 E2E s"] == pytest.approx(2.9)


def test_the_completion_rate_leaves_both_ends_out():
    ends = [50.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0]  # the last one drains alone
    assert completion_rate([times(0.0, 1.0, t) for t in ends]) == pytest.approx(1.0)
    for wrong in ([times(0.0, 1.0)] * 3, [times(0.0, 1.0)] * 4, [times(0.0, float(t), finished=t != 2) for t in range(5)]):
        with pytest.raises(ValueError, match="requests ended"):
            completion_rate(wrong)


def test_an_empty_window_has_no_rates():
    row = summarise([times(0.0, 1.0)], (0.0, 0.0), None)
    assert row["tokens/s"] is row["requests/s"] is row["offered/s"] is row["SLO %"] is row["mean TPOT ms"] is None
    assert row["mean E2E s"] == 1.0


def test_unfinished_requests_count_against_the_slo_alone():
    row = summarise([times(0.0, 1.0, 2.0), times(0.5, 1.0, finished=False)], (0.0, 1.0), Slo(2.0, 2.0))
    assert (row["requests"], row["finished"], row["SLO %"], row["mean E2E s"]) == (2, 1, 50.0, 2.0)


@pytest.mark.parametrize("true, status", [(3.7, "found"), (0.5, "below"), (20.0, "at least")])
def test_capacity_by_bisection(true, status):
    found = find_capacity(lambda rate: 0.95 if rate <= true else 0.85, 1.0, 16.0, 0.05)
    assert found.status == status
    if status == "found":
        assert found.rate <= true < found.fails_at <= found.rate * 1.05
        assert len(found.tried) <= 2 + math.ceil(math.log2(math.log(16) / math.log(1.05)))
        assert all((a >= 0.9) == (rate <= true) for rate, a in found.tried)
    else:
        assert (found.rate, found.fails_at) == ((0.0, 1.0) if status == "below" else (16.0, None))


@pytest.mark.parametrize("true", [3.0, 10.0, 11.9, 40.0])
def test_capacity_from_a_guess(true):
    found = find_capacity_from(lambda rate: 0.95 if rate <= true else 0.85, 10.0, 0.05)
    assert found.status == "found" and found.rate <= true < found.fails_at <= 1.05 * found.rate
    assert found.tried[0][0] == 10.0
    if true == 11.9:
        assert [round(rate, 2) for rate, _ in found.tried] == [10.0, 12.0, 10.95, 11.47]


def test_a_guess_far_off_ends():
    assert find_capacity_from(lambda rate: 1.0, 8.0, 0.05, step=2.0, most=2) == Capacity(32.0, "at least", None, ((8, 1), (16, 1), (32, 1)))
    assert find_capacity_from(lambda rate: 0.0, 8.0, 0.05, step=2.0, most=2) == Capacity(0.0, "below", 2.0, ((8, 0), (4, 0), (2, 0)))
    with pytest.raises(ValueError, match="guess=0"):
        find_capacity_from(lambda rate: 1.0, 0.0, 0.05)


def test_exactly_the_share_is_enough():
    assert find_capacity(lambda rate: 0.9, 1.0, 2.0, 0.1).status == "at least"


@pytest.mark.parametrize("wrong", [(0.0, 1.0, 0.1, 0.9), (2.0, 1.0, 0.1, 0.9), (1.0, 2.0, 0.0, 0.9), (1.0, 2.0, 0.1, 1.5)])
def test_capacity_refuses(wrong):
    with pytest.raises(ValueError, match="are needed"):
        find_capacity(lambda rate: 1.0, *wrong)


@pytest.mark.parametrize(
    "freedom, value", [(1, 12.7062), (2, 4.30265), (3, 3.18245), (5, 2.57058), (10, 2.22814), (30, 2.04227), (1000, 1.96234)]
)
def test_t_quantiles_of_the_tables(freedom, value):
    assert t_quantile(freedom) == pytest.approx(value, abs=1e-4)
    assert t_quantile(freedom, 0.5) == pytest.approx(0.0, abs=1e-6)


def test_t_quantile_refuses():
    with pytest.raises(ValueError, match="freedom=0"):
        t_quantile(0)


def test_interval_and_paired_change():
    mean, width = interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert width == pytest.approx(4.30265 / math.sqrt(3), abs=1e-4)
    assert interval([5.0]) == (5.0, None)
    # the repeats differ a lot, the pairs do not
    change, narrow = paired_change([1.0, 10.0, 100.0], [0.9, 9.0, 90.0])
    assert (change, narrow) == (pytest.approx(-10.0), pytest.approx(0.0, abs=1e-9))
    with pytest.raises(ValueError, match="pairs"):
        paired_change([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="no base value"):
        paired_change([0.0], [1.0])
    with pytest.raises(ValueError, match="no values"):
        interval([])


def test_rows_are_brought_together_by_arm_and_rate_and_paired_by_repeat():
    rows = [
        {"arm": "a", "rate": 1.0, "repeat": 0, "x": 10.0},
        {"arm": "b", "rate": 1.0, "repeat": 0, "x": 5.0},
        {"arm": "b", "rate": 1.0, "repeat": 1, "x": 15.0},  # other order, as arms alternate
        {"arm": "a", "rate": 1.0, "repeat": 1, "x": 30.0},
        {"arm": "b", "rate": 2.0, "repeat": 0, "x": 7.0},  # no partner
    ]
    merged = {(r["arm"], r["rate"]): r for r in aggregate(rows, ("arm", "rate"), ["x", "missing"], "a")}
    assert merged["a", 1.0]["x"] == 20.0
    assert merged["a", 1.0]["repeats"] == 2
    assert "x vs a %" not in merged["a", 1.0]
    assert merged["b", 1.0]["x vs a %"] == -50.0
    assert merged["b", 1.0]["x vs a +-"] == 0.0
    assert "x vs a %" not in merged["b", 2.0]
    assert all("missing" not in r for r in merged.values())


def test_a_base_of_zero_has_no_changes():
    rows = [{"arm": arm, "rate": 1.0, "repeat": i, "x": x} for arm, values in (("a", (0, 2)), ("b", (1, 3))) for i, x in enumerate(values)]
    assert "x vs a %" not in aggregate(rows, ("arm", "rate"), ["x"], "a")[1]
