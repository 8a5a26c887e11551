"""Rules of the scheduler, one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from depthfx.alloc.manager import MemoryManager
from depthfx.errors import InternalError, InvalidRequestError, NonFiniteLogitsError, RequestTooLargeError, SettingError
from depthfx.records import SamplingParams, StepPlan, StepResult
from depthfx.runtime.request import Request, RequestOutput
from depthfx.runtime.scheduler import Scheduler


def build(num_blocks: int = 64, block_tokens: int = 4, batch: int = 8, tokens: int = 64, chunk: int = 16, length: int = 128) -> Scheduler:
    manager = MemoryManager(num_blocks, block_tokens, batch, -(-length // block_tokens))
    return Scheduler(manager, batch, tokens, chunk, length)


def request(name: str, prompt: list[int], max_new: int = 8, **rest) -> Request:
    stop_check = rest.pop("stop_check", None)
    return Request(name, prompt, SamplingParams(max_new_tokens=max_new, **rest), stop_check)


def result(plan: StepPlan, token: int = 1, nan: tuple[str, ...] = ()) -> StepResult:
    names = [chunk.request_id for chunk in plan.sampled]
    finite = tuple(name not in nan for name in names)
    logits = {chunk.request_id: object() for chunk in plan.sampled if chunk.sampling.external}
    tokens = tuple(-1 if name in nan or name in logits else token for name in names)
    return StepResult(plan.step_id, tokens, finite, logits)  # type: ignore[arg-type]


def turn(scheduler: Scheduler, token: int = 1) -> list[RequestOutput]:
    plan = scheduler.plan()
    assert plan is not None
    outputs = scheduler.commit(result(plan, token))
    scheduler.check()
    return outputs


def drain(scheduler: Scheduler) -> dict[str, list[int]]:
    produced: dict[str, list[int]] = {}
    while (plan := scheduler.plan()) is not None:
        for output in scheduler.commit(result(plan)):
            produced.setdefault(output.request_id, []).extend(output.new_token_ids)
        scheduler.check()
    return produced


def test_first_come_first_served_and_one_token_per_decode():
    scheduler = build(batch=2)
    for name in "abc":
        scheduler.add(request(name, [1, 2, 3], max_new=3))
    plan = scheduler.plan()
    assert [c.request_id for c in plan.prefills] == ["a", "b"]  # two table rows
    assert plan.decodes == ()
    scheduler.commit(result(plan))
    plan = scheduler.plan()
    assert [(c.request_id, c.start, c.token_ids, c.sample_index) for c in plan.decodes] == [("a", 3, (1,), 1), ("b", 3, (1,), 1)]
    scheduler.commit(result(plan))
    assert [o.finish_reason for o in turn(scheduler)] == ["length", "length"]
    assert [c.request_id for c in scheduler.plan().prefills] == ["c"]


def test_a_step_with_decodes_bounds_its_prefill_rows():
    scheduler = build(tokens=40, chunk=16)
    scheduler.add(request("a", [7], max_new=20))
    turn(scheduler)
    scheduler.add(request("b", list(range(100, 160))))
    plan = scheduler.plan()
    assert [c.num_tokens for c in plan.decodes] == [1]
    assert [(c.start, c.num_tokens, c.samples) for c in plan.prefills] == [(0, 15, False)]  # 16 rows with the decode
    scheduler.commit(result(plan))
    scheduler.abort("a")
    plan = scheduler.plan()  # no decode: the step may use all its rows
    assert [(c.start, c.num_tokens, c.samples) for c in plan.prefills] == [(15, 40, False)]
    scheduler.commit(result(plan))
    plan = scheduler.plan()
    assert [(c.start, c.num_tokens, c.samples) for c in plan.prefills] == [(55, 5, True)]


@pytest.mark.parametrize(("wanted", "rows"), [(b"\x00\x00", 32), (b"\x00\x01", 16), (b"\x01\x01", 16)], ids=["fast", "mixed", "full"])
def test_steps_that_are_fast_throughout_may_have_longer_chunks(wanted, rows):
    scheduler = build()
    scheduler.wanted, scheduler.fast_chunk_tokens = wanted, 32
    scheduler.add(request("a", [1, 2, 3]))
    turn(scheduler)
    scheduler.add(request("b", list(range(60))))
    assert scheduler.plan().num_tokens == rows


def test_many_decodes_leave_a_quarter_of_the_chunk_to_prefill():
    scheduler = build(tokens=40, chunk=8, batch=8)
    for name in "abcdefg":
        scheduler.add(request(name, [7], max_new=20))
    turn(scheduler)
    scheduler.add(request("long", list(range(100, 160))))
    plan = scheduler.plan()
    assert len(plan.decodes) == 7
    assert [c.num_tokens for c in plan.prefills] == [2]


def test_rows_of_a_step_stay_within_the_budget():
    scheduler = build(tokens=16, chunk=16, batch=8)
    for i in range(8):
        scheduler.add(request(f"r{i}", [100 * i + j for j in range(1, 8)], max_new=12))
    while (plan := scheduler.plan()) is not None:
        assert plan.num_tokens <= 16
        scheduler.commit(result(plan))


def test_the_newest_request_is_preempted_and_loses_no_token():
    scheduler = build(num_blocks=8, block_tokens=4, batch=4)
    scheduler.add(request("old", [1, 2, 3, 4], max_new=20))
    scheduler.add(request("new", [5, 6, 7, 8], max_new=20))
    produced = drain(scheduler)
    assert scheduler.num_preemptions > 0
    assert {name: len(ids) for name, ids in produced.items()} == {"old": 20, "new": 20}
    assert scheduler.manager.usage().num_held == 0


def test_the_oldest_request_gets_a_token_in_every_step():
    scheduler = build(num_blocks=6, block_tokens=4, batch=4)
    for i in range(4):
        scheduler.add(request(f"r{i}", [10 * i + j for j in range(1, 5)], max_new=16))
    for step in range(16):
        outputs = turn(scheduler)
        assert outputs[0].request_id == "r0", step
    assert scheduler.num_preemptions > 0


def test_a_preempted_request_recomputes_prompt_and_output():
    scheduler = build(num_blocks=5, block_tokens=4, batch=2, length=20)
    scheduler.add(request("a", [1, 2, 3, 4], max_new=12, repetition_penalty=1.5))
    scheduler.add(request("b", [5, 6, 7, 8], max_new=8, repetition_penalty=1.5))
    while scheduler.num_preemptions == 0:
        plan = scheduler.plan()
        scheduler.commit(result(plan, token=9))
    while not (plan and plan.prefills):
        plan = scheduler.plan()
        if not plan.prefills:
            scheduler.commit(result(plan, token=9))
    chunk = plan.prefills[0]
    assert chunk.request_id == "b"
    assert chunk.history[:4] == (5, 6, 7, 8)
    assert set(chunk.history[4:]) == {9}
    assert chunk.sample_index == len(chunk.history) - 4 > 0
    assert chunk.start + chunk.num_tokens == len(chunk.history)


def test_equal_prompts_share_blocks():
    scheduler = build()
    prompt = list(range(1, 14))
    scheduler.add(request("a", prompt, max_new=1))
    turn(scheduler)
    scheduler.add(request("b", prompt, max_new=1))
    plan = scheduler.plan()
    assert [(c.start, c.token_ids) for c in plan.prefills] == [(12, (13,))]
    assert scheduler.num_reused_tokens == 12


def test_history_is_sent_once_and_only_for_a_penalty():
    scheduler = build(tokens=8, chunk=8)
    scheduler.add(request("a", list(range(1, 13)), repetition_penalty=1.2))
    plan = scheduler.plan()
    assert plan.prefills[0].history == tuple(range(1, 13))
    scheduler.commit(result(plan))
    plan = scheduler.plan()
    assert plan.prefills[0].history is None


def test_eos_stop_and_length():
    scheduler = build()
    scheduler.add(request("eos", [3], eos_token_ids=(1,)))
    scheduler.add(request("stop", [4], stop_check=lambda ids: ids == [1]))
    scheduler.add(request("length", [5], max_new=1))
    scheduler.add(request("both", [6], max_new=1, eos_token_ids=(1,)))
    outputs = turn(scheduler)
    assert {o.request_id: o.finish_reason for o in outputs} == {"eos": "eos", "stop": "stop", "length": "length", "both": "eos"}
    assert all(o.new_token_ids == (1,) for o in outputs)
    assert not scheduler.has_unfinished()


def test_a_failing_stop_check_ends_its_own_request():
    def stop_check(ids: list[int]) -> bool:
        raise KeyError("mine")

    scheduler = build()
    scheduler.add(request("a", [3], stop_check=stop_check))
    scheduler.add(request("b", [4]))
    outputs = turn(scheduler)
    assert outputs[0].finish_reason == "error"
    assert isinstance(outputs[0].error, KeyError)
    assert not outputs[1].finished


def test_length_is_clipped_to_the_context():
    scheduler = build(length=16)
    scheduler.add(request("a", [1] * 10, max_new=100))
    scheduler.add(request("full", [2] * 16, max_new=100))
    produced = drain(scheduler)
    assert {name: len(ids) for name, ids in produced.items()} == {"a": 6, "full": 1}


@pytest.mark.parametrize(
    "bad, error, text",
    [
        (request("x", []), InvalidRequestError, "empty prompt"),
        (request("x", [1], max_new=0), InvalidRequestError, "max_new_tokens=0"),
        (request("x", [1] * 200), InvalidRequestError, "max_model_len=128"),
        (request("busy", [1]), InvalidRequestError, "in use"),
        (request("x", [1] * 30, max_new=20), RequestTooLargeError, "49 tokens .* 32"),
        (request("x", [1] * 40, max_new=1), RequestTooLargeError, "40 tokens .* 32"),
    ],
)
def test_refused_at_add_and_nobody_else_suffers(bad, error, text):
    scheduler = build(num_blocks=8, block_tokens=4)
    scheduler.add(request("busy", [1, 2, 3], max_new=4))
    with pytest.raises(error, match=text):
        scheduler.add(bad)
    assert drain(scheduler) == {"busy": [1, 1, 1, 1]}


def test_the_largest_request_that_fits_is_served():
    scheduler = build(num_blocks=8, block_tokens=4)
    scheduler.add(request("x", [1] * 30, max_new=3))  # 32 tokens of KV: the last token needs none
    assert len(drain(scheduler)["x"]) == 3


def test_lookahead_names_the_source_row_and_stops_at_the_length():
    scheduler = build()
    scheduler.add(request("a", [1, 2], max_new=3))
    scheduler.add(request("b", [3], max_new=1))
    first = scheduler.plan()
    second = scheduler.plan()
    assert [(c.request_id, c.token_ids, c.source, c.start, c.sample_index) for c in second.decodes] == [("a", (), 0, 2, 1)]
    with pytest.raises(InternalError, match="two steps are outstanding"):
        scheduler.plan()
    scheduler.commit(result(first))
    third = scheduler.plan()
    assert [(c.start, c.source, c.sample_index) for c in third.decodes] == [(3, 0, 2)]
    scheduler.commit(result(second))
    assert scheduler.plan() is None  # the third token is the last
    assert [o.finish_reason for o in scheduler.commit(result(third))] == ["length"]
    assert not scheduler.has_unfinished()


def test_a_request_that_ends_while_planned_keeps_its_blocks_until_that_step_is_committed():
    scheduler = build()
    scheduler.add(request("a", [1, 2], eos_token_ids=(9,)))
    first, second = scheduler.plan(), scheduler.plan()
    outputs = scheduler.commit(result(first, token=9))
    assert outputs[0].finish_reason == "eos"
    assert scheduler.manager.usage().by_request == {"a": 1}
    assert scheduler.has_unfinished()
    scheduler.check()
    assert scheduler.commit(result(second, token=5)) == []
    assert scheduler.manager.usage().by_request == {}
    assert not scheduler.has_unfinished()


@pytest.mark.parametrize("num_planned", [0, 1, 2])
def test_abort_at_any_time(num_planned):
    scheduler = build()
    scheduler.add(request("a", [1, 2, 3]))
    scheduler.add(request("b", [4, 5, 6]))
    plans = [scheduler.plan() for _ in range(num_planned)]
    output = scheduler.abort("a")
    assert (output.finished, output.finish_reason) == (True, "abort")
    assert scheduler.abort("a") is None
    scheduler.check()
    scheduler.add(request("a", [7, 8]))  # the id is free again at once
    for plan in plans:
        assert "a" not in {o.request_id for o in scheduler.commit(result(plan))}
        scheduler.check()
    produced = drain(scheduler)
    assert len(produced["a"]) == 8
    assert scheduler.manager.usage().num_held == 0


def test_no_preemption_while_a_step_is_outstanding():
    scheduler = build(num_blocks=4, block_tokens=4, batch=2)
    scheduler.add(request("a", [1, 2, 3, 4], max_new=9))
    scheduler.add(request("b", [5, 6, 7, 8], max_new=9))
    plans = [scheduler.plan()]
    for _ in range(40):
        num_preemptions = scheduler.num_preemptions
        following = scheduler.plan()
        assert not plans or scheduler.num_preemptions == num_preemptions
        if following is not None:
            plans.append(following)
        if plans:
            scheduler.commit(result(plans.pop(0)))
        scheduler.check()
    assert scheduler.num_preemptions > 0
    assert not scheduler.has_unfinished()


def test_external_requests_park_until_a_token_is_pushed():
    scheduler = build()
    scheduler.add(request("x", [1, 2], max_new=2, external=True))
    plan = scheduler.plan()
    assert scheduler.plan() is None  # never planned ahead
    outputs = scheduler.commit(result(plan))
    assert outputs[0].logits is not None
    assert outputs[0].new_token_ids == ()
    assert scheduler.plan() is None
    with pytest.raises(InvalidRequestError, match="not known"):
        scheduler.push_token("y", 3)
    assert scheduler.push_token("x", 3) == RequestOutput("x", (3,))
    with pytest.raises(InvalidRequestError, match="running, not parked"):
        scheduler.push_token("x", 3)
    plan = scheduler.plan()
    assert plan.decodes[0].token_ids == (3,)
    scheduler.commit(result(plan))
    assert scheduler.push_token("x", 4).finish_reason == "length"
    scheduler.check()
    assert not scheduler.has_unfinished()


def test_a_parked_request_makes_room_rather_than_blocking_everyone():
    scheduler = build(num_blocks=4, block_tokens=4, batch=4)
    scheduler.add(request("x", [1] * 12, max_new=4, external=True))
    turn(scheduler)
    scheduler.add(request("y", [2] * 12, max_new=2))
    assert turn(scheduler)[0].request_id == "y"
    assert turn(scheduler)[0].finished
    scheduler.push_token("x", 5)
    plan = scheduler.plan()
    assert plan.prefills[-1].request_id == "x"
    assert plan.prefills[-1].start + plan.prefills[-1].num_tokens == 13


def test_a_decode_behind_a_parked_request_is_not_stuck():
    scheduler = build(num_blocks=4, block_tokens=4, batch=4)
    scheduler.add(request("x", [1] * 7, max_new=4, external=True))
    scheduler.add(request("y", [2] * 4, max_new=8))
    produced = drain(scheduler)
    assert len(produced["y"]) == 8


def test_nan_logits_end_only_their_request_and_their_kv_is_not_reused():
    scheduler = build(tokens=8)
    prompt = list(range(1, 14))
    scheduler.add(request("bad", prompt))
    scheduler.add(request("good", [20, 21]))
    assert turn(scheduler) == []  # a first chunk, whose blocks are findable by now
    plan = scheduler.plan()
    outputs = scheduler.commit(result(plan, nan=("bad",)))
    assert outputs[0].finish_reason == "error"
    assert isinstance(outputs[0].error, NonFiniteLogitsError)
    assert not outputs[1].finished
    scheduler.add(request("again", prompt))
    assert scheduler.plan().prefills[0].start == 0
    assert scheduler.num_reused_tokens == 0


def test_only_what_was_computed_is_reused():
    scheduler = build(tokens=8)
    prompt = list(range(1, 30))
    scheduler.add(request("a", prompt))
    turn(scheduler)
    scheduler.abort("a")
    scheduler.add(request("b", prompt))
    assert scheduler.plan().prefills[0].start == 8


def test_a_failed_step_ends_its_requests_and_sends_the_tables_again():
    scheduler = build()
    scheduler.add(request("x", [8, 9], external=True))
    turn(scheduler)
    scheduler.add(request("a", [1, 2]))
    plan = scheduler.plan()
    outputs = scheduler.fail(plan.step_id, RuntimeError("broken"))
    assert [(o.request_id, o.finish_reason, str(o.error)) for o in outputs] == [("a", "error", "broken")]
    scheduler.check()
    scheduler.push_token("x", 3)
    assert len(scheduler.plan().table_writes) == 1


def test_a_step_is_booked_in_order():
    scheduler = build()
    scheduler.add(request("a", [1, 2]))
    first = scheduler.plan()
    with pytest.raises(InternalError, match="step 7 is booked"):
        scheduler.commit(replace(result(first), step_id=7))
    with pytest.raises(InternalError, match="samples 1 rows"):
        scheduler.commit(StepResult(first.step_id, (), (), {}))


def test_settings_that_cannot_work_are_refused():
    manager = MemoryManager(4, 4, 4, 4)
    with pytest.raises(SettingError, match="max_batch_tokens=2"):
        Scheduler(manager, 4, 2, 2, 16)
    with pytest.raises(SettingError, match="max_batch_size=8"):
        Scheduler(manager, 8, 8, 2, 16)
    with pytest.raises(SettingError, match="max_chunk_tokens=0"):
        Scheduler(manager, 4, 8, 0, 16)
