"""Seconds and memory of a training step: a skipper (routers and adapters) beside LoRA on the same frozen base and batch.

``python3 benchmarks/train_step.py`` from the root of the repository; LoRA is the library peft. To try it on a CPU:
``--steps 3 --batch 2 --length 48 --dtype float32``. Results go to $OUT, or to benchmarks/results/.

    lora       rank 8 on every linear of the decoder layers, AdamW, loss of the language model
    skipper    through `train_skipper` as it is: routers and adapters on the routed layers, the same loss, no base beside it
    distilled  the same with the divergence from the frozen base, which takes one more forward pass of the base

Model SmolLM2, random token ids, the same micro-batch for all, nothing recomputed. A step's time is that between two ends of steps with the device
idle at both; memory is the device's peak above the model. The first two steps are left out.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import common
import torch

from depthfx.skippers import make_skipper
from depthfx.skippers.train import Stage, TrainSettings, make_sequences, train_skipper
from depthfx.smollm2 import load_smollm2

WARM_UP = 2
COLUMNS = ["what", "trained parameters", "step ms", "spread %", "of lora", "peak MiB", "of lora's peak"]


class Clock:
    """Times between steps."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.times, self.last = device, [], 0.0  # type: torch.device, list[float], float

    def tick(self, *_: Any) -> None:
        """A step has ended."""
        common.synchronize(self.device)
        now = time.perf_counter()
        self.times.append(now - self.last)
        self.last = now


def base(args: argparse.Namespace, device: torch.device) -> Any:
    """The frozen model."""
    return load_smollm2(getattr(torch, args.dtype), str(device))[0].requires_grad_(False)


def lora(args: argparse.Namespace, device: torch.device, ids: torch.Tensor, tick: Callable[[], None]) -> int:
    """Steps of LoRA; returns the number of trained parameters."""
    from peft import LoraConfig, get_peft_model

    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(base(args, device), LoraConfig(r=8, lora_alpha=16, target_modules=names, task_type="CAUSAL_LM"))
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.data = parameter.data.float()  # as the skipper's: trained parameters and optimiser in FP32
    optimiser = torch.optim.AdamW(trained, lr=1e-4)
    scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "float16")
    for step in range(args.steps):
        optimiser.zero_grad()
        rows = ids[step * args.batch : (step + 1) * args.batch].to(device)
        with torch.autocast(device.type, getattr(torch, args.dtype), enabled=args.dtype != "float32"):
            logits = model(input_ids=rows, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), rows[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimiser)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        scaler.step(optimiser)
        scaler.update()
        tick()
    return sum(p.numel() for p in trained)


def skipper(args: argparse.Namespace, device: torch.device, ids: torch.Tensor, tick: Callable[[], None], distill: float) -> int:
    """Steps of the trainer; returns the number of trained parameters."""
    model = base(args, device)
    layers = tuple(range(model.config.num_hidden_layers // 2, model.config.num_hidden_layers))
    made = make_skipper(
        model, "flexidepth", "adapter", layers=layers, gate="hard", reduction=32, proj_reduction=32, head_bias=1.0, zero=True
    )
    settings = TrainSettings(
        stages=(Stage(steps=args.steps, learning_rate=1e-4),), decision="straight_through", batch_size=args.batch, micro_batch=args.batch,
        target_skip=0.3, distill=distill, settle_sequences=0, recompute=False, log_every=10**6, checkpoint_every=10**6,
    )  # fmt: skip
    data = make_sequences(ids.tolist(), args.length, model)
    with tempfile.TemporaryDirectory() as folder:
        train_skipper(model, made, data, folder, settings, progress=False, on_step=lambda record: tick())
    return sum(p.numel() for p in made.parameters())


def measure(name: str, args: argparse.Namespace, device: torch.device, ids: torch.Tensor) -> dict[str, Any]:
    """One row."""
    common.release()
    held = sum(p.nbytes for p in base(args, device).parameters())
    common.release()
    clock = Clock(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    if name == "lora":
        count = lora(args, device, ids, clock.tick)
    else:
        count = skipper(args, device, ids, clock.tick, 1.0 if name == "distilled" else 0.0)
    times = clock.times[WARM_UP:]
    peak = (torch.cuda.max_memory_allocated(device) - held) / 2**20 if device.type == "cuda" else None
    row = {"what": name, "trained parameters": count, "step ms": statistics.median(times) * 1e3, "peak MiB": peak, "times": times}
    return row | {"spread %": (max(times) - min(times)) / statistics.median(times) * 100}


def main() -> None:
    """Measure, print and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=22)
    parser.add_argument("--batch", type=int, default=24, help="sequences of a step, all in one pass")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float16")
    args = parser.parse_args()
    if args.steps <= WARM_UP:
        parser.error(f"--steps {args.steps}: the first {WARM_UP} are left out; give more")
    device = common.default_device()
    ids = torch.randint(100, 40_000, (args.steps * args.batch, args.length), generator=torch.Generator().manual_seed(0))
    rows = [measure(name, args, device, ids) for name in ("lora", "skipper", "distilled")]
    for row in rows:
        row["of lora"] = row["step ms"] / rows[0]["step ms"]
        row["of lora's peak"] = row["peak MiB"] / rows[0]["peak MiB"] if row["peak MiB"] is not None else None
    common.print_table(rows, [c for c in COLUMNS if rows[0].get(c) is not None])
    print(f"written to {common.write_results('train-step', rows, device)}.json")


if __name__ == "__main__":
    main()
