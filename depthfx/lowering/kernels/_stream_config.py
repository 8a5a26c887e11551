"""Which products the Hopper streaming kernel serves, and how they are cut; no GPU and no Gluon is touched at import."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from depthfx.lowering.fragment_order import is_fragment_order
from depthfx.lowering.kernel_spec import is_hopper
from depthfx.lowering.kernels._dual_weight import check_stored, coding_of

MAX_STREAM_ROWS = 256
SHARED_BYTES = 227 << 10  # of one program at most, on compute capability 9


@dataclass(frozen=True)
class StreamConfig:
    """How one product is cut: weight rows of a tile (64 for each group of four warps), step of K, depth of the ring, ranges of K."""

    rows: int
    block_k: int
    stages: int
    splits: int

    def stage_bytes(self, block_t: int) -> int:
        """Shared memory of one step of the ring, its barrier included, for tiles of ``block_t`` rows of x."""
        return 2 * (self.rows + block_t) * self.block_k + 8


# x rows rounded up to 16, 32, 64, 128 or 256; weight rows N (2F when gated); K; gated.
Product = tuple[int, int, int, bool]
# Where another config beats the rule of `default_config` on an H200.
TUNED: dict[Product, StreamConfig] = {
    (16, 6144, 4096, False): StreamConfig(64, 128, 4, 2),
    (32, 6144, 4096, False): StreamConfig(64, 128, 4, 2),
    (64, 6144, 4096, False): StreamConfig(128, 128, 4, 2),
}
# What `use_tiles` put in, by the number of multiprocessors.
_stored: dict[int, dict[Product, StreamConfig]] = {}


def block_rows(num_rows: int) -> int:
    """Rows of x in a tile: a power of two from 16 to 256."""
    return max(16, triton.next_power_of_2(num_rows))


def use_tiles(num_sms: int, tiles: dict[Product, StreamConfig]) -> None:
    """Let :func:`stream_config` prefer ``tiles`` on devices of ``num_sms`` multiprocessors; call it before anything is launched there."""
    _stored[num_sms] = dict(tiles)


def stream_config(num_rows: int, num_outputs: int, num_inputs: int, gated: bool, num_sms: int) -> StreamConfig:
    """Config of a product of ``num_outputs`` weight rows (2F when gated): what :func:`use_tiles` named, else :func:`default_config`."""
    stored = _stored.get(num_sms)
    config = stored.get((block_rows(num_rows), num_outputs, num_inputs, gated)) if stored else None
    return config or default_config(num_rows, num_outputs, num_inputs, gated, num_sms)


def default_config(num_rows: int, num_outputs: int, num_inputs: int, gated: bool, num_sms: int) -> StreamConfig:
    """The config without a tuner: table first, then the rule.

    The rule gives two programs for each multiprocessor where x is small, one where tiles of x fill the shared memory. More
    ranges of K load sooner but must be added up.
    """
    block_t = block_rows(num_rows)
    tuned = TUNED.get((block_t, num_outputs, num_inputs, gated))
    if tuned is not None:
        return tuned
    rows = 128 if block_t > 64 and num_outputs > 128 * num_sms else 64
    block_k, stages = (128, 4 if block_t <= 32 else 3) if block_t <= 64 else (64, 5 if rows == 64 else 6 if block_t <= 128 else 4)
    tiles, steps = triton.cdiv(num_outputs, rows), triton.cdiv(num_inputs, block_k)
    programs = 2 * num_sms if block_t <= 64 else num_sms
    splits = max(1, min((programs + tiles // 2) // tiles, steps // 4))
    return StreamConfig(rows, block_k, stages, splits)


def uses_stream(x: torch.Tensor, upper: torch.Tensor, gated: bool) -> bool:
    """Whether ``_hopper_stream`` serves ``x`` [T, K] and ``upper`` [N, K]: at most 256 16-bit rows on Hopper, weights in fragment order.

    Rows must start at addresses that the tensor copy engine takes (multiples of 16 bytes), gate rows come in groups of 8.
    """
    return (
        x.device.type == "cuda"
        and 0 < x.shape[0] <= MAX_STREAM_ROWS
        and x.element_size() == 2
        and is_fragment_order(upper.shape[1])
        and upper.shape[0] % (16 if gated else 1) == 0
        and x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 and upper.data_ptr() % 16 == 0
        and is_hopper(x.device.index if x.device.index is not None else torch.cuda.current_device())
    )  # fmt: skip


def launch_streamed(
    x: torch.Tensor, upper: torch.Tensor, lower: torch.Tensor, shift: torch.Tensor | None, layer_precision: torch.Tensor,
    layer: int, format: str, bias: torch.Tensor | None = None, activation: int = 0, bound: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """``x W^T`` with the given epilogue by ``_hopper_stream``, which is imported at the first use: it needs Gluon."""
    from depthfx.lowering.kernels._hopper_stream import launch_stream

    check_stored(upper, lower)
    return launch_stream(x, upper, lower, shift, bias, activation, layer_precision, layer, coding_of(format, shift), bound=bound)


def config_fault(product: Product, config: StreamConfig) -> str | None:
    """Why the kernel cannot run ``config`` for ``product``; None where it can."""
    block_t, num_outputs, num_inputs, gated = product
    if block_t not in (16, 32, 64, 128, 256) or num_outputs < 1 or num_inputs < 64 or num_inputs % 64 or (gated and num_outputs % 16):
        return f"no product of the streaming kernel has {block_t} rows and {num_outputs} x {num_inputs} weights, gated {gated}"
    if config.rows not in (64, 128, 256) or config.block_k not in (64, 128) or config.stages < 2:
        return "a tile has 64, 128 or 256 weight rows, a step 64 or 128 columns, a ring at least 2 places"
    if config.stages * config.stage_bytes(block_t) > SHARED_BYTES:
        return f"the ring takes {config.stages * config.stage_bytes(block_t)} bytes of shared memory; at most {SHARED_BYTES}"
    steps = triton.cdiv(num_inputs, config.block_k)
    return None if 1 <= config.splits <= steps else f"{config.splits} ranges of K do not fit its {steps} steps"
