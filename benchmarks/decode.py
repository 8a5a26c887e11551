"""Decode and prefill time of one model shape, side by side: bandwidth floor, depthfx, HF eager, HF static cache compiled."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any

import common
import plots
import torch

import depthfx
from depthfx.records import StepPlan


def prompts(batch: int, length: int, vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(10, vocab - 10, (batch, length), generator=generator).tolist()


def time_depthfx(model: Any, batch: int, length: int, steps: int) -> tuple[list[float], float]:
    """Seconds of each engine turn while ``batch`` requests decode, none finishing or joining, and exposed host seconds a turn."""
    engine = model.engine
    sampling = depthfx.SamplingParams(max_new_tokens=steps + 512)  # more than any request decodes while others still prefill
    waiting = {engine.add(prompt, sampling) for prompt in prompts(batch, length, model.config.vocab_size)}
    everyone = set(waiting)
    while waiting:
        outputs = engine.step()
        assert all(output.error is None for output in outputs), outputs
        waiting -= {output.request_id for output in outputs}
    for _ in range(4):
        engine.step()
    times = []
    before = exposed_seconds(engine)
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    exposed = (exposed_seconds(engine) - before) / steps
    for request_id in everyone:
        engine.abort(request_id)
    while engine.has_unfinished():
        engine.step()
    return times, exposed


def exposed_seconds(engine: Any) -> float:
    """Host seconds so far in which the device had nothing to do."""
    stats = engine.stats()
    return float(stats.exposed_seconds_per_step * stats.num_steps)


def time_replay(model: Any, batch: int) -> list[float] | None:
    """Seconds of bare replays of the captured graph of ``batch`` rows, back to back (device time of a step)."""
    runner = model.engine._runner
    hint = 0 if set(model.engine.precision().values()) == {"fast"} else -1
    large = [
        (form.rows, p != hint, g)
        for (form, p, routed), g in runner.graphs._graphs.items()
        if form.rows >= batch and p in (hint, -1) and not (routed or form.max_chunks)
    ]
    graph = min(large, key=lambda found: found[:2], default=(0, True, None))[2]
    if graph is None:
        return None
    runner.staging.upload(StepPlan(-1, (), (), ()), graph.form)  # idle rows: the weights are read all the same
    times = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(20):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 20 / 1e3)
    return times


def time_prefill(model: Any, batch: int, length: int) -> float:
    """Prompt tokens a second of ``batch`` prompts, one new token each."""
    engine = model.engine
    for _ in range(2):
        for prompt in prompts(batch, length, model.config.vocab_size):
            engine.add([int(time.perf_counter_ns() % 1000) + 10, *prompt[1:]], depthfx.SamplingParams(max_new_tokens=1))
        common.synchronize(model.device)
        start = time.perf_counter()
        while engine.has_unfinished():
            engine.step()
        seconds = time.perf_counter() - start
    return batch * length / seconds


def time_hf(model: Any, batch: int, length: int, steps: int, **kwargs: Any) -> float:
    """Seconds a decode step of ``generate``: the difference of two lengths."""
    ids = torch.tensor(prompts(batch, length, model.config.vocab_size), device=model.device)
    took = []
    for new in (4, 4, 4 + steps):
        common.synchronize(model.device)
        start = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0, **kwargs
        )
        common.synchronize(model.device)
        took.append(time.perf_counter() - start)
    return (took[2] - took[1]) / steps


def parse_arguments() -> argparse.Namespace:
    """Arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(common.SHAPES), default="llama3-8b")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    parser.add_argument("--hf-batches", type=int, nargs="+", default=[1, 32], help="batches of the Hugging Face arms (slow)")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--steps", type=int, default=64)
    arms = ["floor", "depthfx", "prefill", "hf-eager", "hf-static"]
    parser.add_argument("--arms", nargs="+", default=arms, help=f"of {', '.join(arms)}; also depthfx-full, depthfx-fast, depthfx-fp8")
    common.add_weight_options(parser)
    common.add_value_option(parser)
    parser.add_argument("--dtype", default=None, help="float16, bfloat16 or float32; default float16 on CUDA, float32 on a CPU")
    parser.add_argument("--layers", type=int, default=None, help="fewer layers, to try the script")
    parser.add_argument("--kv-blocks", type=int, default=None)
    parser.add_argument("--no-inductor", action="store_true")
    return parser.parse_args()


