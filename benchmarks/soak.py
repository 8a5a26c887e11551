"""Serves random bursts for a long time, with aborts and injected failures, and proves that nothing is lost and nothing leaks.

``python3 benchmarks/soak.py --minutes 30`` from the root of the repository; SmolLM2 with nested weights, elastic memory that is far too small and
a skipper, so that lending, restoring, preemption and routing all happen; ``--shape small`` serves random weights instead, on a GPU, whose units
are at least as large as it maps. What is injected: steps that fail to launch, copies that fail or come late, aborts at any time. What is
checked: every request ends exactly once, for a reason it was given; tokens come in order and as many as were asked for; after each lull no
block is held and all invariants hold; at the end residuals hash to their originals, threads are gone, and memory has not grown. Ends with
exit code 1 and the reasons otherwise. Results go to $OUT, or to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import resource
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common
import torch

import depthfx
from depthfx import ElasticMemory, SamplingParams
from depthfx.skippers import make_skipper
from depthfx.smollm2 import load_smollm2

MIB = 1 << 20
INJECTED = "injected by the soak test"
_GROWTH_MIB = 96  # of the process's memory after the first fifth of the time: caches of the allocator, not what grows with requests


@dataclass
class Asked:
    """What a request was to bring, and what came."""

    new: int
    tokens: list[int] = field(default_factory=list)
    aborted: bool = False
    reason: str | None = None


class Faults:
    """Steps whose launch fails, at random; a step that follows a failed one is left alone, so that the engine itself goes on."""

    def __init__(self, runner: Any, rng: random.Random, share: float) -> None:
        self.count, self._launch, self._rng, self._share, self._last = 0, runner.launch, rng, share, False
        runner.launch = self._maybe

    def _maybe(self, plan: Any) -> Any:
        self._last = not self._last and self._rng.random() < self._share
        if self._last:
            self.count += 1
            raise RuntimeError(INJECTED)
        return self._launch(plan)


class Soak:
    """One run; ``faults`` collects whatever is wrong."""

    def __init__(self, model: Any, args: argparse.Namespace) -> None:
        self.model, self.engine, self.args = model, model.engine, args
        self.rng = random.Random(args.seed)
        self.asked: dict[str, Asked] = {}
        self.open: list[str] = []
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.memory: list[float] = []
        self.prefixes = [[self.rng.randrange(10, 40_000) for _ in range(48)] for _ in range(4)]
        self.injected = Faults(self.engine._runner, self.rng, args.fail_share)
        self.engine.control.shared.worker.copier.disturb(args.seed + 1, delay_share=0.05, most_us=3000, fail_share=0.001)

    def run(self) -> None:
        """Bursts, each followed by a lull, until the time is over."""
        end = time.monotonic() + self.args.minutes * 60
        while time.monotonic() < end and len(self.wrong) < 20:
            for _ in range(self.rng.randrange(1, self.args.burst)):
                self.ask()
            while self.engine.has_unfinished():
                self.turn()
            self.lull()
        self.model.engine.control.shared.worker.copier.disturb(0)

    def ask(self) -> None:
        """One random request."""
        rng = self.rng
        prompt = rng.choice(self.prefixes)[: rng.randrange(49)] + [rng.randrange(10, 40_000) for _ in range(rng.randrange(1, 160))]
        new = rng.randrange(1, 64)
        sampling = SamplingParams(
            max_new_tokens=new, temperature=rng.choice((0.0, 0.0, 0.8)), top_p=rng.choice((1.0, 0.9)), seed=rng.randrange(1 << 30),
            repetition_penalty=rng.choice((1.0, 1.0, 1.2)), depth=rng.choice((None, "dense", "routed", ("dense", "routed"))),
            min_precision="full" if rng.random() < 0.05 else "fast",
        )  # fmt: skip
        name = self.engine.add(prompt, sampling)
        self.asked[name] = Asked(new)
        self.open.append(name)

    def turn(self) -> None:
        """One step, now and then with a new request, an abort or another precision before it."""
        rng = self.rng
        if rng.random() < 0.03:
            self.ask()
        if self.open and rng.random() < 0.01:
            name = rng.choice(self.open)
            self.asked[name].aborted = self.engine.abort(name) or self.asked[name].aborted
        if rng.random() < 0.002:
            self.engine.forget_prefixes()
        for output in self.engine.step():
            self.book(output)

    def book(self, output: Any) -> None:
        """Compares an output with what was asked for."""
        asked = self.asked.get(output.request_id)
        if asked is None or asked.reason is not None:
            self.wrong.append(f"{output.request_id}: an output of a request that {'nobody asked for' if asked is None else 'had ended'}")
            return
        asked.tokens += output.new_token_ids
        if not output.finished:
            return
        asked.reason = output.finish_reason
        self.open.remove(output.request_id)
        self.counts[output.finish_reason] += 1
        self.counts["tokens"] += len(asked.tokens)
        if output.finish_reason == "length" and len(asked.tokens) != asked.new:
            self.wrong.append(f"{output.request_id}: {len(asked.tokens)} tokens instead of {asked.new}")
        if output.finish_reason == "abort" and not asked.aborted:
            self.wrong.append(f"{output.request_id}: aborted by nobody")
        if output.error is not None and INJECTED not in str(output.error):
            self.wrong.append(f"{output.request_id}: {type(output.error).__name__}: {output.error}")
        if output.finish_reason not in ("length", "abort", "error"):
            self.wrong.append(f"{output.request_id}: ended by {output.finish_reason}")

    def lull(self) -> None:
        """Nothing runs: nothing may be held or missing."""
        self.counts["bursts"] += 1
        if self.open:
            self.wrong.append(f"requests without an end: {self.open[:5]}")
            self.open.clear()
        self.asked.clear()
        self.engine._scheduler.check()
        if held := self.engine.stats().kv.num_held:
            self.wrong.append(f"{held} KV blocks are held while nothing runs")
        if self.rng.random() < 0.2:
            self.engine.restore()
            if set(self.engine.precision().values()) != {"full"}:
                self.wrong.append("a layer is not full after everything was restored")
        gc.collect()
        self.memory.append(resident_mib())


def resident_mib() -> float:
    """Memory of this process that is in use now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / MIB


