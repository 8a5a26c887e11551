"""What routing costs on this device, measured once at warm-up, and the file that keeps it beside the program cache.

Steps are those that serve: replays of captured graphs (a few buckets), eager ones for prompts, over made-up requests whose blocks are the
first ones of the empty KV pool. Each is timed dense, routed with every row forced to run (the difference is `overhead`), and
routed as the policy decides for these rows (what it skips tells `saved`, if it skips anything). Nothing stays behind: tables and
blocks are zero again.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch

from depthfx.errors import InvalidRequestError
from depthfx.records import Chunk, SamplingParams, StepPlan
from depthfx.report import CACHES, CompileReport
from depthfx.runtime.depth_control import DepthControl, DepthCosts, StepCost, explain_costs
from depthfx.runtime.engine import Engine
from depthfx.runtime.runner import Runner
from depthfx.settings import DepthRule
from depthfx.whole_file import write_whole

_FORMAT = 1
_SECONDS = 0.45  # of measuring; what has begun is ended, buckets between the smallest and the largest are left out then
_REPEATS, _LONG_REPEATS = 3, 2  # of a decode step, and of others; the shortest counts, for whatever disturbs a step makes it longer
_MOST_REPEATS, _LEAST_SECONDS, _MOST_SECONDS = 10, 0.03, 2.0
_TRIES = 4
_CONTEXT, _LONG_CONTEXT = 64, 1024  # tokens of KV of a decode row
_PROMPTS, _HOST_PROMPTS = (256, 1024), (32, 128)  # rows of a prefill step, on a GPU and on a CPU
_COPY_BYTES, _LEAST_COPY_BYTES = 256 << 20, 16 << 20
_LEAST_SHARE = 0.05  # Project-Only pairs of the made-up rows below which what they save is not known


def depth_costs(
    runner: Runner, num_blocks: int, precision: bytes, folder: Path, key: str, rule: DepthRule, report: CompileReport
) -> DepthCosts:
    """The costs of ``runner``'s steps in state ``precision``, read from ``folder`` or measured over its first ``num_blocks`` KV blocks.

    ``key`` names program and settings; device, sizes and captured buckets count too. A file that is damaged or was made for something
    else is measured anew. Says in ``report`` what was measured and what follows from it.
    """
    identity = _identity(runner, num_blocks, precision, key)
    path = folder / "depth" / f"{hashlib.sha256(identity.encode()).hexdigest()}.json"
    costs, line = load_costs(path, identity)
    if costs is None:
        start = time.perf_counter()
        costs = measure(runner, num_blocks, precision)
        line += f", measured in {time.perf_counter() - start:.2f} s"
        line += f"; not kept, for {why}" if (why := doubt(costs)) else save_costs(path, identity, costs)
    report.add(CACHES, line)
    for text in explain_costs(costs, rule):
        report.add("depth", text)
    return costs


def doubt(costs: DepthCosts) -> str | None:
    """Why ``costs`` are not what this device costs but what something beside it did; None if nothing speaks for that.

    More rows take at most their share more, and a step is not made twice to be routed; factors of 2 beyond that are room for noise.
    """
    for steps in (costs.decode, costs.prefill):
        for few, many in pairwise(steps):
            if many.dense > 2 * few.dense * many.rows / few.rows:
                return f"{many.rows} rows took {1e3 * many.dense:.1f} ms where {few.rows} took {1e3 * few.dense:.1f}: something else was at work"
        for step in steps:
            if step.overhead > 2 * step.dense:
                return f"routing {step.rows} rows took {1e3 * step.overhead:.1f} ms more than {1e3 * step.dense:.1f}: something else was at work"
    return None


def measure(runner: Runner, num_blocks: int, precision: bytes = b"") -> DepthCosts:
    """Times steps of ``runner``, whose KV pool is empty and which nothing else uses; writes its first ``num_blocks`` blocks, then clears them."""
    bench = _Bench(runner, num_blocks, precision)
    kv = runner.shape.kv
    with torch.inference_mode():
        try:
            return bench.costs(kv.token_bytes // kv.num_layers, runner.shape.num_places)
        finally:
            bench.clear()


def calibrate_again(engine: Engine) -> DepthCosts:
    """The costs of ``engine``'s steps measured anew, and nothing known of what its skipper skips: for a policy whose tensors were changed.

    As a model that was just compiled with this policy, but for the file of costs, which is neither read nor written. Cached prefixes are forgotten.
    Raises :class:`InvalidRequestError` while requests are unfinished, or unless the model was compiled with ``depth="auto"``.
    """
    with engine._state:
        scheduler = engine._scheduler
        if scheduler.depth is None or engine.routes is None:
            raise InvalidRequestError(
                "calibrate_again: nothing is decided by costs here; compile the model with a skipper and depth='auto'"
            )
        if scheduler.has_unfinished():  # outputs that nobody has fetched do no harm
            raise InvalidRequestError(
                f"calibrate_again: {len(scheduler.unfinished())} requests are unfinished, and measuring writes over their KV; let them end first"
            )
        manager = scheduler.manager
        manager.forget_content()
        blocks = manager.num_blocks if manager.region is None else manager.region.layout.num_base_blocks
        costs = measure(cast(Runner, engine._runner), blocks, scheduler.precision)
        scheduler.depth = DepthControl(costs, scheduler.depth.rule, scheduler.depth.halves)
        engine.routes.observer = scheduler.depth.observe
    return costs


def load_costs(path: Path, identity: str) -> tuple[DepthCosts | None, str]:
    """What ``path`` keeps for ``identity``, or None, and a line that says what was found."""
    try:
        body = json.loads(path.read_text())
        if body["format"] != _FORMAT or body["identity"] != identity:
            raise ValueError("it was made for something else")
        if body["digest"] != _digest(body["costs"]):
            raise ValueError("its digest does not fit its content")
        return _parsed(body["costs"]), f"depth costs: from {path.name[:12]}"
    except FileNotFoundError:
        return None, f"depth costs: nothing is kept under {path.name[:12]}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return None, f"depth costs: {path} is not used ({type(error).__name__}: {str(error)[:80]})"


def save_costs(path: Path, identity: str, costs: DepthCosts) -> str:
    """Writes ``costs`` in one step; returns what to add to the report where it cannot."""
    plain = asdict(costs)
    body = {"format": _FORMAT, "identity": identity, "digest": _digest(json.loads(json.dumps(plain))), "costs": plain}
    try:
        write_whole(path, json.dumps(body, indent=1))
    except OSError as error:
        return f"; not kept: {error}"
    return ""


def _identity(runner: Runner, num_blocks: int, precision: bytes, key: str) -> str:
    cuda = runner.device.type == "cuda"
    device = torch.cuda.get_device_name(runner.device) if cuda else f"CPU, {torch.get_num_threads()} threads"
    how = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()  # what was measured otherwise is no longer comparable
    return repr((how, key, device, torch.__version__, runner.shape, num_blocks, (runner.graphs.buckets, runner.graphs.prompts), precision))


def _digest(costs: Any) -> str:
    return hashlib.sha256(json.dumps(costs, sort_keys=True).encode()).hexdigest()


def _parsed(data: Any) -> DepthCosts:
    steps = {}
    for kind in ("decode", "prefill"):
        steps[kind] = tuple(StepCost(**step) for step in data[kind])
        rows = [step.rows for step in steps[kind]]
        if not rows or rows != sorted(set(rows)) or any(type(r) is not int or r < 1 for r in rows):
            raise ValueError(f"rows of {kind} steps are {rows}; they must rise")
        for step in steps[kind]:
            if (
                not all(isinstance(v, float) and math.isfinite(v) for v in (step.dense, step.overhead, step.saved))
                or step.dense <= 0
                or step.saved < 0
            ):
                raise ValueError(f"{kind}: {step} has a number that cannot be")
    costs = DepthCosts(**{**data, **steps})
    if not all(0 < v < math.inf for v in (costs.bandwidth, costs.kv_rate, costs.kv_bytes, costs.num_layers)):
        raise ValueError("a rate or a size is not positive")
    return costs


class _Bench:
    def __init__(self, runner: Runner, num_blocks: int, precision: bytes) -> None:
        self.runner, self.num_blocks = runner, num_blocks
        self.hint = runner.flags.send(precision)
        self.tokens, self.columns = runner.shape.kv.block_tokens, runner.shape.blocks_per_row
        self.cuda = runner.device.type == "cuda"
        self.num_used = 0  # blocks that may have been written
        self.started = time.perf_counter()

    def costs(self, kv_bytes: int, num_layers: int) -> DepthCosts:
        """The most needed first."""
        bandwidth = self.bandwidth()
        rows = self.runner.graphs.buckets or (1, self.runner.shape.num_table_rows - 1)
        ends = sorted({rows[0], rows[-1]})
        rate = self.kv_rate(ends[-1], bandwidth)
        decode = [self.decode(count, kv_bytes * num_layers / rate) for count in ends]
        longest = min(self.runner.shape.max_batch_tokens, self.columns * self.tokens)
        prefill = [self.prompt(count) for count in sorted({min(count, longest) for count in (_PROMPTS if self.cuda else _HOST_PROMPTS)})]
        if self.runner.graphs.buckets:
            for wanted in (32, 128, 8, 64):
                bucket = next((b for b in rows if b >= wanted), rows[-1])
                if bucket not in {c.rows for c in decode} and time.perf_counter() - self.started < _SECONDS:
                    decode.append(self.decode(bucket, kv_bytes * num_layers / rate))
        decode.sort(key=lambda cost: cost.rows)
        return DepthCosts(bandwidth, rate, kv_bytes, num_layers, tuple(decode), tuple(prefill))

    def bandwidth(self) -> float:
        """Bytes a second of a copy, read and written, within the KV pool if that is large enough."""
        pool = self.runner.kv_pool.view(torch.uint8).flatten()
        half = min(self.num_blocks * self.runner.shape.kv.block_bytes // 2, _COPY_BYTES)
        if half < _LEAST_COPY_BYTES or not self.cuda:  # a pool on the host is not touched before it is needed
            pool, half = torch.zeros(2 * _LEAST_COPY_BYTES, dtype=torch.uint8, device=pool.device), _LEAST_COPY_BYTES
        source, target = pool[:half], pool[half : 2 * half]
        target.copy_(source)
        return 2 * half / min([self.timed(lambda: target.copy_(source)) for _ in range(_REPEATS)])

    def kv_rate(self, rows: int, bandwidth: float) -> float:
        """Bytes of KV that attention reads in a second, from two lengths of context; that of a copy where they do not differ enough."""
        fits = min(self.num_blocks // rows * self.tokens, self.columns * self.tokens, _LONG_CONTEXT)
        short = min(_CONTEXT, fits)
        if fits < 4 * short or not short:
            return bandwidth
        first, second = (self.times(self.decode_plan(rows, n), _LONG_REPEATS, ("dense",))["dense"] for n in (short, fits))
        if second - first < 0.02 * first:
            return bandwidth
        return min(bandwidth, rows * (fits - short) * self.runner.shape.kv.token_bytes / (second - first))

    def decode(self, rows: int, kv_seconds: float) -> StepCost:
        """``kv_seconds``: of reading the KV of one token in all routed layers."""
        context = min(_CONTEXT, self.columns * self.tokens)
        for seed in range(_TRIES):  # a few rows may all happen to skip nothing
            plan = self.decode_plan(rows, context, seed)
            self.step(plan, routed=True)
            if self.share(rows) >= _LEAST_SHARE:
                break
        return self.cost(rows, plan, _REPEATS, rows * context * kv_seconds)

    def prompt(self, rows: int) -> StepCost:
        """One prompt."""
        self.name_blocks(1, rows)
        token_ids = tuple((7 * i + 11) % self.runner.shape.vocab_size for i in range(rows))
        chunk = Chunk("0", 0, 0, token_ids, -1, True, 0, SamplingParams(), None, True, 5)
        return self.cost(rows, StepPlan(-1, (), (chunk,), ()), _LONG_REPEATS, 0.0)

    def decode_plan(self, rows: int, context: int, seed: int = 0) -> StepPlan:
        """A token of ``rows`` requests with ``context`` tokens of KV each."""
        self.name_blocks(rows, context)
        vocabulary, sampling = self.runner.shape.vocab_size, SamplingParams()
        numbers = torch.randint(0, 1 << 31, (rows,), generator=torch.Generator().manual_seed(seed)).tolist()
        chunks = (
            Chunk(str(i), i, context - 1, ((7 * i + 11 + seed) % vocabulary,), -1, True, 1, sampling, None, True, numbers[i], False)
            for i in range(rows)
        )
        return StepPlan(-1, tuple(chunks), (), ())

    def name_blocks(self, rows: int, tokens: int) -> None:
        """The tables of the first rows name blocks of their own, as far as these go."""
        columns = -(-tokens // self.tokens)
        self.num_used = max(self.num_used, min(rows * columns, self.num_blocks))
        named = torch.arange(rows * columns, dtype=torch.int32, device=self.runner.device) % self.num_blocks
        self.runner.block_tables[:rows, :columns] = named.view(rows, columns)

    def cost(self, rows: int, plan: StepPlan, repeats: int, kv_seconds: float) -> StepCost:
        """``kv_seconds``: what the KV reads of the step's routed layers take."""
        times = self.times(plan, repeats)
        share = self.share(rows)
        saved = max(0.0, (times["forced"] - times["routed"]) / share - kv_seconds) if share >= _LEAST_SHARE else 0.0
        most = times["dense"] * self.runner.shape.num_places / self.runner.shape.kv.num_layers  # the routed layers' part of the step
        return StepCost(rows, times["dense"], times["forced"] - times["dense"], min(saved, most))

    def share(self, rows: int) -> float:
        """Of Project-Only pairs, in the step before."""
        return (self.runner.tape[:, :rows] == 0).float().mean().item()

    def times(self, plan: StepPlan, repeats: int, kinds: tuple[str, ...] = ("dense", "forced", "routed")) -> dict[str, float]:
        """Seconds of the shortest step of each kind, taken ``repeats`` times in turn, short ones more often; the last step is of the last kind."""
        found, begun = dict.fromkeys(kinds, math.inf), time.perf_counter()
        decodes, prefills = (tuple(replace(c, routed=False) for c in part) for part in (plan.decodes, plan.prefills))
        free = StepPlan(-1, decodes, prefills, ())
        for turn in range(_MOST_REPEATS):
            if time.perf_counter() - self.started > _MOST_SECONDS and turn:
                break  # a slow host: once is enough
            if turn >= repeats and time.perf_counter() - begun > _LEAST_SECONDS:
                break
            if turn == 1:
                begun = time.perf_counter()  # the first one may have been cold
            for kind in kinds:
                found[kind] = min(found[kind], self.step(plan if kind == "routed" else free, routed=kind != "dense"))
        return found

    def step(self, plan: StepPlan, routed: bool) -> float:
        """Seconds of one step of the dense or the routed program."""
        runner = self.runner
        graph = runner.graphs.find(plan, self.hint, routed)
        uploaded = runner.staging.upload(plan, graph.form if graph else None, routed)
        return self.timed(graph.replay if graph else lambda: runner.forward(uploaded, self.hint, routed))

    def timed(self, once: Callable[[], Any]) -> float:
        """Seconds, by device events where there are any."""
        if not self.cuda:
            start = time.perf_counter()
            once()
            return time.perf_counter() - start
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        once()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def clear(self) -> None:
        """As if nothing had run."""
        self.runner.block_tables.zero_()
        self.runner.kv_pool[: self.num_used].zero_()  # a copy of zeros wrote zeros
        self.runner.last_tokens.zero_()
        if self.cuda:
            torch.cuda.current_stream(self.runner.device).synchronize()
