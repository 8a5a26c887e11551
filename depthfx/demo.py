"""The demo: eight questions at once through the engine, then the same ones through Hugging Face's own ``generate``, then a burst.

Hugging Face's part runs in a process of its own, so that each peak of memory belongs to one of the two.
"""

from __future__ import annotations

import multiprocessing
import resource
import shutil
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch

from depthfx.cli import chat_ids, eos_ids
from depthfx.demo_burst import BURST, Burst, show_burst
from depthfx.settings import cache_dir, smollm2_source
from depthfx.smollm2 import FOLDER, SEAL, converted_folder, load_smollm2, shipped_skipper

QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Name three uses of a paper clip.",
    "What does a compiler do?",
    "How do bees make honey?",
    "What is photosynthesis?",
    "Why do cats purr?",
    "What causes the seasons?",
)


@dataclass
class Measured:
    """Answers and figures of one side."""

    answers: list[list[int]] = field(default_factory=list)  # token ids, without the end token
    warm_up_seconds: float = 0.0
    single_rate: float = 0.0  # tokens/s of one request
    batch_rate: float = 0.0  # tokens/s of all questions together
    peak_bytes: int = 0


def run_demo(
    device: str, dtype: torch.dtype, max_new_tokens: int, picture: Path, questions: tuple[str, ...] = QUESTIONS, burst: Burst = BURST
) -> int:  # fmt: skip
    """Answer, measure, compare, serve a ``burst`` with a ``picture`` of it (a PNG), print; the exit code is 0."""
    out = sys.stdout
    where = torch.cuda.get_device_name(device) if device.startswith("cuda") else f"CPU, {torch.get_num_threads()} threads"
    kind = str(dtype).removeprefix("torch.")
    print(f"SmolLM2-135M-Instruct, {kind}, {where}; answers of at most {max_new_tokens} tokens", file=out, flush=True)
    convert_once(out)
    print("loading and compiling ...", file=out, flush=True)
    ours, tokenizer = measure_depthfx(device, dtype, max_new_tokens, questions, out)
    print("\nNow Hugging Face's generate, in a fresh process ...", file=out, flush=True)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        theirs = pool.submit(measure_eager, device, dtype, max_new_tokens, questions).result()
    print(table(ours, theirs, len(questions)), file=out)
    print(compare(ours.answers, theirs.answers, tokenizer, dtype), file=out)
    if (skipper := shipped_skipper()) is not None:
        show_skipping(skipper, device, dtype, max_new_tokens, questions, ours, out)
    show_burst(device, dtype, questions, out, picture, burst)
    return 0


def convert_once(out: TextIO) -> None:
    """Convert SmolLM2 on the first run, in a process of its own: its peak of memory belongs to neither side."""
    if smollm2_source() is None and not (cache_dir() / FOLDER / SEAL).is_file():
        print("converting the model, once (about half a minute) ...", file=out, flush=True)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            pool.submit(converted_folder).result()


