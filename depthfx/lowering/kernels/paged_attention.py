"""Causal attention of a whole step against the paged KV pool: decode rows and prefill chunks in one op.

Row t attends keys 0..positions[t] of its request (its own K and V are in the pool already): ``softmax(cap(scale * q k)) v``, with
an optional window (keys j with position - j < window), soft cap ``c * tanh(s / c)`` and sinks (one more logit for each head in the
denominator). Rows ``[0, num_decode_rows)`` go to the decode kernel; the rest are prefill chunks cut in tiles. Positions rise within a
chunk, but they may have gaps: where rows were left out, the ``chunk_starts`` of those that are there suffice, since a tile that begins
behind the end of its chunk has no row.
q [T, Hq, D], pool [blocks, L, 2, Hkv, B, D] of the dtype of q or of E4M3 (widened exactly when read), result [T, Hq, D]; padding rows
come out as zeros.
Example: 2 decode rows and one chunk of 130 rows: T = 132, chunk_starts = [2, 132], tile_chunks = [0, 0], tile_starts = [0, 128].
"""

from __future__ import annotations

import torch

from depthfx.lowering import native
from depthfx.lowering.kernel_spec import Case, KernelSpec, inner_contiguous, register_kernel
from depthfx.lowering.kernels._cases import BF16, F16, F32, paged_tables, poisoned_pool, randn
from depthfx.lowering.kernels._e4m3 import FP8, as_bytes, round_to
from depthfx.lowering.kernels.decode_attention import launch_decode
from depthfx.lowering.kernels.prefill_attention import launch_prefill
from depthfx.records import PREFILL_TILE_ROWS


