"""Load on the scheduler, the memory manager and the controls as they are, with a device that only says how long each step takes.

Time is a number that steps and arrivals move, so every run of the same load is the same run. A step takes what :class:`DepthCosts` says of
it, with a share of the routed rows' layers skipped; restores go over a link that takes ``unit_seconds`` for each unit.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from depthfx.alloc.manager import MemoryManager
from depthfx.alloc.units import SharedRegion, UnitLayout
from depthfx.errors import MemoryStateError
from depthfx.records import SamplingParams, StepPlan, StepResult
from depthfx.runtime.depth_control import DepthControl, DepthCosts, StepCost, cost_at
from depthfx.runtime.elastic import ElasticControl
from depthfx.runtime.request import Request
from depthfx.runtime.routes import RouteLog, depth_parts
from depthfx.runtime.scheduler import Scheduler
from depthfx.settings import ElasticMemory

LAYERS, ROUTED, BLOCK = 8, 4, 16
# About a Llama-3-8B shape on one H200, in seconds.
COSTS = DepthCosts(
    4.2e12, 3.5e12, 4096, ROUTED,
    (StepCost(1, 4.0e-3, 160e-6, 0.8e-3), StepCost(32, 5.0e-3, 180e-6), StepCost(256, 11.7e-3, 170e-6)),
    (StepCost(256, 8e-3, 1.5e-3, 2.5e-3), StepCost(1024, 23e-3, 1.8e-3, 9e-3)),
)  # fmt: skip


@dataclass(frozen=True)
class Ask:
    """A request that arrives."""

    at: float
    prompt: int
    new: int
    options: dict[str, Any] = field(default_factory=dict)


class Link:
    """Stands for the restore worker."""

    device, copied_bytes, seconds_busy, in_flight = torch.device("cpu"), 0, 0.0, (8, 0)

    def __init__(self, simulation: Simulation, unit_seconds: float) -> None:
        self._simulation, self._unit_seconds = simulation, unit_seconds
        self._ends: dict[int, float] = {}

    def submit(self, unit: int, *_: Any) -> None:
        """After those before it."""
        self._ends[unit] = max([self._simulation.now, *self._ends.values()]) + self._unit_seconds

    def cancel(self, unit: int) -> None:
        """At once."""
        if unit not in self._ends:
            raise MemoryStateError("not under way")
        del self._ends[unit]

    def poll(self) -> list[int]:
        """What has ended."""
        done = [unit for unit, end in self._ends.items() if end <= self._simulation.now]
        for unit in done:
            del self._ends[unit]
        return done


class Simulation:
    """One engine under load. ``share`` of the routed layers is skipped by rows that ask the skipper."""

    def __init__(
        self, depth: str = "dense", share: float = 0.25, num_blocks: int = 4096, units: int = 0, unit_seconds: float = 2e-3,
        costs: DepthCosts = COSTS, believed: DepthCosts | None = None, memory: ElasticMemory | None = None, batch: int = 64, fast: float = 1.0,
    ) -> None:  # fmt: skip
        """``units`` of 8 blocks can be lent beside ``num_blocks``; ``believed``: what the controller was told of the costs.

        A layer in fast precision takes ``fast`` times as long as in full.
        """
        self.fast = fast
        self.now, self.costs, self.share = 0.0, costs, share
        per_unit, unit_bytes = 8, 64
        spans = tuple((i * units * unit_bytes // LAYERS, (i + 1) * units * unit_bytes // LAYERS) for i in range(LAYERS)) if units else ()
        layout = UnitLayout(unit_bytes, per_unit, num_blocks, spans) if units else None
        total = num_blocks + units * per_unit
        self.manager = MemoryManager(total, BLOCK, batch + 1, total, region=None if layout is None else SharedRegion(layout))
        self.scheduler = Scheduler(self.manager, batch, 2048, 512, total * BLOCK)
        self.scheduler.wanted = bytes([1] * LAYERS)
        self.routes = RouteLog(range(ROUTED), (depth, depth))  # type: ignore[arg-type]
        if depth == "auto":
            self.scheduler.depth = DepthControl(costs if believed is None else believed)
            self.routes.observer = self.scheduler.depth.observe
        self.control = None if layout is None else self._control(layout, unit_seconds, memory or ElasticMemory())
        self.plans: list[tuple[float, StepPlan]] = []
        self.busy = 0.0  # seconds of steps
        self.ends: dict[str, float] = {}
        self.begins: dict[str, float] = {}  # when each request was in a step for the first time
        self.added: dict[str, float] = {}
        self.waits: list[tuple[float, int]] = []  # (time, preemptions so far) after each step

    def _control(self, layout: UnitLayout, unit_seconds: float, memory: ElasticMemory) -> ElasticControl:
        home = torch.zeros(layout.num_units * layout.unit_bytes, dtype=torch.uint8)
        shared = SimpleNamespace(
            layout=layout, worker=Link(self, unit_seconds), weights=(), backup=SimpleNamespace(unit=lambda unit: home),
            memory=SimpleNamespace(
                home_bytes_tensor=lambda: home, kv_tensor=lambda shape, dtype: torch.zeros(shape, dtype=dtype)
            ),
        )  # fmt: skip
        control = ElasticControl(shared, self.manager, memory, clock=lambda: self.now)  # type: ignore[arg-type]
        self.scheduler.mask = control.mask
        return control

    def run(self, asks: Iterable[Ask]) -> Simulation:
        """Serves all of ``asks`` to their end, checking memory on the way."""
        coming = sorted(asks, key=lambda ask: ask.at)
        draw, number = random.Random(1), 0
        while coming or self.scheduler.has_unfinished():
            while coming and coming[0].at <= self.now:
                ask = coming.pop(0)
                sampling = SamplingParams(max_new_tokens=ask.new, **ask.options)
                depth = depth_parts(sampling, self.routes, measured=True)
                prompt = [draw.randrange(1000) for _ in range(ask.prompt)]
                self.scheduler.add(Request(f"r{number}", prompt, sampling, depth=depth, added_s=ask.at))
                self.added[f"r{number}"] = ask.at
                number += 1
            self._turn(coming[0].at if coming else self.now + 1e-3)
        while self.control is not None and not all(self.control.region.resident()):
            self.control.after_commit(waiting=False, idle=True)
            self.now += 1e-3
        return self

    def _turn(self, later: float) -> None:
        control, scheduler = self.control, self.scheduler
        if control is not None:
            control.before_plan(scheduler.waiting_since)
        plan = scheduler.plan()
        if control is not None:
            control.after_plan()
        if plan is None:
            assert not scheduler.has_unfinished() or scheduler.presses, "requests are left, but nothing can be done"
            if control is not None and scheduler.presses:
                control.press(0)
                later = min(later, self.now + 1e-3)
            self.now = max(later, self.now + 1e-6)
        else:
            self._compute(plan)
        if control is not None and plan is not None:
            if scheduler.presses:
                control.press(scheduler.num_running)
            else:
                control.after_commit(scheduler.num_waiting > 0, not scheduler.has_unfinished())
        if len(self.plans) % 16 == 0:
            scheduler.check()

    def _compute(self, plan: StepPlan) -> None:
        self.plans.append((self.now, plan))
        for chunk in plan.decodes + plan.prefills:
            self.begins.setdefault(chunk.request_id, self.now)
        seconds = self.seconds(plan)
        self.now, self.busy = self.now + seconds, self.busy + seconds
        count = len(plan.sampled)
        outputs = self.scheduler.commit(StepResult(plan.step_id, (7,) * count, (True,) * count, {}))
        if plan.routed:
            self.routes.add(plan, self._tape(plan))
        for output in outputs:
            assert output.error is None, output.error
            if output.finished:
                self.ends[output.request_id] = self.now
        self.waits.append((self.now, self.scheduler.num_preemptions))

    def longest_wait(self) -> float:
        """Of a request for its prompt to begin, in seconds."""
        return max(begin - self.added[request_id] for request_id, begin in self.begins.items())

    def seconds(self, plan: StepPlan) -> float:
        """What a step takes."""
        costs, chunks = self.costs, plan.decodes + plan.prefills
        cost = cost_at(costs.prefill if plan.prefills else costs.decode, plan.num_tokens)
        kv = sum(c.start + 1 for c in plan.decodes) * costs.kv_bytes / costs.kv_rate
        routed_kv = sum(c.start + 1 for c in plan.decodes if c.routed) * costs.kv_bytes / costs.kv_rate
        part = sum(c.num_tokens for c in chunks if c.routed) / plan.num_tokens
        saved = self.share * (routed_kv * ROUTED + cost.saved * part)
        share = sum(plan.precision) / len(plan.precision) if plan.precision else 1.0
        return cost.dense * (share + (1 - share) * self.fast) + kv * LAYERS + (cost.overhead - saved if plan.routed else 0.0)

    def _tape(self, plan: StepPlan) -> torch.Tensor:
        rows = [(c.start + i, c.number, not c.routed) for c in plan.decodes + plan.prefills for i in range(c.num_tokens)]
        at = torch.tensor(rows)
        mixed = (at[:, 0] * 7919 + at[:, 1] % 1009) * 31 + torch.arange(ROUTED)[:, None] * 17
        return ((mixed % 100 >= self.share * 100).int() + 2 * at[:, 2]).to(torch.int8)


def decisions(simulation: Simulation) -> list[tuple[Any, ...]]:
    """What was decided in each step."""
    return [
        (now, plan.precision, plan.probe, [(c.request_id, c.routed, c.num_tokens) for c in plan.decodes + plan.prefills])
        for now, plan in simulation.plans
    ]
