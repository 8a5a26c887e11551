"""When to route: arithmetic over what was measured (:mod:`depthfx.runtime.calibration`), what the skipper decided, and the load.

No torch and no clock: equal calls in an equal order give equal decisions. Decode, of a step of B rows over V tokens of KV:

    gain = share x (V x layers x kv_bytes / kv_rate + saved) - overhead
    V*   = (overhead / share - saved) x kv_rate / (layers x kv_bytes)        where the gain is 0

`share` of row and routed layer pairs is Project-Only, `overhead` and `saved` are seconds of a step of B rows: what routing costs where
nothing is skipped, and what goes beside KV reads where everything is (weights nobody reads, products nobody makes). Routing is entered
where V has been 1.25 V* or more for some steps (1.1 V* while somebody waits for room: whoever ends sooner makes it) and left below V*.
With `saved` = 0 that is the rule of the paper on vSkipper, section 3.3.

A prompt is routed if that saves 1.25 times what it costs, for the rows that it shares its step with; tokens whose KV is cached under
one depth and not under the other count. The rule "paper" asks for 1,536 rows and a share above 0.35 instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from depthfx.settings import DepthRule

ENTER, ENTER_PRESSED = 1.25, 1.1  # multiples of V*; it is left below V* itself
ENTER_STEPS = 8  # steps in a row above the threshold before routing begins: a promotion is for good
PROBE_STEPS, PROBE_COST = 64, 0.002  # a step is looked at after as many unseen ones, or so many that looking costs this share of their time
EARLY_STEPS, EARLY_PAIRS = 8, 64  # sooner, while fewer pairs than that were seen
KEEP = 0.8  # weight of what was seen before, against a new step
PAPER_ROWS, PAPER_SHARE = 1536, 0.35
NOISE = 0.005  # share of a dense step that a measured overhead is at least taken for

Kind = Literal["answer", "prompt"]
Seen = tuple[int, int]  # (Project-Only, all) pairs of row and routed layer


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step of ``rows`` rows: dense; ``overhead`` more if it is routed and skips nothing; ``saved`` less if it skips everything,
    KV reads left out (0: not measured)."""

    rows: int
    dense: float
    overhead: float
    saved: float = 0.0


@dataclass(frozen=True)
class DepthCosts:
    """What :mod:`depthfx.runtime.calibration` measured; steps in rising order of rows, at least one of each kind."""

    bandwidth: float  # bytes a second of a copy, read and written
    kv_rate: float  # bytes of KV that decode attention reads in a second
    kv_bytes: int  # of one token in one layer
    num_layers: int  # routed ones
    decode: tuple[StepCost, ...]
    prefill: tuple[StepCost, ...]


def cost_at(costs: Sequence[StepCost], rows: int) -> StepCost:
    """The cost of a step of ``rows`` rows, on straight lines between the measured ones; beyond the last in proportion to it, and below the
    first too, but for the overhead."""
    after = next((c for c in costs if c.rows >= rows), costs[-1])
    place = costs.index(after)
    if rows > after.rows or place == 0:
        scale = rows / after.rows
        return StepCost(rows, after.dense * scale, _least(after) * max(1.0, scale), after.saved * scale)
    before = costs[place - 1]
    part = (rows - before.rows) / (after.rows - before.rows)

    def between(a: float, b: float) -> float:
        return a + part * (b - a)

    return StepCost(rows, between(before.dense, after.dense), between(_least(before), _least(after)), between(before.saved, after.saved))


def break_even(costs: DepthCosts, share: float, rows: int, routable: int | None = None) -> float:
    """V* of a decode step of ``rows`` rows, of which ``routable`` (None: all) may skip; infinite where nothing is skipped, 0 where it always pays."""
    if share <= 0.0:
        return float("inf")
    cost = cost_at(costs.decode, rows)
    saved = cost.saved if routable is None else cost.saved * routable / rows
    return max(0.0, cost.overhead / share - saved) * costs.kv_rate / (costs.num_layers * costs.kv_bytes)


def prompt_pays(costs: DepthCosts, rule: DepthRule, share: float, step_rows: int, dense_tokens: int, routed_tokens: int) -> bool:
    """Whether a prompt is to be routed that shares a step of ``step_rows`` rows, and of which so many tokens are to be computed in each depth."""
    cost = cost_at(costs.prefill, step_rows)
    if rule == "paper" or not cost.saved:
        return step_rows >= PAPER_ROWS and share > PAPER_SHARE
    extra = cost.dense * (routed_tokens - dense_tokens)
    return share * cost.saved * routed_tokens >= ENTER * (cost.overhead * routed_tokens + extra)


@dataclass(frozen=True)
class DepthStats:
    """Decisions so far and what they rest on; a share is None until one was seen."""

    routing: bool  # answers are routed now
    answer_share: float | None
    prompt_share: float | None
    break_even_tokens: float  # V* of the last step that had rows to decide for
    num_enters: int
    num_leaves: int
    num_promotions: int  # answers that were routed
    num_probes: int