def run_depthfx(
    args: argparse.Namespace,
    device: torch.device,
    dtype: torch.dtype,
    weights: str,
    arms: list[tuple[str, str | None]],
    add: Callable[..., None],
) -> None:
    """The arms that share one compiled model: full and fast precision of nested weights are one switch apart."""
    model = common.make_model(args.shape, device, dtype, args.layers, args.values)
    start = time.perf_counter()
    depthfx.compile(model, kv_blocks=args.kv_blocks, inductor=not args.no_inductor, weights=weights)
    add(arms[0][0], 0, "s to compile", time.perf_counter() - start)
    print(model.explain(), flush=True)
    for arm, precision in arms:
        if precision is not None:
            model.set_precision(precision)
        for batch in args.batches:
            times, exposed = time_depthfx(model, batch, args.prompt, args.steps)
            add(arm, batch, "ms a step", common.spread([t * 1e3 for t in times]))
            add(arm, batch, "exposed host ms a step", exposed * 1e3)
            replay = time_replay(model, batch)
            if replay:
                add(arm, batch, "ms a replay, idle rows", common.spread([t * 1e3 for t in replay]))
        if "prefill" in args.arms:
            add(arm, 8, "prompt tokens/s, 8 x 2048", time_prefill(model, 8, 2048))


def main() -> None:
    args = parse_arguments()
    device = common.default_device()
    dtype = getattr(torch, args.dtype or ("float16" if device.type == "cuda" else "float32"))
    model = common.make_model(args.shape, device, dtype, args.layers, args.values)
    rows: list[dict[str, Any]] = []

    def add(arm: str, batch: int, what: str, value: dict[str, float] | float) -> None:
        values = value if isinstance(value, dict) else {"median": value}
        rows.append({"arm": arm, "batch": batch, "what": what, **values})
        print(rows[-1], flush=True)

    if "floor" in args.arms:
        bandwidth = common.copy_bandwidth(device)
        add("floor", 1, "copy TB/s", bandwidth / 1e12)
        add("floor", 1, "ms a step: weights at copy bandwidth", common.weight_bytes_per_step(model) / bandwidth * 1e3)
    if "hf-eager" in args.arms:
        for batch in args.hf_batches:
            add("HF eager", batch, "ms a step", time_hf(model, batch, args.prompt, min(args.steps, 12)) * 1e3)
    if "hf-static" in args.arms:
        for batch in args.hf_batches:
            start = time.perf_counter()
            # one cache length for all calls: another one would compile again
            longest = args.prompt + args.steps + 8
            step = time_hf(model, batch, args.prompt, args.steps, cache_implementation="static", max_cache_len=longest)
            add("HF static", batch, "ms a step", step * 1e3)
            add("HF static", batch, "s in all, with compilation", time.perf_counter() - start)
        torch._dynamo.reset()
        gc.collect()
    del model
    common.release()
    for weights, arms in common.depthfx_groups(args).items():
        run_depthfx(args, device, dtype, weights, arms, add)
        common.release()
    common.print_table(rows, ["arm", "batch", "what", "median", "p10", "p90"])
    base = common.write_results(f"decode-{args.shape}{common.suffix(args)}", rows, device)
    steps = [r for r in rows if r["what"] == "ms a step"]
    floor = next((r["median"] for r in rows if r["what"].startswith("ms a step: weights")), None)
    if steps:
        title = f"Decode, {args.shape}, prompt {args.prompt}: ms a step (lower is better)"
        plots.bars(base.with_suffix(".png"), title, "ms a step", steps, "batch", "median", floor)


if __name__ == "__main__":
    main()
