"""Steps with prompts that are padded to captured forms: the packing, what the scheduler plans for them, and the tokens."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

import depthfx
from depthfx.alloc.manager import MemoryManager
from depthfx.errors import SettingError
from depthfx.records import SamplingParams, StepPlan, StepResult
from depthfx.runtime.chunks import room_for_prompts
from depthfx.runtime.request import Request
from depthfx.runtime.scheduler import Scheduler
from depthfx.runtime.staging import Staging, prefill_tiles
from depthfx.runtime.step_form import MAX_CHUNKS, MAX_FORM_ROWS, StepForm, decode_places, prompt_forms
from tests.families.configs import build
from tests.families.harness import alone, engine_over, prompts, run_staggered
from tests.runtime.prompt_graphs import capture_prompts, small_forms
from tests.runtime.test_runner import CPU, decode, prefill


def staging():
    return Staging(max_tokens=512, max_rows=8, blocks_per_row=10, device=CPU)


def plan():
    return StepPlan(
        0, (decode("a", 3, 7, 50), decode("b", 1, 9, None, source=2)), (prefill("c", 2, 4, [60, 61, 62]), prefill("d", 0, 0, [70, 71], False)),
        ((3, 0, 5), (2, 1, 6)),
    )  # fmt: skip


def test_a_mixed_step_is_padded_to_a_form():
    up = staging().upload(plan(), StepForm(12, 4, 3))
    assert up.token_ids.tolist() == [50, 0, 0, 0, 60, 61, 62, 70, 71, 0, 0, 0]
    assert up.source.tolist() == [-1, 2] + [-1] * 10
    assert up.positions.tolist() == [7, 9, -1, -1, 4, 5, 6, 0, 1, -1, -1, -1]
    assert up.table_rows.tolist() == [3, 1, 0, 0, 2, 2, 2, 0, 0, 0, 0, 0]
    assert up.logit_rows.tolist() == [0, 1, 6, 3, 4, 5, 6]  # two decodes, the end of c, then rows that nobody reads
    assert (up.write_places.tolist(), up.write_blocks.tolist()) == ([30, 21] + [80] * 10, [5, 6] + [0] * 10)
    assert (up.chunk_starts.tolist(), up.num_decode_rows) == ([4, 7, 9, 9], 4)
    assert (up.tile_chunks.tolist(), up.tile_starts.tolist()) == ([0, 1, -1], [0, 0, 0])


def test_fields_of_a_form_stay_in_place_and_a_dry_run_has_no_rows():
    stage, form = staging(), StepForm(16, 4, 2)
    first, idle = stage.upload(plan(), form), stage.upload(StepPlan(-1, (), (), ()), form)
    for name in ("token_ids", "positions", "logit_rows", "write_places", "chunk_starts", "tile_chunks", "tile_starts"):
        before, after = getattr(first, name), getattr(idle, name)
        assert (before.storage_offset(), before.shape) == (after.storage_offset(), after.shape), name
    assert set(idle.positions.tolist()) == set(idle.tile_chunks.tolist()) == {-1} and set(idle.chunk_starts.tolist()) == {4}


@pytest.mark.parametrize("form", [StepForm(5, 2, 2), StepForm(9, 1, 2), StepForm(9, 4, 1), StepForm(9, 4, 0)])
def test_a_form_that_is_too_small_holds_nothing(form):
    assert not form.holds(plan())


def test_a_form_holds_table_writes_and_decodes_alone():
    form, alone_ = StepForm(9, 4, 2), StepPlan(0, plan().decodes, (), ())
    many = StepPlan(0, plan().decodes, plan().prefills, ((0, 0, 1),) * 10)
    assert form.holds(plan()) and not form.holds(many) and not form.holds(alone_) and StepForm(4, 4).holds(alone_)


def test_tiles_of_every_cut_fit():
    rng = random.Random(0)
    for _ in range(300):
        form = StepForm(rng.randrange(40, 1200), rng.randrange(0, 32), rng.randrange(1, 9))
        rows, cuts = form.rows - form.decode_rows, []
        while rows and len(cuts) < form.max_chunks:
            cuts.append(rng.choice([1, rows, rng.randrange(1, rows + 1), min(rows, 129)]))
            rows -= cuts[-1]
        tiles, _ = prefill_tiles(tuple(prefill(str(i), 0, 0, [0] * n) for i, n in enumerate(cuts)))
        assert len(tiles) <= form.num_tiles


@pytest.mark.parametrize(
    ("batch", "tokens", "chunks"), [(256, 8192, (768, 1536)), (256, 8192, (2048, 4096)), (1, 300, (300,)), (8, 8, (8,))]
)
def test_forms_are_those_of_the_limits(batch, tokens, chunks):
    forms = prompt_forms(batch, tokens, chunks)
    assert list(forms) == sorted(forms, key=lambda form: (form.rows, form.decode_rows))
    assert all(form.decode_rows + MAX_CHUNKS <= form.rows <= min(MAX_FORM_ROWS, tokens) and form.decode_rows <= batch for form in forms)
    wanted = {rows for rows in (256, 512, *chunks) if rows <= min(MAX_FORM_ROWS, tokens) and rows >= MAX_CHUNKS}
    assert {form.rows for form in forms} == wanted
    if tokens >= 512:
        assert {form.decode_rows for form in forms if form.rows == 512} == set(decode_places(batch)) and max(decode_places(batch)) == batch


@pytest.mark.parametrize(
    ("decodes", "tokens", "chunk", "places", "room"),
    [
        (0, 8192, 768, (0, 64, 128, 256), 8192),
        (10, 8192, 768, (), 758),
        (10, 8192, 768, (0, 64, 128, 256), 704),
        (65, 8192, 768, (0, 64, 128, 256), 640),
        (200, 8192, 256, (0, 64, 128, 256), 64),  # a quarter at least
        (10, 64, 64, (0, 64), 54),  # places that would leave nothing for prompts
        (64, 64, 64, (0, 64), 0),
    ],
)
def test_room_for_prompts(decodes, tokens, chunk, places, room):
    assert room_for_prompts(decodes, tokens, chunk, places) == room


def test_every_planned_step_with_decodes_has_a_form():
    """Of random requests; the largest chunk of the scheduler is a captured one."""
    rng, forms = random.Random(1), prompt_forms(100, 2048, (600,))
    scheduler = Scheduler(MemoryManager(4000, 16, 101, 64), 100, 2048, 600, 1024)
    scheduler.decode_places, scheduler.max_chunks = decode_places(100), MAX_CHUNKS
    mixed = padded = 0
    for turn in range(400):
        for _ in range(rng.choice([0, 0, 0, 1, 1, 20])):
            tokens = [rng.randrange(100) for _ in range(rng.choice([1, 5, 40, 300, 900]))]
            scheduler.add(Request(f"{turn} {rng.random()}", tokens, SamplingParams(max_new_tokens=rng.choice([1, 9, 100]))))
        step = scheduler.plan()
        if step is None:
            continue
        if step.decodes and step.prefills:
            mixed += 1
            form = next((f for f in forms if f.holds(step)), None)
            assert form is not None, (len(step.decodes), [c.num_tokens for c in step.prefills])
            padded += form.rows > step.num_tokens
        count = len(step.sampled)
        scheduler.commit(StepResult(step.step_id, (1,) * count, (True,) * count, {}))
    assert mixed > 100 and padded > 50


@cache
def compiled(name):
    return depthfx.compile(build(name), inductor=False, check=True, kv_blocks=64, max_batch_size=8)


@cache
def answers(name):
    return alone(build(name), RAGGED)


RAGGED = prompts((40, 33, 20, 7, 1, 26), shared=17)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_neox"])
@pytest.mark.parametrize("lookahead", [False, True], ids=["in turn", "lookahead"])
def test_tokens_are_hugging_faces(name, lookahead):
    engine = engine_over(compiled(name), lookahead=lookahead, max_chunk_tokens=32)
    engine._runner.last_tokens.fill_(1 << 40)  # what no step wrote must not be read
    graphs = capture_prompts(engine, small_forms())
    for every in (1, 3):
        assert run_staggered(engine, RAGGED, every=every) == answers(name)
    assert len({form.decode_rows for form in graphs.used}) > 1 and any(form.rows == 32 for form in graphs.used)
    assert not any(plan.decodes for plan in graphs.eager)


def test_preempted_and_sampled_requests_get_the_same_tokens():
    rng = random.Random(3)
    cases = [
        (row, SamplingParams(max_new_tokens=20, temperature=rng.choice([0.0, 0.8]), repetition_penalty=rng.choice([1.0, 1.2]), seed=seed))
        for seed, row in enumerate(RAGGED * 2)
    ]
    plain = [output.new_token_ids for output in engine_over(compiled("llama")).run(cases).values()]
    engine = engine_over(compiled("llama"), kv_blocks=9, lookahead=True)
    graphs = capture_prompts(engine, small_forms())
    assert [output.new_token_ids for output in engine.run(cases).values()] == plain
    assert engine.stats().num_preemptions > 0 and graphs.used


def test_a_nan_in_idle_rows_reaches_nobody(monkeypatch):
    """Logits of idle places are whatever they are; here NaN, which would end a request."""
    engine = engine_over(compiled("llama"), max_chunk_tokens=32)
    graphs, forward = capture_prompts(engine, small_forms()), engine._runner.forward

    def poisoned(uploaded, *args, captured=False):
        logits = forward(uploaded, *args, captured=captured)
        idle = uploaded.positions[uploaded.logit_rows.long()] < 0
        return torch.where(idle[:, None], float("nan"), logits)

    monkeypatch.setattr(engine._runner, "forward", poisoned)
    assert run_staggered(engine, RAGGED) == answers("llama") and graphs.used


def test_the_setting_needs_cuda():
    with pytest.raises(SettingError, match="capture_prompts=True needs a model on CUDA and captured graphs; this one is on cpu"):
        depthfx.compile(build("llama"), capture_prompts=True)