class DepthControl:
    """Decides the depth of requests that leave it open; the scheduler asks, the engine tells what was decided in its steps."""

    def __init__(self, costs: DepthCosts, rule: DepthRule = "measured", halves: bool = False) -> None:
        """``halves``: prompts beside routed answers run in a step of their own."""
        self.costs, self.rule = costs, rule
        self.routing = False
        self.halves = halves
        self.break_even_tokens = float("inf")
        self.num_enters = self.num_leaves = self.num_promotions = self.num_probes = 0
        self._above = 0  # steps in a row
        self._seen: dict[Kind, tuple[float, float]] = {}
        self._unseen: dict[Kind, int] = {"answer": 1 << 60, "prompt": 1 << 60}  # steps since one was looked at

    def share(self, kind: Kind) -> float | None:
        """Of Project-Only pairs, lately; None if none was seen."""
        if kind not in self._seen:
            return None
        project, total = self._seen[kind]
        return project / total

    def observe(self, answer: Seen, prompt: Seen) -> None:
        """A routed step, or one that was looked at, is booked: what the skipper said of its rows. Larger steps weigh more."""
        seen: tuple[tuple[Kind, Seen], ...] = (("answer", answer), ("prompt", prompt))
        for kind, (project, total) in seen:
            if total:
                before = self._seen.get(kind, (0.0, 0.0))
                self._seen[kind] = KEEP * before[0] + project, KEEP * before[1] + total

    def decide_answers(self, rows: int, routable: int, kv_tokens: int, pressed: bool) -> bool:
        """Whether answers are to be routed from the next step on: ``rows`` rows decode, ``routable`` of them may skip and have ``kv_tokens``
        tokens of KV; ``pressed``: somebody waits for room."""
        share = self.share("answer")
        if not routable or share is None:
            self._set(False)
            return False
        self.break_even_tokens = limit = break_even(self.costs, share, rows, routable)
        if self.routing:
            self._set(kv_tokens >= limit)
        else:
            self._above = self._above + 1 if kv_tokens >= (ENTER_PRESSED if pressed else ENTER) * limit else 0
            if self._above >= ENTER_STEPS:
                self._set(True)
        return self.routing

    def decide_prompt(self, step_rows: int, dense_tokens: int, routed_tokens: int) -> bool:
        """Whether a prompt that is about to be admitted is to be routed; see :func:`prompt_pays`."""
        share = self.share("prompt")
        return share is not None and prompt_pays(self.costs, self.rule, share, step_rows, dense_tokens, routed_tokens)

    def probe(self, answer_rows: int, prompt_rows: int, routed: bool) -> bool:
        """Whether to look at what the skipper would decide in the step that is being planned; called once for each.

        ``answer_rows``, ``prompt_rows``: rows whose depth is open; ``routed``: it is a routed step anyway, so all is seen, or, where
        ``halves``, its answers.
        """
        present: list[Kind] = [kind for kind, rows in (("answer", answer_rows), ("prompt", prompt_rows)) if rows]  # type: ignore[misc]
        # answers are looked at in a step of their own, which is cheaper, if there is one before long
        due = any(self._unseen[kind] >= self._interval(kind) * (2 if kind == "answer" and prompt_rows else 1) for kind in present)
        seen = routed and not (self.halves and prompt_rows)
        if due and not seen:
            cost = cost_at(self.costs.prefill, prompt_rows) if prompt_rows else cost_at(self.costs.decode, answer_rows)
            due = any(self._unseen[kind] >= cost.overhead / (PROBE_COST * cost.dense) for kind in present)
        for kind in present:
            self._unseen[kind] = 0 if due or seen or (routed and kind == "answer") else self._unseen[kind] + 1
        probing = due and not seen
        self.num_probes += probing
        return probing

    def stats(self) -> DepthStats:
        """Counts so far."""
        return DepthStats(
            self.routing, self.share("answer"), self.share("prompt"), self.break_even_tokens, self.num_enters, self.num_leaves,
            self.num_promotions, self.num_probes,
        )  # fmt: skip

    def _interval(self, kind: Kind) -> int:
        return EARLY_STEPS if self._seen.get(kind, (0, 0))[1] < EARLY_PAIRS else PROBE_STEPS

    def _set(self, routing: bool) -> None:
        if routing != self.routing:
            self.num_enters += routing
            self.num_leaves += not routing
        self.routing, self._above = routing, 0


def explain_costs(costs: DepthCosts, rule: DepthRule) -> list[str]:
    """What was measured and the thresholds that follow, as lines for a person."""
    layers, shares = costs.num_layers, (0.25, 0.5, 0.75)
    lines = [
        f"measured: copy {costs.bandwidth / 1e9:.1f} GB/s, KV is read at {costs.kv_rate / 1e9:.1f} GB/s, {costs.kv_bytes} bytes a token and layer"
    ]
    for name, steps in (("decode", costs.decode), ("prefill", costs.prefill)):
        lines += [
            f"measured: {name} of {c.rows} rows: dense {c.dense * 1e3:.2f} ms, routing {c.overhead * 1e6:+.0f} us "
            f"({c.overhead / layers * 1e6:.1f} a routed layer), everything skipped {-c.saved * 1e6:+.0f} us beside KV"
            for c in steps
        ]
    lines.append("decode: V* = (overhead / share - saved) x KV rate / (routed layers x KV bytes); routed from 1.25 V* on, dense below V*")
    for c in costs.decode:
        limits = ", ".join(f"{break_even(costs, share, c.rows):,.0f} at share {share}" for share in shares)
        lines.append(f"decode of {c.rows} rows: V* is {limits} tokens")
    for c in costs.prefill:
        if rule == "paper" or not c.saved:
            continue
        lines.append(f"prompts in steps of {c.rows} rows: routed from share {ENTER * _least(c) / c.saved:.2f} on")
    if rule == "paper" or not all(c.saved for c in costs.prefill):
        why = "as set" if rule == "paper" else "where too little was skipped to measure what it saves"
        lines.append(f"prompts: routed in steps of {PAPER_ROWS} rows and more above share {PAPER_SHARE} ({why})")
    return lines


def _least(cost: StepCost) -> float:
    return max(cost.overhead, NOISE * cost.dense)
