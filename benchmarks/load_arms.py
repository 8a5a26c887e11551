"""The arms of the load benchmark: names and the settings behind them, all on the same engine code; building and closing one."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common
import torch
from load_drive import replay
from load_metrics import percentile
from load_workload import Ask, Job, Tokenizer, stand_in_tokenizer

import depthfx
from depthfx.skippers import make_skipper


@dataclass(frozen=True)
class Arm:
    """``settings`` go to :func:`depthfx.compile` as they are; ``policy`` is that of the memory settings; ``skips``: a skipper is compiled in."""

    settings: dict[str, Any] = field(default_factory=dict)
    policy: str | None = None
    skips: bool = False


NESTED = {"weights": "nested"}
ARMS = {
    "static-fp16": Arm(),
    "static-fp8": Arm({"weights": "fp8"}),
    "nested-resident": Arm(NESTED, "nested_resident"),
    "static-full": Arm(NESTED, "static_full"),
    "static-fast": Arm(NESTED, "static_fast"),
    "elastic": Arm(NESTED, "elastic"),
    "kv-offload": Arm({"kv_offload_gib": 32.0}),
    "fp8-kv": Arm({"kv_dtype": "fp8"}),
    "weight-offload": Arm({"weight_offload_gib": 4.0}),
    "dense": Arm({"depth": "dense"}, skips=True),
    "routed": Arm({"depth": "routed"}, skips=True),
    "auto": Arm({"depth": "auto"}, skips=True),
    "auto-paper": Arm({"depth": "auto", "depth_rule": "paper"}, skips=True),
    "elastic+routed": Arm({**NESTED, "depth": "routed"}, "elastic", skips=True),
    "elastic+auto": Arm({**NESTED, "depth": "auto"}, "elastic", skips=True),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options that say which model is served, in how much memory, and how the arms differ from their table."""
    add_model_options(parser)
    parser.add_argument("--arms", nargs="+", choices=sorted(ARMS), default=["static-fp16", "elastic"], help="the first one is the baseline")
    parser.add_argument("--unit-mib", type=float, default=64.0, help="of arms with memory settings")
    parser.add_argument("--kv-offload-gib", type=float, default=None)
    parser.add_argument("--weight-offload-gib", type=float, default=None)
    parser.add_argument("--skipper", default=None, metavar="PATH", help="a checkpoint, instead of random_skip")
    parser.add_argument("--skip-rate", type=float, default=0.5, help="share of tokens that skip (random_skip)")
    parser.add_argument("--skip-depth", type=float, default=0.5, help="share of the routed layers that they skip (random_skip)")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Options that say which model is served, in how much memory."""
    parser.add_argument("--shape", choices=sorted(common.SHAPES), default="llama3-8b", help="random weights of this shape")
    parser.add_argument("--model", default=None, metavar="smollm2|PATH", help="a real model instead")
    parser.add_argument("--layers", type=int, default=None, help="fewer layers, to try the script")
    parser.add_argument("--budget-gib", type=float, default=None, help="of every arm, for weights and KV")
    parser.add_argument(
        "--kv-blocks", type=int, default=None, help="exact, instead of the budget: then arms have equal KV, not equal memory"
    )
    parser.add_argument("--max-batch", type=int, default=256)
    parser.add_argument(
        "--chunk-tokens",
        type=int,
        default=None,
        help="rows of a step that decodes and prefills: bounds gaps between tokens (default 2048 on CUDA)",
    )
    parser.add_argument("--capture-prompts", action="store_true", help="short steps with prompts are captured too (CUDA)")
    parser.add_argument("--max-len", type=int, default=None, help="context; longer prompts are cut")
    parser.add_argument("--skip-projector", default="identity")
    parser.add_argument("--no-inductor", action="store_true")


def load_model(args: argparse.Namespace, device: torch.device) -> Any:
    """The model of ``--model`` or ``--shape``, not compiled."""
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    if args.model is None:
        return common.make_model(args.shape, device, dtype, args.layers)
    if args.layers is not None:
        raise SystemExit("--layers needs --shape: a real model keeps its layers")
    if args.model == "smollm2":
        from depthfx.smollm2 import load_smollm2

        return load_smollm2(dtype, device)[0]
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, local_files_only=True).to(device).eval()


def vocabulary_of(args: argparse.Namespace) -> int:
    """Size of the vocabulary of ``--model`` or ``--shape``, before any weights are loaded."""
    if args.model is None:
        return int(common.SHAPES[args.shape][1]["vocab_size"])
    from transformers import AutoConfig

    from depthfx.smollm2 import converted_folder

    folder = converted_folder() if args.model == "smollm2" else args.model
    return int(AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config().vocab_size)


def check_room(model: Any, asks: list[Ask]) -> None:
    """Exits with the reason where the longest ask does not fit the engine: it would be refused, or end early, in the middle of a run."""
    scheduler = model.engine._scheduler
    most = min(scheduler.max_model_len, scheduler.manager.max_request_tokens)
    longest = max(len(a.prompt) + a.output_tokens for a in asks)
    if longest > most:
        raise SystemExit(f"the longest request has {longest} tokens, context and KV of this arm allow {most}; "
                         "set --max-input and --max-output, or raise --max-len, --budget-gib or --kv-blocks")  # fmt: skip


def load_tokenizer(args: argparse.Namespace, vocabulary: int) -> tuple[Tokenizer, str]:
    """The model's own tokenizer, or a stand-in where weights are random; and what it is, for the report."""
    if args.model is None:
        return stand_in_tokenizer(vocabulary), "stand-in (hashes of words)"
    if args.model == "smollm2":
        from depthfx.smollm2 import load_smollm2

        tokenizer = load_smollm2()[1]
    else:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"], "the model's"


