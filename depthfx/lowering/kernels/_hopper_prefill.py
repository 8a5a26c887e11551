"""The prefill kernel for Hopper: warps that load, and two groups of warps that compute, in one persistent program.

Same function as the Triton kernel in ``prefill_attention``, whose ``uses_hopper_kernel`` says for which calls. It is written in
Gluon, Triton's lower level, because speed here needs what Triton does not offer: the tensor copy engine fills a ring of key
and value tiles block by block of the pool, while two groups of four warps, 64 queries each, run their matrix products beside
each other's softmax.

Shared memory holds a tile as columns of 64 numbers (128 bytes, the swizzle of the matrix unit); a pool block of B tokens is one
piece ``[B, 64]`` of such a column, so one copy instruction moves one piece. Tiles of keys run from the last, which needs the
causal mask, to the first. Slots behind the last key may hold anything: their scores are masked, and their values are zeroed.
Example: 300 keys, B = 16: tiles 2 (keys 256 to 299, blocks 16 to 18; 4 slots of block 18 zeroed), 1 and 0.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

COLUMN = gl.constexpr(64)  # numbers of one swizzled row
HALF_ROWS = gl.constexpr(64)  # queries of one group of warps


@gluon.jit
def _locate(item, positions_ptr, chunk_starts_ptr, tile_chunks_ptr, tile_starts_ptr, HEADS: gl.constexpr, ROWS: gl.constexpr):
    """``(first row, rows, number of keys)`` of a work item; rows is 0 where the tile is padding."""
    tile = item // HEADS
    chunk = gl.load(tile_chunks_ptr + tile)
    known = gl.maximum(chunk, 0)
    first_row = gl.load(chunk_starts_ptr + known) + gl.load(tile_starts_ptr + tile)
    count = gl.minimum(gl.load(chunk_starts_ptr + known + 1) - first_row, ROWS)
    count = gl.where(chunk >= 0, gl.maximum(count, 0), 0)
    first_row = gl.where(count > 0, first_row, 0)
    last_position = gl.load(positions_ptr + first_row + gl.maximum(count - 1, 0))
    return first_row, count, gl.maximum(last_position, 0) + 1


@gluon.jit
def _load_tiles(
    q_desc, pool_desc, q_pieces, k_pieces, v_pieces, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    positions_ptr, table_rows_ptr, block_tables_ptr, chunk_starts_ptr, tile_chunks_ptr, tile_starts_ptr,
    num_items, first_pool_row, nowhere, stride_qh, stride_table, block_rows,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_TOKENS: gl.constexpr,
    KEYS: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """The loading warp: queries of the next item and the ring of keys and values. ``nowhere``: a pool row out of bounds."""
    COLUMNS: gl.constexpr = HEAD_DIM // COLUMN
    BLOCKS: gl.constexpr = KEYS // BLOCK_TOKENS
    step = 0
    turn = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        first_row, count, num_keys = _locate(item, positions_ptr, chunk_starts_ptr, tile_chunks_ptr, tile_starts_ptr, HEADS, 2 * HALF_ROWS)
        if count > 0:
            head = item % HEADS
            buffer = turn % 2
            mbarrier.wait(q_empty.index(buffer), (turn // 2 & 1) ^ 1)
            mbarrier.expect(q_full.index(buffer), 2 * HALF_ROWS * HEAD_DIM * 2)
            for part in gl.static_range(2):
                for column in gl.static_range(COLUMNS):
                    tma.async_copy_global_to_shared(
                        q_desc, [first_row + part * HALF_ROWS, head * stride_qh + column * COLUMN], q_full.index(buffer),
                        q_pieces.index((buffer * 2 + part) * COLUMNS + column),
                    )  # fmt: skip
            turn += 1
            table = block_tables_ptr + gl.load(table_rows_ptr + first_row).to(gl.int64) * stride_table
            num_blocks = (num_keys + BLOCK_TOKENS - 1) // BLOCK_TOKENS
            k_row = first_pool_row + head // (HEADS // KV_HEADS) * BLOCK_TOKENS
            v_row = k_row + KV_HEADS * BLOCK_TOKENS
            tiles = (num_keys + KEYS - 1) // KEYS
            for back in range(tiles):
                first = (tiles - 1 - back) * BLOCKS
                stage = step % DEPTH
                parity = (step // DEPTH & 1) ^ 1
                mbarrier.wait(k_empty.index(stage), parity)
                mbarrier.expect(k_full.index(stage), KEYS * HEAD_DIM * 2)
                for j in gl.static_range(BLOCKS):
                    block = gl.load(table + first + j, mask=first + j < num_blocks, other=0)
                    row = gl.where(first + j < num_blocks, block * block_rows + k_row, nowhere)
                    for column in gl.static_range(COLUMNS):
                        piece = k_pieces.index((stage * COLUMNS + column) * BLOCKS + j)
                        tma.async_copy_global_to_shared(pool_desc, [row, column * COLUMN], k_full.index(stage), piece)
                mbarrier.wait(v_empty.index(stage), parity)
                mbarrier.expect(v_full.index(stage), KEYS * HEAD_DIM * 2)
                for j in gl.static_range(BLOCKS):
                    block = gl.load(table + first + j, mask=first + j < num_blocks, other=0)
                    row = gl.where(first + j < num_blocks, block * block_rows + v_row, nowhere)
                    for column in gl.static_range(COLUMNS):
                        piece = v_pieces.index((stage * COLUMNS + column) * BLOCKS + j)
                        tma.async_copy_global_to_shared(pool_desc, [row, column * COLUMN], v_full.index(stage), piece)
                step += 1


@gluon.jit
def _softmax(s, top, total, factor, rows, first_key, MASKED: gl.constexpr, KEYS: gl.constexpr, LAYOUT: gl.constexpr):
    """Weights of one tile of scores, and what the sums so far must be multiplied by."""
    if MASKED:
        keys = first_key + gl.arange(0, KEYS, gl.SliceLayout(0, LAYOUT))
        s = gl.where(rows[:, None] >= keys[None, :], s, float("-inf"))
    new_top = gl.maximum(top, gl.max(s, axis=1) * factor)
    safe = new_top
    if MASKED:
        safe = gl.where(new_top == float("-inf"), 0.0, new_top)
    weight = gl.exp2(s * factor - safe[:, None])
    old = gl.exp2(top - safe)
    return weight, old, new_top, total * old + gl.sum(weight, axis=1)


@gluon.jit
def _advance(
    q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, acc, weight16, top, total, step, first, last, rows, factor,
    MASKED: gl.constexpr, HEAD_DIM: gl.constexpr, KEYS: gl.constexpr, DEPTH: gl.constexpr, LAYOUT: gl.constexpr,
    OPERAND: gl.constexpr,
):  # fmt: skip
    """Tiles ``first - 1`` down to ``last``: scores of each while the values of the tile before are added."""
    for back in range(first - last):
        stage = step % DEPTH
        before = (step - 1) % DEPTH
        mbarrier.wait(k_full.index(stage), step // DEPTH & 1)
        s = gl.zeros([HALF_ROWS, KEYS], gl.float32, LAYOUT)
        s = warpgroup_mma(q, k_tiles.index(stage).permute((1, 0)), s, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), (step - 1) // DEPTH & 1)
        acc = warpgroup_mma(weight16, v_tiles.index(before), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(k_empty.index(stage), count=1)
        weight, old, top, total = _softmax(s, top, total, factor, rows, (first - 1 - back) * KEYS, MASKED, KEYS, LAYOUT)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(before), count=1)
        acc = acc * gl.convert_layout(old, gl.SliceLayout(1, acc.type.layout))[:, None]
        weight16 = gl.convert_layout(weight.to(q.dtype), OPERAND)
        step += 1
    return acc, weight16, top, total, step


@gluon.jit
def _clear_tail(v_pieces, stage, num_keys, BLOCK_TOKENS: gl.constexpr, COLUMNS: gl.constexpr, BLOCKS: gl.constexpr):
    """Zero the values behind the last key in the block that holds it."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    block = (num_keys - 1) // BLOCK_TOKENS % BLOCKS
    used = (num_keys - 1) % BLOCK_TOKENS + 1
    slots = gl.arange(0, BLOCK_TOKENS, gl.SliceLayout(1, LAYOUT))
    for column in gl.static_range(COLUMNS):
        piece = v_pieces.index((stage * COLUMNS + column) * BLOCKS + block)
        values = piece.load(LAYOUT)
        piece.store(gl.where((slots < used)[:, None], values, gl.zeros_like(values)))
    fence_async_shared()


