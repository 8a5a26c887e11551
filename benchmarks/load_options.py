"""Options of the benchmarks under load: what is asked for and when, the SLO, the search for capacity."""

from __future__ import annotations

import argparse

import load_arms


def add_workload_options(parser: argparse.ArgumentParser) -> None:
    """Options that say what is asked for, and when; `load.Workload` reads them."""
    parser.add_argument("--arrivals", default="poisson", metavar="poisson|gamma|TRACE.csv")
    parser.add_argument("--cv", type=float, default=2.0, help="coefficient of variation of gamma gaps")
    parser.add_argument("--rates", type=float, nargs="+", default=[], help="requests a second")
    parser.add_argument("--factors", type=float, nargs="+", default=[], help="instead: times the trace's own rate")
    parser.add_argument("--requests", type=int, default=200, help="of one run; of a trace: the length of its window")
    parser.add_argument("--first", type=int, default=0, help="first request of the trace's window")
    parser.add_argument("--lengths", default=None, metavar="BENCHMARK", help="its file; of BBH also the folder of its tasks")
    parser.add_argument(
        "--examples", default=None, metavar="FILE", help="shared by all prompts of --lengths; of a folder, the one of TASK.txt"
    )
    parser.add_argument(
        "--shuffle-examples", action="store_true", help="each prompt has the examples of a .jsonl file in an order of its own"
    )
    parser.add_argument("--input-tokens", default=None, metavar="DIST", help="fixed:N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA")
    parser.add_argument("--output-tokens", default=None, metavar="DIST", help="likewise; wins over trace and benchmark")
    parser.add_argument("--output-lengths", default=None, metavar="JSON", help="lengths that --record-lengths kept")
    parser.add_argument("--shared-prefix", type=int, default=0, help="tokens that random prompts share")
    parser.add_argument("--max-input", type=int, default=None)
    parser.add_argument("--max-output", type=int, default=None, help="in natural work: what every request may produce")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--warm-up", type=int, default=0, help="requests that each arm serves before its first run")
    parser.add_argument("--lead-in", type=float, default=0.0, help="seconds before the measuring window")


def parse_arguments(description: str | None) -> argparse.Namespace:
    """Arguments of load.py's command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    load_arms.add_options(parser)
    add_workload_options(parser)
    parser.add_argument("--work", choices=["matched", "natural"], default="matched")
    parser.add_argument("--record-lengths", default=None, metavar="JSON", help="keep what the baseline produced in natural work")
    parser.add_argument(
        "--order", choices=["paired", "blocked"], default="paired", help="blocked: all repeats of an arm, then the next arm"
    )
    parser.add_argument("--limit-s", type=float, default=None, help="longest run; what is not finished then misses the SLO")
    parser.add_argument("--slo-ttft", type=float, default=2.0, help="seconds")
    parser.add_argument("--slo-gaps", type=float, default=5.0, help="times T_base")
    parser.add_argument("--t-base-ms", type=float, default=None, help="instead of measuring it")
    parser.add_argument("--base-batch", type=int, default=32)
    parser.add_argument("--base-context", type=int, default=4096)
    parser.add_argument("--base-steps", type=int, default=200)
    parser.add_argument("--base-stat", choices=["p99", "mean"], default="p99")
    parser.add_argument("--capacity", type=float, nargs=2, default=None, metavar=("LOW", "HIGH"), help="requests a second")
    parser.add_argument("--guesses", type=float, nargs="+", default=None, metavar="RATE",
                        help="instead of --capacity: where the search begins, one for each arm or one for all")  # fmt: skip
    parser.add_argument(
        "--own-shares", type=float, nargs="+", default=[], metavar="SHARE", help="then the others run at so much of their own"
    )
    parser.add_argument(
        "--base-shares", type=float, nargs="+", default=[], metavar="SHARE", help="and all arms at so much of the baseline's"
    )
    parser.add_argument("--resolution", type=float, default=0.05, help="relative, of the capacity")
    parser.add_argument("--share", type=float, default=0.9, help="that must attain the SLO")
    parser.add_argument("--name", default="run", help="of the files: DATE-load-NAME")
    parser.set_defaults(of_saturation=[])  # of skip_map.py
    args = parser.parse_args()
    check_arguments(parser, args)
    return args


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuses options that would be ignored beside others."""
    is_trace = args.arrivals not in ("poisson", "gamma")
    if len(set(args.arms)) < len(args.arms):
        parser.error("--arms names one of them twice")
    if args.work == "natural" and args.max_output is None:
        parser.error("--work natural needs --max-output")
    if args.work == "natural" and (args.output_tokens or args.output_lengths):
        parser.error("--work natural lets answers end by themselves; --output-tokens and --output-lengths are of --work matched")
    if args.record_lengths and args.work == "matched":
        parser.error("--record-lengths needs --work natural")
    if args.output_tokens and args.output_lengths:
        parser.error("--output-tokens and --output-lengths: give one of them")
    if args.lengths and args.input_tokens:
        parser.error("--lengths and --input-tokens: give one of them")
    if args.examples and (not args.lengths or args.lengths.endswith(".csv")):
        parser.error("--examples needs --lengths with the file of a benchmark")
    if args.rates and args.factors:
        parser.error("--rates and --factors: give one of them")
    if args.factors and not is_trace:
        parser.error("--factors needs the file of a trace as --arrivals")
    if args.shuffle_examples and not (args.examples or "").endswith(".jsonl"):
        parser.error("--shuffle-examples needs --examples with a .jsonl file")
    if not args.rates and not args.factors and args.capacity is None and args.guesses is None and not is_trace and not args.of_saturation:
        parser.error("give --rates or --capacity")
    if args.capacity and args.guesses:
        parser.error("--capacity and --guesses: give one of them")
    if args.guesses and len(args.guesses) not in (1, len(args.arms)):
        parser.error(f"--guesses: {len(args.guesses)} rates for {len(args.arms)} arms; give one for each, or one for all")
    if (args.own_shares or args.base_shares) and not (args.capacity or args.guesses):
        parser.error("--own-shares and --base-shares are of a capacity: give --capacity or --guesses")
    if args.base_shares and args.order == "blocked":
        parser.error("--base-shares needs --order paired, where the baseline's capacity is known first")