def build(name: str, args: argparse.Namespace, device: torch.device, skips: Callable[[Any], Any] | None = None, **overrides: Any) -> Any:
    """A compiled model of arm ``name``; ``overrides`` win over the table and the options, ``skips`` makes a skipper for the model instead of theirs."""
    arm, start = ARMS[name], time.perf_counter()
    settings = {
        **arm.settings, "memory_budget_gib": args.budget_gib, "kv_blocks": args.kv_blocks, "max_batch_size": args.max_batch,
        "max_model_len": args.max_len, "max_chunk_tokens": args.chunk_tokens, "inductor": not args.no_inductor,
        "capture_prompts": args.capture_prompts,
    }  # fmt: skip
    for option in ("kv_offload_gib", "weight_offload_gib"):
        if option in settings and getattr(args, option) is not None:
            settings[option] = getattr(args, option)
    if arm.policy is not None:
        settings["memory"] = depthfx.ElasticMemory(policy=arm.policy, unit_mib=args.unit_mib)
    model = load_model(args, device)
    skipper: Any = skips(model) if skips is not None else None
    if arm.skips and skips is None:
        options = {"rate": args.skip_rate, "depth": args.skip_depth}
        skipper = Path(args.skipper) if args.skipper else make_skipper(model, "random_skip", args.skip_projector, **options)
    depthfx.compile(model, skipper=skipper, **{**settings, **overrides})
    print(f"{name}: compiled in {time.perf_counter() - start:.1f} s", flush=True)
    return model


def warm_up(model: Any, asks: list[Ask], depth: Any = None) -> None:
    """Serve some asks, all at once and cut short: the first steps of a process are slower. ``depth``: of the asks, None for the engine's own."""
    replay(model.engine, [Job(i, 0.0, Ask(a.prompt, min(a.output_tokens, 4))) for i, a in enumerate(asks)], depth=depth)
    reset(model)


def reset(model: Any) -> None:
    """As a fresh engine would be: nothing cached, nothing lent."""
    engine = model.engine
    if model._depthfx.settings.memory is not None and model._depthfx.settings.memory.policy == "elastic":
        engine.restore()
    engine.forget_prefixes()


def base_time(args: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Seconds between tokens without load, on weights in 16 bits: p99 and mean of ``--base-batch`` requests that decode together.

    Paper DPS, section V.A, after Sarathi-Serve: p99 of a decode iteration, 32 requests, contexts of 4k, no prefill beside it. The times are
    those between the turns of ``step()`` after all prompts are through.
    """
    batch, context, steps = args.base_batch, args.base_context, args.base_steps
    room = context + steps + 16 + batch * context // 64  # the first ones decode while the last ones prefill
    sizes = {"memory_budget_gib": None, "kv_blocks": batch * -(-room // 16), "max_batch_size": batch, "max_model_len": None}
    model = build("static-fp16", args, device, **sizes)
    engine, generator = model.engine, torch.Generator().manual_seed(0)
    ids = torch.randint(10, model.config.vocab_size - 10, (batch, context), generator=generator).tolist()
    times: list[float] = []
    for measured in (False, True):  # once to warm up
        engine.forget_prefixes()
        waiting = {engine.add(prompt, depthfx.SamplingParams(max_new_tokens=room - context)) for prompt in ids}
        while waiting:
            waiting -= {o.request_id for o in engine.step()}
        for turn in range(steps):
            start = time.perf_counter()
            engine.step()
            if measured and turn >= 4:  # the first ones still see the end of the prompts
                times.append(time.perf_counter() - start)
        stats = engine.stats()
        if stats.num_preemptions or stats.num_running != batch:
            raise SystemExit(f"T_base: {stats.num_running} of {batch} requests decode after {stats.num_preemptions} preemptions; "
                             "lower --base-context or --base-batch")  # fmt: skip
        for request_id in engine._scheduler.unfinished():
            engine.abort(request_id)
        while engine.has_unfinished():
            engine.step()
    engine.close()
    return {"p99": percentile(times, 0.99), "mean": statistics.fmean(times), "n": len(times)}
