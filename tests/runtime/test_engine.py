"""The engine over the fake runner: outputs, streams, threads, failures, counts."""

from __future__ import annotations

import gc
import threading
import time

import pytest

from depthfx.alloc.manager import MemoryManager
from depthfx.errors import InternalError, InvalidRequestError, NonFiniteLogitsError, RequestTooLargeError
from depthfx.records import SamplingParams
from depthfx.runtime.engine import Engine
from depthfx.runtime.request import RequestOutput
from depthfx.runtime.scheduler import Scheduler
from tests.runtime.fake_runner import FakeRunner, continuation

VOCAB = 50
BOTH = pytest.mark.parametrize("lookahead", [False, True], ids=["in turn", "lookahead"])


def build(
    lookahead: bool = False, num_blocks: int = 64, block_tokens: int = 4, batch: int = 8, length: int = 64
) -> tuple[Engine, FakeRunner]:
    manager = MemoryManager(num_blocks, block_tokens, batch, length // block_tokens)
    scheduler = Scheduler(manager, batch, 32, 16, length)
    runner = FakeRunner(num_blocks, block_tokens, batch, length // block_tokens, VOCAB, delayed=lookahead)
    return Engine(scheduler, runner, VOCAB, lookahead=lookahead, check=True), runner


def params(max_new: int = 8, **rest) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new, **rest)


def collect(engine: Engine, turns: int = 1000) -> dict[str, RequestOutput]:
    found: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        turns -= 1
        assert turns, "the engine makes no progress"
        for output in engine.step():
            before = found[output.request_id].new_token_ids if output.request_id in found else ()
            found[output.request_id] = RequestOutput(
                output.request_id, before + output.new_token_ids, output.finished, output.finish_reason, output.error
            )
    return found


@BOTH
def test_step_serves_all_requests(lookahead):
    engine, _ = build(lookahead)
    prompts = {engine.add([i, i + 1, 7], params(5 + i)): ([i, i + 1, 7], 5 + i) for i in range(12)}
    outputs = collect(engine)
    for name, (prompt, num_tokens) in prompts.items():
        assert list(outputs[name].new_token_ids) == continuation(prompt, num_tokens, VOCAB)
        assert outputs[name].finish_reason == "length"
    assert engine.stats().kv.num_held == 0


@BOTH
def test_eos_lags_by_no_token(lookahead):
    engine, _ = build(lookahead)
    full = continuation([3, 4], 12, VOCAB)
    name = engine.add([3, 4], params(12, eos_token_ids=(full[5],)))
    output = collect(engine)[name]
    assert list(output.new_token_ids) == full[: full.index(full[5]) + 1]
    assert output.finish_reason == "eos"


def test_lookahead_launches_the_next_step_before_waiting():
    engine, runner = build(lookahead=True)
    engine.add([1, 2], params(4))
    assert engine.step() == []
    assert (len(runner.plans), runner.num_waits) == (1, 0)
    assert len(engine.step()) == 1
    assert (len(runner.plans), runner.num_waits) == (2, 1)


@BOTH
def test_streams_interleave_with_each_other_and_with_step(lookahead):
    engine, _ = build(lookahead)
    a = engine.stream([1, 2], params(6))
    b = engine.stream([3], params(9))
    plain = engine.add([5, 6], params(4))
    got_a, got_b = [next(a), next(a)], [next(b)]
    got_a += list(a)
    got_b += list(b)
    assert got_a == continuation([1, 2], 6, VOCAB)
    assert got_b == continuation([3], 9, VOCAB)
    assert list(collect(engine)[plain].new_token_ids) == continuation([5, 6], 4, VOCAB)
    assert a.last.finish_reason == "length"


@BOTH
def test_threads_each_get_their_own_tokens(lookahead):
    engine, _ = build(lookahead, num_blocks=24)
    results: dict[int, list[int]] = {}

    def read(i: int) -> None:
        results[i] = [token for k in range(3) for token in engine.stream([i, k], params(7))]

    threads = [threading.Thread(target=read, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == {i: [t for k in range(3) for t in continuation([i, k], 7, VOCAB)] for i in range(8)}
    assert not engine.has_unfinished()


def test_add_does_not_wait_for_a_running_step():
    engine, runner = build()
    entered, leave = threading.Event(), threading.Event()
    wait = runner.wait

    def slow_wait(handle):
        entered.set()
        assert leave.wait(10)
        return wait(handle)

    runner.wait = slow_wait
    engine.add([1], params(1))
    thread = threading.Thread(target=engine.step)
    thread.start()
    assert entered.wait(10)
    start = time.perf_counter()
    name = engine.add([2], params(1))
    assert engine.abort(name)
    engine.stats()
    assert time.perf_counter() - start < 5
    leave.set()
    thread.join(10)


@BOTH
def test_run_answers_in_order_and_refuses_all_or_none(lookahead):
    engine, _ = build(lookahead)
    outputs = engine.run([([i], params(3 + i)) for i in range(10)])
    assert [list(o.new_token_ids) for o in outputs.values()] == [continuation([i], 3 + i, VOCAB) for i in range(10)]
    with pytest.raises(InvalidRequestError):
        engine.run([([1], params(3)), ([VOCAB], params(3))])
    assert collect(engine) == {}
    assert engine.stats().kv.num_held == 0


@BOTH
def test_closing_or_dropping_a_stream_aborts_it(lookahead):
    engine, _ = build(lookahead)
    a, b = engine.stream([1], params(40)), engine.stream([2], params(40))
    next(a)
    a.close()
    assert list(a) == []
    next(b)
    del b
    gc.collect()
    collect(engine, turns=5)
    assert engine.stats().kv.num_held == 0


@BOTH
def test_external_tokens(lookahead):
    engine, _ = build(lookahead)
    name = engine.add([1, 2], params(5, external=True))
    other = engine.add([9], params(20))
    tokens: list[int] = []
    got_other: list[int] = []
    while len(tokens) < 5:
        for output in engine.step():
            if output.request_id == other:
                got_other += output.new_token_ids
                continue
            assert output.logits is not None
            token = int(output.logits.argmax())
            tokens.append(token)
            assert engine.push_token(name, token).finished == (len(tokens) == 5)
    assert tokens == continuation([1, 2], 5, VOCAB)
    got_other += collect(engine)[other].new_token_ids
    assert got_other == continuation([9], 20, VOCAB)
    with pytest.raises(InvalidRequestError, match="push_token"):
        engine.stream([1], params(external=True))


@BOTH
def test_abort_delivers_a_last_output(lookahead):
    engine, _ = build(lookahead)
    name = engine.add([1], params(40))
    engine.step()
    engine.step()
    assert engine.abort(name)
    assert not engine.abort(name)
    outputs = collect(engine)
    assert outputs[name].finish_reason == "abort"
    assert engine.stats().kv.num_held == 0


@pytest.mark.parametrize(
    "prompt, text",
    [
        ([], "prompt is empty"),
        ([1, -1], "token 1 of the prompt is -1"),
        ([VOCAB], r"must be in \[0, 50\)"),
        ([1.5], "of type float"),
        (["a"], "of type str"),
        ([True], "of type bool"),
        ([[1]], "of type list"),
        ([1] * 65, "max_model_len=64"),
    ],
)
def test_bad_prompts_are_refused(prompt, text):
    engine, _ = build()
    with pytest.raises(InvalidRequestError, match=text):
        engine.add(prompt)
    assert not engine.has_unfinished()


@pytest.mark.parametrize(
    "bad",
    [{"max_new_tokens": 0}, {"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1}]
    + [{"min_p": 2.0}, {"repetition_penalty": 0.0}, {"min_new_tokens": -1}, {"seed": 1 << 63}],
    ids=str,
)
def test_bad_sampling_is_refused(bad):
    engine, _ = build()
    with pytest.raises(InvalidRequestError, match=f"sampling parameter {next(iter(bad))}="):
        engine.add([1], SamplingParams(**bad))


def test_ids_must_be_unique_while_in_use():
    engine, _ = build(num_blocks=8)
    engine.add([1], params(2), request_id="a")
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.add([1], params(2), request_id="a")
    with pytest.raises(RequestTooLargeError, match="40 tokens"):
        engine.add([1] * 21, params(20))
    collect(engine)
    assert engine.add([1], params(2), request_id="a") == "a"


@BOTH
def test_nan_ends_one_request(lookahead):
    engine, runner = build(lookahead)
    bad, good = engine.add([1, 2], params(9)), engine.add([3, 4], params(9))
    runner.nan = lambda chunk: chunk.request_id == bad and chunk.sample_index >= 2
    outputs = collect(engine)
    assert list(outputs[bad].new_token_ids) == continuation([1, 2], 2, VOCAB)
    assert isinstance(outputs[bad].error, NonFiniteLogitsError)
    assert list(outputs[good].new_token_ids) == continuation([3, 4], 9, VOCAB)
    stream = engine.stream([5], params(4), request_id="s")
    runner.nan = lambda chunk: chunk.request_id == "s"
    with pytest.raises(NonFiniteLogitsError, match="'s' got NaN"):
        list(stream)


@BOTH
@pytest.mark.parametrize("where", ["fail_launch", "fail_wait"])
def test_a_failing_step_ends_its_requests_and_the_others_go_on(lookahead, where):
    engine, runner = build(lookahead, batch=2)
    names = [engine.add([i, i], params(6)) for i in range(4)]
    getattr(runner, where)[2] = RuntimeError("device lost a step")
    outputs = collect(engine)
    assert [outputs[n].finish_reason for n in names] == ["error", "error", "length", "length"]
    assert str(outputs[names[0]].error) == "device lost a step"
    for i, name in enumerate(names):
        assert list(outputs[name].new_token_ids) == continuation([i, i], 6, VOCAB)[: len(outputs[name].new_token_ids)]
    assert len(outputs[names[0]].new_token_ids) == 2
    assert engine.stats().kv.num_held == 0


@BOTH
@pytest.mark.parametrize("where", ["fail_launch", "fail_wait"])
def test_a_runner_that_keeps_failing_comes_through(lookahead, where):
    engine, runner = build(lookahead, batch=2)
    for i in range(8):
        engine.add([i, i], params(6))
    getattr(runner, where).update({i: RuntimeError(f"step {i}") for i in range(2, 100)})
    with pytest.raises(RuntimeError, match="step "):
        collect(engine)
    assert engine.has_unfinished()


def test_a_defect_of_the_runner_is_not_swallowed_and_an_interrupted_wait_can_go_on():
    engine, runner = build()
    name = engine.add([1, 2], params(6))
    runner.fail_wait[1] = InternalError("defect")
    engine.step()
    with pytest.raises(InternalError, match="defect"):
        engine.step()
    runner.fail_wait.clear()
    assert list(collect(engine)[name].new_token_ids) == continuation([1, 2], 6, VOCAB)[1:]


def test_stats_count():
    engine, _ = build(lookahead=True, num_blocks=6, block_tokens=4)
    engine.run([([1, 2, 3, 4, 5], params(12)), ([1, 2, 3, 4, 6], params(12))])
    engine.run([([1, 2, 3, 4, 5], params(2))])
    stats = engine.stats()
    assert stats.num_tokens == 26
    assert stats.num_reused_tokens >= 4
    assert stats.num_preemptions > 0
    assert stats.num_prefill_tokens >= 11
    assert (stats.num_running, stats.num_waiting, stats.kv.num_held) == (0, 0, 0)
    assert stats.num_steps > 12
    assert 0 < stats.exposed_seconds_per_step <= stats.host_seconds_per_step


def test_host_time_of_a_decode_step_is_small():
    """256 decodes over long contexts: planning and booking one step. The limit is far above the usual 1 ms."""

    class Instant:
        def launch(self, plan):
            return plan

        def wait(self, plan):
            from depthfx.records import StepResult

            num_rows = len(plan.sampled)
            return StepResult(plan.step_id, (1,) * num_rows, (True,) * num_rows, {})

    manager = MemoryManager(256 * 80, 16, 256, 128)
    engine = Engine(Scheduler(manager, 256, 8192, 2048, 2048), Instant(), VOCAB, lookahead=True, check=False)
    for i in range(256):
        engine.add([i % VOCAB, (i // VOCAB) % VOCAB] + [1] * 1000, params(200))
    while engine.stats().num_waiting:
        engine.step()
    times = []
    for _ in range(100):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    times.sort()
    print(f"host time of a step of 256 decodes: median {times[50] * 1e3:.2f} ms, best {times[0] * 1e3:.2f} ms")
    assert times[10] < 0.01
