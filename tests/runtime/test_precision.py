"""Switching precision: when it takes effect, what it may not mix, and what is refused."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

import depthfx
from depthfx.alloc.manager import MemoryManager
from depthfx.errors import InvalidRequestError, UnsupportedOptionError
from depthfx.records import SamplingParams
from depthfx.runtime.engine import Engine
from depthfx.runtime.precision import PrecisionFlags, hint
from depthfx.runtime.scheduler import Scheduler
from tests.families.harness import alone, engine_over, prompts
from tests.families.test_nested_families import compiled, exact
from tests.runtime.fake_runner import FakeRunner, continuation

VOCAB, BLOCK, LENGTH, BLOCKS, BATCH = 97, 4, 48, 28, 10
MODES = ("full", "fast", {1: "fast"}, {1: "full"}, {0: "fast", 2: "full"})


class PrecisionRunner(FakeRunner):
    """Also keeps the precision that each slot was computed under, and checks it wherever an admission reused slots."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.computed: dict[int, bytes] = {}
        self.ends: dict[str, int] = {}
        self.num_reused = 0

    def _run(self, plan):
        result = super()._run(plan)
        for chunk in plan.decodes + plan.prefills:
            if chunk.start and chunk.start != self.ends.get(chunk.request_id, 0):  # admitted with what others (or it, before) had computed
                found = {self.computed[self._slot(chunk.table_row, p)] for p in range(chunk.start)}
                assert found == {plan.precision}, f"step {plan.step_id} runs in {plan.precision} on KV of {found}"
                self.num_reused += 1
            for position in range(chunk.start, chunk.start + chunk.num_tokens):
                self.computed[self._slot(chunk.table_row, position)] = plan.precision
            self.ends[chunk.request_id] = chunk.start + chunk.num_tokens
        return result


def fake_engine(lookahead=False):
    manager = MemoryManager(BLOCKS, BLOCK, BATCH, LENGTH // BLOCK)
    runner = PrecisionRunner(BLOCKS, BLOCK, BATCH, LENGTH // BLOCK, VOCAB, delayed=lookahead)
    return Engine(Scheduler(manager, BATCH, 24, 8, LENGTH), runner, VOCAB, lookahead, check=True, layers=range(3)), runner


@pytest.mark.parametrize("lookahead", [False, True], ids=["in turn", "lookahead"])
def test_kv_of_one_precision_is_never_reused_under_another(lookahead):
    rng = random.Random(7)
    engine, runner = fake_engine(lookahead)
    shared = [[rng.randrange(VOCAB) for _ in range(16)] for _ in range(3)]
    expected, answers = {}, {}
    while len(expected) < 300 or engine.has_unfinished():
        if len(expected) < 300 and rng.random() < 0.6:
            before = rng.choice(shared)[: rng.randrange(4, 17)]
            if expected and rng.random() < 0.5:  # the next turn of a conversation: its KV was perhaps computed under two states
                name = rng.choice(list(expected))
                before = (expected[name] + answers[name])[: LENGTH - 20]
            prompt = before + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 4))]
            name = engine.add(prompt, SamplingParams(max_new_tokens=rng.choice([1, 3, 8, 20])))
            runner.prompts[name] = prompt
            expected[name], answers[name] = prompt, []
        if rng.random() < 0.1:
            engine.set_precision(rng.choice(MODES))
        for output in engine.step():
            assert output.error is None, output.error
            answers[output.request_id] += output.new_token_ids
    stats = engine.stats()
    assert runner.num_reused > 50 and stats.num_preemptions > 0 and stats.kv.num_held == 0
    assert all(count > 0 for count in stats.steps_by_precision.values()) and sum(stats.steps_by_precision.values()) == stats.num_steps
    for name, prompt in expected.items():
        assert answers[name] == continuation(prompt, len(answers[name]), VOCAB)


def test_a_prefix_is_found_again_when_its_precision_returns():
    engine, _ = fake_engine()
    prompt = list(range(17))

    def reused():
        before = engine.stats().num_reused_tokens
        engine.run([(prompt, SamplingParams(max_new_tokens=2))])
        return engine.stats().num_reused_tokens - before

    assert (reused(), reused()) == (0, 16)
    engine.set_precision({2: "fast"})
    assert (reused(), reused()) == (0, 16)
    engine.set_precision("full")
    assert reused() == 16


