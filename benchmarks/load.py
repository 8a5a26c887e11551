"""Requests that arrive one by one in real time: latency, SLO attainment and capacity of several ways to serve the same work.

``python3 benchmarks/load.py --arms static-fp16 elastic --arrivals gamma --cv 2 --rates 2 4 8 --requests 500`` from the root of the repository.
Arms are the table of `benchmarks/load_arms.py`; the first one named is the baseline of the paired changes. To try it on a CPU:
``--shape smollm2 --layers 2 --kv-blocks 64 --unit-mib 0.25 --max-batch 8 --max-len 512 --no-inductor --requests 8 --rates 4
--input-tokens fixed:24 --output-tokens fixed:8 --base-batch 2 --base-context 32 --base-steps 12 --repeats 2``.
Results go to $OUT, or to benchmarks/results/.

    arrivals   poisson, gamma (--cv), or the CSV file of a trace, played so that its mean rate is the one of --rates or --factors
    lengths    those of the trace; --lengths with a benchmark file (.jsonl like GSM8K, .json like BBH) behind --examples, or with the CSV file of
               a trace, whose arrivals do not count then; or distributions
    work       matched: each request produces the tokens that it asks for, end tokens ignored; natural: it may end earlier
    SLO        TTFT at most --slo-ttft seconds and no gap between tokens above --slo-gaps x T_base. T_base: p99 of the decode steps of
               32 requests with contexts of 4k on weights of 16 bits (--base-batch, --base-context, --base-stat), the same for all arms
    capacity   --capacity LOW HIGH: highest rate at which --share of the requests attain the SLO, by bisection down to --resolution; --guesses:
               from a guess for each arm, which takes fewer runs. Then --own-shares and --base-shares: runs at parts of what was found
    repeats    each with a seed of its own; the order of the arms alternates, and each change of arm compiles anew
    an end     by SIGINT or SIGTERM, of `timeout` for one: what was run is kept and drawn
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import common
import load_arms
import load_plots
import numpy as np
import torch
from load_drive import Limits, Run, replay
from load_metrics import LATENCIES, Slo, aggregate, attainment, find_capacity, find_capacity_from, in_window, summarise
from load_options import parse_arguments
from load_workload import (
    Ask,
    Job,
    benchmark_asks,
    clamp,
    draw_lengths,
    gamma_arrivals,
    mean_rate,
    random_asks,
    read_trace,
    scaled,
)

GIB = 1 << 30
COLUMNS = ["arm", "rate", "repeat", "finished", "tokens/s", "requests/s", "mean E2E s", "p99 E2E s", "mean TTFT s", "p99 TTFT s", "mean TPOT ms",
           "p99 largest gap ms", "SLO %", "full %", "transitions", "num_preemptions", "peak lent units", "lent GiB",
           "num_restores", "skip share", "num_promotions", "stopped"]  # fmt: skip
# Figures that are averaged over repeats, with intervals and paired changes.
METRICS = ["tokens/s", "requests/s", "SLO %", "makespan s", "full %", "num_preemptions", "skip share"]
METRICS += [f"{what} {name}" for name, _, _ in LATENCIES for what in ("mean", "p50", "p90", "p99")]
Rows = list[dict[str, Any]]


class Workload:
    """What the repeats of a command ask for: asks and arrivals by seed, the same for every arm."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.vocabulary = args, load_arms.vocabulary_of(args)
        self.tokenize, self.tokenizer = load_arms.load_tokenizer(args, self.vocabulary)
        is_trace = args.arrivals not in ("poisson", "gamma")
        self.trace = read_trace(Path(args.arrivals), args.first, args.requests) if is_trace else None
        self.measured = self.trace  # whose lengths are asked for
        self.benchmark = args.lengths if args.lengths and not args.lengths.endswith(".csv") else None  # whose texts are
        if args.lengths and not self.benchmark:
            self.measured = read_trace(Path(args.lengths), args.first, args.requests)
        natural = mean_rate([r.arrival_s for r in self.trace]) if self.trace else 0.0
        self.rates = [f * natural for f in args.factors] if args.factors else args.rates or ([natural] if self.trace else [])
        self.recorded = json.loads(Path(args.output_lengths).read_text()) if args.output_lengths else None
        self.num_cut = 0
        self.asks(0)  # what is wrong with the files shows before anything is compiled

    def asks(self, repeat: int) -> list[Ask]:
        """Prompts and output lengths of one repeat."""
        args = self.args
        rng = np.random.default_rng([args.seed + repeat, 1])
        output_tokens = args.output_tokens
        if self.benchmark:
            examples = Path(args.examples) if args.examples else None
            asks = benchmark_asks(Path(self.benchmark), examples, self.tokenize, args.requests, rng, args.shuffle_examples)
        elif self.measured is not None and args.input_tokens is None:
            inputs, outputs = [r.input_tokens for r in self.measured], [r.output_tokens for r in self.measured]
            asks = random_asks(inputs, outputs, self.vocabulary, rng, args.shared_prefix)
        else:
            inputs = draw_lengths(args.input_tokens or "fixed:512", args.requests, rng)
            asks = random_asks(inputs, [1] * len(inputs), self.vocabulary, rng, args.shared_prefix)
            output_tokens = output_tokens or "fixed:128"
        lengths = self.recorded[str(repeat)] if self.recorded else None
        if output_tokens is not None:
            lengths = draw_lengths(output_tokens, len(asks), rng)
        if lengths is not None:
            asks = [Ask(a.prompt, n) for a, n in zip(asks, lengths, strict=True)]
        asks, self.num_cut = clamp(asks, args.max_input, args.max_output)
        return [Ask(a.prompt, args.max_output) for a in asks] if args.work == "natural" else asks

    def jobs(self, asks: list[Ask], rate: float, repeat: int) -> list[Job]:
        """Asks with their arrivals at a mean ``rate``."""
        if self.trace is not None:
            arrivals = scaled([r.arrival_s for r in self.trace], rate)
        else:
            cv = 1.0 if self.args.arrivals == "poisson" else self.args.cv
            arrivals = gamma_arrivals(len(asks), rate, cv, self.args.seed + repeat)
        return [Job(i, a, ask) for i, (a, ask) in enumerate(zip(arrivals, asks, strict=True))]


