"""Every family with tokens that skip layers, against Hugging Face's own layers run in full and chosen from row by row."""

from __future__ import annotations

import pytest
import torch

import depthfx
from depthfx.lowering.kernel_spec import max_error
from depthfx.lowering.routed_layer import RoutedLayer
from depthfx.records import SamplingParams
from tests.families.configs import FAMILIES, SOME_FAMILIES, build
from tests.families.harness import GREEDY, NEW_TOKENS, engine_over, left_padded, prompts
from tests.families.routed_cases import ALWAYS, COMMON, NEVER, dense, make, push, reference, routed
from tests.families.routed_reference import routed_answer
from tests.families.test_every_family import TOLERANCE, kv_of

RAGGED = prompts((40, 33, 20, 7))
families = pytest.mark.parametrize("name", FAMILIES)
some_families = pytest.mark.parametrize(
    "name", ["llama", "gemma3_text", "gpt_neox", "cohere2"]
)  # plain, sandwich norms, fused and parallel
gates = pytest.mark.parametrize("gate", ["hard", "mlp"])


def generated(model, rows=RAGGED):
    """Ids of the requests, the tokens of each row and its logits ``[NEW_TOKENS, V]``."""
    model.engine.forget_prefixes()
    first = model.engine._next_id
    out = model.generate(**left_padded(rows), **GREEDY, return_dict_in_generate=True, output_logits=True)
    ids = [f"request-{first + i}" for i in range(len(rows))]
    return ids, [s[-NEW_TOKENS:] for s in out.sequences.tolist()], torch.stack(out.logits, 1)


def answer_to(name, skipper, prompt, tokens, request_id, depth=(True, True)):
    return routed_answer(reference(name), name, skipper, prompt + tokens[:-1], len(prompt), request_id, depth)


def assert_greedy(name, skipper, prompt, tokens, request_id, depth=(True, True)):
    """``tokens`` are what the reference chooses after ``prompt`` and each of them; returns its answer."""
    answer = answer_to(name, skipper, prompt, tokens, request_id, depth)
    assert answer.logits[len(prompt) - 1 :].argmax(-1).tolist() == tokens, request_id
    return answer


def serve(engine, asked, every=2, new_tokens=NEW_TOKENS, prefix="r"):
    """Tokens by request id when a new one of ``(prompt, depth)`` arrives every ``every`` steps."""
    answers, waiting, turn = {}, list(enumerate(asked)), 0
    while waiting or engine.has_unfinished():
        if waiting and turn % every == 0:
            number, (prompt, depth) = waiting.pop(0)
            answers[engine.add(prompt, SamplingParams(max_new_tokens=new_tokens, depth=depth), f"{prefix}{number}")] = []
        for output in engine.step():
            assert output.error is None, output.error
            answers[output.request_id].extend(output.new_token_ids)
        turn += 1
    return answers


def serve_routed(engine, rows, **options):
    return serve(engine, [(row, None) for row in rows], **options)


@pytest.mark.parametrize(("name", "gate"), [*((n, "mlp") for n in FAMILIES), *((n, "hard") for n in SOME_FAMILIES)])
def test_logits_are_those_of_the_reference(name, gate):
    model, skipper = routed(name, gate)
    ids, tokens, logits = generated(model)
    skipped = torch.zeros(2)
    for prompt, row, mine, request_id in zip(RAGGED, tokens, logits, ids, strict=True):
        answer = assert_greedy(name, skipper, prompt, row, request_id)
        assert max_error(mine, answer.logits[len(prompt) - 1 :]) < TOLERANCE
        skipped += (answer.actions == 0).sum(1)
    assert (skipped > 0).all(), "the case skips in every layer"


@families
@pytest.mark.parametrize("gate", ["mlp"])
def test_every_layer_of_every_token_has_its_own_kv(name, gate):
    """Chunked prompts that share steps with decodes, in a pool full of NaN: what is not written shows."""
    model, skipper = routed(name, gate)
    engine = engine_over(model)
    engine._runner.kv_pool.fill_(float("nan"))
    engine.routes.record()
    streams = [engine.stream(row, SamplingParams(max_new_tokens=NEW_TOKENS), f"s{i}") for i, row in enumerate(RAGGED)]
    for prompt, stream in zip(RAGGED, streams, strict=True):
        taken = [next(stream) for _ in range(NEW_TOKENS - 1)]
        answer = assert_greedy(name, skipper, prompt, taken, stream.request_id)
        count = len(prompt) + len(taken) - 1  # the KV of the newest token is written by the step that reads it
        assert max_error(kv_of(engine, stream.request_id, count), answer.kv) < TOLERANCE
        assert torch.equal(engine.routes.depth_map(stream.request_id)[:, :count], answer.actions)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_neox"])  # parts of one projection, which are views, enter a body
def test_with_inductor(name):
    model = build(name)
    skipper = make("mlp", model.config.num_hidden_layers)
    model = depthfx.compile(model, skipper=skipper, **{**COMMON, "inductor": True})
    ids, tokens, logits = generated(model)
    for prompt, row, mine, request_id in zip(RAGGED, tokens, logits, ids, strict=True):
        assert max_error(mine, answer_to(name, skipper, prompt, row, request_id).logits[len(prompt) - 1 :]) < TOLERANCE


