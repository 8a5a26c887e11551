"""Typed Python names of the ``depthfx::`` ops; no other file spells an op name as text.

The functions are for eager code; passes put the overloads (capital names) into graphs. Formulas and shapes stand in
``lowering/kernels/<op>.py``.
"""

from __future__ import annotations

import torch

from depthfx.lowering.kernel_spec import KERNELS, enable_pdl
from depthfx.lowering.kernels._fp8_linear import MIN_ROWS as MIN_FP8_ROWS
from depthfx.lowering.kernels._fp8_linear import has_fp8_rows
from depthfx.lowering.kernels._scratch import reserve_scratch
from depthfx.lowering.kernels._upload import upload_words

__all__ = [
    "ADD_RMS_NORM", "DUAL_GATED_LINEAR", "DUAL_LINEAR", "FP8_LINEAR", "GATED_ACTIVATION", "GATED_LINEAR", "KV_APPEND", "LINEAR",
    "LINEAR_ADD", "MIN_FP8_ROWS", "PAGED_ATTENTION", "PARTITION_ROWS", "QUANTIZE_ROWS", "RMS_NORM", "ROTARY_APPEND", "SCATTER_ROWS", "SELECT_ROWS",
    "add_rms_norm", "dual_gated_linear", "dual_linear", "enable_pdl", "fp8_linear", "gated_activation", "gated_linear", "has_fp8_rows",
    "kv_append", "linear", "linear_add", "paged_attention", "partition_rows", "quantize_rows", "reserve_scratch", "rms_norm",
    "rotary_append", "scatter_rows", "select_rows", "upload_words",
]  # fmt: skip

KERNELS.names()  # imports every kernel file, which defines its op

RMS_NORM = torch.ops.depthfx.rms_norm.default
ADD_RMS_NORM = torch.ops.depthfx.add_rms_norm.default
LINEAR = torch.ops.depthfx.linear.default
LINEAR_ADD = torch.ops.depthfx.linear_add.default
GATED_LINEAR = torch.ops.depthfx.gated_linear.default
GATED_ACTIVATION = torch.ops.depthfx.gated_activation.default
DUAL_LINEAR = torch.ops.depthfx.dual_linear.default
DUAL_GATED_LINEAR = torch.ops.depthfx.dual_gated_linear.default
FP8_LINEAR = torch.ops.depthfx.fp8_linear.default
QUANTIZE_ROWS = torch.ops.depthfx.quantize_rows.default
KV_APPEND = torch.ops.depthfx.kv_append.default
ROTARY_APPEND = torch.ops.depthfx.rotary_append.default
PAGED_ATTENTION = torch.ops.depthfx.paged_attention.default
PARTITION_ROWS = torch.ops.depthfx.partition_rows.default
SELECT_ROWS = torch.ops.depthfx.select_rows.default
SCATTER_ROWS = torch.ops.depthfx.scatter_rows.default


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of the last dimension, Llama form."""
    return RMS_NORM(x, weight, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``(rms_norm(x + residual), x + residual)``."""
    return ADD_RMS_NORM(x, residual, weight, eps)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, bound: torch.Tensor | None = None
) -> torch.Tensor:  # fmt: skip
    """``x W^T + bias``; x [T, K], weight [N, K]. Where ``bound`` (one int32) is 0 the result may be anything."""
    return LINEAR(x, weight, bias, bound)


def linear_add(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, bound: torch.Tensor | None = None) -> torch.Tensor:
    """``residual + x W^T``; x [T, K], weight [N, K], residual [T, N]; ``bound`` as in :func:`linear`."""
    return LINEAR_ADD(x, weight, residual, bound)


def gated_linear(x: torch.Tensor, weight: torch.Tensor, activation: str, bound: torch.Tensor | None = None) -> torch.Tensor:
    """``act(x Wg^T) * (x Wu^T)``; weight [2F, K], gate rows first; activation "silu", "gelu_tanh" or "gelu"; bound as in :func:`linear`."""
    return GATED_LINEAR(x, weight, activation, bound)


