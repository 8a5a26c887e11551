"""The end of the demo: a burst of requests on nested weights in too little memory.

The KV cache cannot hold them beside weights in full precision. So residual bytes are lent to it, their layers go on in fast precision, and
when the burst is over everything returns. What is printed was counted by the engine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from depthfx.cli import chat_ids, eos_ids
from depthfx.memory_picture import MIB, draw_memory
from depthfx.settings import ElasticMemory
from depthfx.smollm2 import load_smollm2

STYLES = ("", "In one sentence: ", "As if to a child: ", "With an example: ")  # before each question
SEED = 0
_LOOK_SECONDS = 0.002  # between looks at residuals on their way back
_BACK_SECONDS = 20.0
_CALM = 0.04  # of the time of the burst: how long to look on afterwards, for the picture


@dataclass(frozen=True)
class Burst:
    """How large it is."""

    num_requests: int = 32
    max_new_tokens: int = 20
    kv_blocks: int = 16  # of 16 tokens, beside weights in full precision
    arrivals_a_token: float = 4.0  # requests that arrive, on average, while one alone would get a token


BURST = Burst()


@dataclass
class Counted:
    """What came of it, from the engine's counters."""

    requests: int
    answered: int
    tokens: int
    seconds: float  # from the first arrival to the last answer
    span: float  # from the first arrival to the last one
    rest_blocks: int
    peak_blocks: int
    units: int
    unit_bytes: int
    lends: int
    restores: int
    preemptions: int
    steps: dict[str, int]  # by precision
    back_seconds: float  # from the last answer until every layer was in full precision again
    samples: list[Any]  # of the engine's timeline, from the first arrival on
    first_tokens: list[tuple[float, float]]  # of each request: arrival since the first sample, seconds to its first token