@some_families
@gates
def test_kv_is_there_where_every_row_skips(name, gate):
    model, skipper = routed(name, gate)
    engine = engine_over(model)
    engine._runner.kv_pool.fill_(float("nan"))
    with push(model, skipper, NEVER):
        streams = [engine.stream(row, SamplingParams(max_new_tokens=NEW_TOKENS), f"s{i}") for i, row in enumerate(RAGGED)]
        for prompt, stream in zip(RAGGED, streams, strict=True):
            taken = [next(stream) for _ in range(NEW_TOKENS - 1)]
            answer = assert_greedy(name, skipper, prompt, taken, stream.request_id)
            assert not answer.actions.any()
            assert max_error(kv_of(engine, stream.request_id, len(prompt) + len(taken) - 1), answer.kv) < TOLERANCE
    counts = engine.routes.counts()
    assert not any(counts.run) and all(counts.project)


@some_families
@gates
def test_all_run_is_the_dense_model(name, gate):
    """The same arithmetic, but for K and V, whose product is apart from that of Q."""
    model, skipper = routed(name, gate)
    plain = dense(name)
    with push(model, skipper, ALWAYS):
        _, tokens, logits = generated(model)
    _, expected_tokens, expected = generated(plain)
    assert tokens == expected_tokens
    assert torch.equal(logits, expected), float((logits - expected).abs().max())
    engines = engine_over(model), engine_over(plain)
    with push(model, skipper, ALWAYS):
        pools = []
        for engine in engines:
            serve_routed(engine, RAGGED)
            pools.append(engine._runner.kv_pool)
    assert torch.equal(*pools)
    assert not any(engines[0].routes.counts().project)


@some_families
@gates
def test_preemption_and_prefix_reuse_change_nothing(name, gate):
    model, skipper = routed(name, gate)
    for rows, every, blocks, new in ((prompts((14, 9, 15), seed=2), 1, 5, 26), (prompts((36, 52, 36), seed=1, shared=33), 6, 64, 12)):
        engine = engine_over(model, kv_blocks=blocks)
        for row, (request_id, tokens) in zip(rows, serve_routed(engine, rows, every=every, new_tokens=new).items(), strict=True):
            assert_greedy(name, skipper, row, tokens, request_id)
        assert engine.stats().num_preemptions > 0 if blocks == 5 else engine.stats().num_reused_tokens >= 2 * 32


def poisoned(monkeypatch, skipper_runs=True):
    """Bodies run in place, and what belongs to rows of the other cohort is NaN when it goes in and when it comes out."""
    own = RoutedLayer._in_place
    seen = {"steps": 0}

    def nan_outside(value, choice, wanted, dim):
        mask = (choice != wanted).view([-1 if d == dim else 1 for d in range(value.dim())])
        return value.masked_fill(mask, float("nan"))

    def in_place(self, hidden, counts, run_positions, choice, num_decode_rows, chunk_starts, run_given, project_given):
        def poison(specs, given, wanted):
            return [
                nan_outside(v, choice, wanted, s.dim) if s.kind == "rows" and v.is_floating_point() else v
                for s, v in zip(specs, given, strict=True)
            ]

        bodies = self.run, self.project
        shell = RoutedLayer(
            lambda *a: nan_outside(bodies[0](*a), choice, 1, 0), self._run_inputs,
            None if bodies[1] is None else lambda *a: nan_outside(bodies[1](*a), choice, 0, 0), self._project_inputs,
        )  # fmt: skip
        seen["steps"] += 1
        run_given, project_given = poison(self._run_inputs, run_given, 1), poison(self._project_inputs, project_given, 0)
        return own(shell, hidden, counts, run_positions, choice, num_decode_rows, chunk_starts, run_given, project_given)

    monkeypatch.setattr(RoutedLayer, "_in_place", in_place)
    return seen


@some_families
@gates
def test_rows_of_the_other_cohort_never_leak(name, gate, monkeypatch):
    """The way of captured graphs: both bodies over all rows, and rows that a body must not read hold NaN."""
    model, skipper = routed(name, gate)
    seen = poisoned(monkeypatch)
    engine = engine_over(model)
    own = engine._runner.forward
    engine._runner.forward = lambda uploaded, precision, routed: own(uploaded, precision, routed, captured=routed)
    rows = RAGGED + [RAGGED[0]]
    for row, (request_id, tokens) in zip(rows, serve_routed(engine, rows).items(), strict=True):
        assert_greedy(name, skipper, row, tokens, request_id)
    assert seen["steps"] > 30
    engine.forget_prefixes()
    with push(model, skipper, NEVER):  # an empty cohort
        for row, (request_id, tokens) in zip(RAGGED, serve_routed(engine, RAGGED, prefix="n").items(), strict=True):
            assert_greedy(name, skipper, row, tokens, request_id)


@pytest.mark.parametrize(("name", "captured"), [("llama", False), ("llama", True), ("gemma3_text", True), ("cohere2", False)])
def test_no_layer_reads_the_maps_of_another(name, captured, monkeypatch):
    """Invariant 2: what was decided for a layer is garbage as soon as the layer has run, whether rows are gathered for it or all in place."""
    own, seen = RoutedLayer.forward, []

    def forward(self, hidden, order, counts, run_positions, choice, *rest):
        out = own(self, hidden, order, counts, run_positions, choice, *rest)
        for i, kept in enumerate((order, counts, run_positions, choice)):
            kept.fill_(1 << 20 + i)
        seen.append(self)
        return out

    monkeypatch.setattr(RoutedLayer, "forward", forward)
    model, skipper = routed(name, "mlp")
    engine = engine_over(model)
    launch = engine._runner.forward
    if captured:
        engine._runner.forward = lambda uploaded, precision, routed: launch(uploaded, precision, routed, captured=routed)
    for row, (request_id, tokens) in zip(RAGGED, serve_routed(engine, RAGGED).items(), strict=True):
        assert_greedy(name, skipper, row, tokens, request_id)
    assert len(seen) > 20 and len(set(seen)) == 2
