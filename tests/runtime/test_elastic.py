"""Shared memory in the whole engine on a CPU: the tokens are those of an engine that never lends, under every policy and setting."""

from __future__ import annotations

import time

import pytest
import torch

import depthfx
from depthfx.errors import MemoryBudgetError, SettingError, UnsupportedOptionError
from depthfx.records import SamplingParams
from depthfx.settings import ElasticMemory, Settings
from tests.families.harness import engine_over, prompts
from tests.families.test_nested_families import exact
from tests.runtime.elastic_race import Schedule

# 30,720 residual bytes a layer, 6 KiB a block
COMMON = {
    "weights": "nested", "inductor": False, "kv_blocks": 12, "max_batch_size": 8, "max_batch_tokens": 64, "max_chunk_tokens": 16,
    "max_model_len": 128, "block_tokens": 8, "check": True,
}  # fmt: skip
BURST = prompts((20, 33, 7, 26, 41, 12, 20, 30, 9, 25), seed=1)
TRICKLE = prompts((9, 12), seed=2)


def elastic(model=None, memory=None, **settings):
    """A compiled tiny model whose memory is far too small, with units of 12 KiB (2 blocks)."""
    memory = ElasticMemory(**{"unit_mib": 0.01, "dwell_s": 0.0, "verify": True, **(memory or {})})
    return depthfx.compile(exact("llama") if model is None else model, memory=memory, **{**COMMON, **settings})


def serve(engine, before_step=lambda turn: None) -> dict[str, list[int]]:
    """Tokens of a burst of requests and then of a trickle, during which residuals come back."""
    tokens: dict[str, list[int]] = {}
    later, turn = [(prompt, 50) for prompt in TRICKLE], 0
    for prompt in BURST:
        tokens[engine.add(prompt, SamplingParams(max_new_tokens=24), request_id=f"r{len(tokens)}")] = []
    while engine.has_unfinished() or later:
        if later and engine.stats().num_running < 2 and not engine.stats().num_waiting:
            prompt, new = later.pop()
            tokens[engine.add(prompt, SamplingParams(max_new_tokens=new), request_id=f"r{len(tokens)}")] = []
        before_step(turn)
        for output in engine.step():
            assert output.error is None, output.error
            tokens[output.request_id] += output.new_token_ids
        turn += 1
    return tokens


def wide_layer(model):
    """Layer 1 has weights that no nested format holds: it has no residual."""
    with torch.no_grad():
        for parameter in model.model.layers[1].parameters():
            if parameter.dim() == 2:
                parameter[0, 0:2] = torch.tensor([61440.0, 2.0**-24])
    return model


def switch(engine):
    modes = {5: {1: "fast"}, 20: "fast", 25: "full", 60: {0: "fast"}, 70: "full"}
    return lambda turn: engine.set_precision(modes[turn]) if turn in modes else None