def dual_linear(
    x: torch.Tensor, upper: torch.Tensor, lower: torch.Tensor, shift: torch.Tensor | None, layer_precision: torch.Tensor,
    layer: int, precision: int, format: str, bias: torch.Tensor | None = None, bound: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """``x W^T + bias`` with W [N, K] stored as two bytes; full precision reads both, fast one; ``bound`` as in :func:`linear`."""
    return DUAL_LINEAR(x, upper, lower, shift, layer_precision, layer, precision, format, bias, bound)


def dual_gated_linear(
    x: torch.Tensor, upper: torch.Tensor, lower: torch.Tensor, shift: torch.Tensor | None, layer_precision: torch.Tensor,
    layer: int, precision: int, format: str, activation: str, bound: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """``act(x Wg^T) * (x Wu^T)`` with W [2F, K] stored as two bytes, gate rows first; ``bound`` as in :func:`linear`."""
    return DUAL_GATED_LINEAR(x, upper, lower, shift, layer_precision, layer, precision, format, activation, bound)


def fp8_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x W^T + bias`` over E4M3 bytes [N, K] uint8 in stored order and scales [N]; x [T, K] is rounded to FP8 as well."""
    return FP8_LINEAR(x, weight, scale, bias)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``(x / scale in E4M3 and in stored order, scale [T])``, one scale for each row of x [T, K]."""
    return QUANTIZE_ROWS(x)


def gated_activation(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """``act(gate) * up`` of the joined projection [T, 2F]."""
    return GATED_ACTIVATION(gate_up, activation)


def kv_append(
    k: torch.Tensor, v: torch.Tensor, kv_pool: torch.Tensor, layer: int,
    positions: torch.Tensor, table_rows: torch.Tensor, block_tables: torch.Tensor,
) -> None:  # fmt: skip
    """Write k, v [T, Hkv, D] into their slots of the pool."""
    KV_APPEND(k, v, kv_pool, layer, positions, table_rows, block_tables)


def rotary_append(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None,
    norm_eps: float, kv_pool: torch.Tensor, layer: int, positions: torch.Tensor, table_rows: torch.Tensor,
    block_tables: torch.Tensor, num_heads: int, num_kv_heads: int, head_dim: int,
) -> torch.Tensor:  # fmt: skip
    """Norm and rotate q and k of the joined projection, append K and V, return q [T, Hq, D]; either half may be absent (0 heads)."""
    return ROTARY_APPEND(
        qkv, cos, sin, q_norm, k_norm, norm_eps, kv_pool, layer, positions, table_rows, block_tables,
        num_heads, num_kv_heads, head_dim,
    )  # fmt: skip


def paged_attention(
    q: torch.Tensor, kv_pool: torch.Tensor, layer: int, positions: torch.Tensor, table_rows: torch.Tensor,
    block_tables: torch.Tensor, chunk_starts: torch.Tensor, tile_chunks: torch.Tensor, tile_starts: torch.Tensor,
    num_decode_rows: int, scale: float, window: int = 0, softcap: float = 0.0, sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Causal attention of all rows of a step against the paged pool; [T, Hq, D]."""
    return PAGED_ATTENTION(
        q, kv_pool, layer, positions, table_rows, block_tables, chunk_starts, tile_chunks, tile_starts,
        num_decode_rows, scale, window, softcap, sinks,
    )  # fmt: skip


def partition_rows(
    actions: torch.Tensor, forced: torch.Tensor, positions: torch.Tensor, tape: torch.Tensor, place: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """``(order [T], counts [2], run_positions [T], choice [T])`` int32 of one layer's decisions; ``tape[place, :T]`` gets the choice."""
    return PARTITION_ROWS(actions, forced, positions, tape, place)


def select_rows(run: torch.Tensor, project: torch.Tensor, hidden: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
    """Rows [T, H] from ``run`` where ``choice`` [T] is 1, from ``project`` where it is 0, from ``hidden`` where it is -1."""
    return SELECT_ROWS(run, project, hidden, choice)


def scatter_rows(out: torch.Tensor, packed: torch.Tensor, order: torch.Tensor, counts: torch.Tensor, cohort: int) -> None:
    """Packed rows [n, H] of ``cohort`` (0 RUN, 1 PROJECT) to their places in ``out`` [T, H]; rows behind the count are left out."""
    SCATTER_ROWS(out, packed, order, counts, cohort)
