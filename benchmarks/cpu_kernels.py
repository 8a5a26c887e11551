"""The native fp32 kernels beside torch on the shapes of SmolLM2-135M: one decode step's linears, attention over long KV, calls.

Run ``python benchmarks/cpu_kernels.py``; about a minute. Weights rotate through 30 layers, so that they come from memory as
in a real step. Candidates alternate; each figure is the median, with the minimum behind it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from depthfx.lowering import native

LAYERS = 30
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # (N, K): qkv, o, gate-up, down
HEAD = (49152, 576)
Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 9, 3, 64, 16


def alternate(candidates: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call, candidates in turn, after one warm-up each."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for call in candidates.values():
        call()
    for _ in range(rounds):
        for name, call in candidates.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return times


def show(seconds: list[float], unit: float = 1e3) -> str:
    return f"{statistics.median(seconds) * unit:8.2f} ({min(seconds) * unit:.2f})"


def linears(rounds: int) -> None:
    weights = [[torch.randn(shape) * 0.02 for shape in SHAPES] for _ in range(LAYERS)]
    head = torch.randn(HEAD) * 0.02
    gigabytes = 4e-9 * (head.numel() + sum(w.numel() for layer in weights for w in layer))
    print(f"linears of one step, {gigabytes:.2f} GB of weights, ms: median (minimum)")
    print(f"{'M':>4} {'native':>18} {'F.linear':>18} {'native GB/s':>12} {'ratio':>6}")

    def step(linear: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], inputs: dict[int, torch.Tensor]) -> None:
        for layer in weights:
            for weight in layer:
                linear(inputs[weight.shape[1]], weight)
        linear(inputs[HEAD[1]], head)

    for rows in (1, 2, 4, 8, 16, 32):
        inputs = {width: torch.randn(rows, width) for width in (576, 1536)}
        times = alternate({"native": lambda: step(native.small_linear, inputs), "torch": lambda: step(F.linear, inputs)}, rounds)  # noqa: B023
        ours, theirs = statistics.median(times["native"]), statistics.median(times["torch"])
        print(f"{rows:4} {show(times['native']):>18} {show(times['torch']):>18} {gigabytes / ours:12.1f} {theirs / ours:6.2f}")


def attention(rounds: int) -> None:
    print("\nattention of 30 layers, ms: median (minimum); SDPA on keys that lie gathered already, and with the gather")
    print(f"{'rows':>4} {'keys':>6} {'native':>18} {'SDPA':>18} {'gather + SDPA':>18} {'native GB/s':>12}")
    for rows, keys in ((1, 512), (1, 4096), (8, 128), (8, 1024), (8, 2048)):
        columns = keys // BLOCK_TOKENS
        pool = torch.randn(rows * columns, LAYERS, 2, KV_HEADS, BLOCK_TOKENS, HEAD_DIM)
        tables = torch.randperm(rows * columns).view(rows, columns).to(torch.int32)
        positions, table_rows = torch.full((rows,), keys - 1, dtype=torch.int32), torch.arange(rows, dtype=torch.int32)
        q = torch.randn(rows, Q_HEADS, HEAD_DIM)

        def gather(layer: int) -> list[torch.Tensor]:
            picked = pool[tables.long(), layer]  # noqa: B023
            return [picked[:, :, i].transpose(1, 2).reshape(rows, KV_HEADS, keys, HEAD_DIM) for i in range(2)]  # noqa: B023

        gathered = [gather(layer) for layer in range(LAYERS)]

        def ours() -> None:
            for layer in range(LAYERS):
                native.paged_decode_attention(q, pool, layer, positions, table_rows, tables, HEAD_DIM**-0.5)  # noqa: B023

        def sdpa(from_pool: bool) -> None:
            for layer in range(LAYERS):
                k, v = gather(layer) if from_pool else gathered[layer]  # noqa: B023
                F.scaled_dot_product_attention(q.unsqueeze(2), k, v, enable_gqa=True)  # noqa: B023

        times = alternate({"native": ours, "sdpa": lambda: sdpa(False), "gather": lambda: sdpa(True)}, rounds)
        size = rows * keys * LAYERS * 2 * KV_HEADS * HEAD_DIM * 4e-9
        columns_text = " ".join(f"{show(times[name]):>18}" for name in ("native", "sdpa", "gather"))
        print(f"{rows:4} {keys:6} {columns_text} {size / statistics.median(times['native']):12.1f}")


def calls() -> None:
    print("\none call with next to no work, us: median (minimum)")
    x, weight, scale = torch.randn(1, 64), torch.randn(16, 64), torch.ones(64)
    zero, tables, pool = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 4, dtype=torch.int32), torch.zeros(4, 2, 2, 1, 16, 64)
    q, qkv, paged = torch.randn(1, 3, 64), torch.randn(1, 320), (1, zero, zero, tables)
    candidates: dict[str, Callable[[], object]] = {
        "F.linear": lambda: F.linear(x, weight),
        "small_linear": lambda: native.small_linear(x, weight),
        "F.rms_norm": lambda: F.rms_norm(x, (64,), scale, 1e-6),
        "rms_norm": lambda: native.rms_norm(x, scale, 1e-6),
        "add_rms_norm": lambda: native.add_rms_norm(x, x, scale, 1e-6),
        "rotary_append": lambda: native.rotary_append(qkv, x, x, None, None, 1e-6, pool, *paged, 3, 1, 64),
        "paged_decode_attention": lambda: native.paged_decode_attention(q, pool, *paged, 0.125),
    }
    for name, times in alternate(candidates, 5000).items():
        print(f"{name:>24} {show(times, 1e6):>18}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    found, reason = native.available()
    if not found:
        raise SystemExit(f"native kernels are not available: {reason}")
    torch.set_grad_enabled(False)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
    linears(rounds)
    attention(rounds)
    calls()


if __name__ == "__main__":
    main()
