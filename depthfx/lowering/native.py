"""fp32 decode kernels for a CPU: ``native_cpu.cpp``, compiled once for this machine and called through ctypes.

The library speaks plain C: no ATen headers, no build step at install time, the GIL released while a kernel runs. It uses
the OpenMP runtime that torch has loaded (a second one would start a second set of threads). Where it cannot be built,
:func:`available` says why and callers keep to plain PyTorch.

Each result is the same bits for any batch size and any number of threads: no output is summed by two threads, no order
depends on the other rows. Letters as in ``records.py``; M <= ``MAX_ROWS`` rows of a linear, N outputs, K inputs.
All wrappers raise ``ValueError`` for tensors they cannot read and ``RuntimeError`` where the library is not available.
"""

from __future__ import annotations

import ctypes
import functools
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._C._dynamo.guards

from depthfx.native_build import BuildError, build, find_compiler

# What Inductor's generated code allocates with: a third of the cost of torch.empty.
_empty_strided_cpu: Callable[..., torch.Tensor] = getattr(torch._C._dynamo.guards, "_empty_strided_cpu")  # noqa: B009

# Largest M of small_linear: from there on the matrix product is bound by arithmetic and MKL is as good.
MAX_ROWS = 32
ACTIVATIONS = {"silu": 1, "gelu_tanh": 2, "gelu": 3}

_F32, _I32 = torch.float32, torch.int32
_SOURCE = Path(__file__).with_name("native_cpu.cpp")
_COMPILE_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-std=c++17", "-fopenmp", "-fPIC")
_P, _I, _F, _C = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_PAGED = (_P, _P, _P, _I)  # positions, table rows, block tables, stride of the tables
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "small_linear": (_P, _I, _P, _P, _P, _I, _P, _I, _I, _I, _I, _C, _C),
    "stored_linear": (_P, _I, _P, _P, _P, _C, _C, _C, _P, _P, _I, _I, _I, _I, _C, _C),
    "join_weight": (_P, _P, _P, _C, _C, _C, _P, _I, _I, _C),
    "paged_decode_attention": (_P, _I, _I, _P, _I, _I, *_PAGED, _F, _I, _F, _P, _P, _I, _I, _I, _I, _I, _C),
    "rotary_append": (_P, _I, _P, _I, _P, _I, _I, _P, _P, _F, _P, _I, _I, *_PAGED, _P, _I, _I, _I, _I, _I, _C),
    "kv_append": (_P, _I, _I, _P, _I, _I, _P, _I, _I, *_PAGED, _I, _I, _I, _I, _C),
    "rms_norm": (_P, _I, _P, _I, _P, _F, _F, _P, _P, _I, _I, _C),
    "gated_activation": (_P, _I, _P, _I, _I, _C, _C),
}


class _Library:
    """The loaded functions, one attribute each."""

    def __init__(self, path: Path) -> None:
        try:
            handle = ctypes.CDLL(str(path))
        except OSError as error:
            raise BuildError(f"{path} cannot be loaded: {error}") from error
        for name, arguments in _SIGNATURES.items():
            function = getattr(handle, f"dfx_{name}")
            function.argtypes, function.restype = arguments, None
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:  # reached only for names that are not functions of the library
        raise AttributeError(name)


_lock = threading.Lock()
_library: _Library | None = None
_reason: str | None = None


def available() -> tuple[bool, str]:
    """``(True, "")`` or ``(False, reason)``; builds the library on first use (a few seconds, once per machine)."""
    global _library, _reason
    if _library is None and _reason is None:
        with _lock:
            if _library is None and _reason is None:
                try:
                    _library = _Library(_build())
                except BuildError as error:
                    _reason = str(error)
    return (True, "") if _library is not None else (False, str(_reason))


def usable(*tensors: torch.Tensor | None) -> bool:
    """Whether the kernels take these tensors: all fp32 on the CPU, library available."""
    for tensor in tensors:
        if tensor is not None and (tensor.dtype is not torch.float32 or not tensor.is_cpu):
            return False
    return _library is not None or available()[0]


