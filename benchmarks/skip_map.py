"""Nine RandomSkip arms: change of mean E2E against dense with the depth switch off (always routed) and on (auto), as a map.

``python3 benchmarks/skip_map.py --rates 12 --requests 100 --lengths GSM8K.jsonl --examples EXAMPLES.jsonl --limit 560`` from the root of the
repository; paper vSkipper, Figure 3. To try it on a CPU: ``--shape smollm2 --layers 8 --kv-blocks 128 --max-batch 8 --max-len 256
--no-inductor --requests 12 --rates 6 --input-tokens uniform:16:48 --output-tokens uniform:8:24``. Results go to $OUT, or to benchmarks/results/.

    arm        a share r (--skip-rates) of the tokens skips the last share d (--skip-depths) of the routed layers, the last half of the model
    --hash     position (default): tokens skip by their position alone, so that requests share the KV of a routed prefix as they do with a
               skipper that looks at hidden states; request: RandomSkip as it is, by request too, which computes shared examples for each
               request anew and is charged for it
    switch     dense: no skipper; routed: every row; auto: by what is measured. All of it is one compiled model: rate and depth are a tensor
               (dial.py), the depth is that of each request. Before each auto run costs are measured anew and nothing is known of the skipper, as
               after compiling with it; measuring is not in the run, the first looks at what the skipper would skip are
    work       matched, options as in load.py; dense, routed and auto of one cell follow each other, in alternating order
    rates      --rates; or --of-saturation: shares of the rate at which dense requests end where all wait from the start (0.95: the knee of its
               load curve, 1.25: overload, where requests/s are of interest)
    change     of the mean over requests, in percent of dense. Its 95 % interval: over repeats by the t-distribution; of one run, over its
               requests in pairs, which says nothing of how a run differs from the next
    --limit    seconds for everything; no cell is begun that would not end before, and the picture has what there is
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from pathlib import Path
from typing import Any

import common
import load_arms
import load_plots
import torch
from dial import Dial
from load import Workload
from load_drive import Run, replay
from load_metrics import RequestTimes, completion_rate, in_window, paired_change, summarise
from load_options import add_workload_options, check_arguments
from load_workload import Ask, Job

from depthfx.runtime.calibration import calibrate_again
from depthfx.runtime.depth_control import DepthCosts, break_even
from depthfx.skippers import make_skipper

SWITCH = ("dense", "routed", "auto")
COLUMNS = ["rate", "r", "d", "arm", "repeat", "finished", "mean E2E s", "p99 E2E s", "mean TTFT s", "mean TPOT ms", "tokens/s",
           "num_reused_tokens", "skip share", "num_promotions", "num_probes", "V*"]  # fmt: skip
CELL = ["rate", "r", "d", "repeats", "routed %", "routed +-", "auto %", "auto +-", "interval", "routed requests/s %", "auto requests/s %"]
Cell = tuple[float, float, float]  # requests a second, r, d


class SkipMap:
    """One compiled model, the runs so far, and what they come to."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device, self.started = args, common.default_device(), time.perf_counter()
        torch.zeros(1, device=self.device)  # PyTorch's context first
        try:
            self.workload = Workload(args)
        except ValueError as error:
            raise SystemExit(f"skip_map: {error}") from error
        self.model = load_arms.build("auto", args, self.device, self._skipper)
        asks = self.workload.asks(0)
        load_arms.check_room(self.model, asks)
        for depth in ("dense", "routed"):
            load_arms.warm_up(self.model, asks[: max(min(16, args.max_batch), args.warm_up)], depth)
        common.settle()
        self.how = "over repeats" if args.repeats > 1 else "over requests"
        self.rows: list[dict[str, Any]] = []
        self.changes: list[dict[str, Any]] = []  # one for each cell that was run
        if args.of_saturation:
            most = self.saturated(asks)
            self.workload.rates = [share * most for share in args.of_saturation]
        self.cells: list[Cell] = [(q, r, d) for q in sorted(self.workload.rates) for r in args.skip_rates for d in args.skip_depths]

    def _skipper(self, model: Any) -> Any:
        layers = model.config.get_text_config().num_hidden_layers
        self.dial = Dial(layers - layers // 2, self.args.hash == "request")  # the default layers: the last half
        skipper = make_skipper(model, self.dial, self.args.skip_projector)
        self.dial.turn(self.args.skip_rates[-1], self.args.skip_depths[-1])  # so that costs can be measured while it is compiled
        return skipper

    def saturated(self, asks: list[Ask]) -> float:
        """Dense requests a second while more of them wait than can be served."""
        run = replay(self.model.engine, [Job(i, 0.0, a) for i, a in enumerate(asks)], depth="dense")
        load_arms.reset(self.model)
        rate = completion_rate(run.requests)
        self.rows.append({"kind": "saturation", "requests/s": rate, "makespan s": max(r.token_s[-1] for r in run.requests), **run.counters})
        print(f"saturated: {rate:.3f} requests/s", flush=True)
        return rate

    def expected(self) -> float:
        """Seconds for all cells: until the last arrival and for one longest answer more, and measuring before each auto run."""
        asks = self.workload.asks(0)
        start = time.perf_counter()
        calibrate_again(self.model.engine)
        measuring = time.perf_counter() - start
        jobs = [Job(i, 0.0, Ask(a.prompt, min(a.output_tokens, 8))) for i, a in enumerate(asks[: self.args.max_batch])]
        run = replay(self.model.engine, jobs, depth="dense")
        load_arms.reset(self.model)
        gap = statistics.median([g for r in run.requests if (g := r.tpot) is not None] or [0.0])
        prompts = sum(len(a.prompt) for a in asks) / sum(len(j.ask.prompt) for j in jobs)  # so many times the prompts of that run
        prefill = statistics.fmean(r.ttft or 0.0 for r in run.requests) * prompts
        seconds = 0.0
        for rate in sorted(self.workload.rates):
            work = max(self.workload.jobs(asks, rate, 0)[-1].arrival_s, prefill) + gap * max(a.output_tokens for a in asks)
            seconds += len(self.args.skip_rates) * len(self.args.skip_depths) * self.args.repeats * (len(SWITCH) * work + measuring)
        return seconds

    def left(self) -> float:
        """Seconds until ``--limit``."""
        return math.inf if self.args.limit is None else self.args.limit - (time.perf_counter() - self.started)

    def cell(self, number: int) -> None:
        """All runs of one cell."""
        rate, r, d = self.cells[number]
        served: dict[str, list[list[RequestTimes]]] = {arm: [] for arm in SWITCH}
        pace: dict[str, list[float]] = {arm: [] for arm in SWITCH}
        for repeat in range(self.args.repeats):
            asks = self.workload.asks(repeat)
            for arm in SWITCH if (number + repeat) % 2 == 0 else SWITCH[::-1]:
                run, row = self.run(arm, self.cells[number], asks, repeat)
                self.rows.append(row)
                served[arm].append(in_window(run.requests, (self.args.lead_in, run.requests[-1].arrival_s)))
                pace[arm].append(row["requests/s"])
                common.write_results(f"skip-map-{self.args.name}", [*self.rows, *self.changes], self.device)
        changes = {arm: change_of(served["dense"], served[arm]) for arm in SWITCH[1:]}
        row = {"kind": "cell", "rate": rate, "r": r, "d": d, "repeats": self.args.repeats, "interval": self.how}
        for arm, (mean, width) in changes.items():
            row |= {f"{arm} %": mean, f"{arm} +-": width}
            if all(pace["dense"]):
                more, spread = paired_change(pace["dense"], pace[arm])
                row |= {f"{arm} requests/s %": more, f"{arm} requests/s +-": spread}
        self.changes.append(row)

    def run(self, arm: str, cell: Cell, asks: list[Ask], repeat: int) -> tuple[Run, dict[str, Any]]:
        """One run, and its row."""
        rate, r, d = cell
        engine = self.model.engine
        load_arms.reset(self.model)
        skipped = self.dial.turn(r, d)
        costs = calibrate_again(engine) if arm == "auto" else None
        run = replay(engine, self.workload.jobs(asks, rate, repeat), depth=arm)
        window = (self.args.lead_in, run.requests[-1].arrival_s)
        if not in_window(run.requests, window):
            raise SystemExit(
                f"--lead-in {self.args.lead_in} s is after the last arrival at {window[1]:.3f} s; lower it, or give more --requests"
            )
        row = {"kind": "run", "rate": rate, "r": r, "d": d, "arm": arm, "repeat": repeat, "skipped layers": skipped,
               **summarise(run.requests, window, None), **run.counters, "cut asks": self.workload.num_cut}  # fmt: skip
        if costs is not None:
            row |= _decided(engine, costs, self.args.max_batch)
        common.print_table([row], [c for c in COLUMNS if row.get(c) is not None])
        return run, row

    def write(self) -> Path:
        """Everything so far as JSON and PNG; returns the path without its ending."""
        base = common.write_results(f"skip-map-{self.args.name}", [*self.rows, *self.changes], self.device)
        title = (
            f"{self.args.model or self.args.shape}: mean E2E against dense, RandomSkip, {self.args.requests} requests; ±: 95 % {self.how}"
        )
        if len(self.changes) < len(self.cells):
            title += f"; {len(self.changes)} of {len(self.cells)} cells were run"
        load_plots.draw_map(base.with_suffix(".png"), title, self.changes, self.args.skip_rates, self.args.skip_depths)
        return base


def change_of(dense: list[list[RequestTimes]], other: list[list[RequestTimes]]) -> tuple[float, float | None]:
    """Mean change of mean E2E from ``dense`` to ``other`` in percent, and its 95 % half width; lists by repeat, the same requests in both.

    Several repeats: paired by repeat. One: the ratio of two means over the same requests, by linearisation; None for a single request.
    """
    times = [[[r.e2e or math.nan for r in run] for run in arm] for arm in (dense, other)]
    if len(dense) > 1:
        return paired_change(*([statistics.fmean(run) for run in arm] for arm in times))
    (a,), (b,) = times
    ratio, n = statistics.fmean(b) / statistics.fmean(a), len(a)
    if n < 2:
        return (ratio - 1) * 100, None
    spread = math.sqrt(sum((y - ratio * x) ** 2 for x, y in zip(a, b, strict=True)) / (n - 1))
    return (ratio - 1) * 100, 196 * spread / (statistics.fmean(a) * math.sqrt(n))


def _decided(engine: Any, costs: DepthCosts, rows: int) -> dict[str, Any]:
    """What auto went by: the shares it saw, V* at the end, and V* of steps of all sizes that were measured."""
    depth = engine.stats().depth
    limits = {} if not depth.answer_share else {c.rows: break_even(costs, depth.answer_share, c.rows) for c in costs.decode}
    return {"answer share": depth.answer_share, "prompt share": depth.prompt_share, "V* by rows": limits,
            "V*": None if math.isinf(depth.break_even_tokens) else depth.break_even_tokens, "enters": depth.num_enters,
            "leaves": depth.num_leaves, "max batch": rows}  # fmt: skip


def parse_arguments() -> argparse.Namespace:
    """Arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    load_arms.add_model_options(parser)
    add_workload_options(parser)
    parser.add_argument("--skip-rates", type=_share, nargs="+", default=[0.25, 0.5, 0.75], metavar="R")
    parser.add_argument("--skip-depths", type=_share, nargs="+", default=[0.25, 0.5, 0.75], metavar="D")
    parser.add_argument("--of-saturation", type=float, nargs="+", default=[], metavar="SHARE", help="instead of --rates")
    parser.add_argument("--hash", choices=["position", "request"], default="position")
    parser.add_argument("--limit", type=float, default=None, metavar="SECONDS")
    parser.add_argument("--name", default="run", help="of the files: DATE-skip-map-NAME")
    unused = {"work": "matched", "record_lengths": None, "capacity": None, "guesses": None, "own_shares": [], "base_shares": []}
    parser.set_defaults(arms=list(SWITCH), **unused)
    args = parser.parse_args()
    if args.of_saturation and (args.rates or args.factors):
        parser.error("--of-saturation, --rates and --factors: give one of them")
    if min(args.of_saturation, default=1.0) <= 0:
        parser.error(f"--of-saturation {args.of_saturation} must be positive")
    check_arguments(parser, args)
    return args


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be above 0 and at most 1")
    return value


def main() -> None:
    """Cell after cell; what was run is kept after each."""
    args = parse_arguments()
    skip_map = SkipMap(args)
    begun, number = time.perf_counter(), len(skip_map.cells)
    expected = skip_map.expected()
    print(f"{number} cells of {len(SWITCH)} x {args.repeats} runs: expected to take {expected:.0f} s from here, {begun - skip_map.started:.0f} s "
          f"were spent on compiling{'' if args.limit is None else f'; --limit leaves {skip_map.left():.0f} s'}", flush=True)  # fmt: skip
    longest, base = expected / number, None
    for index in range(number):
        if skip_map.left() < longest:
            break
        start = time.perf_counter()
        skip_map.cell(index)
        base, seconds = skip_map.write(), time.perf_counter() - start
        longest = seconds if index == 0 else max(longest, seconds)
        print(f"cell {index + 1} of {number} took {seconds:.0f} s; about {longest * (number - 1 - index):.0f} s more", flush=True)
    skip_map.model.engine.close()
    if base is None:
        raise SystemExit(
            f"--limit {args.limit:.0f} s leaves {skip_map.left():.0f} s, a cell is expected to take {longest:.0f} s: nothing was run"
        )
    common.print_table(skip_map.changes, CELL)
    done = len(skip_map.changes)
    if done < number:
        missing = ", ".join(f"{r:.0%} x {d:.0%} at {q:g}/s" for q, r, d in skip_map.cells[done:])
        print(f"stopped by --limit {args.limit:.0f} s after {done} of {number} cells; missing (r x d): {missing}")
    print(f"prompts by {skip_map.workload.tokenizer if skip_map.workload.benchmark else 'random ids'}; wrote {base}.json and .png")


if __name__ == "__main__":
    main()
