"""Replace each attention marker by KV append and paged attention over the step inputs."""

from __future__ import annotations

import torch
from torch import fx

from depthfx.errors import UnsupportedModelError
from depthfx.lowering import ops
from depthfx.passes.context import PassContext, batched, call, rows, value_of
from depthfx.records import KvShape, StepInputs

# Example sizes of the step inputs; only dtype and rank matter, the ops run outside Inductor.
_TABLE_ROWS, _BLOCKS_PER_ROW, _BLOCKS, _TAPE = 3, 5, 7, 8192
# What an FP8 pool costs in speed beside the 16-bit (CUDA) or 32-bit (CPU) one.
_SERVED_BY = {
    "cuda": "prefill takes the Triton kernel, since the faster one for Hopper reads 16-bit KV alone",
    "cpu": "read and written in plain PyTorch, since the native kernels take fp32 KV alone",
}


def use_paged_attention(gm: fx.GraphModule, ctx: PassContext) -> None:
    """Add the step inputs under the names of :class:`StepInputs` and use them in every layer.

    Layer ``i`` appends K and V ``[T, Hkv, D]`` of its own rows to the pool, then attends through the block tables. The setting ``kv_dtype``
    gives the pool another dtype than the model's; the ops round and widen.
    Raises :class:`UnsupportedModelError` if the layers differ in KV heads or head dim.
    """
    shapes = {tuple(int(value_of(k).shape[d]) for d in (1, 3)) for k in (layer.attention.args[1] for layer in ctx.layers)}
    if len(shapes) != 1:
        raise UnsupportedModelError(f"layers differ in (KV heads, head dim): {sorted(shapes)}; depthfx needs one shape for all layers")
    (num_kv_heads, head_dim) = shapes.pop()
    dtype = torch.float8_e4m3fn if ctx.settings.kv_dtype == "fp8" else value_of(ctx.layers[0].attention.args[1]).dtype
    ctx.kv_shape = KvShape(len(ctx.layers), num_kv_heads, head_dim, ctx.settings.block_tokens, dtype.itemsize)
    ctx.num_heads = max(int(value_of(layer.attention.args[0]).shape[1]) for layer in ctx.layers)
    inputs = _add_inputs(gm, ctx, dtype)
    for number, layer in enumerate(ctx.layers):
        _rewrite(gm, ctx, layer.attention, number, inputs)
    ctx.report.add(
        "rewritten",
        f"attention of {len(ctx.layers)} layers: paged, {num_kv_heads} KV heads of {head_dim}, {ctx.kv_shape.token_bytes} bytes of KV a token",
    )
    if ctx.settings.kv_dtype == "fp8":
        ctx.report.add("rewritten", f"keys and values: FP8 (E4M3, scale 1, saturating at 448); {_SERVED_BY[ctx.target]}")


def _add_inputs(gm: fx.GraphModule, ctx: PassContext, dtype: torch.dtype) -> dict[str, fx.Node]:
    assert ctx.kv_shape is not None
    nodes = {n.name: n for n in gm.graph.nodes if n.op == "placeholder" and n.name in StepInputs.names()}
    device = value_of(nodes["positions"]).device
    with ctx.fake_mode:
        values = {
            "table_rows": torch.empty_like(value_of(nodes["positions"])),
            "block_tables": torch.empty(_TABLE_ROWS, _BLOCKS_PER_ROW, dtype=torch.int32, device=device),
            "kv_pool": torch.empty(ctx.kv_shape.pool_shape(_BLOCKS), dtype=dtype, device=device),
            **{name: torch.empty(2, dtype=torch.int32, device=device) for name in ("chunk_starts", "tile_chunks", "tile_starts")},
            "num_decode_rows": 0,
            "layer_precision": torch.empty(len(ctx.layers) + ctx.settings.nested_head, dtype=torch.int32, device=device),
            "precision": -1,
        }
        if ctx.skipper is not None:
            row = torch.empty_like(value_of(nodes["positions"]))
            values |= {
                "request_ids": row.to(torch.int64),
                "is_prompt": row.to(torch.bool),
                "forced_run": row,
                "route_tape": torch.empty(len(ctx.skipper.layers), _TAPE, dtype=torch.int8, device=device),
                "captured": False,
            }
    last = [n for n in gm.graph.nodes if n.op == "placeholder"][-1]
    for name, value in values.items():
        with gm.graph.inserting_after(last):
            last = nodes[name] = gm.graph.placeholder(name)
        last.name = last.target = name  # also where a local variable of the traced code was called so; the capture renamed it
        last.meta["example_value"] = value
    return nodes


def _rewrite(gm: fx.GraphModule, ctx: PassContext, marker: fx.Node, number: int, inputs: dict[str, fx.Node]) -> None:
    q, k, v, _, scale, window, softcap, sinks = marker.args
    graph = gm.graph
    with graph.inserting_before(marker):

        def heads(x: fx.Node) -> fx.Node:  # [1, H, T, D] -> [T, H, D]
            return call(graph, ctx, marker, torch.transpose, rows(gm, ctx, x), 0, 1)

        tables = [inputs[name] for name in ("positions", "table_rows", "block_tables")]
        call(graph, ctx, marker, ops.KV_APPEND, heads(k), heads(v), inputs["kv_pool"], number, *tables)
        prefill = [inputs[name] for name in ("chunk_starts", "tile_chunks", "tile_starts", "num_decode_rows")]
        out = call(
            graph, ctx, marker, ops.PAGED_ATTENTION, heads(q), inputs["kv_pool"], number, *tables, *prefill, scale, window, softcap, sinks
        )
        result = batched(gm, ctx, out)
    marker.replace_all_uses_with(result)
    graph.erase_node(marker)