VARIANTS = {
    "layer by layer": ({}, {}, None),
    "lookahead": ({}, {"lookahead": True}, None),
    "whole model": ({"whole_model": True}, {}, None),
    "other order": ({"order": (2, 0)}, {"lookahead": True}, None),
    "ahead of need": ({"high": 0.5, "low": 0.4}, {}, None),
    "switched by hand": ({}, {"lookahead": True}, switch),
    "nested head": ({}, {"nested_head": True}, None),
    "a layer that does not nest": ({}, {}, None),
    "resident": ({"policy": "nested_resident", "high": 0.7, "low": 0.5}, {"kv_blocks": 26}, None),
    "static full": ({"policy": "static_full"}, {"kv_blocks": 26}, None),
    "static fast": ({"policy": "static_fast"}, {}, None),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_tokens_equal_those_of_the_same_steps_without_lending(name):
    memory, settings, by_hand = VARIANTS[name]
    model = exact("llama")
    if settings.get("nested_head"):
        model = exact("llama", tie_word_embeddings=False)
    if "nest" in name and not settings:
        wide_layer(model)
    model = elastic(model, memory, prefix_reuse=False, **settings)
    engine = model.engine
    schedule = Schedule(engine)
    tokens = serve(engine, by_hand(engine) if by_hand else lambda turn: time.sleep(0.001))
    counts, policy = engine.stats().steps_by_precision, engine._scheduler.manager
    engine.restore()
    plain = engine_over(
        model, policy.num_blocks, prefix_reuse=False, max_batch_size=8, max_batch_tokens=64, max_chunk_tokens=16,
        lookahead=settings.get("lookahead", False),
    )  # fmt: skip
    schedule.impose(plain)
    expected = serve(plain)
    assert expected == tokens
    assert plain.stats().num_steps == engine.stats().num_steps
    print(name, counts, engine.control.stats() if hasattr(engine.control, "stats") else "")
    if name == "static full":
        assert counts["fast"] == counts["mixed"] == 0
    elif name == "static fast":
        assert counts["full"] == counts["mixed"] == 0
    else:
        assert counts["fast"] and counts["full"] + counts["mixed"]
    if memory.get("policy") is None:
        stats, control = engine.control.stats(), engine.control
        assert stats.num_lends and stats.num_restores and not stats.num_failures
        assert control.shared.backup.verify(control._home) == len(control.shared.weights)
        if not by_hand:
            assert bool(counts["mixed"]) != bool(memory.get("whole_model"))
    check_order(engine, name)
    engine.close()


def check_order(engine, name) -> None:
    if name not in ("other order", "nested head", "a layer that does not nest"):
        return
    spans = engine.control.shared.layout.spans
    if name == "other order":
        assert spans[2][0] == 0 and spans[0][0] == spans[2][1] and spans[1][0] == spans[0][1]
    elif name == "nested head":
        assert len(spans) == 4 and spans[3][0] == spans[2][1]
    else:
        assert spans[1] == (0, 0) and spans[0] != (0, 0)


def test_shared_prefixes_under_lending():
    """Fast throughout, so that reuse is the same with and without lending."""
    model = elastic(lookahead=True)
    engine = model.engine
    engine.set_precision("fast")
    rows = prompts((40, 37, 40, 26, 41, 33, 20, 30), seed=3, shared=20)

    def answers(engine):
        found = {}
        for wave in range(3):
            for number, row in enumerate(rows):
                found[engine.add(row, SamplingParams(max_new_tokens=10 + 3 * number), request_id=f"{wave}.{number}")] = []
            while engine.has_unfinished():
                for output in engine.step():
                    assert output.error is None, output.error
                    found[output.request_id] += output.new_token_ids
        return found

    found = answers(engine)
    stats = engine.stats()
    assert stats.num_reused_tokens > 100 and engine.control.stats().num_lends > 5 and engine.control.stats().num_restores > 5
    engine.restore()
    plain = engine_over(model, 200, lookahead=True)
    plain.set_precision("fast")
    assert answers(plain) == found
    assert found["0.0"] == found["1.0"] == found["2.0"]
    engine.close()


def test_precision_by_load():
    """Fast when memory is lent, full when it is back; what the user sees."""
    model = elastic()
    engine = model.engine
    names = {0: "full", 1: "full", 2: "full"}
    assert engine.precision() == names
    seen = set()
    serve(engine, lambda turn: seen.add(tuple(engine.precision().values())))
    assert ("fast",) * 3 in seen
    deadline = time.monotonic() + 10
    while engine.precision() != names and time.monotonic() < deadline:  # nobody steps: they come back by themselves
        time.sleep(0.01)
    assert engine.precision() == names
    assert all(usage == 0 for usage in (engine.stats().kv.num_held, engine.control.region.num_open_units))
    engine.close()


def test_an_abort_gives_memory_back():
    engine = elastic().engine
    for number, prompt in enumerate(BURST):
        engine.add(prompt, SamplingParams(max_new_tokens=60), request_id=str(number))
    for _ in range(8):
        engine.step()
    assert engine.control.region.num_open_units > 3
    for number in range(len(BURST)):
        engine.abort(str(number))
    assert engine.control.region.num_open_units == 0  # restoring, though nobody steps any more
    engine.restore()
    engine.close()


def test_static_fast_stays_fast():
    engine = elastic(memory={"policy": "static_fast"}).engine
    fast = {0: "fast", 1: "fast", 2: "fast"}
    assert engine.precision() == fast
    with pytest.raises(UnsupportedOptionError, match="static_fast"):
        engine.set_precision("full")
    engine.set_precision({0: "fast"})
    engine.restore()  # for reading the weights
    assert engine.precision() == fast
    engine.add([5, 6, 7], SamplingParams(max_new_tokens=3))
    while engine.has_unfinished():
        engine.step()
    assert engine.stats().steps_by_precision["full"] == 0 and engine.control.region.next_to_lend() is None
    engine.close()


def test_dwell_holds_back():
    engine = elastic(memory={"dwell_s": 1000.0}).engine
    serve(engine)
    assert engine.stats().steps_by_precision["mixed"] < 10  # before the first burst filled all
    lends = engine.control.stats().num_lends
    assert lends == engine.control.shared.layout.num_units  # each once: nothing came back while requests ran
    engine.close()


def test_one_time_of_calm_brings_everything_back(monkeypatch):
    """A full queue of copies is no pressure: the units behind it do not wait for the dwell time again."""
    monkeypatch.setattr("depthfx.runtime.elastic.MAX_RESTORING", 2)
    engine = elastic(memory={"dwell_s": 10.0}).engine
    control, now = engine.control, [0.0]
    control._clock = lambda: now[0]
    engine.add([5, 6, 7], SamplingParams(max_new_tokens=100))
    engine.step()
    with engine._state:
        control.manager.lend(control.shared.layout.num_units)
    engine.step()
    assert control.region.num_open_units == control.shared.layout.num_units > 4
    now[0] = 11.0
    for _ in range(control.shared.layout.num_units):
        engine.step()
        with monkeypatch.context() as m:
            m.setattr(control, "collect", lambda: None)  # nothing has come back yet
            engine.step()
        assert control.region.num_restoring <= 2
        control.shared.worker.wait_idle(5.0)
    assert control.region.num_open_units == 0 and engine.has_unfinished()
    engine.close()


BAD = [
    ({"policy": "lazy"}, r"policy='lazy' must be one of .*elastic"),
    ({"low": 0.9, "high": 0.9}, r"low=0.9 and high=0.9 must keep 0 < low < high <= 1"),
    ({"low": "0.5"}, r"low='0.5' has type str; allowed: float"),
    ({"order": (0, 0)}, r"order=\(0, 0\) must be a tuple of layer numbers that names no layer twice"),
    ({"order": [0, 1]}, r"order=\[0, 1\] must be a tuple"),
    ({"order": ("a",)}, r"order=\('a',\) must be a tuple of layer numbers"),
    ({"order": (True,)}, r"order=\(True,\) must be a tuple of layer numbers"),
    ({"unit_mib": 0}, r"unit_mib=0 must be positive"),
    ({"unit_mib": None}, r"unit_mib=None has type NoneType; allowed: float"),
    ({"budget_gib": float("inf")}, r"budget_gib=inf must be positive and finite"),
    ({"dwell_s": float("nan")}, r"dwell_s=nan must be at least 0"),
    ({"verify": "yes"}, r"verify='yes' has type str; allowed: bool"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_settings(options, message):
    with pytest.raises(SettingError, match=message):
        ElasticMemory(**options)


def test_the_environment_names_a_policy(monkeypatch):
    monkeypatch.setenv("DEPTHFX_MEMORY", "elastic")
    assert Settings.build(weights="nested").memory == ElasticMemory()
    with pytest.raises(SettingError, match="setting memory='elastic' needs weights='nested'; it is '16bit'"):
        Settings.build()
    monkeypatch.setenv("DEPTHFX_MEMORY", "lazy")
    with pytest.raises(SettingError, match="policy='lazy' must be one of"):
        Settings.build(weights="nested")


def test_what_only_the_model_tells():
    model = exact("llama")
    with pytest.raises(SettingError, match="memory order names layer 9; the model has layers 0 to 2"):
        elastic(model, {"order": (0, 9)})
    with pytest.raises(MemoryBudgetError, match="raise memory_budget_gib"):
        elastic(model, {"budget_gib": 1e-5}, kv_blocks=None)
    with pytest.raises(SettingError, match="memory=1 has type int; allowed: ElasticMemory or None"):
        depthfx.compile(model, memory=1, **COMMON)
    layout = elastic(model, {"unit_mib": 1e6}).engine.control.shared.layout  # after all that, it still compiles
    assert layout.num_units == 1 and layout.unit_bytes < 1 << 20
