"""The sampler against Hugging Face's own processors, and its noise against what noise must be."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from depthfx.errors import InternalError
from depthfx.records import Chunk, SamplingParams
from depthfx.runtime import sampler
from depthfx.runtime.sampler import SamplingTensors, sample

VOCAB = 257


def chunk(row: int = 0, index: int = 0, history: tuple[int, ...] | None = None, **sampling) -> Chunk:
    return Chunk(f"r{row}", row, 0, (1,), -1, True, index, SamplingParams(**sampling), history)


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def build(*chunks: Chunk) -> SamplingTensors:
    return SamplingTensors.build(chunks, VOCAB, torch.clone)


def reference(scores: torch.Tensor, s: SamplingParams, prompt: list[int], output: list[int]) -> torch.Tensor:
    """One row through Hugging Face's processors in the order in which generate() builds them."""
    steps = LogitsProcessorList()
    if s.repetition_penalty != 1.0:
        steps.append(RepetitionPenaltyLogitsProcessor(s.repetition_penalty))
    if s.min_new_tokens and s.eos_token_ids:
        steps.append(MinNewTokensLengthLogitsProcessor(len(prompt), s.min_new_tokens, list(s.eos_token_ids)))
    if s.temperature not in (0.0, 1.0):
        steps.append(TemperatureLogitsWarper(s.temperature))
    if s.temperature:
        if s.top_k:
            steps.append(TopKLogitsWarper(s.top_k))
        if s.top_p < 1.0:
            steps.append(TopPLogitsWarper(s.top_p))
        if s.min_p:
            steps.append(MinPLogitsWarper(s.min_p))
    return steps(torch.tensor([prompt + output]), scores[None].clone())[0]


CASES = [
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.3, "top_k": 1000},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 0.9, "top_p": 0.0001},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 2.0, "top_k": 40, "top_p": 0.7, "min_p": 0.05},
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.6, "temperature": 1.1, "top_k": 20},
    {"min_new_tokens": 6, "eos_token_ids": (3, 250)},
    {"min_new_tokens": 5, "eos_token_ids": (3, 250)},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "min_new_tokens": 9, "eos_token_ids": (0,)},
]


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "in a batch"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_scores_equal_hugging_face(case, alone):
    prompt, output = [5, 9, 200, 9], [17, 5, 42, 3, 250]
    history = tuple(prompt + output)
    others = [chunk(i + 1, 5, history, **c) for i, c in enumerate(CASES)] if not alone else []
    chunks = [chunk(0, 5, history, **case), *others]
    params, raw = build(*chunks), logits(len(chunks))
    seen = sampler.new_seen(len(chunks), VOCAB, "cpu")
    sampler.reset_seen(seen, chunks, torch.clone)
    got = sampler.process(raw, params, seen)
    if case.get("temperature"):
        got = sampler.warp(got, params)
    expected = reference(raw[0], SamplingParams(**case), prompt, output)
    assert torch.equal(got[0].isinf(), expected.isinf())
    # One rounding more or less in the division by temperature or penalty.
    torch.testing.assert_close(got[0].softmax(-1), expected.softmax(-1), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_greedy_is_argmax_with_the_first_of_equals(dtype):
    raw = logits(4).to(dtype)
    raw[0, [7, 100]] = 50.0
    raw[1] = 0.0
    params = build(*(chunk(i) for i in range(4)))
    assert params.greedy_only
    tokens, finite = sample(raw, params)
    assert torch.equal(tokens, raw.float().argmax(-1))
    assert tokens.dtype == torch.int64
    assert tokens[0] == 7
    assert finite.all()
    mixed = build(*(chunk(i) for i in range(3)), chunk(3, temperature=1.0, top_k=3, repetition_penalty=1.1))
    assert torch.equal(sample(raw, mixed, sampler.new_seen(4, VOCAB, "cpu"))[0][:3], tokens[:3])


@pytest.mark.parametrize("case", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 4, "top_p": 0.5}], ids=str)
def test_nan_is_reported_for_its_row_only(case):
    raw = logits(3)
    raw[1, 13] = float("nan")
    raw[2, :200] = float("-inf")
    tokens, finite = sample(raw, build(*(chunk(i, **case) for i in range(3))))
    assert finite.tolist() == [True, False, True]
    assert ((tokens >= 0) & (tokens < VOCAB)).all()
    assert tokens[2] >= 200