class Bench:
    """One command: its arms in turn, its rows, and what the picture shows."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, common.default_device()
        torch.zeros(1, device=self.device)  # PyTorch's context first
        try:
            self.workload = Workload(args)
        except ValueError as error:
            raise SystemExit(f"load: {error}") from error
        self.slo, base = self._slo()
        self.rows: Rows = [{"kind": "SLO", **asdict(self.slo), "T_base": base}]
        self.series: dict[str, dict[str, Any]] = {}
        self.lengths: dict[str, list[int]] = {}
        self._model: Any = None
        self._name = ""

    def _slo(self) -> tuple[Slo, dict[str, float]]:
        args = self.args
        if args.t_base_ms is not None:
            base = {"given": args.t_base_ms / 1e3}
            return Slo(args.slo_ttft, args.slo_gaps * base["given"]), base
        base = load_arms.base_time(args, self.device)
        common.release()
        print(f"T_base {base[args.base_stat] * 1e3:.3f} ms ({args.base_stat} of {base['n']} steps)", flush=True)
        return Slo(args.slo_ttft, args.slo_gaps * base[args.base_stat]), base

    def arm(self, name: str) -> Any:
        """The compiled model of an arm, which takes the place of the one before."""
        if self._name != name:
            self.close()
            self._model, self._name = load_arms.build(name, self.args, self.device), name
            asks = self.workload.asks(0)
            load_arms.check_room(self._model, asks)
            load_arms.warm_up(self._model, asks[: min(16, self.args.max_batch)])
            common.settle()
        return self._model

    def close(self) -> None:
        """Give the present arm's memory back."""
        if self._model is not None:
            self._model.engine.close()
        self._model, self._name = None, ""
        common.release()

    def run(self, name: str, asks: list[Ask], rate: float, repeat: int, limits: Limits) -> dict[str, Any]:
        """One run of an arm at a rate, as a row."""
        fresh, model = name != self._name, self.arm(name)
        load_arms.reset(model)
        jobs = self.workload.jobs(asks, rate, repeat)
        if fresh and self.args.warm_up:  # as in the run: libraries look for an algorithm when they meet a number of rows
            replay(model.engine, jobs[: self.args.warm_up])
            load_arms.reset(model)
        timeline = model.engine.timeline()
        eos = _eos(model) if self.args.work == "natural" else ()
        run = replay(model.engine, jobs, eos, limits)
        window = (self.args.lead_in, jobs[-1].arrival_s)
        if not in_window(run.requests, window):
            raise SystemExit(
                f"--lead-in {self.args.lead_in} s is after the last arrival at {window[1]:.3f} s; lower it, or give more --requests"
            )
        row = {"arm": name, "rate": rate, "repeat": repeat, **summarise(run.requests, window, self.slo), **_counted(run)}
        if hasattr(model.engine.control, "shared"):
            layout = model.engine.control.shared.layout
            most = (run.peak_open_blocks - layout.num_base_blocks) // layout.blocks_per_unit
            row |= {"units": layout.num_units, "peak lent units": most, "peak lent GiB": most * layout.unit_bytes / GIB}
        row |= {"stopped": run.stopped, "cut asks": self.workload.num_cut}
        self._keep(name, rate, run, model, timeline[-1].time_s if timeline else None)
        if self.args.work == "natural" and name == self.args.arms[0]:
            self.lengths.setdefault(str(repeat), [len(r.token_s) for r in run.requests])
        common.print_table([row], [c for c in COLUMNS if row.get(c) is not None])
        row["attained"] = attainment(in_window(run.requests, window), self.slo)
        return row

    def _keep(self, name: str, rate: float, run: Run, model: Any, begun: float | None) -> None:
        """The course of the run at the highest rate, for the picture."""
        if rate < self.series.get(name, {"rate": 0.0})["rate"]:
            return
        memory = [] if begun is None else [s for s in model.engine.timeline() if s.time_s >= begun]
        lends = hasattr(model.engine.control, "shared")
        self.series[name] = {"rate": rate, "samples": run.samples, "memory": memory if lends else [], "memory_begun": begun}

    def write(self) -> Path:
        """All rows so far, with averages over repeats; returns the path without its ending."""
        base = self.args.arms[0]
        whole = [r for r in self.rows if r["kind"] == "run" or (r["kind"] == "capacity run" and r["stopped"] is None)]
        runs = {(r["arm"], r["rate"], r["repeat"]): r for r in whole}
        means = [{"kind": "mean", **r} for r in aggregate(list(runs.values()), ("arm", "rate"), METRICS, base)]
        ends = [r for r in self.rows if r["kind"] == "capacity"]
        open_ended = {r["arm"] for r in ends if r["status"] != "found"}  # of these, a mean would say nothing
        found = [r for r in ends if r["arm"] not in open_ended]
        means += [{"kind": "mean capacity", **r} for r in aggregate(found, ("arm",), ["capacity/s"], base)]
        series = [
            {"kind": "series", "arm": n, "rate": s["rate"], "samples": [asdict(x) for x in load_plots.thinned(s["samples"])]}
            for n, s in self.series.items()
        ]  # fmt: skip
        return common.write_results(f"load-{self.args.name}", self.rows + means + series, self.device)


