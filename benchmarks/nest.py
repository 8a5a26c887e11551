"""Nested weights: seconds and GB/s to nest the linears of a shape on the device, to convert a folder and to load it both ways.

python3 benchmarks/nest.py --shape llama3-8b            # nesting alone
python3 benchmarks/nest.py --shape llama3-8b --layers 8 --folder   # and a folder of 8 layers: save, convert, load, verify
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import SHAPES, default_device, make_model, print_table, synchronize, write_results

from depthfx.lowering.load_model import convert, load_hf_nested, load_nested
from depthfx.lowering.nest import unnest
from depthfx.lowering.nested_linear import linears_to_nest, nested_linears, swap_linear

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def main() -> None:
    """Measure, print and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama3-8b")
    parser.add_argument("--layers", type=int, default=None, help="fewer layers than the shape has")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float16")
    parser.add_argument("--folder", action="store_true", help="also save, convert and load a folder")
    options = parser.parse_args()
    device = default_device()
    rows: list[dict[str, Any]] = []
    model = make_model(options.shape, device, DTYPES[options.dtype], options.layers)
    if options.folder:
        with tempfile.TemporaryDirectory() as name:
            rows += measure_folder(model, Path(name), device)
    rows += measure_nesting(model, device)
    for row in rows:
        row.update(shape=options.shape, layers=options.layers, dtype=options.dtype)
    print_table(rows, ["what", "GiB", "seconds", "GB/s", "extra peak MiB"])
    print(f"written to {write_results('nest', rows, device)}.json")


def measure_nesting(model: Any, device: torch.device) -> list[dict[str, Any]]:
    """Nest every linear in place, then join each once; the first linear is nested before, to warm up, and not counted."""
    first, *paths = linears_to_nest(model)
    swap_linear(model, first)
    size = sum(model.get_submodule(p).weight.nbytes for p in paths)
    before = _reset_peak(device)
    rows = [_timed("nest in place", size, device, lambda: [swap_linear(model, p) for p in paths])]
    rows[0]["extra peak MiB"] = _peak_above(before, device)
    modules = list(nested_linears(model).values())[1:]
    rows.append(_timed("join, one by one", size, device, lambda: [unnest(m.nested, m.weight_dtype) for m in modules]))
    return rows


def measure_folder(model: Any, folder: Path, device: torch.device) -> list[dict[str, Any]]:
    """Save as Hugging Face does, convert, and load both folders on the device; files are in the system's cache by then."""
    size = sum(p.nbytes for p in model.parameters())
    plain, nested = folder / "plain", folder / "nested"
    runs = [
        ("save_pretrained", lambda: model.save_pretrained(plain)),
        ("convert", lambda: convert(plain, nested, device)),
        ("load an ordinary folder, nesting", lambda: load_hf_nested(plain, device)),
        ("load a nested one", lambda: load_nested(nested, device, verify=False)),
        ("load a nested one, verified", lambda: load_nested(nested, device)),
    ]
    return [_timed(what, size, device, run) for what, run in runs]


def _timed(what: str, size: int, device: torch.device, run: Any) -> dict[str, Any]:
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    seconds = time.perf_counter() - start
    return {"what": what, "GiB": size / 2**30, "seconds": seconds, "GB/s": size / seconds / 1e9}


def _reset_peak(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak_above(before: int, device: torch.device) -> float | None:
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20 if device.type == "cuda" else None


if __name__ == "__main__":
    main()
