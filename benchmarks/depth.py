"""Layer skipping on one device: cost of routing, time saved in decode and prefill, cost of a skipped row, cohort products against cuBLAS.

``python3 benchmarks/depth.py [--parts steps one big rows prefill map]`` from the root of the repository. To try it on a CPU:
``--shape smollm2 --layers 4 --no-inductor --kv-blocks 64 --context 32 --big-context 64 --prompt 48 --batches 1 4 --big-batch 4``.
The last half of the layers is routed by a hash of request and position (RandomSkip) whose limit is a tensor, so that one compiled model
serves every share. Decode steps are timed as replays of captured graphs over block tables of distinct blocks; on a CPU as eager steps.
Results go to $OUT, or to benchmarks/results/.

    steps      a routed step in which nothing is skipped against a dense step
    one        one row that skips half of the routed layers
    big        many rows with a long context, half of them skip half of the routed layers; share of the ideal saving (bytes not read)
    rows       what a skipped row of a routed layer costs against one that runs it, and a step with all of them skipped
    map        a picture of every decision of one generation
    prefill    one long prompt, three quarters of the rows skip three quarters of the routed layers; share of the ideal saving (products not made)
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import common
import plots
import torch
from dial import Dial

import depthfx
from depthfx.lowering import ops
from depthfx.records import Chunk, SamplingParams, StepPlan
from depthfx.runtime.graphs import greedy
from depthfx.skippers import make_skipper

PARTS = ("steps", "one", "big", "rows", "prefill", "map")
COLUMNS = {
    "steps": ["batch", "context", "dense ms", "routed ms", "overhead %"],
    "one": ["skipped layers", "dense ms", "routed ms", "saved %"],
    "big": ["batch", "context", "dense ms", "routed ms", "saved %", "ideal %", "of ideal %"],
    "rows": ["batch", "context", "head ms", "all run ms", "all skip ms", "run us a layer", "skip us a layer", "skip/run %"],
    "map": ["tokens", "skipped %", "digest"],
    "prefill": ["tokens", "dense ms", "routed ms", "nothing skipped ms", "saved %", "ideal %", "of ideal %"],
}
Rows_ = list[dict[str, Any]]


class Bench:
    """A compiled model and its dial."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device = common.default_device()
        dtype = torch.float16 if self.device.type == "cuda" else torch.float32
        self.model = common.make_model(args.shape, self.device, dtype, args.layers)
        config = self.model.config
        self.num_layers = config.num_hidden_layers
        self.dial = Dial(self.num_layers - self.num_layers // 2)
        skipper = make_skipper(self.model, self.dial, "identity")
        start = time.perf_counter()
        depthfx.compile(
            self.model, skipper=skipper, weights=args.weights, inductor=not args.no_inductor, kv_blocks=args.kv_blocks,
            max_batch_size=max(*args.batches, args.big_batch), max_model_len=args.max_len,
        )  # fmt: skip
        seconds = {k: round(v, 1) for k, v in self.model._depthfx.report.seconds.items() if v > 0.5}
        print(f"compiled in {time.perf_counter() - start:.1f} s: {seconds}", flush=True)
        self.runner = self.model.engine._runner
        self.layers, self.places = skipper.layers, len(skipper.layers)
        self.config = config

    def skip(self, share: float, depth: float) -> None:
        """``share`` of the rows skip the last ``depth`` of the routed layers."""
        self.dial.turn(share, depth)

    def decode_ms(self, batch: int, context: int, routed: bool) -> float:
        """Median of a decode step of ``batch`` rows with ``context`` tokens of KV each, in blocks that as few rows as possible share."""
        runner, tokens = self.runner, self.runner.shape.kv.block_tokens
        columns = -(-context // tokens)
        table = torch.arange(batch * columns, dtype=torch.int32, device=self.device) % runner.shape.num_blocks
        runner.block_tables[:batch, :columns] = table.view(batch, columns)
        sampling = SamplingParams()
        chunks = tuple(Chunk(str(i), i, context - 1, (i + 10,), -1, True, 0, sampling, None, routed, i) for i in range(batch))
        plan = StepPlan(-1, chunks, (), ())
        with torch.inference_mode():
            graph = runner.graphs.find(plan, -1, routed)
            uploaded = runner.staging.upload(plan, graph.form if graph else None, routed)
            once = graph.replay if graph else lambda: runner.forward(uploaded, -1, routed)
            return timed(once, self.device)

    def head_ms(self, batch: int) -> float:
        """Median of the product and the choice that end a decode step of ``batch`` rows."""
        hidden = torch.randn(batch, self.config.hidden_size, device=self.device).to(self.model.dtype)
        weight = self.model.lm_head.weight

        def once() -> torch.Tensor:
            return greedy(ops.LINEAR(hidden, weight, None))

        with torch.inference_mode():
            once()
            if self.device.type == "cpu":
                return timed(once, self.device)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                once()
            return timed(graph.replay, self.device)

    def prefill_ms(self, tokens: int, routed: bool) -> float:
        """Median of a prefill step of one prompt."""
        runner = self.runner
        columns = -(-tokens // runner.shape.kv.block_tokens)
        runner.block_tables[0, :columns] = torch.arange(columns, dtype=torch.int32, device=self.device)
        ids = tuple(torch.randint(10, self.config.vocab_size - 10, (tokens,), generator=torch.Generator().manual_seed(0)).tolist())
        plan = StepPlan(-1, (), (Chunk("0", 0, 0, ids, -1, True, 0, SamplingParams(), None, routed, 5),), ())
        with torch.inference_mode():
            uploaded = runner.staging.upload(plan, None, routed)
            return timed(lambda: runner.forward(uploaded, 1, routed), self.device, repeats=5, inner=2)


def timed(once: Any, device: torch.device, repeats: int = 7, inner: int = 10) -> float:
    """Median milliseconds of a call, by device events where there are any."""
    times = []
    for _ in range(2):
        once()
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(inner):
                once()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / inner)
        else:
            began = time.perf_counter()
            once()
            times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def steps(bench: Bench, args: argparse.Namespace) -> Rows_:
    """Nothing is skipped."""
    bench.skip(0, 0)
    rows = []
    for batch in args.batches:
        times = {False: [], True: []}  # type: dict[bool, list[float]]
        for routed in (False, True, False, True):
            times[routed].append(bench.decode_ms(batch, args.context, routed))
        dense, routed_ms = (statistics.median(times[r]) for r in (False, True))
        rows.append(
            {
                "batch": batch,
                "context": args.context,
                "dense ms": dense,
                "routed ms": routed_ms,
                "overhead %": 100 * (routed_ms / dense - 1),
            }
        )
    return rows


def one(bench: Bench, args: argparse.Namespace) -> Rows_:
    """One row skips half of the routed layers, then all of them."""
    rows = []
    dense = bench.decode_ms(1, args.context, False)
    for depth in (0.5, 1.0):
        bench.skip(1, depth)
        routed = bench.decode_ms(1, args.context, True)
        rows.append(
            {"skipped layers": round(bench.places * depth), "dense ms": dense, "routed ms": routed, "saved %": 100 * (1 - routed / dense)}
        )
    return rows


def big(bench: Bench, args: argparse.Namespace) -> Rows_:
    """Long contexts: what is saved is mostly the reading of KV."""
    batch, context = args.big_batch, args.big_context
    bench.skip(0.5, 0.5)
    dense, routed = bench.decode_ms(batch, context, False), bench.decode_ms(batch, context, True)
    kv_bytes = bench.runner.shape.kv.token_bytes / bench.num_layers * context  # of one row in one layer
    taped = bench.runner.tape[:, :batch]
    skipped = int((taped == 0).sum())
    ideal = skipped * kv_bytes / (bench.num_layers * batch * kv_bytes + common.weight_bytes_per_step(bench.model))
    saved = 1 - routed / dense
    return [
        {
            "batch": batch,
            "context": context,
            "dense ms": dense,
            "routed ms": routed,
            "saved %": 100 * saved,
            "ideal %": 100 * ideal,
            "of ideal %": 100 * saved / ideal,
        }
    ]


def rows_cost(bench: Bench, args: argparse.Namespace) -> Rows_:
    """All rows run, all rows skip; the other layers are half of a dense step without its head."""
    found = []
    for batch, context in ((max(args.batches), args.context), (args.big_batch, args.big_context)):
        dense = bench.decode_ms(batch, context, False)
        bench.skip(0, 0)
        run = bench.decode_ms(batch, context, True)
        bench.skip(1, 1)
        skip = bench.decode_ms(batch, context, True)
        head = bench.head_ms(batch)
        other = head + (dense - head) * (bench.num_layers - bench.places) / bench.num_layers
        each_run, each_skip = (1e3 * (t - other) / bench.places for t in (run, skip))
        found.append({"batch": batch, "context": context, "head ms": head, "all run ms": run, "all skip ms": skip, "run us a layer": each_run,
                      "skip us a layer": each_skip, "skip/run %": 100 * each_skip / each_run})  # fmt: skip
    return found


def prefill(bench: Bench, args: argparse.Namespace) -> Rows_:
    """One prompt; ideal: multiplications of Q, O, MLP and attention that skipped rows do not need."""
    tokens, c = args.prompt, bench.config
    head = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    q, kv, mlp = (
        c.num_attention_heads * head * c.hidden_size,
        2 * c.num_key_value_heads * head * c.hidden_size,
        3 * c.hidden_size * c.intermediate_size,
    )
    attention = tokens / 2 * 2 * c.num_attention_heads * head
    dense = bench.prefill_ms(tokens, False)
    bench.skip(0, 0)
    nothing = bench.prefill_ms(tokens, True)
    bench.skip(0.75, 0.75)
    routed = bench.prefill_ms(tokens, True)
    skipped = int((bench.runner.tape[:, :tokens] == 0).sum()) / tokens
    ideal = skipped * (2 * q + mlp + attention) / (bench.num_layers * (2 * q + kv + mlp + attention))
    saved = 1 - routed / dense
    return [
        {
            "tokens": tokens,
            "dense ms": dense,
            "routed ms": routed,
            "nothing skipped ms": nothing,
            "saved %": 100 * saved,
            "ideal %": 100 * ideal,
            "of ideal %": 100 * saved / ideal,
        }
    ]


def depth_map(bench: Bench, args: argparse.Namespace) -> Rows_:
    """Prompt and answer of one request, half of the rows skip three quarters of the routed layers."""
    bench.skip(0.5, 0.75)
    engine = bench.model.engine
    engine.routes.record()
    prompt = torch.randint(10, bench.config.vocab_size - 10, (48,), generator=torch.Generator().manual_seed(0)).tolist()
    for _ in engine.stream(prompt, SamplingParams(max_new_tokens=80), request_id="map"):
        pass
    actions = engine.routes.depth_map("map")
    path = common.write_results(f"depth-{args.shape}", [], bench.device).with_suffix(".png")
    plots.draw_depth(actions, bench.layers, len(prompt), path, f"{args.shape}, random skips")
    return [{"tokens": actions.shape[1], "skipped %": 100 * float((actions == 0).float().mean()), "digest": engine.routes.digest("map")}]


def parse_arguments() -> argparse.Namespace:
    """Arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--shape", choices=sorted(common.SHAPES), default="llama3-8b")
    parser.add_argument("--layers", type=int, default=None, help="fewer layers, to try the script")
    parser.add_argument("--weights", choices=("16bit", "nested"), default="16bit")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--big-batch", type=int, default=256)
    parser.add_argument("--big-context", type=int, default=4096)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--max-len", type=int, default=None)
    parser.add_argument("--kv-blocks", type=int, default=None)
    parser.add_argument("--no-inductor", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Run the parts that were asked for, show and keep their tables."""
    args = parse_arguments()
    bench = Bench(args)
    functions = {"steps": steps, "one": one, "big": big, "rows": rows_cost, "prefill": prefill, "map": depth_map}
    found: Rows_ = []
    for part in args.parts:
        rows = functions[part](bench, args)
        found.extend({"part": part, **row} for row in rows)
        print(f"\n{part}")
        common.print_table(rows, COLUMNS[part])
        common.write_results(f"depth-{args.shape}", found, bench.device)  # after each part: a later one may fail


if __name__ == "__main__":
    main()