def show_burst(
    device: str, dtype: torch.dtype, questions: Sequence[str], out: TextIO, picture: Path, burst: Burst = BURST
) -> Counted:  # fmt: skip
    """Serve the burst, print its figures to ``out``, and write the PNG ``picture`` where matplotlib is installed."""
    import depthfx

    print("\nLast, a burst of requests that the KV cache has no room for: nested weights lend it memory ...", file=out, flush=True)
    loaded, tokenizer = load_smollm2(dtype, device)
    room = ElasticMemory(unit_mib=4.0, dwell_s=0.05)
    model = depthfx.compile(loaded, weights="nested", kv_blocks=burst.kv_blocks, max_batch_size=burst.num_requests, memory=room)
    asked = [STYLES[i // len(questions) % len(STYLES)] + questions[i % len(questions)] for i in range(burst.num_requests)]
    prompts = [chat_ids(tokenizer, text) for text in asked]
    try:
        found = run_burst(model, prompts, burst)
    finally:
        model.engine.close()
    print("\n".join(lines(found)), file=out)
    print(draw(found, picture), file=out)
    return found


def run_burst(model: Any, prompts: Sequence[Sequence[int]], burst: Burst) -> Counted:
    """Serve ``prompts`` as they arrive, on a compiled ``model`` with elastic memory, until all residual bytes are back."""
    import depthfx

    engine = model.engine
    sampling = depthfx.SamplingParams(max_new_tokens=burst.max_new_tokens, eos_token_ids=eos_ids(model))
    gap = _token_seconds(engine, prompts[0]) / burst.arrivals_a_token
    engine.forget_prefixes()
    rng = random.Random(SEED)
    arrivals = [0.0]
    while len(arrivals) < len(prompts):
        arrivals.append(arrivals[-1] + rng.expovariate(1.0) * gap)
    before, first = engine.stats(), engine.timeline()[-1]
    start = time.perf_counter()
    waits, answered = _serve(engine, prompts, arrivals, sampling, start)
    ended = time.perf_counter()
    tail = _until_full(engine)
    back = time.perf_counter() - ended
    time.sleep(min(1.0, _CALM * (ended - start)))
    samples = [first, *(s for s in engine.timeline() if s.time_s > first.time_s)]
    samples = sorted([*samples, *tail], key=lambda s: s.time_s)
    after, layout = engine.stats(), engine.control.shared.layout
    steps = {mode: number - before.steps_by_precision[mode] for mode, number in after.steps_by_precision.items()}
    return Counted(
        len(prompts), answered, after.num_tokens - before.num_tokens, ended - start, arrivals[-1], samples[0].num_open_blocks,
        max(s.num_open_blocks for s in samples), layout.num_units, layout.unit_bytes, samples[-1].num_lends - first.num_lends,
        samples[-1].num_restores - first.num_restores, after.num_preemptions - before.num_preemptions, steps, back, samples,
        list(zip(arrivals, waits)),
    )  # fmt: skip


def _token_seconds(engine: Any, prompt: Sequence[int]) -> float:
    """Between two tokens of one request alone; warms up as well."""
    import depthfx

    times = [time.perf_counter() for _ in engine.stream(prompt, depthfx.SamplingParams(max_new_tokens=4))]
    return min(b - a for a, b in zip(times, times[1:]))


def _serve(
    engine: Any, prompts: Sequence[Sequence[int]], arrivals: Sequence[float], sampling: Any, start: float
) -> tuple[list[float], int]:  # fmt: skip
    """Seconds to the first token of each request, and how many were answered to their end."""
    numbers: dict[str, int] = {}
    waits, answered = [0.0] * len(prompts), 0
    while len(numbers) < len(prompts) or engine.has_unfinished():
        now = time.perf_counter() - start
        while len(numbers) < len(prompts) and arrivals[len(numbers)] <= now:
            numbers[engine.add(prompts[len(numbers)], sampling=sampling)] = len(numbers)
        if not engine.has_unfinished():
            time.sleep(max(0.0, arrivals[len(numbers)] - now))
            continue
        for output in engine.step():
            if output.error is not None:
                raise output.error
            number = numbers[output.request_id]
            if output.new_token_ids and not waits[number]:
                waits[number] = time.perf_counter() - start - arrivals[number]
            answered += output.finished
    return waits, answered


def _until_full(engine: Any) -> list[Any]:
    """Wait for residuals that the engine brings back by itself; samples of meanwhile."""
    samples, end = [], time.perf_counter() + _BACK_SECONDS
    while "fast" in engine.precision().values():
        if time.perf_counter() > end:
            engine.restore()  # tries again, and raises with the reason
        samples.append(engine.timeline()[-1])
        time.sleep(_LOOK_SECONDS)
    return [*samples, engine.timeline()[-1]]


def lines(found: Counted) -> list[str]:
    """The figures, for a person."""
    steps = sum(found.steps.values())
    shares = ", ".join(f"{number / steps:.0%} in {mode}" for mode, number in found.steps.items())
    served = f"{found.tokens} tokens in {found.seconds:.1f} s, {found.tokens / found.seconds:.0f} tokens/s, {found.preemptions} preemptions"
    units = f"{found.units} units of {found.unit_bytes / MIB:.1f} MiB, {found.lends} lends, {found.restores} restores"
    return [
        f"{found.answered} of {found.requests} requests answered, which came within {found.span:.2f} s: {served}",
        f"KV blocks: {found.rest_blocks} at rest, {found.peak_blocks} at the peak; {units}",
        f"{steps} steps: {shares} precision; full precision was back {found.back_seconds:.2f} s after the last answer",
    ]


def draw(found: Counted, picture: Path) -> str:
    """Write the PNG; returns the line that says where it is, or what is missing."""
    title = f"SmolLM2, nested weights: {found.requests} requests in a KV cache of {found.rest_blocks} blocks that borrows from residuals"
    try:
        picture.parent.mkdir(parents=True, exist_ok=True)
        draw_memory(found.samples, picture, title, found.first_tokens)
    except ImportError:
        return "a picture of it needs the package matplotlib: pip install depthfx[demo]"
    return f"picture: {picture}"
