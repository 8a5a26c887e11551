"""What a run under load amounts to: latencies, rates inside the measuring window, SLO attainment, capacity, intervals. Pure functions.

Of one request, arrival being the moment the schedule names, whether or not the engine was free to take it then:

    TTFT         first token - arrival
    E2E          last token - arrival
    TPOT         (last token - first token) / (tokens - 1); none for a single token
    largest gap  largest time between two tokens that follow each other; none for a single token

Of a run: latencies are over the requests that arrived in the measuring window (latencies of those that were cut off are not known; they
count as missing the SLO). The window is the time of injection, from the end of the lead-in to the last arrival. Tokens and requests a
second are those that came out, or ended, inside it, over its length: what is drained afterwards does not count. Of a run that was
given up it is only known that too few attain the SLO; its other figures are those of what was served until then.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

# Latencies of a summary: name, attribute of RequestTimes, factor, digits of the unit in the name.
LATENCIES = (("E2E s", "e2e", 1.0), ("TTFT s", "ttft", 1.0), ("TPOT ms", "tpot", 1e3), ("largest gap ms", "largest_gap", 1e3))
SHARES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))


@dataclass
class RequestTimes:
    """One request; all times are seconds since the start of the run."""

    number: int
    arrival_s: float
    asked_tokens: int  # most that it may produce; in matched work: what it must produce
    added_s: float = math.nan  # when the engine got it: never before its arrival, and between two steps
    token_s: list[float] = field(default_factory=list)
    finished: bool = False

    @property
    def ttft(self) -> float | None:
        return self.token_s[0] - self.arrival_s if self.token_s else None

    @property
    def e2e(self) -> float | None:
        return self.token_s[-1] - self.arrival_s if self.finished and self.token_s else None

    @property
    def tpot(self) -> float | None:
        whole = self.finished and len(self.token_s) > 1
        return (self.token_s[-1] - self.token_s[0]) / (len(self.token_s) - 1) if whole else None

    @property
    def largest_gap(self) -> float | None:
        gaps = (b - a for a, b in zip(self.token_s, self.token_s[1:]))
        return max(gaps, default=None)


@dataclass(frozen=True)
class Slo:
    """A request attains it if it ended, its TTFT is at most ``ttft_s`` and no gap between its tokens is above ``gap_s`` (both inclusive)."""

    ttft_s: float
    gap_s: float

    def attained(self, times: RequestTimes) -> bool:
        """Whether a request that will produce nothing more attained it."""
        ttft, gap = times.ttft, times.largest_gap
        return times.finished and ttft is not None and ttft <= self.ttft_s and (gap is None or gap <= self.gap_s)


def percentile(values: Iterable[float], share: float) -> float:
    """Linear interpolation between the two nearest order statistics, as NumPy does. Raises ``ValueError`` for no values or a bad share."""
    ordered = sorted(values)
    if not ordered or not 0 <= share <= 1:
        raise ValueError(f"percentile: {len(ordered)} values and share={share!r}; at least one value and a share in [0, 1] are needed")
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def in_window(requests: Iterable[RequestTimes], window: tuple[float, float]) -> list[RequestTimes]:
    """Those that arrived in ``window``, both ends included."""
    return [r for r in requests if window[0] <= r.arrival_s <= window[1]]


def attainment(requests: Sequence[RequestTimes], slo: Slo) -> float:
    """Share of requests that attain ``slo``. Raises ``ValueError`` for no requests."""
    if not requests:
        raise ValueError("attainment of no requests; give the run requests that arrive inside its measuring window")
    return sum(slo.attained(r) for r in requests) / len(requests)


def summarise(requests: Sequence[RequestTimes], window: tuple[float, float], slo: Slo | None) -> dict[str, Any]:
    """A flat row of the run's figures; see the module's text. None where there is nothing to measure (TPOT of single tokens, an empty window)."""
    counted = in_window(requests, window)
    length = window[1] - window[0]
    tokens = sum(window[0] <= t <= window[1] for r in requests for t in r.token_s)
    ended = sum(r.finished and bool(r.token_s) and window[0] <= r.token_s[-1] <= window[1] for r in requests)
    last = max((r.token_s[-1] for r in requests if r.token_s), default=window[1])
    row: dict[str, Any] = {
        "requests": len(counted), "finished": sum(r.finished for r in counted), "window s": length,
        "tokens/s": tokens / length if length > 0 else None, "requests/s": ended / length if length > 0 else None,
        "offered/s": (len(counted) - 1) / (counted[-1].arrival_s - counted[0].arrival_s) if _spread(counted) else None,
        "makespan s": last, "drain s": max(0.0, last - window[1]), "output tokens": sum(len(r.token_s) for r in requests),
        "SLO %": attainment(counted, slo) * 100 if slo is not None and counted else None,
    }  # fmt: skip
    for name, attribute, factor in LATENCIES:
        values = [v * factor for v in (getattr(r, attribute) for r in counted if r.finished) if v is not None]
        row[f"mean {name}"] = statistics.fmean(values) if values else None
        for label, share in SHARES:
            row[f"{label} {name}"] = percentile(values, share) if values else None
    return row


def completion_rate(requests: Sequence[RequestTimes]) -> float:
    """Requests a second that end in the middle half of all ends: neither while the batch fills nor while it drains.

    Raises ``ValueError`` for fewer than 4 requests, or where one has not ended or all end at once.
    """
    ends = sorted(r.token_s[-1] for r in requests if r.finished and r.token_s)
    first, last = len(ends) // 4, 3 * len(ends) // 4
    if len(ends) < max(4, len(requests)) or ends[last] <= ends[first]:
        raise ValueError(
            f"completion_rate: {len(ends)} of {len(requests)} requests ended; at least 4 are needed, all ended, not all at once"
        )
    return (last - first) / (ends[last] - ends[first])


def _spread(requests: Sequence[RequestTimes]) -> bool:
    return len(requests) > 1 and requests[-1].arrival_s > requests[0].arrival_s


@dataclass(frozen=True)
class Capacity:
    """The highest rate at which enough requests attain the SLO. ``status``: "found"; "below": not even at the lowest; "at least": also at the highest."""

    rate: float  # 0 where the lowest rate fails
    status: str
    fails_at: float | None  # lowest rate that was tried and failed
    tried: tuple[tuple[float, float], ...]  # (rate, attainment), in the order of the runs


def find_capacity(attains: Callable[[float], float], low: float, high: float, resolution: float, share: float = 0.9) -> Capacity:
    """Bisection of [low, high] in logarithmic steps until ``fails_at / rate <= 1 + resolution``.

    ``attains(rate)`` measures attainment, a share; where it does not fall with the rate, the result is one of the rates where it crosses
    ``share``. Raises ``ValueError`` unless 0 < low < high, resolution > 0 and 0 < share <= 1.
    """
    if not (0 < low < high and resolution > 0 and 0 < share <= 1):
        raise ValueError(f"capacity: low={low!r}, high={high!r}, resolution={resolution!r}, share={share!r}; "
                         "0 < low < high, resolution > 0 and 0 < share <= 1 are needed")  # fmt: skip
    tried: list[tuple[float, float]] = []
    if not _enough(attains, low, share, tried):
        return Capacity(0.0, "below", low, tuple(tried))
    if _enough(attains, high, share, tried):
        return Capacity(high, "at least", None, tuple(tried))
    return _bisect(attains, low, high, resolution, share, tried)


def find_capacity_from(attains: Callable[[float], float], guess: float, resolution: float, share: float = 0.9, step: float = 1.2,
                       most: int = 8) -> Capacity:  # fmt: skip
    """As :func:`find_capacity`, but the interval is found first: from ``guess`` up or down by the factor ``step``, ``most`` times at most.

    Raises ``ValueError`` unless guess > 0, resolution > 0, 0 < share <= 1, step > 1 and most >= 1.
    """
    if not (guess > 0 and resolution > 0 and 0 < share <= 1 and step > 1 and most >= 1):
        raise ValueError(f"capacity: guess={guess!r}, resolution={resolution!r}, share={share!r}, step={step!r}, most={most!r}; "
                         "guess > 0, resolution > 0, 0 < share <= 1, step > 1 and most >= 1 are needed")  # fmt: skip
    tried: list[tuple[float, float]] = []
    rises, rate = _enough(attains, guess, share, tried), guess
    for _ in range(most):
        before, rate = rate, rate * step if rises else rate / step
        if _enough(attains, rate, share, tried) != rises:
            return _bisect(attains, *((before, rate) if rises else (rate, before)), resolution, share, tried)
    return Capacity(rate, "at least", None, tuple(tried)) if rises else Capacity(0.0, "below", rate, tuple(tried))


def _enough(attains: Callable[[float], float], rate: float, share: float, tried: list[tuple[float, float]]) -> bool:
    tried.append((rate, attains(rate)))
    return tried[-1][1] >= share


def _bisect(attains: Callable[[float], float], low: float, high: float, resolution: float, share: float,
            tried: list[tuple[float, float]]) -> Capacity:  # fmt: skip
    """``low`` attains the share, ``high`` does not."""
    while high / low > 1 + resolution:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _enough(attains, middle, share, tried) else (low, middle)
    return Capacity(low, "found", high, tuple(tried))


def t_quantile(freedom: int, share: float = 0.975) -> float:
    """Quantile of Student's t with ``freedom`` degrees of freedom, to about 1e-6. Raises ``ValueError`` outside freedom >= 1, 0.5 <= share < 1."""
    if freedom < 1 or not 0.5 <= share < 1:
        raise ValueError(f"t_quantile: freedom={freedom!r} must be at least 1 and share={share!r} in [0.5, 1)")
    # With t = sqrt(n) tan(a) the mass up to t is 1/2 + c * integral of cos(x)^(n - 1) over [0, a].
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)

    def mass(angle: float, pieces: int = 400) -> float:
        step = angle / pieces
        inner = sum((4 if i % 2 else 2) * math.cos(i * step) ** (freedom - 1) for i in range(1, pieces))
        return 0.5 + scale * step / 3 * (1 + inner + math.cos(angle) ** (freedom - 1))

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if mass(middle) < share else (low, middle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and half width of its 95 % interval by the t-distribution; None for the width of a single value. Raises ``ValueError`` for none."""
    if not values:
        raise ValueError("interval of no values; measure at least one")
    mean = statistics.fmean(values)
    if len(values) == 1:
        return mean, None
    return mean, t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def paired_change(base: Sequence[float], other: Sequence[float]) -> tuple[float, float | None]:
    """Mean change in percent from ``base`` to ``other``, value by value in the order of the repeats, and its 95 % half width.

    Raises ``ValueError`` for different lengths or a base value of 0.
    """
    if len(base) != len(other) or 0 in base:
        raise ValueError(f"paired_change: {len(base)} and {len(other)} values; pairs are needed, and no base value may be 0")
    return interval([(b / a - 1) * 100 for a, b in zip(base, other)])


def aggregate(rows: Sequence[dict[str, Any]], keys: Sequence[str], metrics: Sequence[str], base: str | None) -> list[dict[str, Any]]:
    """Rows of repeats brought together by ``keys`` (the first one is the arm): mean and ``... +-`` of each metric, over the repeats that have it.

    With ``base`` also ``... vs BASE %`` and its ``+-``: changes against that arm, paired by ``row["repeat"]``; none where a value of the base is 0.
    Order as in ``rows``.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[k] for k in keys), []).append(row)
    found = []
    for group, members in groups.items():
        merged: dict[str, Any] = {**dict(zip(keys, group)), "repeats": len(members)}
        partners = {r["repeat"]: r for r in groups.get((base, *group[1:]), [])} if base not in (None, group[0]) else {}
        for metric in metrics:
            values = [m[metric] for m in members if m.get(metric) is not None]
            if values:
                merged[metric], merged[f"{metric} +-"] = interval(values)
            pairs = [(partners[m["repeat"]].get(metric), m.get(metric)) for m in members if m["repeat"] in partners]
            pairs = [(a, b) for a, b in pairs if a is not None and b is not None]
            if pairs and all(a for a, _ in pairs):
                change = paired_change([a for a, _ in pairs], [b for _, b in pairs])
                merged[f"{metric} vs {base} %"], merged[f"{metric} vs {base} +-"] = change
        found.append(merged)
    return found
