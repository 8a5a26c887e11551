"""Throughput of many requests at once, side by side: depthfx and Hugging Face's generate_batch on the same weights."""

from __future__ import annotations

import argparse
import time
from typing import Any

import common
import plots
import torch

import depthfx


def prompts(num_requests: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, vocab - 10, (num_requests, length), generator=generator).tolist()


def run_depthfx(model: Any, requests: list[list[int]], new: int) -> dict[str, float]:
    """All requests arrive at once; time to first token of each, largest gap between tokens, and the whole time."""
    engine = model.engine
    sampling = depthfx.SamplingParams(max_new_tokens=new)
    common.synchronize(model.device)
    start = time.perf_counter()
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    gaps: list[float] = []
    tokens = 0
    for prompt in requests:
        engine.add(prompt, sampling)
    while engine.has_unfinished():
        for output in engine.step():
            assert output.error is None, output.error
            now = time.perf_counter() - start
            first.setdefault(output.request_id, now)
            if output.request_id in last and output.new_token_ids:
                gaps.append(now - last[output.request_id])
            last[output.request_id] = now
            tokens += len(output.new_token_ids)
    seconds = time.perf_counter() - start
    assert tokens == len(requests) * new, f"{tokens} tokens came back, {len(requests) * new} were asked for"
    ordered = sorted(first.values())
    return {
        "tokens/s": tokens / seconds,
        "seconds": seconds,
        "mean TTFT s": sum(ordered) / len(ordered),
        "p99 TTFT s": ordered[int(0.99 * (len(ordered) - 1))],
        "largest gap ms": max(gaps) * 1e3,
    }


def run_hf(model: Any, requests: list[list[int]], new: int) -> dict[str, float]:
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    start = time.perf_counter()
    outputs = model.generate_batch(requests, generation_config=config)
    seconds = time.perf_counter() - start
    tokens = sum(len(o.generated_tokens) for o in outputs.values())
    return {"tokens/s": tokens / seconds, "seconds": seconds}


def serve_depthfx(
    args: argparse.Namespace,
    device: torch.device,
    dtype: torch.dtype,
    weights: str,
    arms: list[tuple[str, str | None]],
    rows: list[dict[str, Any]],
) -> None:
    """The arms that share one compiled model."""
    model = depthfx.compile(common.make_model(args.shape, device, dtype, args.layers, args.values), weights=weights)
    vocabulary = model.config.vocab_size
    for arm, precision in arms:
        if precision is not None:
            model.set_precision(precision)
        run_depthfx(model, prompts(16, args.prompt, vocabulary, 99), 8)
        for number in args.requests:
            for repeat in range(args.repeats):
                result = run_depthfx(model, prompts(number, args.prompt, vocabulary, 1 + repeat + number), args.new)
                rows.append({"arm": arm, "requests": number, **result})
                print(rows[-1], flush=True)
        stats = model.engine.stats()
        print(f"exposed host {stats.exposed_seconds_per_step * 1e3:.3f} ms a step, host {stats.host_seconds_per_step * 1e3:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(common.SHAPES), default="llama3-8b")
    parser.add_argument("--requests", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--hf-requests", type=int, nargs="+", default=[128], help="sizes of the Hugging Face arm (slow)")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--arms", nargs="+", default=["depthfx", "hf-batch"], help="also depthfx-full, depthfx-fast, depthfx-fp8")
    common.add_weight_options(parser)
    common.add_value_option(parser)
    parser.add_argument("--layers", type=int, default=None, help="fewer layers, to try the script")
    args = parser.parse_args()
    device = common.default_device()
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    model = common.make_model(args.shape, device, dtype, args.layers, args.values)
    rows: list[dict[str, Any]] = []
    if "hf-batch" in args.arms:
        for number in args.hf_requests:
            result = run_hf(model, prompts(number, args.prompt, model.config.vocab_size, 0), args.new)
            rows.append({"arm": "HF generate_batch", "requests": number, **result})
            print(rows[-1], flush=True)
    del model
    common.release()
    for weights, arms in common.depthfx_groups(args).items():
        serve_depthfx(args, device, dtype, weights, arms, rows)
        common.release()
    common.print_table(rows, ["arm", "requests", "tokens/s", "seconds", "mean TTFT s", "p99 TTFT s", "largest gap ms"])
    base = common.write_results(f"serve-{args.shape}{common.suffix(args)}", rows, device)
    title = f"{args.shape}: requests of {args.prompt} + {args.new} tokens, all at once (higher is better)"
    plots.bars(base.with_suffix(".png"), title, "output tokens a second", rows, "requests", "tokens/s")


if __name__ == "__main__":
    main()