@gluon.jit
def _compute(
    q_tiles, k_tiles, v_tiles, v_pieces, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    out_ptr, positions_ptr, chunk_starts_ptr, tile_chunks_ptr, tile_starts_ptr, num_items, factor,
    PART: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_TOKENS: gl.constexpr, KEYS: gl.constexpr,
    DEPTH: gl.constexpr,
):  # fmt: skip
    """One group of four warps: rows ``64 PART`` to ``64 PART + 63`` of each item's tile."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    step = 0
    turn = 0
    m = gl.arange(0, HALF_ROWS, gl.SliceLayout(1, LAYOUT))
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        first_row, count, num_keys = _locate(item, positions_ptr, chunk_starts_ptr, tile_chunks_ptr, tile_starts_ptr, HEADS, 2 * HALF_ROWS)
        if count > 0:
            # positions rise, but rows between may be absent; a group without rows repeats the last one
            of_rows = positions_ptr + first_row
            first_position = gl.load(of_rows + gl.minimum(PART * HALF_ROWS, count - 1))
            last_position = gl.load(of_rows + gl.minimum(PART * HALF_ROWS + HALF_ROWS - 1, count - 1))
            rows = gl.load(of_rows + gl.minimum(PART * HALF_ROWS + m, count - 1))
            loaded = (num_keys + KEYS - 1) // KEYS
            tiles = gl.minimum((gl.maximum(last_position, 0) + KEYS) // KEYS, loaded)
            seen_by_all = gl.minimum((first_position + 1) // KEYS, tiles - 1)
            for _ in range(tiles, loaded):  # tiles that only the other group's rows see
                # A stage is given back once for each time it was filled. Given back earlier, the arrival would count for the
                # tile before, which the other group may still be reading.
                mbarrier.wait(k_full.index(step % DEPTH), step // DEPTH & 1)
                mbarrier.arrive(k_empty.index(step % DEPTH), count=1)
                mbarrier.wait(v_full.index(step % DEPTH), step // DEPTH & 1)
                mbarrier.arrive(v_empty.index(step % DEPTH), count=1)
                step += 1
            q = q_tiles.index(turn % 2 * 2 + PART)
            mbarrier.wait(q_full.index(turn % 2), turn // 2 & 1)

            stage = step % DEPTH
            mbarrier.wait(k_full.index(stage), step // DEPTH & 1)
            s = gl.zeros([HALF_ROWS, KEYS], gl.float32, LAYOUT)
            s = warpgroup_mma(q, k_tiles.index(stage).permute((1, 0)), s, use_acc=False)
            mbarrier.arrive(k_empty.index(stage), count=1)
            top = gl.full([HALF_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
            total = gl.zeros([HALF_ROWS], gl.float32, gl.SliceLayout(1, LAYOUT))
            weight, _old, top, total = _softmax(s, top, total, factor, rows, (tiles - 1) * KEYS, True, KEYS, LAYOUT)
            weight16 = gl.convert_layout(weight.to(q.dtype), OPERAND)
            if (num_keys % BLOCK_TOKENS != 0) & (tiles == loaded):
                mbarrier.wait(v_full.index(stage), step // DEPTH & 1)
                _clear_tail(v_pieces, stage, num_keys, BLOCK_TOKENS, HEAD_DIM // COLUMN, KEYS // BLOCK_TOKENS)
            acc = gl.zeros([HALF_ROWS, HEAD_DIM], gl.float32, SUMS)
            step += 1
            acc, weight16, top, total, step = _advance(
                q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, acc, weight16, top, total, step, tiles - 1, seen_by_all,
                rows, factor, True, HEAD_DIM, KEYS, DEPTH, LAYOUT, OPERAND,
            )  # fmt: skip
            acc, weight16, top, total, step = _advance(
                q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, acc, weight16, top, total, step, seen_by_all, 0,
                rows, factor, False, HEAD_DIM, KEYS, DEPTH, LAYOUT, OPERAND,
            )  # fmt: skip
            stage = (step - 1) % DEPTH
            mbarrier.wait(v_full.index(stage), (step - 1) // DEPTH & 1)
            acc = warpgroup_mma(weight16, v_tiles.index(stage), acc)
            mbarrier.arrive(v_empty.index(stage), count=1)
            # through the place of the queries, so that each thread stores 16 bytes of a row
            q.store((acc / gl.convert_layout(total, gl.SliceLayout(1, SUMS))[:, None]).to(q.dtype))
            result = q.load(STORED)
            fence_async_shared()
            mbarrier.arrive(q_empty.index(turn % 2), count=1)
            turn += 1
            i = PART * HALF_ROWS + gl.arange(0, HALF_ROWS, gl.SliceLayout(1, STORED))
            d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, STORED))
            target = out_ptr + (first_row.to(gl.int64) * HEADS + item % HEADS) * HEAD_DIM
            gl.store(target + i[:, None] * (HEADS * HEAD_DIM) + d[None, :], result, mask=(i < count)[:, None])


@gluon.jit
def _zero_rows(out_ptr, first, end, ROW: gl.constexpr):
    """Zeros in the rows ``[first, end)`` of ``ROW`` numbers each, which belong to no chunk."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    i = gl.arange(0, 1024, LAYOUT)
    for row in range(first + gl.program_id(0), end, gl.num_programs(0)):
        for start in range(0, ROW, 1024):
            zeros = gl.zeros([1024], out_ptr.dtype.element_ty, LAYOUT)
            gl.store(out_ptr + gl.cast(row, gl.int64) * ROW + start + i, zeros, mask=start + i < ROW)