def thread_names() -> list[str]:
    """Of all threads of this process, those in C included."""
    return [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]


def build(args: argparse.Namespace, device: torch.device) -> Any:
    """SmolLM2, or random weights of ``--shape``, with everything on."""
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    model = load_smollm2(dtype, device)[0] if args.shape is None else common.make_model(args.shape, device, dtype, args.layers)
    skipper = make_skipper(model, "random_skip", rate=0.5, depth=0.5)
    return depthfx.compile(
        model, weights="nested", skipper=skipper, memory=ElasticMemory(unit_mib=2.0, dwell_s=0.2, verify=True), kv_blocks=args.kv_blocks,
        max_batch_size=16, max_batch_tokens=512, max_model_len=320, check=True,
    )  # fmt: skip


def parse_arguments() -> argparse.Namespace:
    """Arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--shape", choices=sorted(common.SHAPES), default=None, help="random weights of this shape instead of SmolLM2")
    parser.add_argument("--layers", type=int, default=None, help="of --shape, to try the script")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--burst", type=int, default=40, help="most requests of a burst")
    parser.add_argument("--kv-blocks", type=int, default=48)
    parser.add_argument("--fail-share", type=float, default=0.002, help="of steps that fail")
    return parser.parse_args()


def main() -> int:
    """Run, close, report; the exit code."""
    args, device = parse_arguments(), common.default_device()
    warnings.filterwarnings("ignore", message="a residual was not restored")
    print(f"seed {args.seed}, {args.minutes} minutes, process {os.getpid()}", flush=True)
    model = build(args, device)
    soak = Soak(model, args)
    soak.run()
    stats, elastic = model.engine.stats(), model.engine.control.stats()
    model.engine.restore()
    model.engine.close()
    calm = soak.memory[len(soak.memory) // 5 :]
    growth = calm[-1] - calm[0] if calm else 0.0
    if growth > _GROWTH_MIB:
        soak.wrong.append(f"the process grew by {growth:.0f} MiB after the first fifth of the bursts")
    if left := [name for name in thread_names() if name.startswith("depthfx")]:
        soak.wrong.append(f"threads are left: {left}")
    row = {
        **soak.counts, "steps": stats.num_steps, "preemptions": stats.num_preemptions, "injected steps": soak.injected.count,
        "lends": elastic.num_lends, "restores": elastic.num_restores, "cancels": elastic.num_cancels, "failed copies": elastic.num_failures,
        "MiB at first": soak.memory[0], "MiB at last": soak.memory[-1], "growth MiB": growth, "wrong": soak.wrong,
        **{f"steps {k}": v for k, v in stats.steps_by_precision.items()},
    }  # fmt: skip
    common.write_results("soak", [row], device)
    print("\n".join(f"{k}: {v}" for k, v in row.items()))
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
