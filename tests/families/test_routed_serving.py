"""Skipping beside everything else that an engine does: dense requests, prefix reuse, preemption, nested weights, lent memory, the route log."""

from __future__ import annotations

import random

import pytest
import torch

import depthfx
from depthfx.contracts import Decision, Policy, Skipper
from depthfx.errors import InvalidRequestError, SettingError, SkipperError
from depthfx.lowering.kernel_spec import max_error
from depthfx.lowering.nested_linear import nested_linears
from depthfx.records import SamplingParams
from depthfx.settings import ElasticMemory
from tests.families.configs import build
from tests.families.harness import alone, engine_over, prompts
from tests.families.routed_cases import ALWAYS, COMMON, NEVER, Adapter, Flip, Identity, make, push, reference, routed
from tests.families.routed_reference import routed_answer
from tests.families.test_every_family import TOLERANCE
from tests.families.test_nested_families import exact, fast_values
from tests.families.test_routed_families import RAGGED, assert_greedy, generated, serve, serve_routed
from tests.runtime.elastic_race import Schedule

SHARED = prompts((36, 52, 36, 44), seed=1, shared=33)
SMALL = prompts((14, 9, 15), seed=2)  # one block each at first, three at the end
policies = pytest.mark.parametrize("policy", ["hashed", "flip", "decodes", "monotone"])


@policies
@pytest.mark.parametrize("gate", ["hard", "mlp"])
def test_every_policy(policy, gate):
    """Staggered, chunked, with prompts that share a prefix and are asked twice: nobody gets what another request's routes computed."""
    model, skipper = routed("llama", gate, policy)
    engine = engine_over(model, lookahead=gate == "mlp")
    rows = SHARED + SHARED
    for row, (request_id, tokens) in zip(rows, serve_routed(engine, rows, every=6).items(), strict=True):
        assert_greedy("llama", skipper, row, tokens, request_id)
    assert (engine.stats().num_reused_tokens > 100) == (policy != "hashed"), "shared where the policy looks at nothing of the request"


@policies
@pytest.mark.parametrize("depth", [None, ("dense", "routed"), ("routed", "dense")])
def test_preemption_changes_no_route(policy, depth):
    """Tokens of an answer that are computed anew are still tokens of an answer."""
    model, skipper = routed("llama", "mlp", policy)
    engine = engine_over(model, kv_blocks=5)
    parts = (True, True) if depth is None else tuple(d == "routed" for d in depth)
    found = serve(engine, [(row, depth) for row in SMALL], every=1, new_tokens=26)
    for row, (request_id, tokens) in zip(SMALL, found.items(), strict=True):
        assert_greedy("llama", skipper, row, tokens, request_id, parts)
    assert engine.stats().num_preemptions > 0


def test_an_answer_is_read_again_as_a_prompt():
    """The next turn of a conversation: KV of an answer is that of a prompt only where the policy does not look at it."""
    for policy in ("decodes", "flip"):
        model, skipper = routed("llama", "hard", policy)
        engine = engine_over(model)
        first = serve_routed(engine, SMALL, new_tokens=30)
        turns = [row + tokens + [7, 8] for row, tokens in zip(SMALL, first.values(), strict=True)]
        before = engine.stats().num_reused_tokens
        for row, (request_id, tokens) in zip(turns, serve_routed(engine, turns, prefix="next").items(), strict=True):
            assert_greedy("llama", skipper, row, tokens, request_id)
        reused = engine.stats().num_reused_tokens - before
        assert reused >= 3 * 32 if policy == "flip" else reused == 0


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt_neox", "gemma3_text"])
def test_dense_and_routed_requests_share_steps(name):
    model, skipper = routed(name, "mlp")
    engine = engine_over(model)
    depths = ["dense", "routed", ("dense", "routed"), ("routed", "dense"), "dense", None, "dense"]
    rows = [RAGGED[0], RAGGED[0], RAGGED[1], RAGGED[2], RAGGED[1], RAGGED[3], RAGGED[2]]
    found = serve(engine, list(zip(rows, depths, strict=True)))
    for row, depth, (request_id, tokens) in zip(rows, depths, found.items(), strict=True):
        if depth == "dense":
            assert tokens == alone(reference(name), [row])[0]
            continue
        parts = {"routed": (True, True), None: (True, True), ("dense", "routed"): (False, True), ("routed", "dense"): (True, False)}[depth]
        assert_greedy(name, skipper, row, tokens, request_id, parts)


