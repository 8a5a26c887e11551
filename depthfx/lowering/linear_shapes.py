"""Shapes of the products that a model's nested linears become, from its modules on the meta device: no weight is read."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from depthfx.errors import UnsupportedModelError
from depthfx.lowering.nested_linear import linears_to_nest


def linear_products(model: Any) -> list[tuple[int, int, bool]]:
    """Distinct ``(N, K, gated)`` of a Hugging Face decoder in order of use, as the passes join them; without the LM head.

    Linears of one module that read the same tensor are one product. It is gated (N counts gate and up rows) where its module holds an activation
    and its next linear takes half of the outputs. A forward pass on the meta device shows who reads what;
    :class:`UnsupportedModelError` where the model has none.
    """
    found: dict[tuple[int, int, bool], None] = {}
    groups = _groups(model)
    for index, (parent, linears) in enumerate(groups):
        num_outputs = sum(m.out_features for m in linears)
        next_parent, following = groups[index + 1] if index + 1 < len(groups) else ("", [])
        halved = parent == next_parent and all(2 * m.in_features == num_outputs for m in following)
        acts = any("act" in name for name, _ in model.get_submodule(parent).named_children())
        gated = halved and acts and all(m.bias is None for m in linears)
        found[num_outputs, linears[0].in_features, gated] = None
    return list(found)


def _groups(model: Any) -> list[tuple[str, list[nn.Linear]]]:
    """Linears in order of use with the path of their module; those of one module that read the same tensor together."""
    seen: list[tuple[str, list[nn.Linear], torch.Tensor]] = []

    def note(path: str, module: nn.Linear, x: torch.Tensor) -> None:
        parent = path.rpartition(".")[0]
        for other, linears, read in seen:
            if read is x and other == parent and (linears[0].bias is None) == (module.bias is None):
                linears.append(module)
                return
        seen.append((parent, [module], x))

    hooks = []
    for path in linears_to_nest(model):
        module = model.get_submodule(path)
        hooks.append(module.register_forward_pre_hook(lambda m, args, path=path: note(path, m, args[0])))
    try:
        with torch.no_grad():
            ids = torch.zeros(1, 8, dtype=torch.int64, device="meta")
            mask = torch.zeros(1, 1, 8, 8, dtype=model.dtype, device="meta")  # complete: nobody looks into the positions to make one
            model(input_ids=ids, attention_mask=mask, use_cache=False)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"the shapes of {type(model).__name__} cannot be read on the meta device ({type(error).__name__}: {error}); only decoders "
            "that run on token ids alone can be tuned"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    return [(parent, linears) for parent, linears, _ in seen]
