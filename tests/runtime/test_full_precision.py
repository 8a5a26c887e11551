"""Requests that ask for full precision in an engine that lends: their tokens are those of full weights, or they wait; nobody starves."""

from __future__ import annotations

import re
import time

import pytest

import depthfx
from depthfx.errors import InvalidRequestError, RequestTooLargeError, RestoreError
from depthfx.records import SamplingParams
from depthfx.runtime import elastic as elastic_file
from tests.families.harness import engine_over, prompts
from tests.families.test_nested_families import exact
from tests.runtime.test_elastic import BURST, COMMON, elastic

FULL = {"min_precision": "full"}


def full_answers(rows: list[list[int]], new: int) -> list[list[int]]:
    """Of weights that are always full, one request at a time."""
    model = depthfx.compile(exact("llama"), **{**COMMON, "kv_blocks": 64})
    return [list(model.engine.run([(row, SamplingParams(max_new_tokens=new))]).popitem()[1].new_token_ids) for row in rows]


def finish(engine, tokens: dict[str, list[int]]) -> list[str]:
    """Steps to the end of everything; the order in which requests got their first token."""
    order = []
    while engine.has_unfinished():
        for output in engine.step():
            assert output.error is None, output.error
            if output.request_id not in order:
                order.append(output.request_id)
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return order


@pytest.mark.parametrize("lookahead", [False, True])
def test_they_wait_for_full_precision_and_get_it(lookahead):
    model = elastic(lookahead=lookahead)
    engine, tokens = model.engine, {}
    asked = prompts((18, 25), seed=9)
    seen = watch(engine, "full")
    for prompt in BURST[:5]:
        engine.add(prompt, SamplingParams(max_new_tokens=24))
    for _ in range(6):
        engine.step()
    assert not all(engine._scheduler.precision), "or there is nothing to wait for"
    for number, prompt in enumerate(asked):
        engine.add(prompt, SamplingParams(max_new_tokens=20, **FULL), request_id=f"full{number}")
    for prompt in BURST[5:]:
        engine.add(prompt, SamplingParams(max_new_tokens=24))
    order = finish(engine, tokens)
    assert [tokens["full0"], tokens["full1"]] == full_answers(asked, 20)
    assert seen and all(all(precision) for precision in seen)
    assert order[-5:] == [f"request-{n}" for n in range(5, 10)], "those behind did not overtake"
    stats = engine.control.stats()
    assert stats.num_restores and engine.stats().steps_by_precision["fast"]
    engine.close()


def watch(engine, name: str) -> list[bytes]:
    """The precision of every step that names a request called so."""
    own, seen = engine._scheduler.plan, []

    def plan():
        made = own()
        if made is not None and any(c.request_id.startswith(name) for c in made.decodes + made.prefills):
            seen.append(made.precision)
        return made

    engine._scheduler.plan = plan
    return seen


def test_a_stream_waits_for_copies_though_nothing_runs():
    """Units are lent and everybody has ended: the engine has nothing to do but to wait."""
    model = elastic(memory={"dwell_s": 0.0})
    engine = model.engine
    engine._scheduler.manager.lend(4)
    engine.control.after_plan()
    assert not all(engine._scheduler.precision)
    (asked,) = prompts((18,), seed=9)
    assert list(engine.stream(asked, SamplingParams(max_new_tokens=8, **FULL))) == full_answers([asked], 8)[0]
    engine.close()


def test_nothing_is_lent_ahead_of_need_while_somebody_waits():
    """What was brought back for the request that waits would go again before the next step, until the one before it has ended."""
    model = elastic(memory={"high": 0.5, "low": 0.3})
    engine, tokens, ended = model.engine, {}, False
    long, asked = prompts((44, 18), seed=5)
    engine.add(long, SamplingParams(max_new_tokens=30), request_id="long")
    for _ in range(3):
        engine.step()
    assert engine.control.stats().num_lends and not all(engine._scheduler.precision)
    engine.add(asked, SamplingParams(max_new_tokens=8, **FULL), request_id="asked")
    while not ended:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            ended |= output.request_id == "asked" and output.finished
    assert engine.has_unfinished() and len(tokens["long"]) < 20, "there is room for both"
    assert tokens["asked"] == full_answers([asked], 8)[0]
    finish(engine, tokens)
    engine.close()


