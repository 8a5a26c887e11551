"""Who makes room for whom, and what a preempted request finds again."""

from __future__ import annotations

import pytest

from depthfx.records import Depth, SamplingParams
from depthfx.runtime.request import Request
from tests.families.harness import prompts
from tests.runtime.test_elastic import elastic
from tests.runtime.test_scheduler import build, drain, request, result, turn


@pytest.mark.parametrize("least", ["fast", "full"])
@pytest.mark.parametrize("sizes", [{"batch": 1}, {"num_blocks": 4}], ids=["row", "blocks"])
def test_a_parked_request_makes_room_where_nothing_is_lent(sizes, least):
    scheduler = build(**sizes)
    scheduler.add(request("parked", [1] * 12, max_new=4, external=True))
    turn(scheduler)
    scheduler.add(request("asked", [2] * 8, max_new=2, min_precision=least))
    assert drain(scheduler)["asked"] == [1, 1]


def test_a_parked_request_ends_the_pressure_that_it_is():
    """Nothing is lent, but all layers are fast for the blocks that it holds, and its caller waits for the other request."""
    model = elastic(memory={"policy": "nested_resident", "high": 0.3, "low": 0.2}, kv_blocks=26)
    engine = model.engine
    long, asked = prompts((110, 18), seed=3)
    parked = engine.add(long, SamplingParams(max_new_tokens=10, external=True))
    while not engine.step():
        pass
    engine.add(asked, SamplingParams(max_new_tokens=8, min_precision="full"), request_id="asked")
    for _ in range(40):
        if any(output.finished for output in engine.step()):
            break
    else:
        pytest.fail("it waits for ever")
    assert engine.abort(parked)
    engine.close()


def test_a_hurry_takes_no_room_from_parked_requests():
    """Steps are fast for a wait, not for their blocks; the hurry ends as soon as somebody waits for full precision."""
    engine = elastic(memory={"policy": "nested_resident", "patience_s": 0.0, "dwell_s": 9.0}, kv_blocks=60).engine
    parked = []
    for prompt in prompts((20, 15), seed=3):
        parked.append(engine.add(prompt, SamplingParams(max_new_tokens=10, external=True)))
        while not engine.step():
            pass
    assert set(engine.precision().values()) == {"fast"}, "or there is no hurry"
    engine.add(prompts((18,), seed=9)[0], SamplingParams(max_new_tokens=3, min_precision="full"))
    assert any(output.finished for _ in range(20) for output in engine.step())
    assert engine.stats().num_preemptions == 0
    for name in parked:
        engine.abort(name)
    engine.close()


def test_who_was_preempted_does_not_wait_for_its_prompt_to_begin():
    """It may have run, or its caller may have thought, for as long as it liked; who was never admitted waits since it was added."""
    scheduler = build()
    for name, since in (("first", 4.0), ("old", 5.0), ("parked", 6.0), ("new", 7.0), ("late", 8.0)):
        sampling = SamplingParams(max_new_tokens=8, external=name == "parked")
        scheduler.add(Request(name, [len(name)] * 4, sampling, added_s=since))
        assert scheduler.waiting_since == min(since, 7.0)
        if since < 7:
            turn(scheduler)
    for name in ("parked", "old"):
        scheduler._preempt(scheduler._requests[name])
    scheduler.push_token("parked", 3)
    assert [r.request_id for r in scheduler._waiting] == ["old", "parked", "new", "late"] and scheduler.waiting_since == 7.0
    for name in ("new", "late"):
        scheduler.abort(name)
    assert scheduler.waiting_since is None
    scheduler.add(request("full", [1] * 4, min_precision="full"))
    assert scheduler.waiting_since is None


def test_an_empty_cache_of_one_block_is_no_pressure():
    engine = elastic(memory={"policy": "nested_resident"}, kv_blocks=1).engine
    engine.add([5, 6], SamplingParams(max_new_tokens=2, min_precision="full"))
    assert any(output.finished for _ in range(10) for output in engine.step()), "it waits for ever"
    engine.close()


def test_the_last_pushed_token_gives_memory_back():
    """No step follows it, so nobody else would."""
    engine = elastic().engine
    parked = engine.add(prompts((110,), seed=3)[0], SamplingParams(max_new_tokens=1, external=True))
    while not engine.step():
        pass
    assert engine._scheduler.manager.num_lent_units and engine.push_token(parked, 5).finished
    engine.control.shared.worker.wait_idle(5.0)
    assert set(engine.precision().values()) == {"full"}
    engine.close()


@pytest.mark.parametrize(
    ("depth", "other", "first"),
    [
        (("dense", "routed"), ("dense", "dense"), 4),
        (("routed", "dense"), ("routed", "routed"), 4),
        (("routed", "routed"), ("routed", "routed"), 12),
        (("dense", "dense"), ("dense", "dense"), 12),
    ],
)
def test_a_preempted_answer_is_not_found_in_another_depth(depth: tuple[Depth, Depth], other: tuple[Depth, Depth], first: int):
    """``other`` computes the same tokens, its answer in the depth of its prompt; ``first``: the token from which on a's are computed anew."""
    scheduler = build(block_tokens=4)
    for name, parts in (("a", depth), ("b", other)):
        scheduler.add(Request(name, [1] * 4, SamplingParams(max_new_tokens=12), depth=parts))
    for _ in range(9):
        turn(scheduler)
    scheduler._preempt(scheduler._requests["a"])
    (chunk,) = (chunk for chunk in scheduler.plan().prefills if chunk.request_id == "a")
    assert (chunk.start, chunk.is_prompt, chunk.routed) == (first, False, depth[1] == "routed")


def test_a_promoted_answer_finds_what_was_dense():
    scheduler = build(block_tokens=4)
    for name in "ab":
        scheduler.add(Request(name, [1] * 4, SamplingParams(max_new_tokens=16), depth=("dense", "auto" if name == "a" else "dense")))
    for _ in range(6):
        turn(scheduler)
    scheduler._requests["a"].promote()  # from token 9 on
    for _ in range(6):
        turn(scheduler)
    scheduler._preempt(scheduler._requests["a"])
    (chunk,) = (chunk for chunk in scheduler.plan().prefills if chunk.request_id == "a")
    assert (chunk.start, chunk.num_tokens, chunk.routed) == (8, 1, False)


def test_a_name_used_again_is_another_request():
    """That the first one of the name found no room says nothing of the second."""
    scheduler = build(num_blocks=6)
    scheduler.add(request("first", [1] * 12, max_new=4))
    turn(scheduler)
    scheduler.add(request("name", [2] * 12, max_new=4))
    assert [chunk.request_id for chunk in turn_plan(scheduler).prefills] == []
    scheduler.abort("name")
    scheduler.add(request("name", [3] * 2, max_new=2))
    assert [chunk.request_id for chunk in turn_plan(scheduler).prefills] == ["name"]


def turn_plan(scheduler):
    plan = scheduler.plan()
    scheduler.commit(result(plan))
    return plan
