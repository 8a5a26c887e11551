"""Seconds and memory of a training step: the shipped skipper of SmolLM2 beside LoRA, on the same frozen base and batch.

``python3 benchmarks/train_step.py`` from the root of the repository. LoRA is the library peft; where it is missing, those arms are left out and
the output says so. To try it on a CPU: ``--rounds 1 --batch 2 --length 48 --dtype float32``. Results go to $OUT, or to benchmarks/results/.

    skipper    through `train_skipper` as it is: routers and adapters, loss of the language model alone
    distilled  the same with the loss as shipped, whose divergence from the frozen base takes one more forward pass of it
    lora       rank 8 on every linear of the layers that the skipper routes, loss of the language model
    lora, all  the same on all decoder layers

What is trained is read from the shipped skipper's config: routed layers, sizes, gate and settings of its first stage, batch and micro-batch and
with them the sequences' length. Both kinds of arms have the trainer's arithmetic: base in ``--dtype`` without autocast; trained parameters in
FP32, rounded to that dtype in each forward; the same chunked loss on the model's own logits (`sum_losses`); the same scaler, clipping,
AdamW and accumulation; nothing computed anew. Token ids are random.

Arms take turns, round by round, each beginning anew. Of a round the first two steps are left out, and the last one, at whose end the trainer
writes its state. A step's time is that between two ends of steps with the device idle at both; memory is the device's peak above the base.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import torch
from torch.func import functional_call

from depthfx.skippers import load_skipper
from depthfx.skippers.train import Stage, TrainSettings, make_sequences, train_skipper
from depthfx.skippers.train.loss import sum_losses
from depthfx.smollm2 import load_smollm2, shipped_skipper

ARMS = ("lora", "skipper", "distilled", "lora, all")
LEFT_OUT = 2, 1  # of a round's steps, at its beginning and end
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
COLUMNS = ["what", "trained parameters", "step ms", "p10 ms", "p90 ms", "of lora", "peak MiB", "of lora's peak"]


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


class Shipped:
    """The skipper in the package, and how its first stage was trained."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.folder, self.layers = folder, config["routing_layers"]
        record = config["training"]
        known = dict(record["settings"])
        stage = Stage(**{**known.pop("stages")[0], "steps": args.steps})
        batch = args.batch or known["batch_size"]
        self.length = args.length or record["tokens"] // record["steps"] // known["batch_size"]
        known |= {"batch_size": batch, "micro_batch": min(batch, known["micro_batch"]), "betas": tuple(known["betas"])}
        quiet = {"log_every": 10**6, "evaluate_every": 10**6, "checkpoint_every": 10**6, "settle_sequences": 0}
        self.settings = TrainSettings(**{**known, **quiet, "stages": (stage,)})


def train(shipped: Shipped, model: Any, ids: torch.Tensor, tick: Callable[..., None], distilled: bool) -> int:
    """Steps of the trainer; returns the number of trained parameters."""
    made = load_skipper(shipped.folder, model)
    loss = {} if distilled else {"lm": 1.0, "distill": 0.0}
    settings = TrainSettings(**{**vars(shipped.settings), **loss})
    with tempfile.TemporaryDirectory() as folder:
        train_skipper(model, made, make_sequences(ids.tolist(), shipped.length, model), folder, settings, progress=False, on_step=tick)
    return sum(p.numel() for p in made.parameters())


def train_lora(shipped: Shipped, model: Any, ids: torch.Tensor, tick: Callable[..., None], layers: list[int] | None) -> int:
    """Steps of LoRA with the trainer's arithmetic; returns the number of trained parameters. ``model`` is itself again afterwards."""
    from peft import LoraConfig, get_peft_model

    settings, stage = shipped.settings, shipped.settings.stages[0]
    adapted = get_peft_model(
        model, LoraConfig(r=8, lora_alpha=16, target_modules=LINEARS, layers_to_transform=layers, task_type="CAUSAL_LM")
    )
    wide = {name: p.detach().float().requires_grad_() for name, p in adapted.named_parameters() if p.requires_grad}
    trained = list(wide.values())
    optimiser = torch.optim.AdamW(
        trained, lr=stage.learning_rate, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay
    )
    scaler = torch.amp.GradScaler(model.device.type, enabled=model.dtype is torch.float16)
    for rows in ids.split(settings.batch_size):
        optimiser.zero_grad()
        totals = torch.zeros(1, device=model.device)
        targets = rows[:, 1:].numel()
        for part in rows.to(model.device).split(settings.micro_batch):
            rounded = {name: p.to(model.dtype) for name, p in wide.items()}
            logits = functional_call(adapted, rounded, (), {"input_ids": part, "use_cache": False}).logits
            real = torch.ones_like(part, dtype=torch.bool)
            sums = sum_losses(logits, part, real, [torch.zeros_like(part, dtype=logits.dtype)], None, 1.0)
            scaler.scale(sums.loss(targets, part.numel(), 0.0, 0.0)).backward()
            totals += sums.lm.detach()
        assert torch.isfinite(totals).all(), "the trainer looks at it too"
        scaler.unscale_(optimiser)
        assert float(torch.nn.utils.clip_grad_norm_(trained, settings.clip)) != 0, "gradients have arrived"
        scaler.step(optimiser)
        scaler.update()
        tick()
    adapted.unload()
    return sum(p.numel() for p in trained)


