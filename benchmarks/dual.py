"""Products of nested weights beside cuBLAS in FP16 and FP8 on one Hopper GPU; every timed call is checked first.

``python3 benchmarks/dual.py [--quick] [--shapes 6144x4096 28672x4096-gated] [--rows 1 64 1024]`` from the root of the repository.
Times are medians over replays of a captured graph whose calls read other weights one after another, more than the L2 holds. Up to
256 rows the op runs as in captured steps (flags on the device unless all is fast, dependent launch), above as in steps whose precision the host knows.
Results go to $OUT, or to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from common import write_results
from kernels import HALF, ROTATE_BYTES, graph_us

from depthfx.lowering import ops
from depthfx.lowering.fp8_weight import quantize_weight
from depthfx.lowering.kernel_spec import max_error
from depthfx.lowering.kernels import gated_activation
from depthfx.lowering.kernels._dual_weight import FP8_TOLERANCE, plain_weight
from depthfx.lowering.kernels._fp8_linear import MIN_ROWS, uses_fp8
from depthfx.lowering.kernels._stream_config import MAX_STREAM_ROWS
from depthfx.lowering.nest import nest
from depthfx.lowering.nested_format import NestedWeight
from depthfx.lowering.precompile import KernelWorkers, collected
from depthfx.lowering.tile_store import device_kind, use_stored_tiles
from depthfx.report import CACHES, CompileReport
from depthfx.settings import Settings, cache_dir

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
QUICK_ROWS = (1, 16, 64, 256, 1024)
TOLERANCE = 8e-3  # of a 16-bit product: the FP16 result, where gated three roundings


@dataclass(frozen=True)
class Shape:
    """One product ``[N, K]``; N counts gate and up rows where gated."""

    n: int
    k: int
    gated: bool = False

    def __str__(self) -> str:
        return f"{self.n}x{self.k}{'-gated' if self.gated else ''}"


SHAPES = (
    Shape(6144, 4096),  # Llama-3-8B and Qwen3-8B: q, k, v
    Shape(4096, 4096),  # both: o
    Shape(28672, 4096, gated=True),  # Llama-3-8B: gate, up
    Shape(4096, 14336),  # Llama-3-8B: down
    Shape(24576, 4096, gated=True),  # Qwen3-8B: gate, up
    Shape(4096, 12288),  # Qwen3-8B: down
    Shape(5120, 2048),  # Qwen3-30B-A3B: q, k, v
    Shape(2048, 4096),  # Qwen3-30B-A3B: o
)
QUICK_SHAPES = (SHAPES[0], SHAPES[2], SHAPES[3])


@dataclass(frozen=True)
class Weight:
    """One random weight in all its forms."""

    dense: torch.Tensor  # [N, K] float16
    nested: NestedWeight
    fp8: torch.Tensor  # [N, K] E4M3 bytes in stored order
    scale: torch.Tensor  # [N] float32


def draw_weight(shape: Shape, device: torch.device) -> Weight:
    """Of standard deviation ``K^-0.5``, so that outputs are of order one; its nested form is exact."""
    dense = torch.randn(shape.n, shape.k, dtype=HALF, device=device) * shape.k**-0.5
    return Weight(dense, nest(dense), *quantize_weight(dense))


def dual(shape: Shape, x: torch.Tensor, nested: NestedWeight, full: bool, flags: torch.Tensor) -> torch.Tensor:
    """The op as the engine calls it: layer 1 of ``flags`` holds the precision, the hint only where a step is not captured."""
    hint = int(full) if x.shape[0] > MAX_STREAM_ROWS or (not full and x.shape[0] >= MIN_ROWS) else -1
    args = (x, nested.upper, nested.lower, nested.shift, flags, 1, hint, nested.format)
    return ops.dual_gated_linear(*args, "silu") if shape.gated else ops.dual_linear(*args, None)


def flags_of(full: bool, device: torch.device) -> torch.Tensor:
    """Layer 1 has the asked precision, its neighbours the other."""
    return torch.tensor([1 - full, full, 1 - full], dtype=torch.int32, device=device)


@contextmanager
def launch_of(rows: int, device: torch.device) -> Iterator[None]:
    """Dependent launch inside, where captured steps of ``rows`` use it."""
    ops.enable_pdl(device.type == "cuda" and rows <= MAX_STREAM_ROWS)
    try:
        yield
    finally:
        ops.enable_pdl(False)


def precompile(shapes: list[Shape], rows: list[int], device: torch.device) -> None:
    """Have worker processes compile every kernel that the timed calls launch, from a run that launches none."""
    begin, report = time.time(), CompileReport()
    with collected() as found:
        for shape in shapes:
            upper, lower = (torch.empty(shape.n, shape.k, dtype=torch.uint8, device=device) for _ in range(2))
            nested = NestedWeight("nested_e4m3", upper, lower, None)
            for count in sorted({min(r, MAX_STREAM_ROWS + 1) for r in rows}):  # more rows take the same kernels
                x = torch.empty(count, shape.k, dtype=HALF, device=device)
                for full in (True, False):
                    with launch_of(count, device):
                        dual(shape, x, nested, full, flags_of(full, device))
                if shape.gated and count <= MAX_STREAM_ROWS:  # for the arm cuBLAS with activation
                    ops.gated_activation(torch.empty(count, shape.n, dtype=HALF, device=device), "silu")
                if count >= MIN_ROWS:
                    ops.quantize_rows(x)
    with KernelWorkers(report, enabled=True) as workers:
        workers.compile(list(found))
    print(f"{'; '.join(report.sections[CACHES])}; {time.time() - begin:.0f} s", flush=True)


def arms(shape: Shape, x: torch.Tensor) -> dict[str, Callable[[Weight], torch.Tensor]]:
    """Name to call of everything that is timed for ``x`` [M, K]; each call takes the weight to use."""
    flags = {full: flags_of(full, x.device) for full in (True, False)}
    found: dict[str, Callable[[Weight], torch.Tensor]] = {
        "cublas": lambda w: torch.nn.functional.linear(x, w.dense),
        "full": lambda w: dual(shape, x, w.nested, True, flags[True]),
        "fast": lambda w: dual(shape, x, w.nested, False, flags[False]),
    }
    if shape.gated:
        found["cublas_act"] = lambda w: ops.gated_activation(torch.nn.functional.linear(x, w.dense), "silu")
    if x.shape[0] >= MIN_ROWS:
        quantized, row_scale = ops.quantize_rows(x)
        found["scaled_mm"] = lambda w: torch._scaled_mm(
            quantized, w.fp8.view(torch.float8_e4m3fn).t(), scale_a=row_scale[:, None], scale_b=w.scale[None],
            out_dtype=HALF, use_fast_accum=True,
        )  # fmt: skip
    return found


class Checker:
    """Compares a few rows of each call on one weight with products in FP32."""

    def __init__(self, shape: Shape, x: torch.Tensor, rows: list[int], weight: Weight) -> None:
        self.shape = shape
        picked = sorted({i for r in rows for i in self.picked(r)})
        self.place = {row: place for place, row in enumerate(picked)}
        some, nested = x[picked].float(), weight.nested
        fast = plain_weight(nested.upper, nested.lower, nested.shift, nested.format, False).float()
        self.plain = {"full": some @ weight.dense.float().t(), "fast": some @ fast.t()}
        self.gated = {k: gated_activation.reference(v, "silu") for k, v in self.plain.items()} if shape.gated else self.plain

    @staticmethod
    def picked(rows: int) -> list[int]:
        """First, middle and last row."""
        return sorted({0, rows // 2, rows - 1})

    def check(self, arm: str, x: torch.Tensor, out: torch.Tensor, weight: Weight) -> None:
        """End the run where ``out`` [M, N or F] of ``arm`` is off."""
        expected = (self.plain if arm in ("cublas", "scaled_mm") else self.gated)["fast" if arm == "fast" else "full"]
        rows = self.picked(x.shape[0])
        rounded = arm == "scaled_mm" or (arm == "fast" and uses_fp8(x, weight.nested.upper, 0))
        tolerance = FP8_TOLERANCE[HALF] if rounded else TOLERANCE
        error = max_error(out[rows], expected[[self.place[r] for r in rows]])
        if not error <= tolerance:
            sys.exit(f"{self.shape}, {x.shape[0]} rows, {arm}: off by {error:.2e}, allowed {tolerance:.0e}")


def bench(shape: Shape, rows: list[int], device: torch.device) -> list[dict[str, Any]]:
    """All rows of one shape: check each arm, time it, print the line."""
    sets = max(2, min(64, -(-ROTATE_BYTES // (shape.n * shape.k))))
    weights = [draw_weight(shape, device) for _ in range(sets)]
    all_rows = torch.randn(max(rows), shape.k, dtype=HALF, device=device)
    checker = Checker(shape, all_rows, rows, weights[0])
    results = []
    for count in rows:
        x = all_rows[:count]
        row: dict[str, Any] = {"shape": str(shape), "n": shape.n, "k": shape.k, "gated": shape.gated, "rows": count}
        with launch_of(count, device):
            for arm, call in arms(shape, x).items():
                checker.check(arm, x, call(weights[0]), weights[0])
                row[f"{arm}_us"] = graph_us([lambda w=w, call=call: call(w) for w in weights], replays=7 if count <= 1024 else 5)
        results.append(row)
        print(line(row), flush=True)
    return results


def line(row: dict[str, Any]) -> str:
    """One shape and number of rows as text; ratios are speeds, above 1 is faster."""
    base = row["cublas_us"]
    text = f"{row['shape']:16} M {row['rows']:4}: cuBLAS {base:8.1f} us, full {row['full_us']:8.1f} ({base / row['full_us']:.2f})"
    text += f", fast {row['fast_us']:8.1f} ({base / row['fast_us']:.2f})"
    if "cublas_act_us" in row:
        text += f", cuBLAS and activation {row['cublas_act_us']:8.1f}"
    if "scaled_mm_us" in row:
        text += f", _scaled_mm {row['scaled_mm_us']:8.1f} (fast {row['scaled_mm_us'] / row['fast_us']:.2f} of its speed)"
    return text


def speeds(results: list[dict[str, Any]], arm: str, base: str, least: int, most: int) -> dict[str, list[float]]:
    """Shape to speeds of ``arm`` against ``base`` over the rows from ``least`` to ``most``; where gated, ``cublas_act`` counts the activation."""
    found: dict[str, list[float]] = {}
    for row in results:
        against = row.get(f"{base}_us") or (row["cublas_us"] if base == "cublas_act" else None)
        if least <= row["rows"] <= most and against is not None:
            found.setdefault(row["shape"], []).append(against / row[f"{arm}_us"])
    return found


def summary(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The means that matter, each with its target; those of rows that were not timed are left out."""
    found = []
    for arm, base, least, most, target, worst_target in (
        ("full", "cublas", 1, 64, 0.97, None),
        ("full", "cublas", 128, 8192, 0.95, 0.85),
        ("fast", "cublas", 1, 32, 1.8, None),
        ("fast", "scaled_mm", 512, 8192, 0.95, None),
        ("full", "cublas_act", 1, 64, None, None),
        ("full", "cublas_act", 128, 8192, None, None),
        ("fast", "cublas_act", 1, 32, None, None),
    ):
        by_shape = speeds(results, arm, base, least, most)
        if not by_shape:
            continue
        means = {shape: statistics.geometric_mean(values) for shape, values in by_shape.items()}
        worst = min(means, key=means.__getitem__)
        found.append(
            {
                "summary": f"{arm} against {base}, M = {least}..{most}", "mean": statistics.geometric_mean(itertools.chain(*by_shape.values())),
                "target": target, "worst_shape": worst, "worst_mean": means[worst], "worst_target": worst_target,
                "worst_single": min(min(values) for values in by_shape.values()),
            }
        )  # fmt: skip
    return found