def _eos(model: Any) -> tuple[int, ...]:
    ids = model.generation_config.eos_token_id
    if ids is None:
        raise SystemExit("--work natural needs a model with an end token; random weights have none: give --model, or --work matched")
    return tuple(ids) if isinstance(ids, (list, tuple)) else (ids,)


def _counted(run: Run) -> dict[str, Any]:
    """Shares of time by mode, and the engine's counters."""
    seconds = sum(run.mode_s.values())
    row: dict[str, Any] = {f"{mode} %": run.mode_s.get(mode, 0.0) / seconds * 100 for mode in ("full", "mixed", "fast")}
    row |= {"transitions": run.transitions, **run.counters, "peak KV %": max(s.held_blocks / s.open_blocks for s in run.samples) * 100}
    row |= {"peak held blocks": run.peak_held_blocks, "peak open blocks": run.peak_open_blocks}
    if "lent_bytes" in row:
        row["lent GiB"] = row["lent_bytes"] / GIB
    return row


def sweep(bench: Bench, name: str, repeat: int) -> None:
    """All rates, lowest first."""
    asks = bench.workload.asks(repeat)
    for rate in sorted(bench.workload.rates):
        bench.rows.append({"kind": "run", **bench.run(name, asks, rate, repeat, Limits(seconds=bench.args.limit_s))})
        bench.write()


