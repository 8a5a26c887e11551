"""Products of a cohort in a captured step against cuBLAS on the same rows, packed beforehand: 20 shapes and counts.

``python3 benchmarks/cohort.py`` from the root of the repository; ``--scale 16`` to try it on a CPU (sizes divided by 16). A body of a routed layer
is one gather of rows, four products and one scatter, behind one SWITCH node (`depthfx.lowering.graph_switch`); so is what is timed here, with
four products of one shape, of weights that follow each other around. Steps of up to 64 rows have bounded products of all rows in place and neither
gather nor scatter. The peer is four calls of ``torch.nn.functional.linear`` on exactly the rows that run. Both are captured; replays alternate.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import common
import torch
from depth import timed

from depthfx.lowering import ops
from depthfx.lowering.announce import MAX_ROWS_IN_PLACE, RUN, sizes_of
from depthfx.lowering.graph_switch import Choice, GraphSwitch, HostSwitch, Switch

SHAPES = {"q, o": (4096, 4096), "gate-up": (28672, 4096), "down": (4096, 14336), "k, v": (2048, 4096)}  # outputs, inputs
COUNTS = [(256, 16), (256, 100), (256, 128), (256, 250), (32, 10)]  # rows of the step, rows that run
PRODUCTS = 4  # of a body
WEIGHTS = 8  # that take turns, so that the L2 cache does not hold them


class Cohort:
    """Inputs and outputs of one shape and one count."""

    def __init__(self, outputs: int, inputs: int, rows: int, count: int, device: torch.device, dtype: torch.dtype) -> None:
        g = torch.Generator(device).manual_seed(rows + count)
        self.rows, self.count = rows, count
        self.x = torch.randn(rows, inputs, generator=g, device=device).to(dtype)
        self.weights = [(torch.randn(outputs, inputs, generator=g, device=device) * inputs**-0.5).to(dtype) for _ in range(WEIGHTS)]
        self.out = torch.full((rows, outputs), float("nan"), dtype=dtype, device=device)
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(rows))
        self.order = torch.cat((order[:count].sort().values, order[count:].sort().values)).to(torch.int32).to(device)
        self.counts = torch.tensor([count, rows - count], dtype=torch.int32, device=device)
        self.packed = self.x[self.order[:count].long()].contiguous()

    def body(self, size: int, first: int) -> None:
        """As `RoutedLayer` has it, with ``size`` rows."""
        gathered = self.x.index_select(0, self.order[:size])
        for weight in self.weights[first : first + PRODUCTS]:
            result = torch.nn.functional.linear(gathered, weight)
        ops.scatter_rows(self.out, result, self.order, self.counts, RUN)

    def ours(self, switch: Switch, first: int) -> None:
        """Four products in a step of all rows."""
        if self.rows <= MAX_ROWS_IN_PLACE:
            for weight in self.weights[first : first + PRODUCTS]:
                self.out = ops.LINEAR(self.x, weight, None, self.counts[:1])
            return
        step, sizes = sizes_of(self.rows)
        (choice,) = switch.choose([Choice(self.counts, RUN, step)])
        switch.run(choice, [None, *(partial(self.body, size, first) for size in sizes)])

    def peer(self, first: int) -> torch.Tensor:
        """Four products of the packed rows."""
        for weight in self.weights[first : first + PRODUCTS]:
            result = torch.nn.functional.linear(self.packed, weight)
        return result

    def error(self) -> float:
        """Largest difference of a row that runs between the two, and NaN if one was left out."""
        found = self.out[self.order[: self.count].long()].float()
        return (found - self.peer(WEIGHTS - PRODUCTS).float()).abs().max().item()


def captured(every: Callable[[int], Any], device: torch.device) -> Callable[[], Any]:
    """A replay of both halves of the weights, one after another; on a CPU the calls themselves."""

    def both() -> None:
        for first in range(0, WEIGHTS, PRODUCTS):
            every(first)

    both()
    if device.type == "cpu":
        return both
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        both()
    return graph.replay


def measure(name: str, rows: int, count: int, switch: Switch, device: torch.device, scale: int) -> dict[str, Any]:
    """One line of the table."""
    outputs, inputs = (n // scale for n in SHAPES[name])
    cohort = Cohort(outputs, inputs, rows, count, device, torch.float16 if device.type == "cuda" else torch.float32)
    ours, peer = captured(partial(cohort.ours, switch), device), captured(cohort.peer, device)
    times: dict[str, list[float]] = {"ours": [], "peer": []}
    for _ in range(3):
        times["ours"].append(timed(ours, device))
        times["peer"].append(timed(peer, device))
    a, b = (1e3 * statistics.median(times[key]) / WEIGHTS for key in ("ours", "peer"))
    return {"product": name, "rows": rows, "run": count, "cohort us": a, "cuBLAS us": b, "ratio": a / b, "error": cohort.error()}


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=int, default=1, help="divides the sizes")
    args = parser.parse_args()
    device = common.default_device()
    switch = GraphSwitch(device) if device.type == "cuda" else HostSwitch()
    with torch.inference_mode():
        rows = [measure(name, *count, switch, device, args.scale) for count in COUNTS for name in SHAPES]
    common.print_table(rows, ["product", "rows", "run", "cohort us", "cuBLAS us", "ratio", "error"])
    ratios = [row["ratio"] for row in rows]
    print(f"median {statistics.median(ratios):.3f}, worst {max(ratios):.3f}; largest error {max(row['error'] for row in rows):.1e}")
    common.write_results("cohort", rows, device)


if __name__ == "__main__":
    main()
