"""Steps that decode and prefill, captured beside launched one by one: the host's time to queue a step, and the device's to run it.

Where the first is the longer one, it is the gap between two tokens of everybody who decodes. Steps run on the runner, over KV that nobody computed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import common
import torch

import depthfx
from depthfx.records import Chunk, SamplingParams, StepPlan

GREEDY = SamplingParams()


def mixed_plan(num_decodes: int, prompt_rows: int, num_chunks: int, context: int, block_tokens: int, precision: bytes) -> StepPlan:
    """Decodes behind ``context`` tokens and chunks of new prompts that have ``prompt_rows`` rows together; blocks of its own for each."""
    lengths = [prompt_rows // num_chunks + (i < prompt_rows % num_chunks) for i in range(num_chunks)]
    chunks, writes, block = [], [], 0
    for row in range(num_decodes + num_chunks):
        is_decode = row < num_decodes
        start, length = (context, 1) if is_decode else (0, lengths[row - num_decodes])
        tokens = tuple(10 + (row + i) % 1000 for i in range(length))
        chunks.append(Chunk(str(row), row, start, tokens, -1, True, int(is_decode), GREEDY))
        for column in range(-(-(start + length) // block_tokens)):
            writes.append((row, column, block))
            block += 1
    return StepPlan(-1, tuple(chunks[:num_decodes]), tuple(chunks[num_decodes:]), tuple(writes), precision)


def write_tables(runner: Any, plan: StepPlan) -> StepPlan:
    """The plan without its table writes, which are applied once: steps under load have few."""
    runner.wait(runner.launch(plan))
    return StepPlan(plan.step_id, plan.decodes, plan.prefills, (), plan.precision)


def time_steps(runner: Any, plan: StepPlan, repeats: int) -> dict[str, float]:
    """Milliseconds of one step, nothing else under way: until it is queued, and until its tokens are on the host; medians."""
    queued, done = [], []
    for _ in range(repeats):
        common.synchronize(runner.device)
        start = time.perf_counter()
        launched = runner.launch(plan)
        queued.append(time.perf_counter() - start)
        runner.wait(launched)
        done.append(time.perf_counter() - start)
    return {
        "host ms": statistics.median(queued) * 1e3,
        "host p90 ms": common.spread(queued)["p90"] * 1e3,
        "step ms": statistics.median(done) * 1e3,
    }


def run_arm(args: argparse.Namespace, device: torch.device, weights: str, modes: list[str]) -> list[dict[str, Any]]:
    model = common.make_model(args.shape, device, torch.float16 if device.type == "cuda" else torch.float32, args.layers)
    captured = device.type == "cuda"
    start, before = time.perf_counter(), _allocated(device)
    depthfx.compile(
        model, weights=weights, inductor=not args.no_inductor, kv_blocks=args.kv_blocks, max_chunk_tokens=args.chunk_tokens,
        max_batch_tokens=max(8192 if captured else 512, args.chunk_tokens), max_batch_size=256 if captured else 32, capture_prompts=captured,
    )  # fmt: skip
    rows = [
        {
            "weights": weights,
            "s to compile": time.perf_counter() - start,
            "GiB taken": (_allocated(device) - before) / 2**30,
        }
    ]
    runner = model.engine._runner
    common.settle()
    prompts = runner.graphs.prompts
    for mode in modes:
        entries = runner.shape.num_precisions if weights == "nested" else 0
        for decodes in args.decodes:
            for total in args.rows:
                if total - decodes < args.chunks:
                    continue
                precision = bytes([mode == "full"] * entries)
                plan = write_tables(
                    runner, mixed_plan(decodes, total - decodes, args.chunks, args.context, runner.shape.kv.block_tokens, precision)
                )
                found = {"weights": weights, "mode": mode, "decodes": decodes, "rows": total}
                for how in ("launched", "captured") if captured else ("launched",):
                    runner.graphs.prompts = prompts if how == "captured" else ()
                    graph = runner.graphs.find(plan, runner.flags.send(precision))
                    if how == "captured" and graph is None:
                        continue
                    time_steps(runner, plan, 2)
                    form = {} if graph is None else {"padded to": graph.form.rows}
                    rows.append({**found, "how": how, **form, **time_steps(runner, plan, args.repeats)})
                runner.graphs.prompts = prompts
    model.engine.close()
    return rows


def _allocated(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[1] - torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def main() -> int:
    """The script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(common.SHAPES), default="llama3-8b")
    parser.add_argument("--arms", nargs="+", choices=["16bit", "nested", "fp8"], default=["16bit", "nested", "fp8"])
    parser.add_argument("--decodes", type=int, nargs="+", default=[0, 1, 32, 128])
    parser.add_argument("--rows", type=int, nargs="+", default=[200, 500, 768, 1536])
    parser.add_argument("--chunks", type=int, default=2, help="prompts that share the other rows")
    parser.add_argument("--context", type=int, default=1024, help="of the decodes")
    parser.add_argument("--chunk-tokens", type=int, default=768)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--kv-blocks", type=int, default=10240)
    parser.add_argument("--layers", type=int, default=None, help="fewer layers, to try the script")
    parser.add_argument("--no-inductor", action="store_true")
    args = parser.parse_args()
    device = common.default_device()
    rows: list[dict[str, Any]] = []
    for weights in args.arms:
        found = run_arm(args, device, weights, ["full", "fast"] if weights == "nested" else [""])
        common.print_table(found[:1], ["weights", "s to compile", "GiB taken"])
        common.print_table(found[1:], ["weights", "mode", "decodes", "rows", "how", "padded to", "host ms", "host p90 ms", "step ms"])
        rows += found
        common.release()
    common.write_results(f"mixed-{args.shape}", rows, device)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