def measure(name: str, shipped: Shipped, model: Any, ids: torch.Tensor, row: dict[str, Any]) -> None:
    """One round of one arm, added to its row."""
    common.release()
    clock, cuda = Clock(model.device), model.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(model.device)
        held = torch.cuda.memory_allocated(model.device)
    if name.startswith("lora"):
        row["trained parameters"] = train_lora(shipped, model, ids, clock.tick, shipped.layers if name == "lora" else None)
    else:
        row["trained parameters"] = train(shipped, model, ids, clock.tick, name == "distilled")
    row["times"] += clock.times[LEFT_OUT[0] : -LEFT_OUT[1]]
    if cuda:
        row["peak MiB"] = max(row.get("peak MiB") or 0.0, (torch.cuda.max_memory_allocated(model.device) - held) / 2**20)


def summed_up(rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with their medians and what those are of LoRA's, where there is one."""
    for row in rows.values():
        found = {key: value * 1e3 for key, value in common.spread(row["times"]).items() if key != "n"}
        row.update({"step ms": found["median"], "p10 ms": found["p10"], "p90 ms": found["p90"]})
    if lora := rows.get("lora"):
        for row in rows.values():
            row["of lora"] = row["step ms"] / lora["step ms"]
            # In each round one after the other, so that what the host does meanwhile is in both.
            pairs = [a / b for a, b in zip(row["times"], lora["times"], strict=True)]
            row["of lora, pairs"] = common.spread(pairs)
            row["of lora's peak"] = row["peak MiB"] / lora["peak MiB"] if "peak MiB" in row else None
    return list(rows.values())


def parse_arguments() -> argparse.Namespace:
    """Arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=9, help=f"of a round; the first {LEFT_OUT[0]} and the last {LEFT_OUT[1]} are left out")
    parser.add_argument("--batch", type=int, help="sequences of a step; default: as the shipped skipper was trained")
    parser.add_argument("--length", type=int, help="tokens of a sequence; likewise")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float16")
    args = parser.parse_args()
    if args.steps <= sum(LEFT_OUT):
        parser.error(f"--steps {args.steps}: {sum(LEFT_OUT)} of them are left out; give more")
    return args


def main() -> None:
    """Measure, print and write the rows."""
    args, device = parse_arguments(), common.default_device()
    folder = shipped_skipper()
    if folder is None:
        raise SystemExit("this copy of depthfx holds no trained skipper for SmolLM2, which is what is measured; `make skipper` trains one")
    arms = list(ARMS)
    try:
        import peft
    except ImportError:
        print("without lora: that arm is the package peft, which is not installed (pip install peft); the skipper's own steps alone follow")
        arms = [a for a in arms if not a.startswith("lora")]
    shipped = Shipped(folder, args)
    model = load_smollm2(getattr(torch, args.dtype), str(device))[0].requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (args.steps * shipped.settings.batch_size, shipped.length), generator=generator)
    rows: dict[str, dict[str, Any]] = {a: {"what": a, "layers": shipped.layers, "times": []} for a in arms}
    if "lora" in rows:
        rows["lora, all"]["layers"] = list(range(model.config.num_hidden_layers))
        rows["lora"]["peft"] = peft.__version__
    print(f"{shipped.settings.batch_size} sequences of {shipped.length} tokens a step, {shipped.settings.micro_batch} at once")
    for number in range(args.rounds):
        for name in arms[:: 1 if number % 2 == 0 else -1]:
            measure(name, shipped, model, ids, rows[name])
    found = summed_up(rows)
    common.print_table(found, [c for c in COLUMNS if found[0].get(c) is not None])
    print(f"written to {common.write_results('train-step', found, device)}.json")


if __name__ == "__main__":
    main()
