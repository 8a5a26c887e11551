"""When waiting for copies from the host is given up: tries that failed, in a row and as a whole."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from depthfx.errors import MemoryStateError, RestoreError
from depthfx.runtime import elastic
from depthfx.settings import ElasticMemory
from tests.runtime.load_simulator import Simulation

pytestmark = pytest.mark.filterwarnings("ignore:a residual was not restored:UserWarning")
UNITS = 8


class OneByOne:
    """Stands for the restore worker: each poll ends one copy, a unit of ``bad`` fails; ``dead``: it takes none."""

    device, copied_bytes, seconds_busy = torch.device("cpu"), 0, 0.0

    def __init__(self, bad: set[int], once: bool = False, dead: bool = False) -> None:
        self.bad, self.once, self.dead = bad, once, dead
        self.queue: list[int] = []
        self.submitted: list[int] = []

    def submit(self, unit: int, *_) -> None:
        self.submitted.append(unit)
        if self.dead:
            raise RestoreError("the restore worker ended: injected")
        self.queue.append(unit)

    def poll(self) -> list[int]:
        if not self.queue:
            return []
        unit = self.queue.pop(0)
        if unit in self.bad:
            self.bad -= {unit} if self.once else set()
            raise RestoreError(f"unit {unit} was not copied back: injected", unit)
        return [unit]

    def wait_idle(self, timeout: float) -> bool:
        return not self.queue

    def close(self) -> None:
        """Nothing to end."""


def lent(worker: OneByOne, monkeypatch):
    """A control all of whose units are lent, and its presses: each one retry later than the one before."""
    simulation = Simulation(num_blocks=16, units=UNITS, memory=ElasticMemory(dwell_s=0.0))
    control = simulation.control
    control.shared.worker, control.shared.resources = worker, SimpleNamespace(worker=worker)
    monkeypatch.setattr(elastic, "RestoreWorker", lambda device: worker)
    simulation.manager.lend(UNITS)
    control.after_plan()

    def press() -> str:
        simulation.now += 2 * elastic.RETRY_SECONDS
        return control.press(0)

    return control, press


def test_a_try_of_which_most_was_copied_has_not_failed(monkeypatch):
    """Whether the copy that fails is told of with the others, or last and alone."""
    worker = OneByOne({0})
    control, press = lent(worker, monkeypatch)
    while worker.queue or not worker.submitted:
        assert press() == ""
    assert control.region.num_restores == UNITS - 1 and control.num_failures == 1
    assert control.num_tries_failed == 0
    told = [press() for _ in range(10)]
    first = next(why for why in told if why)
    assert "3 tries in a row failed" in first and worker.submitted[: UNITS + elastic.MAX_TRIES].count(0) == 1 + elastic.MAX_TRIES


def test_units_that_find_no_worker_are_one_try(monkeypatch):
    control, press = lent(OneByOne(set(), dead=True), monkeypatch)
    for number in range(elastic.MAX_TRIES):
        assert press() == "" and control.num_tries_failed <= number + 1
    assert "3 tries in a row failed" in press() and control.num_failures >= elastic.MAX_TRIES * UNITS


def test_restore_goes_on_as_long_as_something_comes_back(monkeypatch):
    control, _ = lent(OneByOne({6, 4, 2, 0}, once=True), monkeypatch)
    control.restore(5.0)
    assert control.num_failures == 4 and all(control.region.resident())
    control, _ = lent(OneByOne({4}), monkeypatch)
    with pytest.raises(MemoryStateError, match=r"cannot be copied back; .*unit 4"):
        control.restore(5.0)