def test_prefixes_of_another_depth_are_not_reused():
    model, skipper = routed("llama", "hard")
    engine = engine_over(model)
    row, reused = RAGGED[0], []
    for number, depth in enumerate(("routed", "dense", "routed", "dense", ("dense", "routed"), ("routed", "dense"))):
        before = engine.stats().num_reused_tokens
        ((request_id, tokens),) = serve(engine, [(row, depth)], prefix=f"p{number}.").items()
        reused.append(engine.stats().num_reused_tokens - before)
        if depth == "dense":
            assert tokens == alone(reference("llama"), [row])[0]
        else:
            parts = (True, True) if depth == "routed" else (depth[0] == "routed", depth[1] == "routed")
            assert_greedy("llama", skipper, row, tokens, request_id, parts)
    assert reused == [0, 0, 32, 32, 32, 32]  # two full blocks of 40 tokens


# -- nested weights

LENDING = {"kv_blocks": 12, "max_batch_tokens": 64, "max_chunk_tokens": 16, "max_model_len": 128, "block_tokens": 8, "prefix_reuse": False}


def nested(gate="mlp", **settings):
    """A llama of nested weights with a skipper, and the skipper."""
    model = exact("llama")
    skipper = make(gate, 3)
    return depthfx.compile(model, skipper=skipper, weights="nested", **{**COMMON, **settings}), skipper


def test_nested_weights_in_both_precisions():
    model, skipper = nested()
    plain, same = exact("llama"), make("mlp", 3)
    full = depthfx.compile(plain, skipper=same, **COMMON)
    _, tokens, logits = generated(model)
    _, expected_tokens, expected = generated(full)
    assert tokens == expected_tokens and torch.equal(logits, expected)
    fast = exact("llama")
    with torch.no_grad():
        for path, module in nested_linears(model).items():
            fast.get_submodule(path).weight.copy_(fast_values(module))
    model.set_precision("fast")
    ids, tokens, fast_logits = generated(model)
    for row, answer, mine, request_id in zip(RAGGED, tokens, fast_logits, ids, strict=True):
        wanted = routed_answer(fast, "llama", skipper, row + answer[:-1], len(row), request_id)
        assert max_error(mine, wanted.logits[len(row) - 1 :]) < TOLERANCE
    assert not torch.equal(fast_logits, logits)
    assert_one_copy(model)
    with push(model, skipper, ALWAYS):  # all rows run: the tokens of dense steps, whatever precision each step has
        assert switched(engine_over(model), None) == switched(engine_over(model), "dense")
    gathered, in_place = engine_over(model), engine_over(model)
    own = in_place._runner.forward
    in_place._runner.forward = lambda uploaded, precision, routed: own(uploaded, precision, routed, captured=routed)
    assert switched(gathered, None) == switched(in_place, None)


def switched(engine, depth):
    """Tokens of a few requests while the precision of layers changes before many of the steps."""
    draw, own = random.Random(5), engine.step

    def step():
        if draw.random() < 0.4:
            engine.set_precision(draw.choice(["full", "fast", {1: "fast"}, {0: "full", 2: "fast"}]))
        return own()

    engine.step = step
    return serve(engine, [(row, depth) for row in RAGGED])


def assert_one_copy(model):
    """Dense and routed program read the same bytes, and the modules of the model too."""
    runner = model.engine._runner
    weights = [{w.name: (w.upper.data_ptr(), w.lower.data_ptr()) for w in p.stored} for p in (runner.program, runner.routed)]
    storages = [{t.untyped_storage().data_ptr() for w in p.stored for t in (w.upper, w.lower)} for p in (runner.program, runner.routed)]
    assert len(weights[1]) >= 10 and storages[0] == storages[1]
    assert {m.upper.untyped_storage().data_ptr() for m in nested_linears(model).values()} <= storages[0]


def test_sixteen_bit_weights_are_there_once():
    for name in ("llama", "phi3", "gpt_neox"):
        model, _ = routed(name, "hard")
        runner = model.engine._runner
        mine = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers())}
        for program in (runner.program, runner.routed):
            for key, buffer in program.module.named_buffers():
                if "position_table" not in key and "skipper" not in key:
                    assert buffer.untyped_storage().data_ptr() in mine, key


def test_memory_is_lent_while_tokens_skip():
    model, _ = nested("hard", memory=ElasticMemory(unit_mib=0.01, dwell_s=0.0, verify=True), **LENDING)
    engine, asked = model.engine, [(row, None) for row in prompts((20, 33, 7, 26, 41, 12, 20, 30), seed=1)]
    schedule = Schedule(engine)
    found = serve(engine, asked, every=1, new_tokens=24)
    engine.restore()
    counts, stats, blocks = engine.stats().steps_by_precision, engine.control.stats(), engine._scheduler.manager.num_blocks
    assert stats.num_lends and stats.num_restores and counts["fast"] and counts["full"] + counts["mixed"]
    assert_one_copy(model)
    options = {"max_batch_size": 8, "max_batch_tokens": 64, "max_chunk_tokens": 16, "prefix_reuse": False}
    plain = engine_over(model, blocks, **options)
    schedule.impose(plain)
    assert serve(plain, asked, every=1, new_tokens=24) == found
    assert plain.stats().num_steps == engine.stats().num_steps
    assert 0 < plain.routes.counts().skipped_share < 1
    engine.close()


