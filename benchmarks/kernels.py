"""Time the Triton kernels on one GPU beside cuBLAS and torch's attention; correctness comes first.

``python3 benchmarks/kernels.py [--quick] [--sweep] [--only linear decode prefill chain]`` from the root of the repository.
Times are medians over replays of a captured graph in which each call reads other weights or another layer than the one
before (more than the L2 holds). Results go to $OUT, or to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import triton

from depthfx.lowering import ops
from depthfx.lowering.kernel_spec import KERNELS, max_error
from depthfx.lowering.kernels import _small_linear, gated_linear, linear, linear_add
from depthfx.lowering.kernels._small_linear import LinearConfig, linear_config
from depthfx.lowering.kernels._stream_bench import replayed_us as graph_us
from depthfx.lowering.kernels.decode_attention import DecodeConfig, decode_config, launch_decode
from depthfx.lowering.kernels.paged_attention import step_inputs
from depthfx.lowering.kernels.prefill_attention import PrefillConfig, launch_prefill, prefill_config, uses_hopper_kernel

HALF = torch.float16
ROTATE_BYTES = 160 << 20  # between two uses of the same bytes; the L2 of an H200 holds 60 MB
BLOCK = 16
# kind, weight rows, inputs
SHAPES = [
    ("linear", 6144, 4096),  # Llama-3-8B and Qwen3-8B: q, k, v
    ("add", 4096, 4096),  # o
    ("gated", 28672, 4096),  # Llama-3-8B: gate, up
    ("add", 4096, 14336),  # Llama-3-8B: down
    ("linear", 128256, 4096),  # Llama-3-8B: head
    ("gated", 24576, 4096),  # Qwen3-8B: gate, up
    ("add", 4096, 12288),  # Qwen3-8B: down
    ("linear", 960, 576),  # SmolLM2-135M, in the same order
    ("add", 576, 576),
    ("gated", 3072, 576),
    ("add", 576, 1536),
    ("linear", 49152, 576),
]


def check_all() -> None:
    """Every case of every kernel against its reference; ends the run at the first disagreement."""
    for name, spec in KERNELS.items():
        for case, dtype in itertools.product(spec.cases, (HALF, torch.bfloat16)):
            expected_args = case.inputs(torch.device("cpu"), dtype, 0)
            args = case.inputs(torch.device("cuda"), dtype, 0)
            expected, actual = spec.reference(*expected_args), getattr(torch.ops.depthfx, name)(*args)
            pairs = [(a, b) for a, b in zip(args, expected_args) if isinstance(a, torch.Tensor)]
            if expected is not None:
                pairs += list(zip(actual, expected)) if isinstance(expected, tuple) else [(actual, expected)]
            for error, allowed in ((max_error(a.cpu(), b), case.allowed(b, dtype)) for a, b in pairs):
                if not error <= allowed:
                    sys.exit(f"{name} {case.label} {dtype}: off by {error:.2e}, allowed {allowed:.0e}")
    print("all kernel cases agree with their references", flush=True)


def candidates(kind: str, rows: int, outputs: int, inputs: int, num_sms: int, quick: bool) -> list[LinearConfig]:
    """Configs worth timing for one product, the default first."""
    found = [linear_config(rows, outputs, inputs, kind == "gated", num_sms)]
    if rows <= 2:
        for block_n, block_k, warps in itertools.product((2, 4, 8, 16), (256, 512, 1024, 2048), (4, 8)):
            least_columns = 8 * 32 * warps  # 16 bytes for each thread of the program
            if least_columns <= block_n * block_k <= 8192 * (2 if warps == 8 else 1) and block_k <= 2 * inputs:
                found.append(LinearConfig(block_n, block_k, 1, warps, 1, False))
    for block_n, (block_k, stages) in itertools.product((64, 128), ((64, 4), (64, 6), (128, 3), (128, 4), (256, 3))):
        tiles = triton.cdiv(outputs, block_n)
        for programs in (1, 2, 3, 4):
            split = max(1, round(programs * num_sms / tiles))
            shared = stages * 2 * block_k * (block_n + max(16, triton.next_power_of_2(rows)))
            if split <= min(32, triton.cdiv(inputs, block_k)) and shared <= 220 << 10:
                found.append(LinearConfig(block_n, block_k, split, 4, stages, True))
    unique = list(dict.fromkeys(found))
    return unique[:: max(1, len(unique) // 10)] if quick else unique


def product(kind: str, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, config: LinearConfig | None) -> torch.Tensor:
    """One call of the op's launch with a config (None: its default)."""
    if kind == "gated":
        return gated_linear.launch(x, weight, "silu", config=config)
    if kind == "add":
        return linear_add.launch(x, weight, residual, config=config)
    return linear.launch(x, weight, None, config=config)


