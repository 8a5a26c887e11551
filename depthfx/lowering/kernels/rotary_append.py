"""Optional q/k norm, rotary embedding and KV append in one pass over the joined projection.

With x the row of one head: ``n = round(x * rsqrt(mean(x^2) + eps)) * norm`` (only with a norm, q and k alone), then for the first
R features ``out[d] = n[d] * cos[d] + half[d] * sin[d]`` where ``half = [-n[R/2:R], n[:R/2]]`` (q and k alone); features from R on
pass through. K and V go into the pool as in ``kv_append``, q is returned.
qkv [T, (Hq + 2 Hkv) * D], cos, sin [T, R], norms [D], pool [blocks, L, 2, Hkv, B, D]; result [T, Hq, D]. A row with position -1
appends nothing; its q is computed like any other. Either half may be absent: with ``num_heads`` 0 the input is the joined K and V,
with ``num_kv_heads`` 0 it is q and nothing is appended.
Example: D = R = 2, x = [1, 2], cos = [0, 0], sin = [1, 1]: out = [-2, 1].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from depthfx.lowering import native
from depthfx.lowering.kernel_spec import Case, KernelSpec, inner_contiguous, pdl_options, register_kernel
from depthfx.lowering.kernels import kv_append
from depthfx.lowering.kernels._cases import (
    COPY_TOLERANCE,
    NORM_REASON,
    NORM_TOLERANCE,
    STEP_FP8,
    STEP_FP8_REASON,
    STORE_FP8_REASON,
    paged_tables,
    randn,
)
from depthfx.lowering.kernels._device import pdl_release, pdl_wait
from depthfx.lowering.kernels._e4m3 import FP8, encode, stored_form


@triton.jit(do_not_specialize=["layer"])
def _rotary_append_kernel(
    qkv_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, out_ptr, pool_ptr, positions_ptr, table_rows_ptr, block_tables_ptr,
    eps, layer, stride_qkv, stride_cos, stride_sin, stride_table, stride_block, stride_layer,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_Q_NORM: tl.constexpr, HAS_K_NORM: tl.constexpr, CODING: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_H heads (q, then k, then v) of one row; a tile is [BLOCK_H, BLOCK_D >= D]."""
    row = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    in_head = d < HEAD_DIM
    mask = (heads < HEADS + 2 * KV_HEADS) & in_head
    is_q = heads < HEADS
    is_v = heads >= HEADS + KV_HEADS
    in_rotary = d < ROTARY_DIM
    half: tl.constexpr = ROTARY_DIM // 2
    partner = tl.where(d < half, d + half, tl.where(in_rotary, d - half, d))
    dtype = out_ptr.dtype.element_ty
    pdl_release(PDL)
    pdl_wait(PDL)

    base = qkv_ptr + row * stride_qkv + heads * HEAD_DIM
    x = tl.load(base + d, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(base + partner, mask=mask, other=0.0).to(tl.float32)
    if HAS_Q_NORM or HAS_K_NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
        x_normed = (x * scale).to(dtype).to(tl.float32)
        y_normed = (y * scale).to(dtype).to(tl.float32)
        if HAS_Q_NORM:
            weight = tl.load(q_norm_ptr + d, mask=in_head, other=0.0).to(tl.float32)
            weight_partner = tl.load(q_norm_ptr + partner, mask=in_head, other=0.0).to(tl.float32)
            x = tl.where(is_q, (x_normed * weight).to(dtype).to(tl.float32), x)
            y = tl.where(is_q, (y_normed * weight_partner).to(dtype).to(tl.float32), y)
        if HAS_K_NORM:
            weight = tl.load(k_norm_ptr + d, mask=in_head, other=0.0).to(tl.float32)
            weight_partner = tl.load(k_norm_ptr + partner, mask=in_head, other=0.0).to(tl.float32)
            is_k = (heads >= HEADS) & (heads < HEADS + KV_HEADS)
            x = tl.where(is_k, (x_normed * weight).to(dtype).to(tl.float32), x)
            y = tl.where(is_k, (y_normed * weight_partner).to(dtype).to(tl.float32), y)
    cos = tl.load(cos_ptr + row * stride_cos + d, mask=in_rotary, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + row * stride_sin + d, mask=in_rotary, other=0.0).to(tl.float32)
    rotated = x * cos + tl.where(d < half, -y, y) * sin
    result = tl.where(is_v, x, rotated).to(dtype)
    if HEADS > 0:
        tl.store(out_ptr + (row * HEADS + heads) * HEAD_DIM + d, result, mask=is_q & in_head)
    if KV_HEADS > 0:
        position = tl.load(positions_ptr + row)
        if position >= 0:
            table = tl.load(table_rows_ptr + row).to(tl.int64)
            block = tl.load(block_tables_ptr + table * stride_table + position // BLOCK_TOKENS).to(tl.int64)
            target = pool_ptr + block * stride_block + layer.to(tl.int64) * stride_layer
            # K heads, then V heads: the pool's own order of [2, Hkv]
            target += ((heads - HEADS) * BLOCK_TOKENS + position % BLOCK_TOKENS) * HEAD_DIM + d
            tl.store(target, encode(result, CODING), mask=mask & (heads >= HEADS))


def _check(qkv: torch.Tensor, cos: torch.Tensor, kv_pool: torch.Tensor, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    if qkv.dim() != 2 or qkv.shape[1] != (num_heads + 2 * num_kv_heads) * head_dim:
        raise ValueError(
            f"qkv has shape {tuple(qkv.shape)}; it must be [T, {(num_heads + 2 * num_kv_heads) * head_dim}] for {num_heads} + 2 x "
            f"{num_kv_heads} heads of {head_dim}; join the projections in the order q, k, v"
        )
    if num_kv_heads not in (0, kv_pool.shape[3]) or num_heads + num_kv_heads == 0:
        raise ValueError(
            f"{num_heads} query heads and {num_kv_heads} KV heads do not fit a pool of {kv_pool.shape[3]}; allowed: all its KV heads, or "
            "none of them where there are query heads; pass the layer's own numbers"
        )
    if cos.dim() != 2 or cos.shape[1] > head_dim or cos.shape[1] % 2:
        raise ValueError(f"cos has shape {tuple(cos.shape)}; it must be [T, R] with R even and at most {head_dim}")


def _norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    if weight is None:
        return x
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    rotary_dim = cos.shape[1]
    turned, passed = x[..., :rotary_dim].float(), x[..., rotary_dim:]
    low, high = turned.chunk(2, dim=-1)
    turned = turned * cos.float().unsqueeze(1) + torch.cat((-high, low), dim=-1) * sin.float().unsqueeze(1)
    return torch.cat((turned.to(x.dtype), passed), dim=-1)


def reference(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None,
    norm_eps: float, kv_pool: torch.Tensor, layer: int, positions: torch.Tensor, table_rows: torch.Tensor,
    block_tables: torch.Tensor, num_heads: int, num_kv_heads: int, head_dim: int,
) -> torch.Tensor:  # fmt: skip
    """Plain PyTorch: split, norm, rotate, append."""
    _check(qkv, cos, kv_pool, num_heads, num_kv_heads, head_dim)
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if num_kv_heads:
        k = _rotate(_norm(k, k_norm, norm_eps), cos, sin)
        kv_append.reference(k, v, kv_pool, layer, positions, table_rows, block_tables)
    return _rotate(_norm(q, q_norm, norm_eps), cos, sin).contiguous()


def cpu(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None,
    norm_eps: float, kv_pool: torch.Tensor, layer: int, positions: torch.Tensor, table_rows: torch.Tensor,
    block_tables: torch.Tensor, num_heads: int, num_kv_heads: int, head_dim: int,
) -> torch.Tensor:  # fmt: skip
    """The native kernel for fp32, the reference for the rest."""
    step = (q_norm, k_norm, norm_eps, kv_pool, layer, positions, table_rows, block_tables, num_heads, num_kv_heads, head_dim)
    if native.usable(qkv, cos, sin, q_norm, k_norm, kv_pool):
        return native.rotary_append(inner_contiguous(qkv), inner_contiguous(cos), inner_contiguous(sin), *step)
    return reference(qkv, cos, sin, *step)


def launch(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None,
    norm_eps: float, kv_pool: torch.Tensor, layer: int, positions: torch.Tensor, table_rows: torch.Tensor,
    block_tables: torch.Tensor, num_heads: int, num_kv_heads: int, head_dim: int,
) -> torch.Tensor:  # fmt: skip
    _check(qkv, cos, kv_pool, num_heads, num_kv_heads, head_dim)
    qkv, cos, sin = inner_contiguous(qkv), inner_contiguous(cos), inner_contiguous(sin)
    num_rows = qkv.shape[0]
    stride_block, stride_layer = kv_append.pool_strides(kv_pool)
    pool, coding = stored_form(kv_pool)
    out = torch.empty((num_rows, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    block_h = 2 if num_rows <= 64 else 8  # few rows: many small programs; many rows: fewer, larger ones
    if num_rows:
        _rotary_append_kernel[(num_rows, triton.cdiv(num_heads + 2 * num_kv_heads, block_h))](
            qkv, cos, sin, q_norm, k_norm, out, pool, positions, table_rows, block_tables,
            norm_eps, layer, qkv.stride(0), cos.stride(0), sin.stride(0), block_tables.stride(0), stride_block, stride_layer,
            HEADS=num_heads, KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, ROTARY_DIM=cos.shape[1],
            BLOCK_TOKENS=kv_pool.shape[4], BLOCK_H=block_h, BLOCK_D=triton.next_power_of_2(head_dim),
            HAS_Q_NORM=q_norm is not None and num_heads > 0, HAS_K_NORM=k_norm is not None and num_kv_heads > 0, CODING=coding,
            num_warps=1 if num_rows <= 64 else 4, **pdl_options(),
        )  # fmt: skip
    return out


def fake(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None,
    norm_eps: float, kv_pool: torch.Tensor, layer: int, positions: torch.Tensor, table_rows: torch.Tensor,
    block_tables: torch.Tensor, num_heads: int, num_kv_heads: int, head_dim: int,
) -> torch.Tensor:  # fmt: skip
    return qkv.new_empty((qkv.shape[0], num_heads, head_dim))


def _case(
    rows: int, heads: int, kv_heads: int, head_dim: int, rotary_dim: int, norms: bool, block_tokens: int = 16, extra: int = 0,
    fp8: bool = False, exact: bool = False, absent: bool = False,
) -> Case:  # fmt: skip
    """``extra``: columns behind each row of qkv, so that the row stride is larger than the row. ``fp8``: of the pool.

    ``exact``: quarter turns of numbers from far below to far above what E4M3 holds, so that nothing but the store rounds.
    ``absent``: all rows are padding.
    """

    def make(g: torch.Generator, dtype: torch.dtype) -> tuple:
        width = (heads + 2 * kv_heads) * head_dim
        qkv = randn(g, dtype, rows, width + extra)[:, :width]
        angles = 6.3 * torch.rand(rows, rotary_dim // 2, generator=g)
        angles = torch.cat((angles, angles), dim=1)
        cos, sin = angles.cos(), angles.sin()
        if exact:
            qkv = (qkv.float() * 10.0 ** torch.randint(-4, 4, qkv.shape, generator=g)).to(dtype)
            quarters = torch.randint(0, 4, (rows, rotary_dim // 2), generator=g).repeat(1, 2)
            cos, sin = torch.tensor([1.0, 0.0, -1.0, 0.0])[quarters], torch.tensor([0.0, 1.0, 0.0, -1.0])[quarters]
        q_norm, k_norm = (1 + 0.1 * randn(g, dtype, head_dim) for _ in range(2)) if norms else (None, None)
        tables, num_blocks = paged_tables(g, rows, 3)
        pool = torch.full((num_blocks, 2, 2, kv_heads or 2, block_tokens, head_dim), float("nan")).to(FP8 if fp8 else dtype)
        positions = torch.randint(0, 3 * block_tokens, (rows,), generator=g, dtype=torch.int32)
        positions[0 if absent else rows - 1 :] = -1 if rows > 1 or absent else positions[-1]
        table_rows = torch.randperm(rows, generator=g).to(torch.int32)
        return (
            qkv, cos.to(dtype), sin.to(dtype), q_norm, k_norm, 1e-6, pool, 1, positions, table_rows, tables,
            heads, kv_heads, head_dim,
        )  # fmt: skip

    label = f"{rows}rows-{heads}:{kv_heads}x{head_dim}-rotary{rotary_dim}-norms{norms:d}" + "-fp8" * fp8 + "-exact" * exact
    label += "-absent" * absent
    if exact:
        return Case(label, make, COPY_TOLERANCE, STORE_FP8_REASON)
    return Case(label, make, STEP_FP8, STEP_FP8_REASON) if fp8 else Case(label, make, NORM_TOLERANCE, NORM_REASON)


register_kernel(
    KernelSpec(
        name="rotary_append",
        schema="(Tensor qkv, Tensor cos, Tensor sin, Tensor? q_norm, Tensor? k_norm, float norm_eps, Tensor(a!) kv_pool, "
        "int layer, Tensor positions, Tensor table_rows, Tensor block_tables, int num_heads, int num_kv_heads, int head_dim) "
        "-> Tensor",
        reference=reference,
        cpu=cpu,
        launch=launch,
        fake=fake,
        cases=(
            _case(3, 9, 3, 64, 64, norms=False),
            _case(17, 4, 1, 128, 128, norms=True, extra=16),
            _case(1, 8, 1, 80, 32, norms=False, block_tokens=8),
            _case(65, 1, 1, 96, 96, norms=True),
            _case(5, 3, 1, 80, 32, norms=False, block_tokens=8, extra=16, fp8=True, exact=True),
            _case(66, 4, 2, 64, 64, norms=False, fp8=True, exact=True),
            _case(3, 4, 2, 96, 96, norms=True, fp8=True),
            _case(3, 0, 3, 64, 64, norms=False),
            _case(17, 0, 1, 128, 128, norms=True, extra=16),
            _case(2, 0, 2, 80, 32, norms=True, block_tokens=8, absent=True),
            _case(66, 0, 2, 64, 64, norms=False, fp8=True, exact=True),
            _case(1, 9, 0, 64, 64, norms=False),
            _case(18, 4, 0, 128, 128, norms=True, extra=16),
            _case(65, 3, 0, 80, 32, norms=True, absent=True),
            _case(5, 5, 0, 96, 96, norms=False, fp8=True),
        ),
    )
)
