"""The tuner over the products of a model: which of them the streaming kernel serves, the run on the device, what is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from depthfx.errors import SettingError
from depthfx.lowering.fragment_order import is_fragment_order
from depthfx.lowering.kernel_spec import is_hopper
from depthfx.lowering.kernels._stream_bench import StreamBench, compile_configs
from depthfx.lowering.kernels._stream_config import MAX_STREAM_ROWS, Product, block_rows
from depthfx.lowering.tile_store import device_kind, load_tiles, save_tiles
from depthfx.lowering.tuner import HEADER, ROW_CLASSES, candidates, merged, table_line, tune
from depthfx.report import CACHES, CompileReport


def row_classes(rows: Iterable[int] | None) -> tuple[int, ...]:
    """The classes (16 to 256) that hold ``rows``; all for None. :class:`SettingError` for rows that the kernel does not serve."""
    if rows is None:
        return ROW_CLASSES
    wrong = [r for r in rows if not 1 <= r <= MAX_STREAM_ROWS]
    if wrong:
        raise SettingError(f"--rows {wrong[0]}: the streaming kernel has 1 to {MAX_STREAM_ROWS} rows; more rows have no tiles to choose")
    return tuple(sorted({block_rows(r) for r in rows}))


def tunable(shapes: Iterable[tuple[int, int, bool]], classes: tuple[int, ...]) -> tuple[list[Product], list[str]]:
    """Products of ``(N, K, gated)`` and row classes that have tiles to choose, and a line for each shape that has none."""
    products: list[Product] = []
    skipped = []
    for n, k, gated in shapes:
        if is_fragment_order(k) and n % (16 if gated else 1) == 0:
            products += [(block_t, n, k, gated) for block_t in classes]
        else:
            skipped.append(f"{n}x{k}{' gated' if gated else ''}: not served by the streaming kernel (K in steps of 64, gate rows of 8)")
    return products, skipped


def why_nothing(device: str) -> str:
    """Why no tile can be timed on ``device`` ("cuda" or "cuda:N"); "" where it can."""
    if not device.startswith("cuda"):
        return f"--device {device} runs no Triton kernel; tiles are timed on a CUDA device of compute capability 9"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(device.partition(":")[2] or 0)
    if index >= count:
        return f"torch {torch.__version__} sees {count or 'no'} CUDA device(s) here; tiles are timed on one of compute capability 9"
    if not is_hopper(index):
        return f"{torch.cuda.get_device_name(index)} does not run the streaming kernel: it needs compute capability 9 and Triton 3.6"
    return ""


def tune_products(products: list[Product], device: str, folder: Path, say: Callable[[str], object]) -> None:
    """Tune ``products`` on ``device`` and keep what won under ``folder``; ``say`` gets the table line by line."""
    target = torch.device(device if ":" in device else "cuda:0")
    kind, report = device_kind(target), CompileReport()
    with torch.cuda.device(target):
        compile_configs([(p, candidates(p, kind.num_sms)) for p in products], target, report)
        say("\n".join(report.sections[CACHES]))
        say(HEADER)
        outcomes = []
        for outcome in tune(products, lambda product: StreamBench(product, target), kind.num_sms):
            say("\n".join([table_line(outcome), *(f"  left out: {fault}" for fault in outcome.faults)]))
            outcomes.append(outcome)
    earlier, line = load_tiles(folder, kind)
    say(line)
    path = save_tiles(folder, kind, merged(earlier, outcomes))
    say(f"{sum(o.kept for o in outcomes)} of {len(outcomes)} products got another tile; kept in {path}")
