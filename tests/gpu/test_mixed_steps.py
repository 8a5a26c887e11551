"""Captured steps with prompts: bits of the padded step run without a graph, logits near the step as it is, and tokens of whole engines."""

from __future__ import annotations

from functools import cache

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import depthfx
from depthfx.records import Chunk, SamplingParams, StepPlan
from depthfx.runtime.graphs import StepGraphs
from depthfx.runtime.step_form import MAX_CHUNKS
from tests.families.configs import build
from tests.families.harness import prompts, run_staggered
from tests.gpu.test_engine import check_near_greedy

RAGGED = prompts((40, 200, 20, 7, 1, 126), shared=17)
SIZES = {"kv_blocks": 160, "max_batch_size": 9, "max_batch_tokens": 1024, "max_chunk_tokens": 320}


@cache
def compiled(name, weights="16bit", captured=True):
    model = build(name, torch.float16, "cuda")
    return depthfx.compile(model, weights=weights, inductor=False, check=True, capture_prompts=captured, **SIZES)


@pytest.fixture
def used(monkeypatch):
    """Forms of the captured steps with prompts, in the order in which they were found."""
    forms, find = [], StepGraphs.find

    def noted(graphs, plan, *args):
        graph = find(graphs, plan, *args)
        if plan.prefills:
            forms.append(None if graph is None else graph.form)
        return graph

    monkeypatch.setattr(StepGraphs, "find", noted)
    return forms


def mixed_plan(precision: bytes, num_decodes: int, lengths: tuple[int, ...]) -> StepPlan:
    """Decodes at position 33 and prompts from position 16 on, each in blocks of its own, over KV that nobody computed."""
    starts = (33,) * num_decodes + (16,) * len(lengths)
    tokens = [[(7 * row + i) % 90 + 1 for i in range(n)] for row, n in enumerate((1,) * num_decodes + lengths)]
    chunks = [
        Chunk(str(row), row, start, tuple(ids), -1, True, int(row < num_decodes), SamplingParams())
        for row, (start, ids) in enumerate(zip(starts, tokens, strict=True))
    ]
    width = -(-max(s + len(t) for s, t in zip(starts, tokens, strict=True)) // 16)
    writes = tuple((row, column, row * width + column) for row in range(len(chunks)) for column in range(width))
    return StepPlan(-1, tuple(chunks[:num_decodes]), tuple(chunks[num_decodes:]), writes, precision)


@pytest.mark.parametrize("weights", ["16bit", "nested"])
@pytest.mark.parametrize("mode", ["full", "fast", "mixed"])
@pytest.mark.parametrize(("num_decodes", "lengths"), [(3, (100, 5)), (0, (130,)), (5, (200, 1, 40)), (1, (70,))])
@torch.inference_mode()
def test_a_replay_has_the_bits_of_the_padded_step(weights, mode, num_decodes, lengths):
    if weights == "16bit" and mode != "full":
        pytest.skip("weights of one precision")
    runner = compiled("llama", weights).engine._runner
    entries = runner.shape.num_precisions if weights == "nested" else 0
    precision = {"full": bytes([1] * entries), "fast": bytes(entries), "mixed": bytes([0, *[1] * (entries - 1)][:entries])}[mode]
    plan = mixed_plan(precision, num_decodes, lengths)
    noise = torch.randn(runner.kv_pool.shape, generator=torch.Generator().manual_seed(0)).to(runner.kv_pool)
    found = []
    hint = runner.flags.send(precision)
    for how in ("replayed", "padded", "as it is"):
        runner.kv_pool.copy_(noise)
        runner.last_tokens.fill_(-7)
        graph = runner.graphs.find(plan, hint)
        assert graph is not None and graph.form.max_chunks == MAX_CHUNKS
        uploaded = runner.staging.upload(plan, None if how == "as it is" else graph.form)
        if how == "replayed":
            graph.replay()
            logits = graph.logits
            assert torch.equal(runner.last_tokens[: len(plan.sampled)], logits[: len(plan.sampled)].argmax(-1))
        else:  # a graph of -1 serves every precision, so that is what the padded step runs with
            logits = runner.forward(uploaded, hint if how == "as it is" or hint == 0 else -1, captured=how == "padded")
        found.append((logits[: len(plan.sampled)].float().clone(), runner.kv_pool.clone()))
        torch.cuda.synchronize()
    (replayed, kv), (padded, padded_kv), (plain, plain_kv) = found
    assert torch.equal(replayed, padded) and torch.equal(kv.view(torch.int16), padded_kv.view(torch.int16))
    # other row counts take other tiles: sums in another order, through a few layers of fp16; FP8 rows are rounded once more each
    slack = 0.1 if mode != "full" else 2e-2
    assert replayed.isfinite().all() and float((replayed - plain).abs().max()) < slack * (1 + float(plain.abs().max()))
    changed = (kv != noise).flatten(1).any(1)
    assert torch.equal(changed, (plain_kv != noise).flatten(1).any(1)), "blocks were written that the step does not name"


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3_text", "gpt_neox"])
@pytest.mark.parametrize("every", [1, 3])
def test_tokens_are_those_of_the_model(name, every, used):
    rows = RAGGED if name != "gpt_neox" else [row[:40] for row in RAGGED]
    for row, answer in zip(rows, run_staggered(compiled(name).engine, rows, every=every), strict=True):
        check_near_greedy(name, row, answer)
    assert used and None not in used


def test_nested_weights_switch_between_steps(used):
    model, rows = compiled("llama", "nested"), [row for row in RAGGED if len(row) < 130]
    engine = model.engine
    for mode in ("full", {1: "fast"}, "fast", "full"):
        engine.set_precision(mode)
        answers = run_staggered(engine, rows, every=1)
        if mode == "full":
            for row, answer in zip(rows, answers, strict=True):
                check_near_greedy("llama", row, answer)
    assert used and None not in used


def test_without_the_setting_nothing_is_captured(used):
    engine = compiled("llama", captured=False).engine
    assert engine._runner.graphs.prompts == () and not engine._scheduler.decode_places
    for row, answer in zip(RAGGED, run_staggered(engine, RAGGED), strict=True):
        check_near_greedy("llama", row, answer)
    assert set(used) == {None}


def test_more_chunks_than_a_form_takes(used):
    """Twenty prompts at once beside a decode come in turns of eight."""
    rows = prompts((30, *range(1, 21)), seed=4)
    model = depthfx.compile(
        build("llama", torch.float16, "cuda"), inductor=False, check=True, capture_prompts=True, kv_blocks=160, max_batch_size=32
    )
    engine = model.engine
    first = engine.add(rows[0], SamplingParams(max_new_tokens=40))
    engine.step()
    engine.step()
    names = [engine.add(row, SamplingParams(max_new_tokens=5)) for row in rows[1:]]
    answers = {name: [] for name in (first, *names)}
    del used[:]
    while engine.has_unfinished():
        for output in engine.step():
            answers[output.request_id].extend(output.new_token_ids)
    assert len(used) == 3 and None not in used
    for row, name in zip(rows[1:], names, strict=True):
        check_near_greedy("llama", row, answers[name])
