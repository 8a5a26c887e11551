"""The memory manager over unified memory against an independent model of both, over random sequences of calls, on every backend.

Hypothesis draws a share and shortens what fails; a seeded driver walks the rest. ``OPERATIONS=100000`` in the environment makes both walk that far on
each of dry and memfd: ``OPERATIONS=100000 python -m pytest tests/alloc/test_shared_model.py -s``. `tests/gpu/test_shared_walk.py` is the same on CUDA.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from tests.alloc.physical_cases import backends
from tests.alloc.shared_walk import REACHED, ROWS, STEPS, Walk, check_reached, drive
from tests.alloc.walk_world import World

CASES = backends()
DRAWN = {"dry": 1750, "memfd": 1750}  # by hypothesis
DRIVEN = {"dry": 9000, "memfd": 9000, "cuda_vmm-fake": 500}  # by a seed; whatever other backend there is needs its own machine
OPERATIONS = int(os.environ.get("OPERATIONS", "0"))


@pytest.fixture
def world(name: str) -> Iterator[World]:
    made = World(CASES[name])
    yield made
    made.close()


def machine(world: World, seen: Counter[str]) -> type[RuleBasedStateMachine]:
    """The walk as a state machine of hypothesis."""

    def run(self: Any, method: str, arguments: dict[str, Any]) -> None:
        getattr(self.walk, method)(**arguments)

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.walk = Walk(world, seen)

        @initialize(prompts=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 4)), min_size=2, max_size=ROWS))
        def start_under_load(self, prompts: list[tuple[int, int]]) -> None:
            for zeros, ones in prompts:
                self.walk.admit(zeros, ones, 0, True)

        @invariant()
        def adds_up(self) -> None:
            self.walk.adds_up()

        def teardown(self) -> None:
            self.walk.end_here()

    for method, choices, loaded in Walk.rules():
        drawn = {argument: st.sampled_from(values) for argument, values in choices.items()}
        made = rule(**drawn)(lambda self, method=method, **arguments: run(self, method, arguments))
        setattr(Machine, method, precondition(lambda self: self.walk.tokens)(made) if loaded else made)
    return Machine


@pytest.mark.timeout(120 + OPERATIONS // 100)
@pytest.mark.parametrize("name", DRAWN)
def test_manager_agrees_with_the_model(name, world):
    """The walk asserts in each of its rules and after each; derandomized, so a failure repeats in the same selection of tests.

    What is drawn depends on the constants of all modules that are imported, so only the seeded walk promises to come everywhere.
    """
    operations, seen = OPERATIONS or DRAWN[name], Counter()
    limits = settings(
        max_examples=operations * 7 // STEPS // 5,
        stateful_step_count=STEPS,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine(world, seen), settings=limits)
    print(f"{name}: {dict(seen)}")
    assert seen["operations"] >= operations and all(seen[what] for what in REACHED)


@pytest.mark.timeout(120 + OPERATIONS // 100)
@pytest.mark.parametrize("name", DRIVEN)
def test_a_seeded_walk_agrees_with_the_model(name, world):
    operations = DRIVEN[name] if "fake" in name else OPERATIONS or DRIVEN[name]
    start = time.monotonic()
    seen = drive(world, 0, lambda done: done >= operations)
    print(f"{name}, seed 0: {seen['operations']} operations in {time.monotonic() - start:.1f} s, {dict(seen)}")
    check_reached(seen)