def verdict(value: float, target: float | None) -> str:
    """The value, and whether it reaches the target."""
    return f"{value:.3f}" + ("" if target is None else f" (target {target}, {'met' if value >= target else 'MISSED'})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three shapes and five numbers of rows")
    parser.add_argument("--shapes", nargs="+", choices=[str(s) for s in SHAPES], metavar="NxK[-gated]", help="some of the shapes")
    parser.add_argument("--rows", nargs="+", type=int, metavar="M", help=f"numbers of rows (default {' '.join(map(str, ROWS))})")
    parser.add_argument("--tuned", action="store_true", help="use the tiles that `depthfx tune` kept in the cache folder")
    args = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        sys.exit("dual.py compares kernels for Hopper: it needs a CUDA device of compute capability 9")
    shapes = [s for s in SHAPES if str(s) in args.shapes] if args.shapes else list(QUICK_SHAPES if args.quick else SHAPES)
    rows = sorted(set(args.rows or (QUICK_ROWS if args.quick else ROWS)))
    if rows[0] < 1:
        parser.error(f"--rows {rows[0]}: a product has at least one row")
    device = torch.device("cuda")
    torch.manual_seed(0)
    ops.reserve_scratch(device, 256, 32, 128)
    if args.tuned:
        tuned = CompileReport()
        use_stored_tiles(cache_dir(Settings.build()), device_kind(device), tuned)
        print("\n".join(tuned.sections[CACHES]))
    precompile(shapes, rows, device)
    begin, results = time.time(), []
    for shape in shapes:
        results += bench(shape, rows, device)
        torch.cuda.empty_cache()
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, {time.time() - begin:.0f} s; geometric means of speed:")
    means = summary(results)
    for mean in means:
        worst = f"worst shape {mean['worst_shape']} {verdict(mean['worst_mean'], mean['worst_target'])}, worst product {mean['worst_single']:.2f}"
        print(f"{mean['summary']:38} {verdict(mean['mean'], mean['target'])}; {worst}")
    print(f"results: {write_results('dual', results + means, device)}.json")


if __name__ == "__main__":
    main()
