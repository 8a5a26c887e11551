"""What precision and skipped layers cost in quality: SmolLM2 on plain text, perplexity, KL and greedy agreement with the FP16 model.

Without ``--skipper`` each kind of weights; with it a skipper and its controls (see ``quality_depth.py``).
Every arm runs the compiled program, with its own kernels. The weights are rounded to FP16 first, so the dense arm is FP16 weights.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import common
import quality_depth
import torch

import depthfx
from depthfx.lowering.nested_format import FORMATS, choose_format
from depthfx.lowering.nested_linear import linears_to_nest
from depthfx.records import SamplingParams
from depthfx.runtime.prompt_logits import prompt_logits
from depthfx.smollm2 import load_smollm2

ARMS = ("full", "fast", "fp8", "formats")


def read_text(paths: list[Path]) -> str:
    """Text of ``.txt`` files, and of all strings in the lines of ``.jsonl`` files."""
    parts = []
    for path in paths:
        text = path.read_text()
        if path.suffix == ".jsonl":
            lines = [json.loads(line) for line in text.splitlines() if line.strip()]
            text = "\n\n".join("\n".join(v for v in line.values() if isinstance(v, str)) for line in lines)
        parts.append(text)
    return "\n\n".join(parts)


def logits_of(model: Any, token_ids: list[int], routed: bool = False) -> torch.Tensor:
    """Logits ``[T, V]`` float32 of every position of one prompt, dense or routed."""
    return prompt_logits(model.engine, token_ids, routed)


def measure(
    dense: Any, model: Any, windows: list[list[int]], prompts: list[list[int]], answers: list[list[int]], new: int
) -> dict[str, float]:
    """Perplexity, mean KL to ``dense`` in nats a token, and how far greedy continuations agree with ``answers``."""
    loss = divergence = 0.0
    count = 0
    for window in windows:
        exact, ours = (torch.log_softmax(logits_of(m, window), -1)[:-1] for m in (dense, model))
        targets = torch.tensor(window[1:], device=ours.device)
        loss -= float(ours.gather(1, targets[:, None]).sum())
        divergence += float((exact.exp() * (exact - ours)).sum())
        count += len(targets)
    found = continuations(model, prompts, new)
    same = [next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), new) for x, y in zip(found, answers, strict=True)]
    return {
        "perplexity": float(torch.tensor(loss / count).exp()),
        "KL to FP16": divergence / count,
        "same answers": sum(s == new for s in same) / len(same),
        "same leading tokens": sum(same) / len(same),
    }


def continuations(model: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    """Greedy tokens of each prompt."""
    outputs = model.engine.run((prompt, SamplingParams(max_new_tokens=new)) for prompt in prompts).values()
    assert all(o.error is None for o in outputs), [o.error for o in outputs]
    return [list(o.new_token_ids) for o in outputs]


def fresh(dtype: torch.dtype, device: torch.device) -> Any:
    """SmolLM2 with weights that FP16 holds."""
    model, _ = load_smollm2(torch.float32, "cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half())
    return model.to(dtype).to(device)


@torch.no_grad()
def with_fast_values(model: Any, only: str | None, force: str | None) -> tuple[Any, int]:
    """``model`` with FP8 numbers in the place of weights that chose format ``only``, or of all that ``force`` covers; and how many."""
    count = 0
    for path in linears_to_nest(model):
        weight = model.get_submodule(path).weight
        half = weight.half()
        form = FORMATS.get(force) if force else choose_format(half)
        if form.fp8 is None or not form.covers(half) or (only and form.name != only):
            continue
        weight.copy_(form.fast_values(form.split(half)).to(weight.dtype))
        count += 1
    return model, count


def parse_arguments() -> argparse.Namespace:
    """Arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path, nargs="+", help="plain text (.txt), or .jsonl files whose strings are text")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--tokens", type=int, default=None, help="of the text; default 32768 on CUDA, 2048 on a CPU")
    parser.add_argument("--window", type=int, default=512, help="tokens of one forward")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--new", type=int, default=32, help="tokens of each greedy continuation")
    parser.add_argument("--dtype", default=None, help="of the activations; default float16 on CUDA, float32 on a CPU")
    parser.add_argument("--skipper", type=Path, help="measure this skipper of SmolLM2, a folder, instead of kinds of weights")
    parser.add_argument("--before", type=Path, help="with --skipper: the result of its first stage alone")
    parser.add_argument("--thresholds", type=float, nargs="*", default=list(quality_depth.THRESHOLDS), help="with --skipper: of the curve")
    parser.add_argument("--no-served", action="store_true", help="with --skipper: plain PyTorch only")
    parser.add_argument("--name", default="", help="with --skipper: of the text, for the names of the results")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    device = common.default_device()
    dtype = getattr(torch, args.dtype or ("float16" if device.type == "cuda" else "float32"))
    ids = load_smollm2()[1](read_text(args.text), return_tensors=None)["input_ids"]
    wanted = args.tokens or (32768 if device.type == "cuda" else 2048)
    windows = [ids[at : at + args.window] for at in range(0, min(wanted, len(ids)) - args.window + 1, args.window)]
    stride = max(1, (len(ids) - 64) // args.prompts)
    prompts = [ids[at : at + 64] for at in range(0, stride * args.prompts, stride)]
    if not windows or len(prompts[-1]) < 64:
        raise SystemExit(f"the text has {len(ids)} tokens; give more of it, or a smaller --window or --prompts")
    options = {"inductor": False, "max_batch_tokens": max(512, args.window), "max_model_len": max(512, args.window), "lookahead": False}
    if args.skipper:
        options |= {"kv_blocks": 4 * max(8, args.window // 16), "max_batch_size": 1, "cuda_graphs": False}  # a window at a time
        return quality_depth.measure_skipper(args, windows, lambda: fresh(dtype, device), logits_of, options)
    dense = depthfx.compile(fresh(dtype, device), **options)
    answers = continuations(dense, prompts, args.new)
    rows: list[dict[str, Any]] = []

    def add(arm: str, weights: int, model: Any) -> None:
        rows.append({"arm": arm, "weights": weights, **measure(dense, model, windows, prompts, answers, args.new)})
        print(rows[-1], flush=True)

    linears = len(linears_to_nest(dense))
    add("dense FP16", linears, dense)
    if {"full", "fast"} & set(args.arms):
        nested = depthfx.compile(fresh(dtype, device), weights="nested", **options)
        for precision in ("full", "fast"):
            if precision in args.arms:
                nested.set_precision(precision)
                add(f"nested, {precision}", linears, nested)
        del nested
        common.release()
    if "fp8" in args.arms:
        add("static FP8", linears, depthfx.compile(fresh(dtype, device), weights="fp8", **options))
        common.release()
    if "formats" in args.arms:
        for only, force in (("nested_e4m3", None), ("nested_e4m3_scaled", None), ("nested_e5m2", None), (None, "nested_e5m2")):
            changed, count = with_fast_values(fresh(dtype, device), only, force)
            if count:
                label = f"fast, those in {only}" if only else f"fast, all in {force}"
                add(label, count, depthfx.compile(changed, **options))
    common.print_table(rows, ["arm", "weights", "perplexity", "KL to FP16", "same answers", "same leading tokens"])
    common.write_results("quality-smollm2", rows, device)


if __name__ == "__main__":
    main()
