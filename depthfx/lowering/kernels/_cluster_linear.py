"""The product of nested weights and many rows on Hopper: weights joined in registers, tiles of x shared by two blocks of a cluster.

``y[t, n] = sum_k x[t, k] w[n, k]`` with the epilogue of `_hopper_stream`; x [T, K] 16-bit, out [T, N], or [T, F] when gated. CUDA C++ because
a tile of 128 weight rows and 256 rows of x reads 48 KiB for each step of 64 columns, more than the L2 cache delivers at the pace of the matrix
unit; copies to both blocks of a cluster make it 32, and Gluon in Triton 3.6 has none. Where tiles are fewer than blocks, K is cut in ranges, which
the last block to arrive adds up in order, so results repeat bit for bit. Example: T = 512, N = 4096: 2 x 16 pairs of tiles, 2 ranges.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

from depthfx.lowering.cuda_function import SWIZZLE_128, SWIZZLE_NONE, CudaFunction, tensor_map
from depthfx.lowering.fragment_order import is_fragment_order
from depthfx.lowering.kernel_spec import device_sms, is_collecting
from depthfx.lowering.kernels._dual_weight import check_stored, coding_of
from depthfx.lowering.kernels._scratch import scratch_of
from depthfx.lowering.nvrtc import has_nvrtc, machine_code

MIN_ROWS = 129  # `_hopper_stream` is as fast up to 128
TILE_WEIGHTS, TILE_ROWS, STEP, STAGES = 128, 256, 64, 4  # weight rows, rows of x, columns of one step, depth of the ring
_THREADS = 384
_STAGED_BYTES = 2 * 64 * 128  # results on their way out
_SHARED_BYTES = STAGES * (2 * TILE_WEIGHTS * STEP + 2 * TILE_ROWS * STEP + 16) + _STAGED_BYTES + 1024

Variant = tuple[int, bool, int]  # coding, bfloat16, activation
_compilers = ThreadPoolExecutor(4, thread_name_prefix="depthfx-nvrtc")
_codes: dict[Variant, Future[bytes]] = {}
_lock = threading.Lock()


def uses_cluster(x: torch.Tensor, upper: torch.Tensor, gated: bool) -> bool:
    """Whether this kernel serves ``x`` [T, K] and ``upper`` [N, K]: more than 128 16-bit rows on Hopper, weights in fragment order, and NVRTC.

    Rows must start at addresses that the tensor copy engine takes (multiples of 16 bytes), and results come in groups of 8.
    """
    return (
        x.device.type == "cuda"
        and x.shape[0] >= MIN_ROWS
        and x.element_size() == 2
        and is_fragment_order(upper.shape[1])
        and upper.shape[0] % (16 if gated else 8) == 0
        and x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 and upper.data_ptr() % 16 == 0
        and _is_supported(x.device.index if x.device.index is not None else torch.cuda.current_device())
    )  # fmt: skip


@cache
def _is_supported(index: int) -> bool:
    return torch.cuda.get_device_capability(index)[0] == 9 and has_nvrtc()


def num_ranges(num_rows: int, num_outputs: int, num_inputs: int, num_sms: int) -> int:
    """Ranges of K of a product of ``num_outputs`` weight rows: as many as there are clusters for, of 4 steps at least."""
    pairs = -(-num_rows // TILE_ROWS) * -(-num_outputs // (2 * TILE_WEIGHTS))
    return max(1, min(num_sms // 2 // pairs, num_inputs // STEP // 4))


def launch_cluster(
    x: torch.Tensor, upper: torch.Tensor, lower: torch.Tensor, shift: torch.Tensor | None, layer_precision: torch.Tensor,
    layer: int, format: str, bias: torch.Tensor | None = None, activation: int = 0, splits: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """``x W^T`` with the given epilogue, in the precision that ``layer_precision[layer]`` says; ``splits`` replaces :func:`num_ranges`.

    Raises ``ValueError`` for more ranges than steps of 64 columns: the kernel would wait for ever for a range without any.
    """
    check_stored(upper, lower)
    num_rows, num_inputs = x.shape
    num_weights = upper.shape[0]
    num_outputs = num_weights // 2 if activation else num_weights
    splits = num_ranges(num_rows, num_weights, num_inputs, device_sms(x.device)) if splits is None else splits
    if not 1 <= splits <= num_inputs // STEP:
        raise ValueError(
            f"splits is {splits}; {num_inputs} columns can be cut in 1 to {num_inputs // STEP} ranges of {STEP} columns or more"
        )
    tiles, pairs = -(-num_weights // TILE_WEIGHTS), -(-num_weights // (2 * TILE_WEIGHTS))
    row_tiles = -(-num_rows // TILE_ROWS)
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    variant = (coding_of(format, shift), x.dtype is torch.bfloat16, activation)
    if is_collecting():
        _code_of(variant)
        return out
    partial = counters = None
    if splits > 1:
        slots = 4 * row_tiles * pairs  # two groups in each of two blocks
        scratch = scratch_of(x.device, slots * splits * (TILE_WEIGHTS // 2) * TILE_ROWS, slots)
        partial, counters = scratch.values, scratch.counters
    x_map = tensor_map(x.data_ptr(), x.dtype, (num_inputs, num_rows), (2 * x.stride(0),), (STEP, TILE_ROWS // 2), SWIZZLE_128)
    sizes: tuple[int, ...] = (num_inputs, num_weights)
    strides: tuple[int, ...] = (num_inputs,)
    box: tuple[int, ...] = (STEP, TILE_WEIGHTS)
    if activation:  # 8 gate rows, the 8 up rows that belong to them, and so on
        sizes, strides = (num_inputs, 8, 2, num_outputs // 8), (num_inputs, num_outputs * num_inputs, 8 * num_inputs)
        box = (STEP, 8, 2, TILE_WEIGHTS // 16)
    maps = [tensor_map(w.data_ptr(), torch.uint8, sizes, strides, box, SWIZZLE_NONE) for w in (upper, lower)]
    clusters = min(row_tiles * pairs * splits, device_sms(x.device) // 2)
    _function(variant, torch.cuda.current_device()).launch(
        2 * clusters, *maps, x_map, out, shift, bias, partial, counters, layer_precision, layer, num_rows, num_outputs,
        num_inputs // STEP, splits, tiles,
    )  # fmt: skip
    return out


def source_of(variant: Variant) -> str:
    """The CUDA C++ of one variant."""
    coding, bfloat16, activation = variant
    given = {"BT": TILE_ROWS, "STAGES": STAGES, "FORMAT": coding, "BF16": int(bfloat16), "ACTIVATION": activation}
    text = Path(__file__).with_suffix(".cu").read_text()
    return "".join(f"#define {name} {value}\n" for name, value in given.items()) + text.replace("@MMA@", _mma(bfloat16))


def _mma(bfloat16: bool) -> str:
    """The function of one matrix instruction, 64 weight rows, TILE_ROWS rows of x and 16 columns: its sums are that many operands."""
    count, kind = TILE_ROWS // 2, "bf16" if bfloat16 else "f16"
    sums = ", ".join(f"%{i}" for i in range(count))
    weights = ", ".join(f"%{count + i}" for i in range(4))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return (
        "__device__ __forceinline__ void mma(float (&d)[ACCS], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int add) {\n"
        f'  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 5}, 0;\\n'
        f'wgmma.mma_async.sync.aligned.m64n{TILE_ROWS}k16.f32.{kind}.{kind} {{{sums}}}, {{{weights}}}, %{count + 4}, p, 1, 1, 0;\\n}}"\n'
        f'    : {operands} : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add));\n}}\n'
    )


def _code_of(variant: Variant) -> Future[bytes]:
    """Its machine code, which a thread compiles from the first time on that it is asked for; a dry run asks ahead."""
    with _lock:
        if variant not in _codes:
            _codes[variant] = _compilers.submit(machine_code, source_of(variant), "sm_90a", ("-std=c++17",))
        return _codes[variant]


@cache
def _function(variant: Variant, index: int) -> CudaFunction:
    """Loaded on the current device, whose number is ``index``."""
    return CudaFunction(_code_of(variant).result(), "nested_gemm", _THREADS, _SHARED_BYTES)