def test_a_row_draws_the_same_whatever_shares_its_step():
    raw = logits(9)
    chunks = [chunk(i, index=i * 3, temperature=0.5 + i / 5, top_k=i * 10, seed=i // 2) for i in range(8)] + [chunk(8)]
    together, _ = sample(raw, build(*chunks))
    for i in range(9):
        alone, _ = sample(raw[i : i + 1], build(chunks[i]))
        assert alone[0] == together[i]
    backwards, _ = sample(raw.flip(0), build(*chunks[::-1]))
    assert torch.equal(backwards.flip(0), together)


def test_draws_follow_the_probabilities():
    """Chi-square over 20,000 draws of 12 tokens; the seed is fixed, the limit is the 99.9 % point for 11 degrees."""
    num_draws, vocab = 20_000, 12
    scores = torch.linspace(-2.0, 2.0, vocab)
    probs = scores.softmax(-1)
    for seed in (0, 1, -5, 1 << 40):
        chunks = [chunk(0, index=i, temperature=1.0, seed=seed) for i in range(num_draws)]
        params = SamplingTensors.build(chunks, vocab, torch.clone)
        tokens, _ = sample(scores.expand(num_draws, vocab), params)
        counts = torch.bincount(tokens, minlength=vocab)
        chi_square = ((counts - probs * num_draws) ** 2 / (probs * num_draws)).sum()
        assert chi_square < 31.3, (seed, counts.tolist())


def test_noise_is_uniform_and_independent_along_all_three_axes():
    seeds = torch.arange(64, dtype=torch.int64).repeat_interleave(64)
    indices = torch.arange(64, dtype=torch.int64).repeat(64)
    u = sampler.uniform(seeds, indices, 128)
    assert ((u > 0) & (u < 1)).all()
    counts = torch.histc(u, bins=64, min=0, max=1)
    expected = u.numel() / 64
    assert ((counts - expected) ** 2 / expected).sum() < 103.4  # 99.9 % point for 63 degrees
    cube = u.reshape(64, 64, 128) - 0.5
    for axis in range(3):
        moved = cube.roll(1, axis)
        correlation = (cube * moved).mean() / cube.square().mean()
        assert abs(correlation) < 5 / cube.numel() ** 0.5, axis
    assert u.unique().numel() > 0.98 * u.numel()


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, -(2**31), 2**32, 2**63 - 1, -(2**63)])
def test_any_64_bit_seed_gives_its_own_noise(seed):
    others = torch.tensor([s for s in (0, 1, -1, 2**32) if s != seed])
    one = sampler.uniform(torch.tensor([seed]), torch.tensor([0]), 64)
    rest = sampler.uniform(others, torch.zeros_like(others), 64)
    assert not torch.isclose(one, rest).all(-1).any()


def test_noise_matches_plain_integers():
    """The tensor arithmetic against Python integers, so that no backend's wrap-around is taken on trust."""

    def mix(x: int) -> int:
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
        x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
        return x ^ (x >> 16)

    for seed, index in ((0, 0), (12345, 7), (-9, 100_000), (1 << 50, 3)):
        low = mix(mix(seed & 0xFFFFFFFF) ^ index)
        high = mix(mix(((seed >> 32) & 0xFFFFFFFF) ^ 0x5BD1E995) ^ low)
        expected = torch.tensor([(mix(mix(v ^ low) ^ high) + 0.5) / 2**32 for v in range(50)])
        got = sampler.uniform(torch.tensor([seed]), torch.tensor([index]), 50)[0]
        torch.testing.assert_close(got, expected, rtol=2e-7, atol=0)


def test_seen_tokens_are_marked_and_padding_marks_nothing():
    chunks = [chunk(0, 0, (4, 5), repetition_penalty=3.0), chunk(1)]
    params, seen = build(*chunks), sampler.new_seen(2, VOCAB, "cpu")
    seen[0, 99] = True  # left by an earlier request
    sampler.reset_seen(seen, chunks, torch.clone)
    tokens, _ = sample(logits(2), params, seen)
    assert sorted(seen[0].nonzero()[:, 0].tolist()) == sorted({4, 5, tokens[0].item()})
    before = seen[:2].clone()
    sampler.mark_seen(seen, torch.tensor([-1, -1]), torch.tensor([1, 2]))
    assert torch.equal(seen[:2], before)
    with pytest.raises(InternalError, match="no table of seen tokens"):
        sample(logits(2), params)


def test_static_buffers_give_the_same_tokens():
    chunks = [chunk(i, 2, (1, 2), **case) for i, case in enumerate(CASES)]
    params, raw = build(*chunks), logits(16)
    static = SamplingTensors.static(16, "cpu")
    tables = [sampler.new_seen(16, VOCAB, "cpu") for _ in range(2)]
    assert torch.equal(sample(raw, static, tables[1])[0], raw.argmax(-1))
    assert not tables[1][:-1].any()  # neutral rows mark nothing
    best = raw.argmax(-1).tolist()
    stale = [chunk(i, temperature=1.0, top_k=2, seed=3, min_new_tokens=9, eos_token_ids=(best[i],) * 8) for i in range(16)]
    static.copy_from(build(*stale))
    static.copy_from(params)
    for seen in tables:
        sampler.reset_seen(seen, chunks, torch.clone)
    expected, _ = sample(raw[: len(chunks)], params, tables[0])
    got, finite = sample(raw, static, tables[1])
    assert torch.equal(got[: len(chunks)], expected)
    assert torch.equal(tables[0][:-1], tables[1][:-1])
    assert torch.equal(got[len(chunks) :], raw[len(chunks) :].argmax(-1))
    assert finite.all()
    greedy = SamplingTensors.static(16, "cpu", like=build(chunk()))
    assert greedy.greedy_only
    with pytest.raises(InternalError, match="do not cover"):
        greedy.copy_from(params)


def test_external_rows_are_left_alone():
    params = build(chunk(0, external=True, temperature=1.0, top_k=3, repetition_penalty=2.0, min_new_tokens=4, eos_token_ids=(1,)))
    assert params.greedy_only


def test_compiles_to_one_graph_without_a_host_sync():
    params = SamplingTensors.static(4, "cpu")
    seen, raw = sampler.new_seen(4, VOCAB, "cpu"), logits(4)
    compiled = torch.compile(lambda x: sample(x, params, seen), backend="eager", fullgraph=True)
    assert torch.equal(compiled(raw)[0], sample(raw, params, seen)[0])