_RUNTIME = ["num_items", "num_chunks", "num_decode_rows", "num_rows", "first_pool_row", "nowhere", "stride_table", "block_rows"]


@gluon.jit(do_not_specialize=_RUNTIME)
def _hopper_prefill_kernel(
    q_desc, pool_desc, out_ptr, positions_ptr, table_rows_ptr, block_tables_ptr, chunk_starts_ptr, tile_chunks_ptr, tile_starts_ptr,
    num_items, num_chunks, num_decode_rows, num_rows, first_pool_row, nowhere, factor, stride_qh, stride_table, block_rows,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_TOKENS: gl.constexpr,
    KEYS: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """A persistent program: items ``program, program + programs, ...`` of (tile, head), the longest first."""
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    COLUMNS: gl.constexpr = HEAD_DIM // COLUMN
    PIECES: gl.constexpr = COLUMNS * (KEYS // BLOCK_TOKENS)
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_pieces = gl.allocate_shared_memory(dtype, [4 * COLUMNS, HALF_ROWS, COLUMN], TILE)
    k_pieces = gl.allocate_shared_memory(dtype, [DEPTH * PIECES, BLOCK_TOKENS, COLUMN], TILE)
    v_pieces = gl.allocate_shared_memory(dtype, [DEPTH * PIECES, BLOCK_TOKENS, COLUMN], TILE)
    q_tiles = q_pieces._reinterpret(dtype, [4, HALF_ROWS, HEAD_DIM], TILE)
    k_tiles = k_pieces._reinterpret(dtype, [DEPTH, KEYS, HEAD_DIM], TILE)
    v_tiles = v_pieces._reinterpret(dtype, [DEPTH, KEYS, HEAD_DIM], TILE)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], BARRIER)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
    for i in gl.static_range(DEPTH):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    _zero_rows(out_ptr, gl.maximum(gl.load(chunk_starts_ptr + num_chunks), num_decode_rows), num_rows, HEADS * HEAD_DIM)
    gl.warp_specialize(
        [
            (_compute, (
                q_tiles, k_tiles, v_tiles, v_pieces, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                out_ptr, positions_ptr, chunk_starts_ptr, tile_chunks_ptr, tile_starts_ptr, num_items, factor,
                0, HEADS, HEAD_DIM, BLOCK_TOKENS, KEYS, DEPTH,
            )),
            (_compute, (
                q_tiles, k_tiles, v_tiles, v_pieces, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                out_ptr, positions_ptr, chunk_starts_ptr, tile_chunks_ptr, tile_starts_ptr, num_items, factor,
                1, HEADS, HEAD_DIM, BLOCK_TOKENS, KEYS, DEPTH,
            )),
            (_load_tiles, (
                q_desc, pool_desc, q_pieces, k_pieces, v_pieces, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                positions_ptr, table_rows_ptr, block_tables_ptr, chunk_starts_ptr, tile_chunks_ptr, tile_starts_ptr,
                num_items, first_pool_row, nowhere, stride_qh, stride_table, block_rows,
                HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS, KEYS, DEPTH,
            )),
        ],
        [4, 1], [240, 40],
    )  # fmt: skip


