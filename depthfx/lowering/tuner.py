"""Time tiles of the streaming kernel on the device at hand and keep those that beat the built-in choice.

A product is timed in full and in fast precision and judged by the sum. Another tile is kept only where it is at least 3 % faster,
in the search and once more when both are timed again: the fastest of twenty equal tiles always looks a little faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass
from typing import Protocol

from depthfx.errors import InternalError
from depthfx.lowering.kernels._stream_config import SHARED_BYTES, Product, StreamConfig, config_fault, default_config
from depthfx.lowering.tile_store import Tiles

GAIN = 0.03
ROW_CLASSES = (16, 32, 64, 128, 256)
_MAX_STAGES = 8
_MAX_PARTIALS = 8 << 20  # fp32 values of scratch that are reserved before graphs are captured


class Bench(Protocol):
    """Measures one product on one device."""

    def fault(self, config: StreamConfig) -> str | None:
        """Why ``config`` does not run or gives wrong numbers; None where all is well."""

    def time_us(self, config: StreamConfig, full: bool) -> float:
        """Microseconds of one call in full or fast precision."""

    def cublas_us(self) -> float:
        """Microseconds of the same product with a 16-bit weight in cuBLAS, without the activation."""


@dataclass(frozen=True)
class Outcome:
    """What the search over one product found; times are full plus fast, in microseconds."""

    product: Product
    before: StreamConfig
    after: StreamConfig
    before_us: float
    after_us: float
    cublas_us: float  # of one call
    faults: tuple[str, ...]  # candidates that did not run or were wrong

    @property
    def kept(self) -> bool:
        """Whether another tile than the built-in one won."""
        return self.after != self.before


def candidates(product: Product, num_sms: int) -> list[StreamConfig]:
    """Configs worth timing, the built-in one first: one to three programs for each multiprocessor, rings as deep as fits."""
    block_t, num_outputs, num_inputs, gated = product
    found = [default_config(block_t, num_outputs, num_inputs, gated, num_sms)]
    for rows in (64, 128):
        for block_k in (64, 128):
            for programs in (1, 2, 3):
                room = (SHARED_BYTES + 1024) // programs - 1024  # each program also takes 1 KiB of the multiprocessor
                stages = min(_MAX_STAGES, room // StreamConfig(rows, block_k, 1, 1).stage_bytes(block_t))
                tiles = -(-num_outputs // rows)
                exact = programs * num_sms / tiles
                most = max(1, min(num_inputs // block_k // 2, _MAX_PARTIALS // (tiles * rows * block_t)))
                found += [StreamConfig(rows, block_k, stages, max(1, min(splits, most))) for splits in (int(exact), int(exact) + 1)]
    return [c for c in dict.fromkeys(found) if config_fault(product, c) is None]


def tune_product(product: Product, bench: Bench, num_sms: int) -> Outcome:
    """Time every candidate and pick the built-in config or one that is at least ``GAIN`` faster, twice."""

    def total(config: StreamConfig) -> float:
        return bench.time_us(config, True) + bench.time_us(config, False)

    before, *others = candidates(product, num_sms)
    if (fault := bench.fault(before)) is not None:
        raise InternalError(f"the built-in {before} of product {product} fails: {fault}")
    times, faults = {before: total(before)}, []
    for config in others:
        if (fault := bench.fault(config)) is not None:
            faults.append(f"{config}: {fault}")
        else:
            times[config] = total(config)
    best = min(times, key=times.__getitem__)
    before_us = after_us = times[before]
    after = before
    if best != before and times[best] <= (1 - GAIN) * before_us:
        before_us, best_us = total(before), total(best)
        after_us = before_us
        if best_us <= (1 - GAIN) * before_us:
            after, after_us = best, best_us
    return Outcome(product, before, after, before_us, after_us, bench.cublas_us(), tuple(faults))


def tune(products: Iterable[Product], bench_of: Callable[[Product], Bench], num_sms: int) -> Iterator[Outcome]:
    """:func:`tune_product` for each; a bench lives as long as its product is timed."""
    for product in products:
        yield tune_product(product, bench_of(product), num_sms)


def merged(tiles: Tiles, outcomes: Iterable[Outcome]) -> Tiles:
    """``tiles`` of earlier runs with what this run found; a product that fell back to the built-in config is dropped."""
    found = dict(tiles)
    for outcome in outcomes:
        found.pop(outcome.product, None)
        if outcome.kept:
            found[outcome.product] = outcome.after
    return found


HEADER = f"{'weights':>15} {'gated':5} {'rows':>4} {'before':>20} {'us':>8} {'after':>20} {'us':>8} {'gain':>6} {'2 x cuBLAS':>10}"


def table_line(outcome: Outcome) -> str:
    """One outcome under :data:`HEADER`: configs as rows/step/depth/ranges, full plus fast in microseconds, cuBLAS twice."""
    block_t, num_outputs, num_inputs, gated = outcome.product
    before, after = ("/".join(map(str, astuple(c))) for c in (outcome.before, outcome.after))
    gain = f"{outcome.before_us / outcome.after_us - 1:.1%}" if outcome.kept else "-"
    return (
        f"{f'{num_outputs}x{num_inputs}':>15} {'yes' if gated else '':5} {block_t:4} {before:>20} {outcome.before_us:8.1f} "
        f"{after if outcome.kept else 'the same':>20} {outcome.after_us:8.1f} {gain:>6} {2 * outcome.cublas_us:10.1f}"
    )