def small_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """``x @ weight.T + bias + residual`` for few rows: x [M, K], weight [N, K] contiguous, bias [N], residual [M, N] -> [M, N].

    With an ``activation`` of ``ACTIVATIONS`` the weight is [2N, K] (and the bias [2N]), gate rows before up rows, and the
    result ``act(gate) * up + residual``. Rows of x and of the residual may be strided. M is at most ``MAX_ROWS``.
    """
    rows, inner = x.shape
    outputs = weight.shape[0]
    code = 0
    if activation is not None:
        code = _activation(activation)
        outputs //= 2
    if rows > MAX_ROWS or weight.shape[1] != inner or not weight.is_contiguous():
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} must be [M <= {MAX_ROWS}, K] and contiguous [N, K]")
    _check(x, weight, bias, residual)
    if (bias is not None and bias.shape != weight.shape[:1]) or (residual is not None and residual.shape != (rows, outputs)):
        raise ValueError(f"bias must be [{weight.shape[0]}] and residual [{rows}, {outputs}]")
    out = _empty_strided_cpu((rows, outputs), (outputs, 1), _F32)
    if rows:
        _loaded().small_linear(
            x.data_ptr(), x.stride()[0], weight.data_ptr(), _address(bias),
            _address(residual), 0 if residual is None else residual.stride()[0],
            out.data_ptr(), outputs, rows, outputs, inner, code, torch.get_num_threads(),
        )  # fmt: skip
    return out


