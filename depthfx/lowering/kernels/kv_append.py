"""Write the keys and values of a step into their slots of the block-major KV pool.

``kv_pool[block, layer, 0 | 1, h, slot, :] = store(k | v [t, h, :])`` with ``block = block_tables[table_rows[t], positions[t] // B]``
and ``slot = positions[t] % B``; a row with position -1 writes nothing. k, v [T, Hkv, D], pool [blocks, L, 2, Hkv, B, D] of the dtype
of k (``store`` keeps every bit) or of E4M3 (``store`` rounds to the nearest and saturates at 448).
Example: B = 16, position 35, table row [7, 2, 9]: block 9, slot 3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from depthfx.lowering import native
from depthfx.lowering.kernel_spec import Case, KernelSpec, inner_contiguous, pdl_options, register_kernel
from depthfx.lowering.kernels._cases import COPY_REASON, COPY_TOLERANCE, STORE_FP8_REASON, paged_tables, randn, wide_randn
from depthfx.lowering.kernels._device import pdl_release, pdl_wait
from depthfx.lowering.kernels._e4m3 import FP8, as_bytes, encode, round_to, stored_form


@triton.jit(do_not_specialize=["layer"])
def _kv_append_kernel(
    k_ptr, v_ptr, pool_ptr, positions_ptr, table_rows_ptr, block_tables_ptr,
    layer, stride_kt, stride_kh, stride_vt, stride_vh, stride_table, stride_block, stride_layer,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, CODING: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for all KV heads of one row."""
    row = tl.program_id(0).to(tl.int64)
    pdl_release(PDL)
    pdl_wait(PDL)
    position = tl.load(positions_ptr + row)
    if position >= 0:
        table = tl.load(table_rows_ptr + row).to(tl.int64)
        block = tl.load(block_tables_ptr + table * stride_table + position // BLOCK_TOKENS).to(tl.int64)
        heads = tl.arange(0, BLOCK_H)[:, None]
        features = tl.arange(0, BLOCK_D)[None, :]
        mask = (heads < HEADS) & (features < HEAD_DIM)
        target = pool_ptr + block * stride_block + layer.to(tl.int64) * stride_layer
        target += (heads * BLOCK_TOKENS + position % BLOCK_TOKENS) * HEAD_DIM + features
        k = tl.load(k_ptr + row * stride_kt + heads * stride_kh + features, mask=mask)
        v = tl.load(v_ptr + row * stride_vt + heads * stride_vh + features, mask=mask)
        tl.store(target, encode(k, CODING), mask=mask)
        tl.store(target + HEADS * BLOCK_TOKENS * HEAD_DIM, encode(v, CODING), mask=mask)


def pool_strides(kv_pool: torch.Tensor) -> tuple[int, int]:
    """Elements between blocks and between layers; inside one layer of a block the pool must be contiguous.

    Raises ``ValueError`` for a pool that is not ``[blocks, L, 2, Hkv, B, D]`` in that sense.
    """
    if kv_pool.dim() != 6 or kv_pool.shape[2] != 2 or not kv_pool[0, 0].is_contiguous():
        raise ValueError(
            f"kv_pool has shape {tuple(kv_pool.shape)} and strides {kv_pool.stride()}; it must be [blocks, L, 2, Hkv, B, D] "
            "with contiguous [2, Hkv, B, D] parts; build it with KvShape.pool_shape"
        )
    return kv_pool.stride(0), kv_pool.stride(1)


def reference(
    k: torch.Tensor, v: torch.Tensor, kv_pool: torch.Tensor, layer: int,
    positions: torch.Tensor, table_rows: torch.Tensor, block_tables: torch.Tensor,
) -> None:  # fmt: skip
    """Plain PyTorch: one indexed assignment each for keys and values."""
    rows = (positions >= 0).nonzero().squeeze(1)
    at = positions[rows].long()
    block_tokens = kv_pool.shape[4]
    blocks = block_tables[table_rows[rows].long(), at // block_tokens].long()
    slots = at % block_tokens
    pool = as_bytes(kv_pool)
    pool[blocks, layer, 0, :, slots] = as_bytes(round_to(k[rows], kv_pool.dtype))
    pool[blocks, layer, 1, :, slots] = as_bytes(round_to(v[rows], kv_pool.dtype))


def cpu(
    k: torch.Tensor, v: torch.Tensor, kv_pool: torch.Tensor, layer: int,
    positions: torch.Tensor, table_rows: torch.Tensor, block_tables: torch.Tensor,
) -> None:  # fmt: skip
    """The native kernel for fp32, the reference for the rest."""
    step = (kv_pool, layer, positions, table_rows, block_tables)
    if native.usable(k, v, kv_pool):
        native.kv_append(inner_contiguous(k), inner_contiguous(v), *step)
    else:
        reference(k, v, *step)


def launch(
    k: torch.Tensor, v: torch.Tensor, kv_pool: torch.Tensor, layer: int,
    positions: torch.Tensor, table_rows: torch.Tensor, block_tables: torch.Tensor,
) -> None:  # fmt: skip
    k, v = inner_contiguous(k), inner_contiguous(v)
    num_rows, num_heads, head_dim = k.shape
    stride_block, stride_layer = pool_strides(kv_pool)
    pool, coding = stored_form(kv_pool)
    if num_rows:
        _kv_append_kernel[(num_rows,)](
            k, v, pool, positions, table_rows, block_tables,
            layer, k.stride(0), k.stride(1), v.stride(0), v.stride(1), block_tables.stride(0), stride_block, stride_layer,
            HEADS=num_heads, HEAD_DIM=head_dim, BLOCK_TOKENS=kv_pool.shape[4],
            BLOCK_H=triton.next_power_of_2(num_heads), BLOCK_D=triton.next_power_of_2(head_dim),
            CODING=coding, num_warps=4, **pdl_options(),
        )  # fmt: skip


def fake(
    k: torch.Tensor, v: torch.Tensor, kv_pool: torch.Tensor, layer: int,
    positions: torch.Tensor, table_rows: torch.Tensor, block_tables: torch.Tensor,
) -> None:  # fmt: skip
    return None


def _case(rows: int, heads: int, head_dim: int, block_tokens: int, packed: bool, fp8: bool = False) -> Case:
    """``packed``: k and v are slices of one joined projection, so their row stride is larger than H * D. ``fp8``: of the pool."""
    draw = wide_randn if fp8 else randn

    def make(g: torch.Generator, dtype: torch.dtype) -> tuple:
        tables, num_blocks = paged_tables(g, rows, 4)
        pool = torch.full((num_blocks, 2, 2, heads, block_tokens, head_dim), float("nan")).to(FP8 if fp8 else dtype)
        if packed:
            joined = draw(g, dtype, rows, 3 * heads, head_dim)
            k, v = joined[:, heads : 2 * heads], joined[:, 2 * heads :]
        else:
            k, v = draw(g, dtype, heads, rows, head_dim).transpose(0, 1), draw(g, dtype, rows, heads, head_dim)
        positions = torch.randint(0, 4 * block_tokens, (rows,), generator=g, dtype=torch.int32)
        positions[rows // 2] = -1 if rows > 1 else positions[0]
        return k, v, pool, 1, positions, torch.randperm(rows, generator=g).to(torch.int32), tables

    label = f"{rows}x{heads}x{head_dim}-block{block_tokens}-packed{packed:d}" + "-fp8" * fp8
    return Case(label, make, COPY_TOLERANCE, STORE_FP8_REASON if fp8 else COPY_REASON)


register_kernel(
    KernelSpec(
        name="kv_append",
        schema="(Tensor k, Tensor v, Tensor(a!) kv_pool, int layer, Tensor positions, Tensor table_rows, Tensor block_tables) -> ()",
        reference=reference,
        cpu=cpu,
        launch=launch,
        fake=fake,
        cases=(
            _case(17, 3, 64, 16, True),
            _case(1, 1, 128, 16, False),
            _case(5, 8, 80, 8, True),
            _case(3, 2, 96, 32, False),
            _case(7, 3, 80, 16, True, fp8=True),
            _case(3, 2, 128, 8, False, fp8=True),
        ),
    )
)