def test_failing_copies_make_them_wait_and_end_nothing(monkeypatch):
    monkeypatch.setattr("depthfx.runtime.elastic.RETRY_SECONDS", 0.02)
    model = elastic()
    engine = model.engine
    engine.control.shared.worker.copier.fail("before chunk", 1, count=3)
    engine._scheduler.manager.lend(4)
    engine.control.after_plan()
    (asked,) = prompts((18,), seed=9)
    with pytest.warns(UserWarning, match="is tried again"):
        assert list(engine.stream(asked, SamplingParams(max_new_tokens=8, **FULL))) == full_answers([asked], 8)[0]
    assert engine.control.num_failures
    engine.close()


@pytest.mark.filterwarnings("ignore:a residual was not restored:UserWarning")
@pytest.mark.parametrize("lookahead", [False, True])
def test_copies_that_always_fail_end_them_and_nobody_else(lookahead, monkeypatch):
    """Requests end with an error after MAX_TRIES tries, later ones after one try, and are served again once the link works."""
    monkeypatch.setattr("depthfx.runtime.elastic.RETRY_SECONDS", 0.02)
    model = elastic(lookahead=lookahead)
    engine, control, asked = model.engine, model.engine.control, prompts((18, 25, 12), seed=9)
    reference = dict(zip(("full0", "full1"), full_answers(asked[:2], 20)))
    control.shared.worker.copier.disturb(1, fail_share=1.0)
    for number, prompt in enumerate(BURST):
        engine.add(prompt, SamplingParams(max_new_tokens=24), request_id=f"fast{number}")
    for _ in range(6):
        engine.step()
    assert not all(engine._scheduler.precision), "or there is nothing to wait for"
    for name, prompt in zip(("full0", "full1"), asked):
        engine.add(prompt, SamplingParams(max_new_tokens=20, **FULL), request_id=name)
    engine.add(asked[2], SamplingParams(max_new_tokens=24), request_id="behind")
    ended = run_out(engine)
    words = r"request 'full0'.*min_precision='full'.*(\d+) tries in a row.*unit \d+ was not copied back: injected.*without min_precision"
    found = re.search(words, str(ended["full0"]))
    assert found and int(found[1]) == elastic_file.MAX_TRIES and isinstance(ended["full0"], RestoreError)
    assert isinstance(ended["full1"], RestoreError) and "'full1'" in str(ended["full1"])
    assert {name for name, error in ended.items() if error is None} == {*(f"fast{n}" for n in range(10)), "behind"}
    before = control.num_tries_failed
    with pytest.raises(RestoreError, match=r"request 'late'.*\d+ tries in a row") as late:
        list(engine.stream(asked[0], SamplingParams(max_new_tokens=20, **FULL), request_id="late"))
    engine.add(asked[0], SamplingParams(max_new_tokens=20, **FULL), request_id="last")
    assert isinstance(run_out(engine)["last"], RestoreError)
    assert not control._pressed, "nobody is left who waits, so memory follows load again"
    tries = int(re.search(r"(\d+) tries", str(late.value))[1])
    assert before < tries <= before + 3, "one that begins while it waits; on a slow machine one or two more may end before that is seen"
    control.shared.worker.copier.disturb(0)
    for name, prompt in zip(reference, asked):
        assert list(engine.stream(prompt, SamplingParams(max_new_tokens=20, **FULL), request_id=name)) == reference[name]
    assert control.num_tries_failed == 0
    engine.close()


@pytest.mark.filterwarnings("ignore:a residual was not restored:UserWarning")
def test_a_success_between_failures_counts_anew(monkeypatch):
    model = elastic()
    engine, control = model.engine, model.engine.control
    now = [0.0]
    monkeypatch.setattr(control, "_clock", lambda: now[0])
    worker, units = control.shared.worker, control.shared.layout.num_units
    engine._scheduler.manager.lend(units)
    control.after_plan()
    (asked,) = prompts((18,), seed=9)
    engine.add(asked, SamplingParams(max_new_tokens=8, **FULL))

    def step_until(reached) -> None:
        deadline = time.monotonic() + 20
        while not reached():
            assert engine.step() == [] and time.monotonic() < deadline
            now[0] += 2 * elastic_file.RETRY_SECONDS  # one try for each step
            assert worker.wait_idle(20)  # what is changed between steps is changed between tries

    worker.copier.disturb(1, fail_share=1.0)
    for _ in range(2):
        step_until(lambda: control.num_tries_failed == elastic_file.MAX_TRIES - 1)
        worker.copier.disturb(0)
        restored = control.stats().num_restores
        worker.copier.fail("before chunk", 1, count=units - restored - 1)  # of units that wait together each second one, else all but one
        step_until(lambda restored=restored: control.stats().num_restores > restored)
        worker.copier.fail("before chunk", 0)
        worker.copier.disturb(1, fail_share=1.0)
        assert control.region.num_restoring > 0 and control.num_tries_failed == 0
    worker.copier.disturb(0)
    tokens: dict[str, list[int]] = {}
    finish(engine, tokens)
    assert list(tokens.values()) == full_answers([asked], 8)
    engine.close()


