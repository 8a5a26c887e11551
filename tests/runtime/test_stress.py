"""A thousand random requests on a KV pool that is far too small: every token must be the right one, and nothing may leak."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from depthfx.alloc.manager import MemoryManager
from depthfx.records import SamplingParams
from depthfx.runtime.engine import Engine
from depthfx.runtime.request import RequestOutput
from depthfx.runtime.scheduler import Scheduler
from tests.runtime.fake_runner import FakeRunner, continuation

VOCAB, BLOCK, LENGTH = 97, 4, 48
NUM_REQUESTS, NUM_BLOCKS, BATCH = 1000, 28, 10


@dataclass
class Case:
    prompt: list[int]
    sampling: SamplingParams
    stop_token: int | None
    abort_after: int | None  # turns
    tokens: list[int] = field(default_factory=list)
    end: RequestOutput | None = None

    def expected(self) -> list[int]:
        num_tokens = min(self.sampling.max_new_tokens, LENGTH - len(self.prompt))
        stops = (*self.sampling.eos_token_ids, *(() if self.stop_token is None else (self.stop_token,)))
        return continuation(self.prompt, num_tokens, VOCAB, stops)


def random_case(rng: random.Random, prefixes: list[list[int]]) -> Case:
    prompt = rng.choice(prefixes)[: rng.randrange(0, 17)] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 8))]
    external = rng.random() < 0.1
    eos = tuple(rng.sample(range(VOCAB), 2)) if rng.random() < 0.5 else ()
    sampling = SamplingParams(
        max_new_tokens=rng.choice([1, 2, 5, 12, 25, 60]),
        eos_token_ids=eos,
        external=external,
        repetition_penalty=rng.choice([1.0, 1.2]),
    )
    stop_token = rng.randrange(VOCAB) if rng.random() < 0.2 else None
    return Case(prompt, sampling, stop_token, rng.randrange(12) if rng.random() < 0.15 else None)


@pytest.mark.parametrize("lookahead", [False, True], ids=["in turn", "lookahead"])
@pytest.mark.parametrize("seed", [1, 2])
def test_no_token_is_lost_and_no_block_leaks(seed, lookahead):
    print(f"seed {seed}, lookahead {lookahead}")
    rng = random.Random(seed)
    manager = MemoryManager(NUM_BLOCKS, BLOCK, BATCH, LENGTH // BLOCK)
    scheduler = Scheduler(manager, BATCH, 24, 8, LENGTH)
    runner = FakeRunner(NUM_BLOCKS, BLOCK, BATCH, LENGTH // BLOCK, VOCAB, delayed=lookahead)
    engine = Engine(scheduler, runner, VOCAB, lookahead=lookahead, check=True)
    prefixes = [[rng.randrange(VOCAB) for _ in range(16)] for _ in range(4)]
    cases: dict[str, Case] = {}
    parked: list[tuple[str, int]] = []
    aborts: list[tuple[int, str]] = []
    turn = idle = 0
    while len(cases) < NUM_REQUESTS or engine.has_unfinished():
        turn += 1
        while len(cases) < NUM_REQUESTS and rng.random() < 0.45 and scheduler.num_waiting < 30:
            case = random_case(rng, prefixes)
            check = None if case.stop_token is None else (lambda ids, stop=case.stop_token: ids[-1] == stop)
            name = engine.add(case.prompt, case.sampling, stop_check=check)
            cases[name] = case
            runner.prompts[name] = case.prompt
            if case.abort_after is not None:
                aborts.append((turn + case.abort_after, name))
        for due in [a for a in aborts if a[0] <= turn]:
            aborts.remove(due)
            engine.abort(due[1])
        rng.shuffle(parked)
        while parked and rng.random() < 0.4:
            name, token = parked.pop()
            if name in scheduler._requests:  # not aborted meanwhile
                book(cases, engine.push_token(name, token))
        outputs = engine.step()
        idle = 0 if outputs or parked else idle + 1
        assert idle < 10, "no progress"
        for output in outputs:
            if output.logits is not None:
                parked.append((output.request_id, int(output.logits.argmax())))
            book(cases, output)
    manager.check()
    assert manager.usage().num_held == 0
    assert scheduler.num_preemptions > 20
    assert scheduler.num_reused_tokens > 200
    ends = {reason: sum(c.end.finish_reason == reason for c in cases.values()) for reason in ("eos", "stop", "length", "abort")}
    print(f"{turn} turns, {scheduler.num_preemptions} preemptions, {scheduler.num_reused_tokens} reused tokens, {ends}")
    assert sum(ends.values()) == NUM_REQUESTS
    assert min(ends.values()) > 10
    for name, case in cases.items():
        if case.end.finish_reason == "abort":
            assert case.tokens == case.expected()[: len(case.tokens)], name
        else:
            assert case.tokens == case.expected(), name


def book(cases: dict[str, Case], output: RequestOutput) -> None:
    case = cases[output.request_id]
    assert case.end is None, f"{output.request_id} got news after its end"
    case.tokens += output.new_token_ids
    if output.finished:
        case.end = output