def measure_depthfx(device: str, dtype: torch.dtype, max_new_tokens: int, questions: tuple[str, ...], out: TextIO) -> tuple[Measured, Any]:
    """Stream the answers of ``questions`` to ``out`` and measure; returns the figures and the tokenizer."""
    import depthfx

    loaded, tokenizer = load_smollm2(dtype, device)
    prompts = [chat_ids(tokenizer, q) for q in questions]
    needed = sum((len(p) + max_new_tokens) // 16 + 2 for p in prompts)
    start = time.perf_counter()
    model = depthfx.compile(loaded, kv_blocks=needed)
    sampling = depthfx.SamplingParams(max_new_tokens=max_new_tokens, eos_token_ids=eos_ids(model))
    warm = depthfx.SamplingParams(max_new_tokens=4, eos_token_ids=eos_ids(model))
    serve(model.engine, prompts, warm)
    serve(model.engine, prompts[:1], warm)
    result = Measured(warm_up_seconds=time.perf_counter() - start)
    print(f"compiled and warmed up in {result.warm_up_seconds:.1f} s\n", file=out, flush=True)

    ends = set(eos_ids(model))
    screen = Screen(out, questions, lambda ids: tokenizer.decode(ids, skip_special_tokens=True))
    start = time.perf_counter()
    answers = serve(model.engine, prompts, sampling, screen)
    result.batch_rate = _rate(answers, start)
    start = time.perf_counter()
    result.single_rate = _rate(serve(model.engine, prompts[1:2], sampling), start)
    result.answers = [[t for t in ids if t not in ends] for ids in answers]
    result.peak_bytes = peak_bytes(device)
    print(f"\n{sum(map(len, answers))} tokens for {len(questions)} questions at {result.batch_rate:.0f} tokens/s", file=out)
    return result, tokenizer


def show_skipping(
    skipper: Path, device: str, dtype: torch.dtype, max_new_tokens: int, questions: tuple[str, ...], ours: Measured, out: TextIO
) -> None:
    """The same questions once more with a skipper: how many layers its tokens left out, its pace, and how far the answers are the same."""
    import depthfx

    print("\nNow the same with the skipper in the package, which lets each token leave out layers ...\n", file=out, flush=True)
    loaded, tokenizer = load_smollm2(dtype, device)
    prompts = [chat_ids(tokenizer, q) for q in questions]
    needed = sum((len(p) + max_new_tokens) // 16 + 2 for p in prompts)
    # on a CPU Inductor takes 25 of 33 s to compile the routed program, which is no faster with it (50 against 52 tokens/s)
    model = depthfx.compile(loaded, skipper=skipper, kv_blocks=needed, inductor=not device.startswith("cpu"))
    ends = set(eos_ids(model))
    serve(model.engine, prompts, depthfx.SamplingParams(max_new_tokens=4, eos_token_ids=eos_ids(model)))
    before = model.engine.routes.counts()
    screen = Screen(out, questions, lambda ids: tokenizer.decode(ids, skip_special_tokens=True))
    start = time.perf_counter()
    answers = serve(model.engine, prompts, depthfx.SamplingParams(max_new_tokens=max_new_tokens, eos_token_ids=eos_ids(model)), screen)
    rate = _rate(answers, start)
    after = model.engine.routes.counts()
    run, project = (sum(getattr(after, name)) - sum(getattr(before, name)) for name in ("run", "project"))
    rows, num_layers = (run + project) / len(after.layers), model.config.num_hidden_layers
    same = [_same_start([t for t in a if t not in ends], b) for a, b in zip(answers, ours.answers)]
    print(
        f"\n{project / (rows * num_layers):.1%} of all layer passes were left out, in {len(after.layers)} routed layers of {num_layers}.",
        file=out,
    )
    print(pace_beside(rate, ours.batch_rate, len(questions)), file=out)
    print(f"On average the first {sum(same) / len(same):.0f} tokens of an answer are those without it;", file=out)
    print("from there on it is the answer of a model that does less for each token, and less reliable.", file=out)


def pace_beside(rate: float, plain: float, count: int) -> str:
    """One line on tokens/s with the skipper and without it, for ``count`` questions."""
    slower = " Here routing costs more than it saves: the layers of so small a model are cheap." if rate < plain else ""
    return f"{rate:.0f} tokens/s for {count} questions, {plain:.0f} without the skipper.{slower}"


def serve(engine: Any, prompts: list[list[int]], sampling: Any, screen: Screen | None = None) -> list[list[int]]:
    """Run all prompts together to their ends; the produced ids in the order of the prompts."""
    ids = [engine.add(prompt, sampling=sampling) for prompt in prompts]
    index = {request_id: i for i, request_id in enumerate(ids)}
    answers: list[list[int]] = [[] for _ in prompts]
    while engine.has_unfinished():
        for output in engine.step():
            i = index[output.request_id]
            if output.error is not None:
                raise output.error if isinstance(output.error, Exception) else RuntimeError(str(output.error))
            answers[i].extend(int(t) for t in output.new_token_ids)
            if screen is not None:
                screen.show(i, answers[i], output.finished)
    return answers


def measure_eager(device: str, dtype: torch.dtype, max_new_tokens: int, questions: tuple[str, ...]) -> Measured:
    """The same questions through Hugging Face's ``generate``: one left-padded batch, and one question alone."""
    model, tokenizer = load_smollm2(dtype, device)
    tokenizer.padding_side = "left"
    ends = set(eos_ids(model))

    def answer(prompts: list[list[int]]) -> list[list[int]]:
        batch = tokenizer.pad({"input_ids": prompts}, return_tensors="pt").to(device)
        with torch.inference_mode():
            rows = model.generate(**batch, max_new_tokens=max_new_tokens, do_sample=False)[:, batch["input_ids"].shape[1] :].tolist()
        return [_until_end(row, ends) for row in rows]

    prompts = [chat_ids(tokenizer, q) for q in questions]
    result = Measured()
    start = time.perf_counter()
    answer(prompts[:1])
    result.warm_up_seconds = time.perf_counter() - start
    start = time.perf_counter()
    answers = answer(prompts)
    result.batch_rate = _rate(answers, start)
    start = time.perf_counter()
    result.single_rate = _rate(answer(prompts[1:2]), start)
    result.answers = [[t for t in ids if t not in ends] for ids in answers]
    result.peak_bytes = peak_bytes(device)
    return result


def peak_bytes(device: str) -> int:
    """Most memory so far: of the device's tensors on CUDA, of the whole process on a CPU."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss would include the parent's memory at the time of the fork
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM:")) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def table(ours: Measured, theirs: Measured, batch: int) -> str:
    """The figures side by side."""
    rows = [
        ("", "depthfx", "Hugging Face", ""),
        ("tokens/s, batch 1", f"{ours.single_rate:.1f}", f"{theirs.single_rate:.1f}", _ratio(ours.single_rate, theirs.single_rate)),
        (f"tokens/s, batch {batch}", f"{ours.batch_rate:.1f}", f"{theirs.batch_rate:.1f}", _ratio(ours.batch_rate, theirs.batch_rate)),
        ("peak memory", f"{ours.peak_bytes / 2**20:,.0f} MiB", f"{theirs.peak_bytes / 2**20:,.0f} MiB", ""),
    ]
    return "\n" + "\n".join(f"{a:<20}{b:>14}{c:>15}{d:>9}".rstrip() for a, b, c, d in rows) + "\n"


def compare(ours: list[list[int]], theirs: list[list[int]], tokenizer: Any, dtype: torch.dtype) -> str:
    """One line on the greedy answers, and for each that differs the first place where it does."""
    differing = [i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b]
    lines = [f"{len(ours) - len(differing)} of {len(ours)} greedy answers are the same, token for token."]
    if differing and dtype != torch.float32:
        lines[0] += " 16-bit sums depend on their order; in float32 on a CPU the answers compare exactly."
    for i in differing:
        at = next((k for k, (a, b) in enumerate(zip(ours[i], theirs[i])) if a != b), min(len(ours[i]), len(theirs[i])))
        a, b = (repr(tokenizer.decode(x[at : at + 4])) for x in (ours[i], theirs[i]))
        lines.append(f"  question {i + 1} parts at token {at}: {a} / {b}")
    return "\n".join(lines)


class Screen:
    """The answers on a terminal, one live line each; where output is not a terminal, each answer once it is complete."""

    def __init__(self, out: TextIO, questions: tuple[str, ...], decode: Callable[[list[int]], str]) -> None:
        self.out = out
        self.questions = questions
        self.decode = decode
        self.live = out.isatty()
        self.width = max(20, min(shutil.get_terminal_size().columns, 110))
        self.open = list(range(len(questions)))
        self.tails = [""] * len(questions)
        self.drawn = 0

    def show(self, index: int, ids: list[int], finished: bool) -> None:
        """Take the answer of question ``index`` so far."""
        text = " ".join(self.decode(ids).replace("\ufffd", "").split())
        self.tails[index] = text
        if finished:
            self.open.remove(index)
            self._clear()
            body = textwrap.fill(text, self.width, initial_indent="   ", subsequent_indent="   ")
            print(f"{index + 1}. {self._bold(self.questions[index])}\n{body}", file=self.out)
        if self.live:
            self._clear()
            self._draw()
        self.out.flush()

    def _draw(self) -> None:
        for i in self.open:
            head = f"   {i + 1}> "
            room = self.width - len(head) - 1
            self.out.write(f"{head}{self.tails[i][-room:]}\n")
        self.drawn = len(self.open)

    def _clear(self) -> None:
        if self.drawn:
            self.out.write(f"\x1b[{self.drawn}A\x1b[J")
            self.drawn = 0

    def _bold(self, text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if self.live else text


def _until_end(row: list[int], ends: set[int]) -> list[int]:
    for k, token in enumerate(row):
        if token in ends:
            return row[: k + 1]
    return row


def _same_start(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _rate(answers: list[list[int]], start: float) -> float:
    return sum(map(len, answers)) / (time.perf_counter() - start)


def _ratio(ours: float, theirs: float) -> str:
    return f"{ours / theirs:.2f}x" if theirs else ""