def run_out(engine) -> dict[str, BaseException | None]:
    """Steps until nothing is unfinished; how each request ended, in that order."""
    ended: dict[str, BaseException | None] = {}
    deadline = time.monotonic() + 20
    while engine.has_unfinished():
        assert time.monotonic() < deadline, f"{engine._scheduler.unfinished()} hang"
        ended.update({output.request_id: output.error for output in engine.step() if output.finished})
    return ended


def test_a_parked_request_makes_room():
    """It holds blocks of lent units and its caller lets it wait."""
    model = elastic()
    engine = model.engine
    parked = engine.add(prompts((110,), seed=3)[0], SamplingParams(max_new_tokens=10, external=True))
    while not engine.step():
        pass
    assert engine._scheduler.manager.num_lent_units
    (asked,) = prompts((18,), seed=9)
    assert list(engine.stream(asked, SamplingParams(max_new_tokens=8, **FULL))) == full_answers([asked], 8)[0]
    assert engine.stats().num_preemptions == 1
    engine.push_token(parked, 5)
    while not engine.step():
        pass
    engine.abort(parked)
    engine.close()


@pytest.mark.parametrize("policy", ["nested_resident", "static_full"])
def test_policies_that_lend_nothing(policy):
    model = elastic(memory={"policy": policy, "high": 0.7, "low": 0.5}, kv_blocks=26)
    engine, tokens, asked = model.engine, {}, prompts((18, 25), seed=9)
    seen = watch(engine, "full")
    for number, prompt in enumerate(BURST):
        engine.add(prompt, SamplingParams(max_new_tokens=24))
        if number in (3, 7):
            engine.add(asked[number // 4], SamplingParams(max_new_tokens=20, **FULL), request_id=f"full{number // 4}")
    finish(engine, tokens)
    assert [tokens["full0"], tokens["full1"]] == full_answers(asked, 20)
    assert all(all(precision) for precision in seen)
    assert bool(engine.stats().steps_by_precision["fast"]) == (policy == "nested_resident")
    engine.close()


def test_what_cannot_be_had_is_refused_at_once():
    fast = elastic(memory={"policy": "static_fast"}).engine
    with pytest.raises(InvalidRequestError, match=r"min_precision='full'.*static_fast.*for good"):
        fast.add([5, 6], SamplingParams(**FULL))
    assert not fast.has_unfinished() and fast.add([5, 6], SamplingParams(min_precision="fast"))
    model = elastic()
    engine = model.engine
    with pytest.raises(RequestTooLargeError, match="one request can have 96"):  # 12 base blocks of 8 tokens
        engine.add(list(range(5, 100)), SamplingParams(max_new_tokens=20, **FULL))
    assert engine.add(list(range(5, 100)), SamplingParams(max_new_tokens=20))
    with pytest.raises(InvalidRequestError, match=r"min_precision='best' must be 'fast'.*or 'full'"):
        engine.add([5, 6], SamplingParams(min_precision="best"))
    for modes in ("fast", {1: "fast"}):
        engine.set_precision(modes)
        with pytest.raises(InvalidRequestError, match=r"set_precision\(.full.\) first"):
            engine.add([5, 6], SamplingParams(max_new_tokens=9, **FULL))
    engine.set_precision("full")
    waiting = engine.add([5, 6], SamplingParams(max_new_tokens=9, **FULL))
    with pytest.raises(InvalidRequestError, match="1 unfinished requests ask for min_precision='full'"):
        engine.set_precision({1: "fast"})
    engine.abort(waiting)
    engine.set_precision({1: "fast"})
    rounded = depthfx.compile(exact("llama"), **{**COMMON, "weights": "fp8"}).engine
    with pytest.raises(InvalidRequestError, match="rounded for good"):
        rounded.add([5, 6], SamplingParams(**FULL))
    plain = engine_over(depthfx.compile(exact("llama"), **{**COMMON, "weights": "16bit"}))
    assert plain.run([([5, 6], SamplingParams(max_new_tokens=2, **FULL))]), "weights of one precision are full"
