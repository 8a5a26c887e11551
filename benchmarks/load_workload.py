"""What arrives when: arrivals from a trace or a seeded process, lengths and prompts from a trace, a benchmark file or a distribution.

Traces are CSV files with a header: ``arrival_s,input_tokens,output_tokens``, or the official columns of BurstGPT (``Timestamp``,
``Request tokens``, ``Response tokens`` and others). Benchmark files are GSM8K-like JSON lines (``question``, ``answer``) or BBH-like
JSON (``examples`` of ``input`` and ``target``), with an optional file of examples that all prompts share.
"""

from __future__ import annotations

import csv
import json
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

Tokenizer = Callable[[str], list[int]]
# Header columns of the known formats: arrival in seconds, tokens of the prompt, tokens of the answer.
TRACE_COLUMNS = (("arrival_s", "input_tokens", "output_tokens"), ("Timestamp", "Request tokens", "Response tokens"))
_CALCULATOR = re.compile(r"<<[^>]*>>")
_WORDS = re.compile(r"\w{1,4}|[^\w\s]|\n")


@dataclass(frozen=True)
class TraceRow:
    """One request of a trace; ``arrival_s`` counts from the first row of its window."""

    arrival_s: float
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Ask:
    """What one request asks: its prompt, and the tokens of its answer (in natural mode: at most so many)."""

    prompt: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True)
class Job:
    """An ask and when it arrives, in seconds since the start."""

    number: int
    arrival_s: float
    ask: Ask


def read_trace(path: Path, first: int = 0, count: int | None = None) -> list[TraceRow]:
    """Rows ``first`` to ``first + count`` (None: to the end) of those that are no failed requests (0 tokens), in the order of arrival.

    Raises ``ValueError`` for unknown columns, a bad number, or a window that the file does not have.
    """
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        header = reader.fieldnames or []
        columns = next((c for c in TRACE_COLUMNS if set(c) <= set(header)), None)
        if columns is None:
            known = " or ".join(",".join(c) for c in TRACE_COLUMNS)
            raise ValueError(f"{path.name}: columns {header} are no known trace; its first line must name {known}")
        rows = []
        for number, line in enumerate(reader, 2):
            try:
                row = TraceRow(float(line[columns[0]]), int(line[columns[1]]), int(line[columns[2]]))
            except (TypeError, ValueError):
                raise ValueError(f"{path.name}, line {number}: {line} lacks a number in one of {columns}") from None
            rows.append(row)
    served = sorted((r for r in rows if r.input_tokens > 0 and r.output_tokens > 0), key=lambda r: r.arrival_s)
    end = len(served) if count is None else first + count
    if first < 0 or not first < end <= len(served):
        raise ValueError(f"{path.name} has {len(served)} requests with tokens; the window [{first}, {end}) is not inside: choose another")
    window = served[first:end]
    return [TraceRow(r.arrival_s - window[0].arrival_s, r.input_tokens, r.output_tokens) for r in window]


def mean_rate(arrivals: Sequence[float]) -> float:
    """Requests a second: intervals over the time from the first arrival to the last. Raises ``ValueError`` where that time is 0."""
    if len(arrivals) < 2 or arrivals[-1] <= arrivals[0]:
        raise ValueError(f"{len(arrivals)} arrivals within no time have no rate; give two or more that differ")
    return (len(arrivals) - 1) / (arrivals[-1] - arrivals[0])


def scaled(arrivals: Sequence[float], rate: float) -> list[float]:
    """The same arrivals, played faster or slower so that their mean rate is ``rate`` a second, from 0."""
    factor = mean_rate(arrivals) / rate
    return [(a - arrivals[0]) * factor for a in arrivals]


def gamma_arrivals(count: int, rate: float, cv: float, seed: int) -> list[float]:
    """Arrivals whose gaps are Gamma with mean ``1 / rate`` and coefficient of variation ``cv`` (shape ``1 / cv**2``); 1 is a Poisson process.

    The gaps of one seed are the same at every rate but for their scale. Raises ``ValueError`` for what is not positive.
    """
    if count < 1 or rate <= 0 or cv <= 0:
        raise ValueError(f"gamma_arrivals: count={count!r}, rate={rate!r} and cv={cv!r} must be positive")
    shape = 1 / cv**2
    return list(np.cumsum(np.random.default_rng(seed).gamma(shape, 1 / shape, count)) / rate)


def draw_lengths(text: str, count: int, rng: np.random.Generator) -> list[int]:
    """``count`` lengths of at least 1 from ``fixed:N``, ``uniform:LOW:HIGH`` (both included) or ``lognormal:MEDIAN:SIGMA``.

    Raises ``ValueError`` for any other text.
    """
    kind, *values = text.split(":")
    try:
        numbers = [float(v) for v in values]
    except ValueError:
        numbers = []
    if kind == "fixed" and len(numbers) == 1 and numbers[0] >= 1:
        return [int(numbers[0])] * count
    if kind == "uniform" and len(numbers) == 2 and 1 <= numbers[0] <= numbers[1]:
        return rng.integers(int(numbers[0]), int(numbers[1]) + 1, count).tolist()
    if kind == "lognormal" and len(numbers) == 2 and numbers[0] >= 1 and numbers[1] >= 0:
        return np.maximum(1, np.rint(numbers[0] * np.exp(numbers[1] * rng.standard_normal(count)))).astype(int).tolist()
    raise ValueError(f"lengths {text!r} must be fixed:N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA, with lengths of at least 1")