def key_tile(num_rows: int, num_chunks: int) -> tuple[int, int]:
    """``(keys, depth)`` of the ring: small tiles waste less behind the diagonal, which counts where chunks are short."""
    return (128, 2) if num_rows >= 1024 * num_chunks else (64, 4)


def launch_hopper(
    q: torch.Tensor, kv_pool: torch.Tensor, layer: int, positions: torch.Tensor, table_rows: torch.Tensor,
    block_tables: torch.Tensor, chunk_starts: torch.Tensor, tile_chunks: torch.Tensor, tile_starts: torch.Tensor,
    out: torch.Tensor, num_decode_rows: int, scale: float, num_sms: int, tile: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """Fill ``out`` [T, Hq, D] for all rows from ``chunk_starts[0]`` on; ``tile`` replaces :func:`key_tile` in a benchmark."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, block_tokens = kv_pool.shape[3], kv_pool.shape[4]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    width = (num_heads - 1) * q.stride(1) + head_dim
    q_desc = TensorDescriptor(q, [num_rows, width], [q.stride(0), 1], [64, 64], layout)
    block_rows, layer_rows = kv_pool.stride(0) // head_dim, kv_pool.stride(1) // head_dim
    pool_rows = (kv_pool.shape[0] - 1) * block_rows + (kv_pool.shape[1] - 1) * layer_rows + 2 * num_kv_heads * block_tokens
    pool_desc = TensorDescriptor(kv_pool, [pool_rows, head_dim], [head_dim, 1], [block_tokens, 64], layout)
    keys, depth = tile or key_tile(num_rows - num_decode_rows, chunk_starts.shape[0] - 1)
    _hopper_prefill_kernel[(num_sms,)](
        q_desc, pool_desc, out, positions, table_rows, block_tables, chunk_starts, tile_chunks, tile_starts,
        tile_chunks.shape[0] * num_heads, chunk_starts.shape[0] - 1, num_decode_rows, num_rows,
        layer * layer_rows, pool_rows, scale * 1.4426950408889634, q.stride(1), block_tables.stride(0), block_rows,
        HEADS=num_heads, KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_TOKENS=block_tokens, KEYS=keys, DEPTH=depth,
        num_warps=4, maxnreg=168,
    )  # fmt: skip