def paged_decode_attention(
    q: torch.Tensor,
    kv_pool: torch.Tensor,
    layer: int,
    positions: torch.Tensor,
    table_rows: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of single rows over their paged keys, read in place: q [T, Hq, D], any strides over T and Hq -> [T, Hq, D].

    Row t sees keys 0..positions[t] of its request, with a ``window`` only those with ``positions[t] - j < window``;
    position -1 gives zeros. ``softcap`` c > 0 makes each scaled score s into ``c * tanh(s / c)``; ``sinks`` [Hq] join the
    softmax denominator alone. Meant for decode rows: each row reads its whole context.
    """
    num_rows, num_heads, head_dim = q.shape
    block_stride, layer_stride, kv_heads, block_tokens = _pool(kv_pool, head_dim)
    if num_heads % kv_heads or (sinks is not None and sinks.shape != (num_heads,)):
        raise ValueError(f"{num_heads} query heads must be a multiple of {kv_heads} KV heads, and sinks must be [{num_heads}]")
    _check(q, kv_pool, sinks)
    out = _empty_strided_cpu((num_rows, num_heads, head_dim), (num_heads * head_dim, head_dim, 1), _F32)
    if num_rows:
        _loaded().paged_decode_attention(
            q.data_ptr(), q.stride()[0], q.stride()[1], kv_pool.data_ptr(), block_stride, layer * layer_stride,
            *_paged(num_rows, positions, table_rows, block_tables), scale, window, softcap, _address(sinks),
            out.data_ptr(), num_rows, num_heads, kv_heads, block_tokens, head_dim, torch.get_num_threads(),
        )  # fmt: skip
    return out


def rotary_append(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    norm_eps: float,
    kv_pool: torch.Tensor,
    layer: int,
    positions: torch.Tensor,
    table_rows: torch.Tensor,
    block_tables: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> torch.Tensor:
    """Norm (optional), rotate and append in one pass: qkv [T, (Hq + 2 Hkv) * D], cos, sin [T, R], norms [D] -> q [T, Hq, D].

    Rotates the first R <= D features of q and k by halves; K and V go to their slots of the pool, unless the row's
    position is -1. ``num_heads`` or ``num_kv_heads`` may be 0. Arguments as in the op ``depthfx::rotary_append``.
    """
    num_rows, rotary_dim = cos.shape
    block_stride, layer_stride, kv_heads, block_tokens = _pool(kv_pool, head_dim)
    if qkv.shape != (num_rows, (num_heads + 2 * num_kv_heads) * head_dim) or num_kv_heads not in (0, kv_heads):
        raise ValueError(f"qkv {tuple(qkv.shape)} must be [{num_rows}, ({num_heads} + 2 x {kv_heads}) x {head_dim}] in the order q, k, v")
    if rotary_dim > head_dim or rotary_dim % 2 or sin.shape != cos.shape:
        raise ValueError(f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} must be [T, R] with R even and at most {head_dim}")
    _check(qkv, cos, sin, q_norm, k_norm, kv_pool)
    out = _empty_strided_cpu((num_rows, num_heads, head_dim), (num_heads * head_dim, head_dim, 1), _F32)
    if num_rows:
        _loaded().rotary_append(
            qkv.data_ptr(), qkv.stride()[0], cos.data_ptr(), cos.stride()[0], sin.data_ptr(), sin.stride()[0], rotary_dim,
            _address(q_norm), _address(k_norm), norm_eps, kv_pool.data_ptr(), block_stride, layer * layer_stride,
            *_paged(num_rows, positions, table_rows, block_tables),
            out.data_ptr(), num_rows, num_heads, num_kv_heads, block_tokens, head_dim, torch.get_num_threads(),
        )  # fmt: skip
    return out


def kv_append(
    k: torch.Tensor,
    v: torch.Tensor,
    kv_pool: torch.Tensor,
    layer: int,
    positions: torch.Tensor,
    table_rows: torch.Tensor,
    block_tables: torch.Tensor,
) -> None:
    """Write k, v [T, Hkv, D] (any strides over T and Hkv) into their slots of the pool; a row with position -1 writes nothing."""
    num_rows, num_heads, head_dim = k.shape
    block_stride, layer_stride, kv_heads, block_tokens = _pool(kv_pool, head_dim)
    if num_heads != kv_heads or v.shape != k.shape:
        raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} must be [T, {kv_heads}, {head_dim}]")
    _check(k, v, kv_pool)
    if num_rows:
        _loaded().kv_append(
            k.data_ptr(), k.stride()[0], k.stride()[1], v.data_ptr(), v.stride()[0], v.stride()[1],
            kv_pool.data_ptr(), block_stride, layer * layer_stride, *_paged(num_rows, positions, table_rows, block_tables),
            num_rows, kv_heads, block_tokens, head_dim, torch.get_num_threads(),
        )  # fmt: skip


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """``x * rsqrt(mean(x^2) + eps) * (weight + offset)`` over the last dimension: x [..., H], weight [H] -> [..., H]."""
    out = _dense_like(x)
    _norm(x, None, weight, (eps, offset), None, out)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(rms_norm(sum), sum)`` with ``sum = x + residual``: x, residual [..., H], weight [H] -> twice [..., H]."""
    out, total = _dense_like(x), _dense_like(x)
    _norm(x, residual, weight, (eps, offset), total, out)
    return out, total


def gated_activation(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """``act(gate) * up``: gate_up [..., 2F], gates before ups -> [..., F]."""
    code = _activation(activation)
    rows = gate_up if gate_up.dim() == 2 else gate_up.reshape(-1, gate_up.shape[-1])
    _check(rows)
    num_rows, width = rows.shape
    out = torch.empty((*gate_up.shape[:-1], width // 2), dtype=_F32, device="cpu")
    if num_rows:
        _loaded().gated_activation(rows.data_ptr(), rows.stride()[0], out.data_ptr(), num_rows, width // 2, code, torch.get_num_threads())
    return out


def _dense_like(x: torch.Tensor) -> torch.Tensor:
    if x.dim() == 2:
        rows, width = x.shape
        return _empty_strided_cpu((rows, width), (width, 1), _F32)
    return torch.empty(x.shape, dtype=_F32, device="cpu")


def _norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    terms: tuple[float, float],  # eps, offset
    total: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    num_rows, features = rows.shape
    other = residual
    if residual is not None and residual.dim() != 2:
        other = residual.reshape(-1, features)
    if weight.shape != (features,) or (other is not None and other.shape != rows.shape):
        raise ValueError(f"weight {tuple(weight.shape)} must be [{features}] and the residual shaped as x {tuple(x.shape)}")
    _check(rows, other, weight)
    if num_rows:
        _loaded().rms_norm(
            rows.data_ptr(), rows.stride()[0], _address(other), 0 if other is None else other.stride()[0],
            weight.data_ptr(), terms[1], terms[0], _address(total), out.data_ptr(), num_rows, features, torch.get_num_threads(),
        )  # fmt: skip


def _loaded() -> _Library:
    if _library is None:
        found, reason = available()
        if not found or _library is None:
            raise RuntimeError(f"native CPU kernels are not available: {reason}; ask native.available() before calling them")
    return _library


def _check(*tensors: torch.Tensor | None) -> None:
    for tensor in tensors:
        if tensor is None or (tensor.dtype is _F32 and tensor.is_cpu and (tensor.is_contiguous() or tensor.stride()[-1] == 1)):
            continue
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)}, strides {tensor.stride()}, {tensor.dtype} on {tensor.device} must be float32 "
            "on the CPU with a contiguous last dimension"
        )


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _activation(name: str) -> int:
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not known; allowed: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _pool(kv_pool: torch.Tensor, head_dim: int) -> tuple[int, int, int, int]:
    """Stride of blocks, stride of layers, KV heads, tokens of a block; the parts [2, Hkv, B, D] must be contiguous."""
    _, _, two, heads, tokens, width = kv_pool.shape
    blocks, layers, *inner = kv_pool.stride()
    if two != 2 or width != head_dim or inner != [heads * tokens * width, tokens * width, width, 1]:
        raise ValueError(
            f"kv_pool {tuple(kv_pool.shape)}, strides {kv_pool.stride()}, must be [blocks, L, 2, Hkv, B, {head_dim}] with "
            "contiguous parts [2, Hkv, B, D]; build it with KvShape.pool_shape"
        )
    return blocks, layers, heads, tokens


def _paged(num_rows: int, positions: torch.Tensor, table_rows: torch.Tensor, block_tables: torch.Tensor) -> tuple[int, int, int, int]:
    for tensor in (positions, table_rows, block_tables):
        if tensor.dtype is not _I32 or not tensor.is_cpu or not (tensor.is_contiguous() or tensor.stride()[-1] == 1):
            raise ValueError("positions, table_rows and block_tables must be int32 on the CPU, contiguous in the last dimension")
    if positions.numel() != num_rows or table_rows.numel() != num_rows:
        raise ValueError(f"positions {tuple(positions.shape)} and table_rows {tuple(table_rows.shape)} must both be [{num_rows}]")
    return positions.data_ptr(), table_rows.data_ptr(), block_tables.data_ptr(), block_tables.stride()[0]


def _build() -> Path:
    """Path of the library for this source, compiler and processor; compiles it where the cache has none."""
    purpose = "the native CPU kernels"
    compiler = find_compiler(["g++"], purpose)
    # linked without -fopenmp: no other runtime
    return build(compiler, [_SOURCE], _COMPILE_FLAGS, [str(_openmp_runtime())], [_processor()], purpose)


def _openmp_runtime() -> Path:
    """The OpenMP library in this process: torch's."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError as error:
        raise BuildError(f"the native CPU kernels are for Linux: {error}") from error
    found = re.search(r"(/\S*/lib(?:gomp|iomp5|omp)[-.][^/\n]*)$", maps, re.MULTILINE)
    if found is None:
        raise BuildError("this torch has no OpenMP runtime loaded; install a torch build with OpenMP")
    return Path(found.group(1))


@functools.cache
def _processor() -> str:
    """Model and features of the processor: what -march=native depends on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    wanted = [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return "\n".join(sorted(set(wanted)))
