"""Times the Hopper streaming kernel on the device at hand, for the tuner: replayed graphs, weights rotated beyond the L2."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from depthfx.lowering.kernel_spec import enable_pdl, max_error
from depthfx.lowering.kernels import gated_activation
from depthfx.lowering.kernels._dual_weight import coding_of, plain_weight
from depthfx.lowering.kernels._stream_config import Product, StreamConfig
from depthfx.lowering.nest import nest
from depthfx.lowering.nested_format import NestedWeight
from depthfx.lowering.precompile import KernelWorkers, collected
from depthfx.report import CompileReport

ROTATE_BYTES = 160 << 20  # between two uses of the same bytes; the L2 of an H200 holds 60 MB
TOLERANCE = 8e-3  # of an FP16 result, where gated three roundings
_CALLS, _REPLAYS = 12, 7


@contextmanager
def _dependent_launch() -> Iterator[None]:
    """As in captured steps over nested weights."""
    enable_pdl(True)
    try:
        yield
    finally:
        enable_pdl(False)


def _launch(x: torch.Tensor, w: NestedWeight, gated: bool, flags: torch.Tensor, config: StreamConfig) -> torch.Tensor:
    from depthfx.lowering.kernels._hopper_stream import launch_stream

    assert w.lower is not None
    return launch_stream(x, w.upper, w.lower, w.shift, None, int(gated), flags, 0, coding_of(w.format, w.shift), config)


def replayed_us(calls: list[Callable[[], Any]], replays: int = _REPLAYS) -> float:
    """Median microseconds of one call, over replays of one captured graph that holds them all."""
    repeated = list(itertools.islice(itertools.cycle(calls), max(len(calls), _CALLS)))
    stream, graph, times = torch.cuda.Stream(), torch.cuda.CUDAGraph(), []
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for call in repeated:
            call()
    for _ in range(replays + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(repeated))
    return statistics.median(times[1:])


def compile_configs(work: Iterable[tuple[Product, list[StreamConfig]]], device: torch.device, report: CompileReport) -> None:
    """Have worker processes compile all configs of all products; nothing is launched meanwhile."""
    flags = torch.ones(1, dtype=torch.int32, device=device)
    with collected() as found, _dependent_launch():
        for (block_t, num_outputs, num_inputs, gated), configs in work:
            x = torch.empty(block_t, num_inputs, dtype=torch.float16, device=device)
            upper, lower = (torch.empty(num_outputs, num_inputs, dtype=torch.uint8, device=device) for _ in range(2))
            for config in configs:
                _launch(x, NestedWeight("nested_e4m3", upper, lower, None), gated, flags, config)
    with KernelWorkers(report, enabled=True) as workers:
        workers.compile(list(found))


class StreamBench:
    """One product on one device: random weights, a check against FP32, times. Fulfils ``tuner.Bench``."""

    def __init__(self, product: Product, device: torch.device) -> None:
        block_t, num_outputs, num_inputs, self._gated = product
        generator = torch.Generator(device).manual_seed(0)
        self._x = torch.randn(block_t, num_inputs, dtype=torch.float16, device=device, generator=generator)
        self._flags = {full: torch.tensor([int(full)], dtype=torch.int32, device=device) for full in (True, False)}
        count = max(2, min(64, -(-ROTATE_BYTES // (num_outputs * num_inputs))))
        shape, half = (num_outputs, num_inputs), torch.float16
        self._dense = [torch.randn(shape, dtype=half, device=device, generator=generator) * num_inputs**-0.5 for _ in range(count)]
        self._nested = [nest(w) for w in self._dense]
        self._expected = {full: self._exact(full) for full in (True, False)}

    def fault(self, config: StreamConfig) -> str | None:
        """Why ``config`` does not run or is wrong on the first weight, in either precision."""
        for full, expected in self._expected.items():
            try:
                with _dependent_launch():
                    out = _launch(self._x, self._nested[0], self._gated, self._flags[full], config)
            except OutOfResources as error:
                return str(error)
            if not (error_size := max_error(out, expected)) <= TOLERANCE:
                return f"off by {error_size:.1e} in {'full' if full else 'fast'} precision; allowed {TOLERANCE:.0e}"
        return None

    def time_us(self, config: StreamConfig, full: bool) -> float:
        """Microseconds of one call, under dependent launch."""
        flags = self._flags[full]
        with _dependent_launch():
            return replayed_us([functools.partial(_launch, self._x, w, self._gated, flags, config) for w in self._nested])

    def cublas_us(self) -> float:
        """Microseconds of the 16-bit product without the activation."""
        return replayed_us([functools.partial(torch.nn.functional.linear, self._x, w) for w in self._dense])

    def _exact(self, full: bool) -> torch.Tensor:
        first = self._nested[0]
        assert first.lower is not None
        out = self._x.float() @ plain_weight(first.upper, first.lower, first.shift, first.format, full).float().t()
        return gated_activation.reference(out, "silu") if self._gated else out
