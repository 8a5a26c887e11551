"""A routed step of many decodes whose cohorts have chosen sizes: its logits, routes and KV are those of cohorts that are gathered."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from depthfx.lowering.graph_switch import HostSwitch, active_switch, switching
from depthfx.runtime import graphs, warmup
from tests.runtime.switched_cases import Case, check_same

SHARES = (0.0, 0.1, 0.95, 1.0)


class Watched(HostSwitch):
    """Counts the bodies that were picked."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def run(self, choice, bodies):
        """As it is, and noted."""

        def noted(number, body):
            return None if body is None else lambda: (self.sizes.append(number), body())

        super().run(choice, [noted(n, body) for n, body in enumerate(bodies)])


@pytest.mark.parametrize(("family", "weights"), [("llama", "16bit"), ("gemma2", "16bit"), ("llama", "nested")])
def test_chosen_sizes_give_what_gathered_cohorts_give(family, weights):
    dtype, tolerance = (torch.float32, 1e-4) if weights == "16bit" else (torch.float16, 5e-3)
    case, switch = Case(family, dtype, "cpu", weights), Watched()
    for share in SHARES:
        case.skip(share)
        gathered = case.step(captured=False)
        with switching(switch):
            check_same(case.step(captured=True), gathered, share, tolerance)
    # of two layers each: all run (3: in place); some run and some skip, in 64 rows (1) or in 80 (2); all skip, and none (0) runs
    assert switch.sizes[:2] == [3, 3] and set(switch.sizes[2:-4]) == {1, 2} and switch.sizes[-4:] == [0, 2, 0, 2]
    case.model.engine.close()


def test_without_a_switch_cohorts_stay_in_place():
    case = Case("llama", torch.float32, "cpu")
    case.skip(0.5)
    check_same(case.step(captured=True), case.step(captured=False), 0.5, 1e-4)
    case.model.engine.close()


def test_a_switch_is_that_of_its_thread():
    """Two models that are compiled side by side, the second one longer."""
    first, second, seen = threading.Barrier(2, timeout=30), threading.Barrier(2, timeout=30), []

    def other():
        first.wait()
        with switching(None):
            seen.append(active_switch())
            second.wait()
            first.wait()
        seen.append(active_switch())

    thread = threading.Thread(target=other)
    thread.start()
    with switching(mine := HostSwitch()):
        first.wait()
        second.wait()
        seen.append(active_switch())
    first.wait()
    thread.join()
    assert seen == [None, mine, None] and active_switch() is None


@pytest.mark.parametrize(("buckets", "switched"), [((1, 64), []), ((1, 64, 80), [(80, True), (64, True), (1, True)])])
def test_the_dry_run_names_the_kernels_of_chosen_sizes(buckets, switched, monkeypatch):
    """Its runner has no graphs of its own, and is to run what the captures will."""
    seen = []

    def forward(uploaded, precision, routed, captured=False):
        if captured and routed and active_switch() is not None:
            seen.append((uploaded, isinstance(active_switch(), HostSwitch)))

    limits = {"nested": False, "max_batch_tokens": 512, "blocks_per_row": 8, "kv": SimpleNamespace(block_tokens=16)}
    staging = SimpleNamespace(upload=lambda plan, form, routed: form.rows if form else None)
    runner = SimpleNamespace(
        device=torch.device("cuda", 0), routed=forward, shape=SimpleNamespace(**limits), staging=staging, forward=forward
    )
    runner.graphs = SimpleNamespace(switch=None)
    monkeypatch.setattr(graphs, "GraphSwitch", lambda device: HostSwitch())
    monkeypatch.setattr(graphs, "unavailable", lambda: None)
    monkeypatch.setattr(warmup, "dependent_launch", lambda *_: nullcontext())
    monkeypatch.setattr(warmup, "collected", lambda: nullcontext({}))
    monkeypatch.setattr(warmup, "_settle", lambda _: None)
    assert warmup._variants(runner, buckets, (), (-1,)) == []
    assert seen == switched