def test_a_switch_takes_effect_at_the_next_plan():
    engine, runner = fake_engine(lookahead=True)
    engine.add([1, 2, 3], SamplingParams(max_new_tokens=8))
    engine.step()  # launches the first step
    engine.step()  # launches the second, settles the first
    engine.set_precision("fast")
    while engine.has_unfinished():
        engine.step()
    states = [plan.precision for plan in runner.plans]
    at = states.index(bytes(3))
    assert at == 2 and states == [b"\1\1\1"] * at + [bytes(3)] * (len(states) - at)
    assert engine.stats().steps_by_precision == {"full": 2, "fast": len(states) - 2, "mixed": 0}


def test_64_requests_while_precision_switches_at_random():
    rng = random.Random(3)
    model = compiled("llama")
    engine = engine_over(model, kv_blocks=256, max_batch_size=64, max_batch_tokens=512, max_chunk_tokens=512)
    rows = prompts(tuple(rng.randint(3, 40) for _ in range(64)), seed=5, shared=16)
    together = 0
    answers = {engine.add(row, SamplingParams(max_new_tokens=rng.randint(12, 24))): [] for row in rows}
    while engine.has_unfinished():
        if rng.random() < 0.4:
            engine.set_precision(rng.choice(MODES))
        outputs = engine.step()
        together = max(together, len(outputs))
        for output in outputs:
            assert output.error is None, output.error
            answers[output.request_id] += output.new_token_ids
    assert together == 64, "all of them in one step"
    stats = engine.stats()
    assert stats.kv.num_held == 0 and all(stats.steps_by_precision.values())
    assert all(answers.values())
    engine.set_precision("full")
    full = [list(o.new_token_ids) for o in engine.run((row, SamplingParams(max_new_tokens=8)) for row in rows).values()]
    assert full == alone(compiled("llama", "16bit"), rows, max_new_tokens=8), "full after all switches is the dense model"


def test_flags_on_the_device_follow_the_plan():
    flags = PrecisionFlags(3, torch.device("cpu"))
    address = flags.tensor.data_ptr()
    assert flags.send(b"") == 1 and flags.tensor.tolist() == [1, 1, 1]
    assert flags.send(b"\1\0\1") == -1 and flags.tensor.tolist() == [1, 0, 1]
    assert flags.send(bytes(3)) == 0 and flags.tensor.tolist() == [0, 0, 0]
    assert flags.send(b"") == 1 and flags.tensor.tolist() == [1, 1, 1] and flags.tensor.data_ptr() == address
    assert [hint(s) for s in (b"", b"\1", b"\0", b"\0\1")] == [1, 1, 0, -1]


REFUSED = {
    "unknown mode": ("half", InvalidRequestError, "mode 'half' is not known; allowed: 'full' and 'fast'"),
    "unknown layer": ({3: "fast"}, InvalidRequestError, "layer 3 is not known; allowed: 0 to 2"),
    "negative layer": ({-1: "fast"}, InvalidRequestError, "layer -1 is not known"),
    "bool": ({True: "fast"}, InvalidRequestError, "layer True is not known"),
    "head": ({"head": "fast"}, InvalidRequestError, "compiled with nested_head=True"),
    "mode of a layer": ({0: 1}, InvalidRequestError, "mode 1 is not known"),
    "neither": (3, InvalidRequestError, "3 must be 'full', 'fast' or a mapping"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_modes(case):
    modes, error, message = REFUSED[case]
    model = compiled("llama")
    with pytest.raises(error, match=message):
        model.set_precision(modes)
    with pytest.raises(error, match=message):
        model.set_precision({0: "fast", **modes} if isinstance(modes, dict) else modes)
    assert set(model.precision().values()) == {"full"}, "nothing changes"


@pytest.mark.parametrize("weights", ["16bit", "fp8"])
def test_weights_of_one_precision_cannot_switch(weights):
    model = compiled("llama", weights)
    with pytest.raises(UnsupportedOptionError, match="compile it with weights='nested'"):
        model.set_precision("fast")
    assert model.precision() == {}


@cache
def with_head():
    return depthfx.compile(exact("llama"), inductor=False, kv_blocks=64, max_batch_size=8, weights="nested", nested_head=True)


def test_the_head_switches_by_name():
    model, rows = with_head(), prompts((20, 9))
    assert model.precision() == {0: "full", 1: "full", 2: "full", "head": "full"}
    assert alone(model, rows) == alone(compiled("llama", "16bit"), rows)
    ids = torch.tensor(rows[:1])
    options = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True, "do_sample": False}
    full = model.generate(ids, **options).logits[0]
    model.set_precision({"head": "fast"})
    fast = model.generate(ids, **options).logits[0]
    model.set_precision("full")
    assert not torch.equal(full, fast) and torch.equal(model.generate(ids, **options).logits[0], full)
    assert "LM head: 1 x nested_e4m3" in model.explain()