def random_asks(inputs: Sequence[int], outputs: Sequence[int], vocabulary: int, rng: np.random.Generator, shared: int = 0) -> list[Ask]:
    """Prompts of random ids of these lengths, whose first ``shared`` tokens (as many as they have) are the same."""
    prefix = rng.integers(10, vocabulary - 10, shared).tolist()
    asks = []
    for length, output in zip(inputs, outputs, strict=True):
        own = rng.integers(10, vocabulary - 10, max(0, length - shared)).tolist()
        asks.append(Ask(tuple(prefix[:length] + own), output))
    return asks


def stand_in_tokenizer(vocabulary: int) -> Tokenizer:
    """Ids of a text without a tokenizer: hashes of its words, cut into four letters; equal texts give equal ids, lengths are about right."""
    return lambda text: [10 + zlib.crc32(piece.encode()) % (vocabulary - 20) for piece in _WORDS.findall(text)]


def benchmark_asks(
    path: Path, examples: Path | None, tokenize: Tokenizer, count: int, rng: np.random.Generator, shuffle: bool = False
) -> list[Ask]:
    """``count`` different questions of a benchmark file, or of a folder of BBH tasks, in random order, each behind its examples.

    All prompts share the examples; those of a folder share TASK.txt of the folder ``examples`` with their task. With ``shuffle`` each prompt has
    the examples of a .jsonl file in a random order of its own, as where they are drawn for each question: what can be shared is then little.
    The answer's length is that of the file's own answer for GSM8K; for BBH, whose targets are a word or two, that of the reasoning in the
    examples, one after another. Raises ``ValueError`` for a file of another form, an empty folder, or fewer questions.
    """
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    questions = [(f, *pair) for f in files for pair in (_gsm8k(f) if f.suffix == ".jsonl" else _bbh(f))]
    if count > len(questions):
        raise ValueError(
            f"{path.name} has {len(questions)} questions; ask for at most so many, as repeated ones would be found in the cache"
        )
    if path.is_dir() and examples is not None and not examples.is_dir():
        raise ValueError(f"{path.name} is a folder of tasks and {examples.name} is not one of their examples; give the folder of TASK.txt")
    shots = {f: _examples(examples / f"{f.stem}.txt" if examples is not None and path.is_dir() else examples, tokenize) for f in files}
    asks = []
    for place, index in enumerate(rng.permutation(len(questions))[:count]):
        file, question, answer = questions[index]
        texts, lengths = shots[file]
        if answer is None and not lengths:
            raise ValueError(f"{path.name} says nothing of the length of answers; give its file of examples, or a distribution of lengths")
        output = lengths[place % len(lengths)] if answer is None else len(tokenize(answer))
        order = rng.permutation(len(texts)) if shuffle else range(len(texts))
        prompt = "".join(texts[i] for i in order)
        asks.append(Ask(tuple(tokenize(f"{prompt}Q: {question}\nA:")), max(1, output)))
    return asks


def _gsm8k(path: Path) -> list[tuple[str, str | None]]:
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        return [(row["question"], _CALCULATOR.sub("", row["answer"])) for row in rows]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path.name}: each line must be a JSON object with question and answer ({error!r})") from error


def _bbh(path: Path) -> list[tuple[str, str | None]]:
    try:
        return [(example["input"], None) for example in json.loads(path.read_text())["examples"]]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path.name}: it must be a JSON object whose examples have an input each ({error!r})") from error


def _examples(path: Path | None, tokenize: Tokenizer) -> tuple[list[str], list[int]]:
    """The texts that stand before a question, and the lengths of the answers in them."""
    if path is None:
        return [], []
    if path.suffix == ".jsonl":
        pairs = _gsm8k(path)
        return [f"Q: {q}\nA: {a}\n\n" for q, a in pairs], [len(tokenize(a)) for _, a in pairs if a]
    text = path.read_text().split("-----\n", 1)[-1].strip() + "\n\n"  # before the line of dashes stands a canary
    return [text], [len(tokenize(part.split("\nQ:")[0].strip())) for part in text.split("\nA:")[1:]]


def clamp(asks: Sequence[Ask], max_input: int | None, max_output: int | None) -> tuple[list[Ask], int]:
    """Prompts cut to their first ``max_input`` tokens and answers to ``max_output`` (None: as they are), and how many asks that changed."""
    cut = [
        Ask(a.prompt if max_input is None else a.prompt[:max_input], a.output_tokens if max_output is None else min(a.output_tokens, max_output))
        for a in asks
    ]  # fmt: skip
    return cut, sum(a != b for a, b in zip(asks, cut))
