"""Seconds from nothing to the first token of one model shape: cold (empty caches), then warm, each in a process of its own."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_MARK = "warm-up seconds: "


def measure(shape: str, layers: int | None, dtype: str | None, prompt: int, profile: str | None) -> None:
    """Import, build, compile and serve one token in this process; print the seconds of each stage as JSON."""
    began = time.perf_counter()
    import common
    import torch

    import depthfx
    import depthfx.api

    seconds = {"imports": time.perf_counter() - began}
    device = common.default_device()
    chosen = getattr(torch, dtype or ("float16" if device.type == "cuda" else "float32"))
    start = time.perf_counter()
    model = common.make_model(shape, device, chosen, layers)
    common.synchronize(device)
    seconds["build the model (not depthfx)"] = time.perf_counter() - start
    if profile:
        import cProfile

        recorded = cProfile.Profile()
        recorded.enable()
    start = time.perf_counter()
    depthfx.compile(model)
    seconds["compile"] = time.perf_counter() - start
    ids = torch.randint(10, model.config.vocab_size - 10, (1, prompt), generator=torch.Generator().manual_seed(0)).to(device)
    start = time.perf_counter()
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False, pad_token_id=0)
    common.synchronize(device)
    seconds["first token"] = time.perf_counter() - start
    if profile:
        recorded.disable()
        recorded.dump_stats(profile)
    seconds["compile to first token"] = seconds["compile"] + seconds["first token"]
    stages = model._depthfx.report.seconds
    print(model.explain(), file=sys.stderr)
    print(_MARK + json.dumps({**seconds, **{f"  {stage}": value for stage, value in stages.items()}}), flush=True)


def run_fresh(folder: Path, arguments: list[str]) -> dict[str, float]:
    """The stages of a new process whose caches lie in ``folder``."""
    places = {"DEPTHFX_CACHE": "depthfx", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "CUDA_CACHE_PATH": "cuda"}
    environment = {**os.environ, **{name: str(folder / place) for name, place in places.items()}}
    start = time.perf_counter()
    command = [sys.executable, __file__, "--measure", *arguments]
    out = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    found: dict[str, float] = json.loads(next(line for line in out.splitlines() if line.startswith(_MARK)).removeprefix(_MARK))
    return {**found, "whole process": time.perf_counter() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama3-8b", help="one of benchmarks/common.py's SHAPES")
    parser.add_argument("--layers", type=int, default=None, help="fewer layers, to try the script")
    parser.add_argument("--dtype", default=None, help="float16, bfloat16 or float32; default float16 on CUDA, float32 on a CPU")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--profile", default=None, help="write the profile of each process to PROFILE.<cold or warm>")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.shape, args.layers, args.dtype, args.prompt, args.profile)
        return
    arguments = ["--shape", args.shape, "--prompt", str(args.prompt)]
    arguments += [f"--layers={args.layers}"] if args.layers else []
    arguments += [f"--dtype={args.dtype}"] if args.dtype else []
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for arm in ("cold", "warm"):
            extra = [f"--profile={args.profile}.{arm}"] if args.profile else []
            stages = run_fresh(Path(folder), arguments + extra)
            rows += [{"arm": arm, "what": f"s, {what}", "median": value} for what, value in stages.items()]
            print(arm, json.dumps({k: round(v, 2) for k, v in stages.items()}), flush=True)
    import common

    common.print_table(rows, ["arm", "what", "median"])
    common.write_results(f"warmup-{args.shape}", rows, common.default_device())


if __name__ == "__main__":
    main()
