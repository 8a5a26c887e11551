"""Bind the weight inputs of a program to the model's tensors; joined weights take the place of their parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import fx

from depthfx.lowering.nested_linear import NestedLinear
from depthfx.passes.context import SKIPPER, PassContext
from depthfx.passes.nested_weights import bind_stored, join_parameters


def bind_weights(gm: fx.GraphModule, ctx: PassContext, model: torch.nn.Module) -> Callable[[], None]:
    """Turn weight inputs into attributes of ``gm``; the function returned fills tables and copies again, after weights have changed.

    A joined weight is one new tensor, and the parameters it was made of become views of it: no weight is stored twice,
    the model's ``state_dict`` stays as it was. One joined weight at a time is in memory beside its parts.
    """
    holder = torch.nn.Module()
    gm.add_submodule("weights", holder)
    device = next(model.parameters()).device
    fills = bind_stored(gm, ctx, model, holder)
    for node in [n for n in gm.graph.nodes if n.op == "placeholder" and n.name in ctx.weights]:
        tensors = [_lookup(model, ctx, name) for name in ctx.weights[node.name]]
        if node.name in ctx.tables:
            fill = partial(_fill_table, ctx.tables[node.name], ctx.num_positions, tensors, device)
            value = fill()
            fills.append((value, fill))
        elif any(isinstance(_owner(model, ctx, name), NestedLinear) for name in ctx.weights[node.name]):
            fill = partial(_copied, model, ctx, ctx.weights[node.name])  # nested modules that the graph reads in 16 bits
            value = fill()
            fills.append((value, fill))
        else:
            value = join_parameters(tensors)
        holder.register_buffer(node.name, value, persistent=False)
        with gm.graph.inserting_before(node):
            attribute = gm.graph.get_attr(f"weights.{node.name}")
        attribute.meta.update(node.meta)
        node.replace_all_uses_with(attribute)
        gm.graph.erase_node(node)
    _inputs_first(gm)
    gm.graph.lint()
    gm.recompile()

    @torch.inference_mode()
    def refill() -> None:
        for table, fill in fills:
            table.copy_(fill())  # in place: captured graphs hold its address

    return refill


@torch.no_grad()
def _fill_table(recipe: fx.GraphModule, num_positions: int, tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    table: torch.Tensor = recipe(torch.arange(num_positions, dtype=torch.int32, device=device), *tensors)
    return table.contiguous()


def _copied(model: torch.nn.Module, ctx: PassContext, names: Sequence[str]) -> torch.Tensor:
    return torch.cat([_lookup(model, ctx, name).detach() for name in names])


def _owner(model: torch.nn.Module, ctx: PassContext, name: str) -> torch.nn.Module:
    """The module that holds the tensor ``name``: of the model, or of the skipper."""
    if ctx.skipper is not None and name.startswith(SKIPPER):
        model, name = ctx.skipper, name.removeprefix(SKIPPER)
    return model.get_submodule(name.rpartition(".")[0])


def _lookup(model: torch.nn.Module, ctx: PassContext, name: str) -> torch.Tensor:
    found: torch.Tensor = getattr(_owner(model, ctx, name), name.rpartition(".")[2])
    return found


def _inputs_first(gm: fx.GraphModule) -> None:
    """Weight attributes stand among the inputs; move every input before them."""
    first = next(iter(gm.graph.nodes))
    for node in [n for n in gm.graph.nodes if n.op == "placeholder"]:
        first.prepend(node) if node is not first else None