# -- the route log


def test_routes_are_counted_and_recorded():
    model, _ = routed("llama", "hard", "flip")
    engine = engine_over(model)
    engine.routes.record()
    found = serve(engine, [(RAGGED[3], None), (RAGGED[2], "dense"), (RAGGED[3], ("dense", "routed"))], every=3)
    routes = engine.routes
    length = len(RAGGED[3]) + len(found["r0"]) - 1
    wanted = torch.stack([(torch.arange(length) + place) % 2 for place in range(3)]).to(torch.int8)
    assert torch.equal(routes.depth_map("r0"), wanted), "the other way at every step, on the tape too"
    late = routes.depth_map("r2")
    assert (late[:, : len(RAGGED[3])] == -1).all() and torch.equal(late[:, len(RAGGED[3]) :], wanted[:, len(RAGGED[3]) :])
    one = routes.counts("r0")
    assert one.layers == (0, 1, 2) and one.run == tuple(wanted.sum(1).tolist()) and one.project == tuple((wanted == 0).sum(1).tolist())
    both = routes.counts("r2")
    assert routes.counts().run == tuple(a + b for a, b in zip(one.run, both.run, strict=True))
    for call in (routes.counts, routes.depth_map, routes.digest):
        with pytest.raises(InvalidRequestError, match="r1"):
            call("r1")
    routes.record(False)
    with pytest.raises(InvalidRequestError, match="was not recorded"):
        routes.depth_map("r0")


def test_digests_follow_from_the_request_id():
    model, _ = routed("llama", "hard", "hashed")
    digests = []
    for options in ({}, {"max_chunk_tokens": 3}, {"kv_blocks": 5}):  # other steps, the same routes
        engine = engine_over(model, **options)
        engine.routes.record()
        serve_routed(engine, [RAGGED[3]] * 3, new_tokens=26)
        digests.append([engine.routes.digest(f"r{i}") for i in range(3)])
    assert digests[0] == digests[1] == digests[2]
    assert len(set(digests[0])) == 3


# -- what is refused


class Narrow(Policy):
    """Says too little."""

    def forward(self, rows):
        """One action for all."""
        return Decision(torch.ones(1, dtype=torch.bool))


def test_bad_skippers_and_requests():
    with pytest.raises(SkipperError, match=r"\[3\].*3 layers"):
        depthfx.compile(build("llama"), skipper=Skipper([1, 3], Flip(), Identity()), **COMMON)
    with pytest.raises(SkipperError, match=r"Narrow.*shape"):
        depthfx.compile(build("llama"), skipper=Skipper([1], Narrow(), Identity()), **COMMON)
    with pytest.raises(SkipperError, match="Adapter of layer 1"):
        depthfx.compile(build("llama"), skipper=Skipper([1], Flip(), Adapter(32, 0)), **COMMON)
    with pytest.raises(SettingError, match="weights='16bit' or 'nested'"):
        depthfx.compile(build("llama"), skipper=Skipper([1], Flip(), Identity()), weights="fp8", **COMMON)
    plain = depthfx.compile(build("llama"), **COMMON).engine
    assert plain.routes is None
    with pytest.raises(InvalidRequestError, match="compiled without a skipper"):
        plain.add([5, 6], SamplingParams(depth="routed"))
    assert plain.add([5, 6], SamplingParams(depth="dense"))
    for depth in ("deep", ("dense",), ("dense", "routed", "routed"), ("dense", None), 3):
        with pytest.raises(InvalidRequestError, match=r"depth=.*'dense', 'routed', or a pair"):
            routed("llama", "hard")[0].engine.add([5, 6], SamplingParams(depth=depth))


def test_a_skipper_that_is_changed_in_place():
    """Its KV is computed anew, and what was tabulated by position too."""
    model, skipper = routed("llama", "mlp")
    before = generated(model)[2]
    for strength in (ALWAYS, NEVER):
        for policy in skipper.policies:
            policy.push.fill_(strength)
        request_id = f"request-{model.engine._next_id}"
        tokens = model.generate(torch.tensor([RAGGED[0]]), max_new_tokens=8, do_sample=False)[0, len(RAGGED[0]) :].tolist()
        assert_greedy("llama", skipper, RAGGED[0], tokens, request_id)
    for policy in skipper.policies:
        policy.push.zero_()
    assert torch.equal(generated(model)[2], before)