def capacity(bench: Bench, name: str, repeat: int) -> None:
    """The search, in which a run is given up once it cannot attain the share; then the runs at parts of what was found."""
    args = bench.args
    asks = bench.workload.asks(repeat)
    limits = Limits(args.limit_s, bench.slo, args.share, args.lead_in)

    def attains(rate: float) -> float:
        row = bench.run(name, asks, rate, repeat, limits)
        bench.rows.append({"kind": "capacity run", **row})
        bench.write()
        return float(row["attained"])

    if args.guesses:
        guess = args.guesses[args.arms.index(name) % len(args.guesses)]
        found = find_capacity_from(attains, guess, args.resolution, args.share)
    else:
        found = find_capacity(attains, *args.capacity, args.resolution, args.share)
    row = {"kind": "capacity", "arm": name, "repeat": repeat, "capacity/s": found.rate, **asdict(found), "resolution": args.resolution}
    print(f"{name}: capacity {found.rate:.3f}/s ({found.status}; fails at {found.fails_at})", flush=True)
    bench.rows.append(row)
    base = [r["capacity/s"] for r in bench.rows if r["kind"] == "capacity" and r["arm"] == args.arms[0]][-1]
    own = args.own_shares if name != args.arms[0] else []
    for of, share, most in [("own", x, found.rate) for x in own] + [("baseline", x, base) for x in args.base_shares]:
        if most:
            run = bench.run(name, asks, share * most, repeat, Limits(args.limit_s))
            bench.rows.append({"kind": "run", "share of capacity": share, "capacity of": of, **run})
            bench.write()


def turns(args: argparse.Namespace) -> list[tuple[str, int]]:
    """Arms and repeats in the order in which they run."""
    if args.order == "blocked":
        return [(name, repeat) for name in args.arms for repeat in range(args.repeats)]
    return [(name, repeat) for repeat in range(args.repeats) for name in (args.arms if repeat % 2 == 0 else args.arms[::-1])]


def main() -> int:
    """Run, show and keep everything; the exit code."""
    args = parse_arguments(__doc__)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts commands in the background without it
    bench = Bench(args)
    searches = bool(args.capacity or args.guesses)
    parts: list[Callable[[Bench, str, int], None]] = [] if searches and not (args.rates or args.factors) else [sweep]
    parts += [capacity] if searches else []
    code = 0
    try:
        for name, repeat in turns(args):
            for part in parts:
                part(bench, name, repeat)
        bench.close()
    except KeyboardInterrupt:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it comes to a group of processes twice
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("interrupted: what follows is of the runs that had ended", flush=True)
        code = 130
    show(bench)
    return code


def show(bench: Bench) -> None:
    """Everything so far: tables, JSON, PNG."""
    args, base = bench.args, bench.write()
    rows = json.loads(base.with_suffix(".json").read_text())["rows"]
    means = [r for r in rows if r["kind"] == "mean"]
    if means:
        shown = ["arm", "rate", "repeats"]
        for metric in ("tokens/s", "SLO %", "mean E2E s", "p99 TTFT s"):
            shown += [metric, f"{metric} +-", *([f"{metric} vs {args.arms[0]} %"] if len(args.arms) > 1 else [])]
        common.print_table(means, shown)
    ends = [r for r in rows if r["kind"] in ("capacity", "mean capacity")]
    if ends:
        shown = ["kind", "arm", "repeat", "capacity/s", "status", "fails_at", "capacity/s +-"]
        common.print_table(ends, shown + [f"capacity/s vs {args.arms[0]} {sign}" for sign in ("%", "+-")] * (len(args.arms) > 1))
    if args.record_lengths:
        Path(args.record_lengths).write_text(json.dumps(bench.lengths))
    title = f"{args.model or args.shape}: {args.requests} requests, {Path(args.arrivals).stem} arrivals, {args.work} work"
    load_plots.draw_load(base.with_suffix(".png"), title, means, bench.series, bench.slo.ttft_s)
    print(f"prompts by {bench.workload.tokenizer if bench.workload.benchmark else 'random ids'}; wrote {base}.json and .png")


if __name__ == "__main__":
    sys.exit(main())
