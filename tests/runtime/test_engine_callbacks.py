"""Engine: stop checks that raise or reach back into the engine, interruptions, and ids given by hand."""

from __future__ import annotations

import re

import pytest

from depthfx.errors import InvalidRequestError
from tests.runtime.test_engine import BOTH, VOCAB, build, collect, continuation, params


class Ours(Exception):
    """An error of a class that depthfx has never heard of."""


@BOTH
@pytest.mark.parametrize("fault", [ValueError, Ours, StopIteration], ids=lambda c: c.__name__)
def test_a_stop_check_that_raises_ends_its_own_request_alone(lookahead, fault):
    engine, _ = build(lookahead)

    def check(output_ids: list[int]) -> bool:
        if len(output_ids) == 3:
            raise fault("no")
        return False

    before = engine.add([1, 2, 3], params(6))
    bad = engine.add([4, 5], params(6), stop_check=check)
    after = engine.add([6, 7, 8], params(6))
    outputs = collect(engine)
    assert outputs[bad].finish_reason == "error" and isinstance(outputs[bad].error, fault)
    for name, prompt in ((before, [1, 2, 3]), (after, [6, 7, 8])):
        assert list(outputs[name].new_token_ids) == continuation(prompt, 6, VOCAB)
    assert engine.stats().kv.num_held == 0


@BOTH
@pytest.mark.parametrize("spoil", [lambda ids: ids.clear(), lambda ids: ids.extend([1] * 40), lambda ids: ids.pop()])
def test_a_stop_check_that_writes_into_its_ids_spoils_nobodys(lookahead, spoil):
    engine, _ = build(lookahead)
    bad = engine.add([4, 5], params(20), stop_check=lambda ids: bool(spoil(ids)) and False)
    other = engine.add([6, 7, 8], params(30))
    outputs = collect(engine)
    assert list(outputs[bad].new_token_ids) == continuation([4, 5], 20, VOCAB) and outputs[bad].finish_reason == "length"
    assert list(outputs[other].new_token_ids) == continuation([6, 7, 8], 30, VOCAB)
    assert engine.stats().kv.num_held == 0


def test_a_stop_check_sees_every_id_once_also_after_a_preemption():
    engine, _ = build(num_blocks=10)
    seen = {prompt: [] for prompt in range(4)}
    names = [
        engine.add([p, p + 1], params(20), stop_check=lambda ids, p=p: bool(seen[p].append(list(ids))) and False) for p in range(len(seen))
    ]
    outputs = collect(engine)
    assert engine.stats().num_preemptions > 0
    for p, name in enumerate(names):
        tokens = continuation([p, p + 1], 20, VOCAB)
        assert list(outputs[name].new_token_ids) == tokens and seen[p] == [tokens[: n + 1] for n in range(20)]


def test_an_interrupted_stop_check_comes_through_and_the_others_go_on():
    engine, _ = build()

    def check(output_ids: list[int]) -> bool:
        raise KeyboardInterrupt

    with engine.collect([([4, 5], params(6), check)]) as rows:
        other = engine.add([6, 7, 8], params(6))
        with pytest.raises(KeyboardInterrupt):
            next(rows)
    assert list(collect(engine)[other].new_token_ids) == continuation([6, 7, 8], 6, VOCAB)
    assert engine.stats().kv.num_held == 0


@pytest.mark.parametrize("use", ["abort itself", "abort another", "stream", "step", "close"])
def test_a_stop_check_cannot_use_the_engine_under_its_hands(use):
    engine, _ = build()
    other = engine.add([6, 7, 8], params(6))
    stream = engine.stream([9, 9], params(6))
    uses = {
        "abort itself": lambda: engine.abort("own"),
        "abort another": lambda: engine.abort(other),
        "stream": lambda: next(engine.stream([3, 3], params(2))),
        "step": lambda: engine.step(),
        "close": lambda: stream.close(),
    }
    engine.add([4, 5], params(6), request_id="own", stop_check=lambda ids: len(ids) == 2 and bool(uses[use]()))
    outputs = collect(engine)
    assert outputs["own"].finish_reason == "error"
    assert isinstance(outputs["own"].error, InvalidRequestError) and "stop_check" in str(outputs["own"].error)
    assert list(outputs[other].new_token_ids) == continuation([6, 7, 8], 6, VOCAB)
    assert list(stream) == continuation([9, 9], 6, VOCAB)
    assert engine.stats().kv.num_held == 0


def test_a_launch_that_is_interrupted_again_and_again_is_raised_once_each_time(monkeypatch):
    engine, runner = build()

    def interrupted(plan):
        raise KeyboardInterrupt

    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(runner, "launch", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.run([([1, 2], params(4))])
    (output,) = engine.run([([1, 2], params(4))]).values()
    assert list(output.new_token_ids) == continuation([1, 2], 4, VOCAB)


def test_given_ids_do_not_clash_with_made_ones():
    engine, _ = build()
    engine.add([1, 2], params(4), request_id="request-0")
    stream = engine.stream([1, 2], params(4), request_id="request-1")
    assert engine.add([1, 2], params(4)) == "request-2"
    assert list(stream) == continuation([1, 2], 4, VOCAB)
    assert all(o.finish_reason == "length" for o in collect(engine).values())


@pytest.mark.parametrize("how", ["abort", "close"])
@pytest.mark.parametrize("external", [False, True], ids=["engine's tokens", "pushed tokens"])
def test_a_group_is_told_that_others_ended_its_request(external, how):
    engine, _ = build()
    with engine.collect([([4, 5], params(6, external=external), None), ([6, 7, 8], params(6, external=external), None)]) as rows:
        assert {next(rows)[0], next(rows)[0]} == {0, 1}
        rows.abort(1)  # its own doing, of which it is told nothing
        engine.abort("request-0") if how == "abort" else engine.close()
        why = "request 'request-0' .row 0 of this call.*" + ("engine.abort was called" if how == "abort" else "the engine was closed")
        if external:
            with pytest.raises(InvalidRequestError, match=why):
                rows.push(0, 3)
        ((number, output),) = list(rows)
        assert (number, output.finished, output.finish_reason) == (0, True, "abort")
        assert isinstance(output.error, InvalidRequestError) and re.search(why, str(output.error))
    assert not engine.has_unfinished()


def test_a_token_that_is_pushed_twice_is_still_told_as_such():
    engine, _ = build()
    with engine.collect([([4, 5], params(6, external=True), None)]) as rows:
        next(rows)
        rows.push(0, 3)
        with pytest.raises(InvalidRequestError, match="push a token once"):
            rows.push(0, 3)