def _compile(task: tuple[str, int, int, int, LinearConfig]) -> None:
    """Compile one config into Triton's cache, on the CPU, in a process of its own."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    class Target:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    kind, rows, outputs, inputs, config = task
    triton.runtime.driver.set_active(Target())
    run = JITFunction.run
    JITFunction.run = lambda self, *a, grid, warmup, **k: run(self, *a, grid=grid, warmup=True, **k)
    try:
        product(
            kind,
            torch.empty(rows, inputs, dtype=HALF),
            torch.empty(outputs, inputs, dtype=HALF),
            torch.empty(rows, outputs, dtype=HALF),
            config,
        )
    finally:
        JITFunction.run = run


def precompile(tasks: list[tuple[str, int, int, int, LinearConfig]]) -> None:
    """Fill Triton's cache from many processes: compiling is the longest part of a sweep."""
    begin = time.time()
    with multiprocessing.get_context("spawn").Pool(max(1, (os.cpu_count() or 2) - 1)) as pool:
        pool.map(_compile, tasks, chunksize=4)
    print(f"compiled {len(tasks)} launches in {time.time() - begin:.0f} s", flush=True)


def bench_linear(quick: bool, sweep: bool) -> list[dict[str, Any]]:
    """Each shape and number of rows: default config, cuBLAS, and with ``sweep`` the best config as a line for ``TUNED``."""
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    shapes = SHAPES[:4] + SHAPES[9:11] if quick else SHAPES
    swept = {1: 1, 2: 2, 8: 16, 32: 32, 64: 64} if not quick else {1: 1, 8: 16, 32: 32}
    if sweep:
        precompile(
            [
                (kind, rows, n, k, c)
                for (kind, n, k), rows in itertools.product(shapes, swept)
                for c in candidates(kind, rows, n, k, num_sms, quick)
            ]
        )
    results = []
    for kind, n, k in shapes:
        sets = max(2, min(64, -(-ROTATE_BYTES // (2 * n * k))))
        weights = [torch.randn(n, k, dtype=HALF, device="cuda") * k**-0.5 for _ in range(sets)]
        for rows in (1, 8, 32) if quick else (1, 2, 4, 8, 16, 32, 64):
            x, residual = torch.randn(rows, k, dtype=HALF, device="cuda"), torch.randn(rows, n, dtype=HALF, device="cuda")

            def us(config: LinearConfig | None, kind=kind, x=x, residual=residual, weights=weights) -> float:
                return graph_us([lambda w=w: product(kind, x, w, residual, config) for w in weights])

            cublas = graph_us([lambda w=w, x=x: torch.nn.functional.linear(x, w) for w in weights])
            row = {"kind": kind, "n": n, "k": k, "rows": rows, "us": us(None), "cublas_us": cublas}
            row["tb_s"], row["cublas_tb_s"] = 2e-6 * n * k / row["us"], 2e-6 * n * k / cublas
            if sweep and rows in swept:
                timed = sorted(((us(c), c) for c in candidates(kind, rows, n, k, num_sms, quick)), key=lambda t: t[0])
                row["best_us"], row["top"] = timed[0][0], [(round(t, 2), str(c)) for t, c in timed[:4]]
                print(f"    ({swept[rows]}, {n}, {k}, {kind == 'gated'}): {timed[0][1]},  # {timed[0][0]:.2f} us")
            results.append(row)
            print(
                f"{kind:6} {n:6} x {k:5} rows {rows:2}: {row['us']:7.2f} us {row['tb_s']:5.2f} TB/s, cuBLAS {cublas:7.2f} us,"
                f" best {row.get('best_us', float('nan')):7.2f}",
                flush=True,
            )
    return results


def paged_state(
    decodes: list[int], chunks: list[tuple[int, int]], heads: tuple[int, int] = (32, 8), dim: int = 128, max_len: int = 0
) -> dict[str, Any]:
    """Queries, pool and step tensors on the GPU.

    The pool has the 32 layers of the real one where that fits 48 GiB: a block then spans 2 MiB, and one layer's blocks lie in
    as many pages as there are blocks, which matters at large batches. Otherwise as many layers as it takes to leave the L2.
    """
    lengths = [p + 1 for p in decodes] + [first + rows for first, rows in chunks]
    width = -(-max(*lengths, max_len) // BLOCK)
    used = -(-max(lengths) // BLOCK)
    layer_bytes = len(lengths) * used * BLOCK * 2 * heads[1] * dim * 2
    layers = 32 if 32 * layer_bytes <= 48 << 30 else max(1, min(64, -(-ROTATE_BYTES // layer_bytes)))
    pool = torch.empty(len(lengths) * used, layers, 2, heads[1], BLOCK, dim, dtype=HALF, device="cuda").normal_()
    tables = torch.zeros(len(lengths), width, dtype=torch.int32, device="cuda")
    tables[:, :used] = torch.randperm(len(lengths) * used, device="cuda").view(len(lengths), used)
    positions, table_rows, starts, tile_chunks, tile_starts = (t.cuda() for t in step_inputs(decodes, chunks))
    q = torch.randn(positions.numel(), heads[0], dim, dtype=HALF, device="cuda")
    return {
        "q": q, "pool": pool, "layers": layers, "positions": positions, "table_rows": table_rows, "tables": tables,
        "starts": starts, "tile_chunks": tile_chunks, "tile_starts": tile_starts, "out": torch.empty_like(q),
    }  # fmt: skip


def bench_decode(quick: bool, sweep: bool) -> list[dict[str, Any]]:
    """Decode attention with the heads of Llama-3-8B: default and best config, effective bandwidth of K and V."""
    results = []
    batches, contexts = ((1, 32), (512, 4096)) if quick else ((1, 32, 128, 256), (512, 640, 4096))
    for batch, context in itertools.product(batches, contexts):
        s = paged_state([context - 1] * batch, [])
        common = (s["positions"], s["table_rows"], s["tables"], s["out"], batch, 128**-0.5, 0, 0.0, None)

        def us(config: DecodeConfig | None, s=s, common=common) -> float:
            calls = [lambda layer=layer: launch_decode(s["q"], s["pool"], layer, *common, config=config) for layer in range(s["layers"])]
            return graph_us(calls)

        default = decode_config(batch, 8, s["tables"].shape[1] * BLOCK, 128, 132)
        row = {"batch": batch, "context": context, "us": us(None), "config": str(default)}
        row["tb_s"] = batch * context * 8 * 128 * 4e-6 / row["us"]
        if sweep:
            splits = sorted({max(1, default.num_splits // 2), default.num_splits, min(64, default.num_splits * 2)})
            forms = ((64, 4, 2), (64, 4, 3), (64, 4, 5), (128, 4, 3), (128, 8, 3), (32, 4, 3))
            timed = sorted((us(DecodeConfig(*f, n)), str(DecodeConfig(*f, n))) for f in forms for n in splits)
            row["best_us"], row["best"] = timed[0]
        results.append(row)
        print("decode", row, flush=True)
    return results


def bench_prefill(quick: bool, sweep: bool) -> list[dict[str, Any]]:
    """Causal prefill with the heads of Llama-3-8B beside torch's flash attention on contiguous tensors."""
    results = []
    plans = {
        "1x2048": [(0, 2048)], "4x2048": [(0, 2048)] * 4, "8x2048": [(0, 2048)] * 8, "16x512": [(0, 512)] * 16, "1x512": [(0, 512)],
        "2048 after 6144": [(6144, 2048)], "200 after 1000, 8 times": [(1000, 200)] * 8,
    }  # fmt: skip
    for name, chunks in list(plans.items())[: 2 if quick else None]:
        s = paged_state([], chunks)
        flop = sum(4 * 32 * 128 * (rows * first + rows * (rows + 1) / 2) for first, rows in chunks)
        step = (s["positions"], s["table_rows"], s["tables"], s["starts"], s["tile_chunks"], s["tile_starts"], s["out"])

        def us(config: PrefillConfig | None, s=s, step=step) -> float:
            return graph_us([lambda: launch_prefill(s["q"], s["pool"], 0, *step, 0, 128**-0.5, 0, 0.0, None, config=config)])

        row = {"plan": name, "us": us(None)}
        if chunks[0][0] == 0:
            n, rows = len(chunks), chunks[0][1]
            q, k, v = (torch.randn(n, 32, rows, 128, dtype=HALF, device="cuda") for _ in range(3))
            torch_us = graph_us([lambda q=q, k=k, v=v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)])
            row["torch_tflop_s"] = 1e-6 * flop / torch_us
        row["tflop_s"] = 1e-6 * flop / row["us"]
        row["triton_tflop_s"] = 1e-6 * flop / us(prefill_config(128, 2))
        if uses_hopper_kernel(s["q"], s["pool"], 0, 0.0, None):
            from depthfx.lowering.kernels._hopper_prefill import launch_hopper

            for tile in ((128, 2), (64, 4)):
                call = functools.partial(launch_hopper, s["q"], s["pool"], 0, *step, 0, 128**-0.5, 132, tile=tile)
                row[f"tile {tile[0]}"] = 1e-6 * flop / graph_us([call])
        if sweep:
            forms = [PrefillConfig(*f) for f in ((64, 8, 2), (64, 8, 3), (128, 8, 2), (128, 8, 3), (64, 4, 3), (128, 4, 2))]
            row["sweep"] = sorted((round(1e-6 * flop / us(c)), str(c)) for c in forms)[::-1]
        results.append(row)
        print("prefill", row, flush=True)
    return results


def _layer(s: dict[str, Any], w: dict[str, torch.Tensor], cos: torch.Tensor, sin: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """All kernels of one decoder layer on its residual stream."""
    step = (s["positions"], s["table_rows"], s["tables"])
    normed = ops.rms_norm(hidden, w["norm"], 1e-5)
    qkv = ops.linear(normed, w["qkv"])
    q = ops.rotary_append(qkv, cos, sin, None, None, 1e-5, s["pool"], 0, *step, 32, 8, 128)
    rows = hidden.shape[0]
    seen = ops.paged_attention(q, s["pool"], 0, *step, s["starts"], s["tile_chunks"], s["tile_starts"], rows, 128**-0.5)
    hidden = ops.linear_add(seen.view(rows, 4096), w["o"], hidden)
    normed = ops.rms_norm(hidden, w["norm"], 1e-5)
    return ops.linear_add(ops.gated_linear(normed, w["gate_up"], "silu"), w["down"], hidden)


def chain(batch: int) -> tuple[list[dict[str, torch.Tensor]], Callable[[], torch.Tensor]]:
    """Weights of three layers of Llama-3-8B, and a call that runs them for ``batch`` requests of 512 tokens."""
    sizes = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336), "norm": (4096,)}
    weights = [{n: torch.randn(*s, dtype=HALF, device="cuda") * s[-1] ** -0.5 for n, s in sizes.items()} for _ in range(3)]
    state = paged_state([511] * batch, [])
    cos, sin = (torch.randn(batch, 128, dtype=HALF, device="cuda") for _ in range(2))
    hidden = torch.randn(batch, 4096, dtype=HALF, device="cuda")

    def step() -> torch.Tensor:
        x = hidden
        for w in weights:
            x = _layer(state, w, cos, sin, x)
        return x

    return weights, step


def bench_chain(quick: bool, sweep: bool) -> list[dict[str, Any]]:
    """One layer of Llama-3-8B as a chain of kernels, with and without dependent launch; both must give the same bits."""
    results = []
    for batch in (1, 32) if quick else (1, 2, 4, 8, 16, 32, 64):
        weights, step = chain(batch)
        floor_us = sum(2e-6 * w.numel() for w in weights[0].values()) / 4.2
        row: dict[str, Any] = {"batch": batch, "floor_us": floor_us}
        outputs = {}
        for pdl in (False, True):
            ops.enable_pdl(pdl)
            row["pdl_us" if pdl else "us"] = graph_us([step]) / len(weights)
            outputs[pdl] = step()
        ops.enable_pdl(False)
        row["same_bits"] = torch.equal(outputs[False], outputs[True])
        results.append(row)
        print("chain", row, flush=True)
    return results


PARTS = {"linear": bench_linear, "decode": bench_decode, "prefill": bench_prefill, "chain": bench_chain}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer shapes, rows and configs")
    parser.add_argument("--sweep", action="store_true", help="time many configs and print the best of each shape")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args()
    torch.manual_seed(0)
    ops.reserve_scratch(torch.device("cuda"), 256, 32, 128)
    check_all()
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "command": " ".join(sys.argv), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    for name in args.only:
        report[name] = PARTS[name](args.quick, args.sweep)
        torch.cuda.empty_cache()
    folder = Path(os.environ.get("OUT", Path(__file__).parent / "results"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"kernels-{'-'.join(args.only)}.json").write_text(json.dumps(report, indent=1))
    print(f"\n{report['device']}, torch {report['torch']}, triton {report['triton']}, {len(_small_linear.TUNED)} tuned shapes")
    for r in report.get("linear", []):
        print(
            f"{r['kind']:6} {r['n']:6}x{r['k']:5} T={r['rows']:2} {r['us']:7.1f} us {r['tb_s']:4.2f} | cuBLAS {r['cublas_us']:7.1f} {r['cublas_tb_s']:4.2f}"
        )
    for r in report.get("decode", []):
        print(
            f"decode batch {r['batch']:3} context {r['context']:4}: {r['us']:7.1f} us {r['tb_s']:4.2f} TB/s, best {r.get('best_us', 0):.1f}"
        )
    for r in report.get("prefill", []):
        print(
            f"prefill {r['plan']:24}: {r['us']:8.1f} us {r['tflop_s']:4.0f} TFLOP/s | torch {r.get('torch_tflop_s', 0):4.0f}"
            f" | Triton kernel {r['triton_tflop_s']:4.0f} | tiles of 128 / 64 keys {r.get('tile 128', 0):4.0f} / {r.get('tile 64', 0):4.0f}"
        )
    for r in report.get("chain", []):
        print(f"layer, batch {r['batch']:2}: {r['us']:6.1f} us, dependent launch {r['pdl_us']:6.1f}, weights alone {r['floor_us']:6.1f}")


if __name__ == "__main__":
    main()