def reference(
    q: torch.Tensor, kv_pool: torch.Tensor, layer: int, positions: torch.Tensor, table_rows: torch.Tensor,
    block_tables: torch.Tensor, chunk_starts: torch.Tensor, tile_chunks: torch.Tensor, tile_starts: torch.Tensor,
    num_decode_rows: int, scale: float, window: int, softcap: float, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Plain PyTorch in fp32, one row after another; the tiles are not needed."""
    num_heads, num_kv_heads, block_tokens = q.shape[1], kv_pool.shape[3], kv_pool.shape[4]
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for row, position in enumerate(positions.tolist()):
        if position < 0:
            continue
        low = max(0, position - window + 1) if window > 0 else 0
        at = torch.arange(low, position + 1, device=q.device)
        blocks = block_tables[int(table_rows[row]), at // block_tokens].long()
        keys, values = (
            as_bytes(kv_pool)[blocks, layer, part, :, at % block_tokens]
            .view(kv_pool.dtype)
            .float()
            .repeat_interleave(num_heads // num_kv_heads, dim=1)
            for part in (0, 1)
        )  # [keys, Hq, D]
        scores = torch.einsum("hd,jhd->hj", q[row].float(), keys) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat((scores, sinks.float()[:, None]), dim=1)
        weights = scores.softmax(dim=1)[:, : at.numel()]
        out[row] = torch.einsum("hj,jhd->hd", weights, values).to(q.dtype)
    return out


def _gather(kv_pool: torch.Tensor, layer: int, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Keys and values ``[2, Hkv, n, K, D]`` in ``dtype`` of the named blocks [n, blocks of a request]: one copy, already in order."""
    num_heads, _, head_dim = kv_pool.shape[3:]
    taken = as_bytes(kv_pool)[:, layer].permute(1, 2, 0, 3, 4).index_select(2, blocks.reshape(-1))
    return taken.view(2, num_heads, blocks.shape[0], -1, head_dim).view(kv_pool.dtype).to(dtype)


def _attend(
    q: torch.Tensor, taken: torch.Tensor, mask: torch.Tensor | None, scale: float, softcap: float, sinks: torch.Tensor | None
) -> torch.Tensor:  # fmt: skip
    """Queries [n, r, Hq, D] of n requests against their keys and values [2, Hkv, n, K, D]; mask [n, 1, r or 1, K]."""
    keys, values = taken[0].transpose(0, 1), taken[1].transpose(0, 1)  # [n, Hkv, K, D]
    num_requests, num_rows, num_heads, head_dim = q.shape
    num_kv_heads, num_keys = keys.shape[1], keys.shape[2]
    turned = q.transpose(1, 2)
    if softcap <= 0 and sinks is None:
        out = torch.nn.functional.scaled_dot_product_attention(
            turned, keys, values, attn_mask=mask, scale=scale, enable_gqa=num_heads != num_kv_heads
        )
        return out.transpose(1, 2)
    grouped = turned.reshape(num_requests, num_kv_heads, -1, head_dim)
    scores = torch.matmul(grouped, keys.transpose(2, 3)).float().mul_(scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.view(num_requests, num_heads, num_rows, num_keys)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        extra = sinks.float().view(1, -1, 1, 1).expand(num_requests, -1, num_rows, 1)
        scores = torch.cat((scores, extra), dim=3)
    weights = scores.softmax(dim=3)[..., :num_keys].to(values.dtype)
    out = torch.matmul(weights.reshape(num_requests, num_kv_heads, -1, num_keys), values)
    return out.view(num_requests, num_heads, num_rows, head_dim).transpose(1, 2)


def _first_key(position: int, window: int) -> int:
    return max(0, position - window + 1) if window > 0 else 0


def _decode_groups(positions: list[int], window: int, block_tokens: int) -> list[list[int]]:
    """Decode rows in groups of about equal length: small products share one call, and little is padding."""
    lengths = {
        row: position // block_tokens * block_tokens - _first_key(position, window) + block_tokens
        for row, position in enumerate(positions)
        if position >= 0
    }
    groups: list[list[int]] = []
    longest = 0
    for row in sorted(lengths, key=lengths.__getitem__, reverse=True):
        if groups and (len(groups[-1]) + 1) * longest <= 4096 and 2 * lengths[row] >= longest:
            groups[-1].append(row)
        else:
            groups.append([row])
            longest = lengths[row]
    return groups


def _gathered_decode(
    q: torch.Tensor, kv_pool: torch.Tensor, layer: int, positions: torch.Tensor, table_rows: torch.Tensor,
    block_tables: torch.Tensor, scale: float, window: int, softcap: float, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Decode rows in plain PyTorch: gather the blocks that a group of rows sees, then products over all heads at once."""
    block_tokens = kv_pool.shape[4]
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    at = positions.tolist()
    for rows in _decode_groups(at, window, block_tokens):
        firsts = [_first_key(at[row], window) // block_tokens for row in rows]
        width = max(at[row] // block_tokens - first for row, first in zip(rows, firsts, strict=True)) + 1
        index = torch.tensor(rows)
        columns = torch.tensor(firsts)[:, None] + torch.arange(width)
        columns = torch.minimum(columns, positions[index][:, None] // block_tokens)
        taken = _gather(kv_pool, layer, block_tables[table_rows[index].long()[:, None], columns], q.dtype)
        mask = None
        if len(rows) == 1:  # cut to the keys that are seen: no mask
            base = firsts[0] * block_tokens
            taken = taken[:, :, :, _first_key(at[rows[0]], window) - base : at[rows[0]] + 1 - base]
        else:
            keys = torch.tensor(firsts)[:, None] * block_tokens + torch.arange(width * block_tokens)
            mask = keys <= positions[index][:, None]
            for n, row in enumerate(rows):  # slots behind the last key may hold anything, even NaN
                taken[:, :, n, at[row] + 1 - firsts[n] * block_tokens :].zero_()
            if window > 0:
                mask &= keys > positions[index][:, None] - window
                for n, row in enumerate(rows):
                    taken[:, :, n, : _first_key(at[row], window) - firsts[n] * block_tokens].zero_()
            mask = mask[:, None, None, :]
        out[index] = _attend(q[index].unsqueeze(1), taken, mask, scale, softcap, sinks).squeeze(1)
    return out


def cpu(
    q: torch.Tensor, kv_pool: torch.Tensor, layer: int, positions: torch.Tensor, table_rows: torch.Tensor,
    block_tables: torch.Tensor, chunk_starts: torch.Tensor, tile_chunks: torch.Tensor, tile_starts: torch.Tensor,
    num_decode_rows: int, scale: float, window: int, softcap: float, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """The production path on a CPU: native decode for fp32; else, and for chunks, gather the blocks that are seen."""
    block_tokens, total = kv_pool.shape[4], q.shape[0]
    decode = (q[:num_decode_rows], kv_pool, layer, positions[:num_decode_rows], table_rows[:num_decode_rows], block_tables)
    options = (scale, window, softcap, sinks)
    if native.usable(q, kv_pool, sinks):
        decoded = native.paged_decode_attention(inner_contiguous(decode[0]), *decode[1:], *options)
    else:
        decoded = _gathered_decode(*decode, *options)
    if num_decode_rows == total:
        return decoded
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    out[:num_decode_rows] = decoded
    at = positions.tolist()
    starts = chunk_starts.tolist()
    for begin, end in zip(starts, starts[1:], strict=False):
        while end > begin and at[end - 1] < 0:  # padding at the end of a chunk
            end -= 1
        if end == begin:
            continue
        low = _first_key(at[begin], window)
        base = low // block_tokens
        blocks = block_tables[int(table_rows[begin]), base : at[end - 1] // block_tokens + 1]
        taken = _gather(kv_pool, layer, blocks[None], q.dtype)[:, :, :, low - base * block_tokens : at[end - 1] + 1 - base * block_tokens]
        distance = positions[begin:end, None] - torch.arange(low, at[end - 1] + 1)[None, :]
        mask = (distance >= 0) & (distance < window) if window > 0 else distance >= 0
        out[begin:end] = _attend(q[None, begin:end], taken, mask[None, None], scale, softcap, sinks)[0]
    return out


def launch(
    q: torch.Tensor, kv_pool: torch.Tensor, layer: int, positions: torch.Tensor, table_rows: torch.Tensor,
    block_tables: torch.Tensor, chunk_starts: torch.Tensor, tile_chunks: torch.Tensor, tile_starts: torch.Tensor,
    num_decode_rows: int, scale: float, window: int, softcap: float, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    if q.shape[2] > 256 or q.shape[1] % kv_pool.shape[3]:
        raise ValueError(
            f"q has shape {tuple(q.shape)} and the pool {kv_pool.shape[3]} KV heads; head dims up to 256 and a whole number of "
            "query heads for each KV head are allowed; run this model outside depthfx"
        )
    q = inner_contiguous(q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_decode_rows > 0:
        launch_decode(q, kv_pool, layer, positions, table_rows, block_tables, out, num_decode_rows, scale, window, softcap, sinks)
    if q.shape[0] > num_decode_rows:
        launch_prefill(
            q, kv_pool, layer, positions, table_rows, block_tables, chunk_starts, tile_chunks, tile_starts, out,
            num_decode_rows, scale, window, softcap, sinks,
        )  # fmt: skip
    return out


def fake(
    q: torch.Tensor, kv_pool: torch.Tensor, layer: int, positions: torch.Tensor, table_rows: torch.Tensor,
    block_tables: torch.Tensor, chunk_starts: torch.Tensor, tile_chunks: torch.Tensor, tile_starts: torch.Tensor,
    num_decode_rows: int, scale: float, window: int, softcap: float, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    return q.new_empty(q.shape)


def step_inputs(
    decode_positions: list[int], chunks: list[tuple[int, int]], padding_rows: int = 0, kept: list[list[int]] | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(positions, table_rows, chunk_starts, tile_chunks, tile_starts)`` of a step with these decode rows and chunks.

    A chunk is (first position, rows); request s is decode row s, then the chunks follow. One padding tile ends the list.
    ``kept`` names the rows of each chunk that are there, from 0 and rising; the tiles stay those of the whole chunks.
    """
    positions, table_rows = list(decode_positions), list(range(len(decode_positions)))
    starts, tiles = [len(positions)], []
    for index, (first, rows) in enumerate(chunks):
        present = range(rows) if kept is None else kept[index]
        positions += [first + row for row in present]
        table_rows += [len(decode_positions) + index] * len(present)
        starts.append(len(positions))
        tiles += [(first + start, index, start) for start in range(0, rows, PREFILL_TILE_ROWS)]
    tiles = sorted(tiles, reverse=True) + [(0, -1, 0)]  # the longest first
    positions += [-1] * padding_rows
    table_rows += [0] * padding_rows
    columns = (positions, table_rows, starts, [t[1] for t in tiles], [t[2] for t in tiles])
    return tuple(torch.tensor(c, dtype=torch.int32) for c in columns)  # type: ignore[return-value]


_TOLERANCE = {F32: 2e-5, F16: 2e-3, BF16: 2e-2}
_REASON = "online softmax sums in another order and rounds its weights to the model dtype before the second product"


def _case(
    label: str, heads: tuple[int, int], head_dim: int, decodes: list[int], chunks: list[tuple[int, int]], *,
    padding: int = 0, block_tokens: int = 16, window: int = 0, softcap: float = 0.0, sinks: bool = False, table_blocks: int = 0,
    fp8: bool = False, shares: tuple[float, ...] | None = None,
) -> Case:  # fmt: skip
    """``table_blocks``: width of the block table, which alone decides how many key ranges the decode kernel plans. ``fp8``: of the pool.

    ``shares``: how much of each chunk is there; the rows are drawn.
    """

    def make(g: torch.Generator, dtype: torch.dtype) -> tuple:
        kept = None
        if shares is not None:
            drawn = zip(shares, chunks, strict=True)
            kept = [torch.randperm(rows, generator=g)[: round(share * rows)].sort().values.tolist() for share, (_, rows) in drawn]
        positions, table_rows, starts, tile_chunks, tile_starts = step_inputs(decodes, chunks, padding, kept)
        lengths = [p + 1 for p in decodes] + [first + rows for first, rows in chunks]
        width = max(table_blocks, max(-(-n // block_tokens) for n in lengths))
        tables, num_blocks = paged_tables(g, len(lengths), width)
        pool = poisoned_pool(g, dtype, (num_blocks, 2, 2, heads[1], block_tokens, head_dim), tables, lengths, layer=1)
        pool = round_to(pool, FP8) if fp8 else pool
        q = randn(g, dtype, len(positions), heads[0] + 2, head_dim)[:, : heads[0]]
        sink_logits = randn(g, dtype, heads[0]) if sinks else None
        return (
            q, pool, 1, positions, table_rows, tables, starts, tile_chunks, tile_starts,
            len(decodes), head_dim**-0.5, window, softcap, sink_logits,
        )  # fmt: skip

    return Case(label, make, _TOLERANCE, _REASON)


register_kernel(
    KernelSpec(
        name="paged_attention",
        schema="(Tensor q, Tensor kv_pool, int layer, Tensor positions, Tensor table_rows, Tensor block_tables, "
        "Tensor chunk_starts, Tensor tile_chunks, Tensor tile_starts, int num_decode_rows, float scale, int window, "
        "float softcap, Tensor? sinks) -> Tensor",
        reference=reference,
        cpu=cpu,
        launch=launch,
        fake=fake,
        cases=(
            _case("decode-9:3x64-padding", (9, 3), 64, [0, 15, -1, 70], [], table_blocks=12),
            _case("decode-8:1x80-splits-sinks", (8, 1), 80, [200, 63], [], table_blocks=16, sinks=True),
            _case("decode-4:4x128-window-softcap", (4, 4), 128, [150], [], window=40, softcap=5.0, block_tokens=32),
            _case("decode-many", (4, 2), 64, [33, 20, 47, -1, 40, 16], [], window=30, sinks=True),
            _case("decode-window-in-large-block", (2, 2), 64, [150, 120], [], window=5, block_tokens=128, sinks=True),
            _case("prefill-3:1x64", (3, 1), 64, [], [(0, 17)], padding=3),
            _case("prefill-two-tiles-from-the-middle", (2, 1), 64, [], [(100, 140), (0, 1)]),
            _case("prefill-window-softcap-sinks", (2, 2), 80, [], [(60, 150)], window=70, softcap=8.0, sinks=True),
            _case("prefill-small-window", (1, 1), 128, [], [(33, 140)], window=3, block_tokens=8),
            _case("mixed-4:2x96", (4, 2), 96, [40, -1, 3], [(20, 33), (0, 5)], padding=2),
            _case("mixed-padded-to-a-form-4:2x128", (4, 2), 128, [40, -1, -1], [(20, 150), (0, 5), (0, 0), (0, 0)], padding=30),
            _case("gathered-3:1x64", (3, 1), 64, [], [(0, 50)], padding=2, shares=(0.4,)),
            _case("gathered-two-tiles", (2, 1), 64, [], [(100, 240)], shares=(0.6,)),
            _case("gathered-few-of-many", (2, 2), 128, [], [(37, 400)], shares=(0.05,), block_tokens=32),
            _case("gathered-one-none-all", (2, 1), 64, [9], [(5, 200), (0, 140), (30, 70)], padding=1, shares=(0.005, 0, 1)),
            _case("gathered-none", (4, 2), 96, [7], [(0, 5)], padding=2, shares=(0,)),
            _case(
                "gathered-window-softcap-sinks",
                (2, 2),
                80,
                [],
                [(60, 300)],
                window=70,
                softcap=8.0,
                sinks=True,
                block_tokens=8,
                shares=(0.5,),
            ),
            _case("gathered-small-window", (1, 1), 128, [3], [(33, 280)], window=3, block_tokens=8, shares=(0.2,)),
            _case("fp8-gathered-4:2x128", (4, 2), 128, [40, -1, 3], [(20, 250), (0, 5)], padding=2, fp8=True, shares=(0.55, 0.6)),
            _case("fp8-decode-9:3x64-padding", (9, 3), 64, [0, 15, -1, 70], [], table_blocks=12, fp8=True),
            _case("fp8-decode-8:1x80-splits-window-sinks", (8, 1), 80, [200, 63], [], table_blocks=16, window=90, sinks=True, fp8=True),
            _case("fp8-prefill-two-tiles-from-the-middle", (2, 1), 64, [], [(100, 140), (0, 1)], fp8=True),
            _case(
                "fp8-mixed-4:2x128-softcap", (4, 2), 128, [40, -1, 3], [(20, 33), (0, 5)], padding=2, block_tokens=8, softcap=5.0, fp8=True
            ),
        ),
    )
)
