"""Hand a piece of the graph to Inductor, or run it as it stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx

from depthfx.errors import FOREIGN_FAULTS, DepthfxError, GraphError, UnsupportedModelError


def compile_with_inductor(piece: fx.GraphModule, example_inputs: list[Any], fake_mode: Any, rounds: bool = False) -> Callable[..., Any]:
    """Compile ``piece`` for any number of rows; ``example_inputs`` are fake tensors and symbolic sizes of ``fake_mode``.

    ``rounds``: every half-precision value is rounded where plain PyTorch rounds it. A decision by threshold depends on it: without, 10 of
    12,004 decisions of a FlexiDepth router in FP16 came out otherwise than in plain PyTorch; with it, none.

    CUDA graphs are captured by the runner over whole steps, never here. Identical input text gives identical code.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx

    patches = {"triton.cudagraphs": False, "reorder_for_locality": False, "fx_graph_cache": True, "emulate_precision_casts": rounds}
    before = _symbols(example_inputs)
    with tracing(TracingContext(fake_mode)), torch.no_grad():
        try:
            compiled = cast("Callable[..., Any]", compile_fx(piece, example_inputs, config_patches=patches))
        except (DepthfxError, torch.OutOfMemoryError):
            raise
        except FOREIGN_FAULTS as error:
            first = next(iter(str(error).strip().splitlines()), "no reason")[:300]
            raise UnsupportedModelError(
                f"Inductor fails at a part of this model with {type(error).__name__}: {first}; compile with inductor=False to run it without"
            ) from error
    if _symbols(example_inputs) != before:
        raise GraphError(f"Inductor fixed a number of rows: sizes {before} became {_symbols(example_inputs)}; compile with inductor=False")
    return compiled


def _symbols(values: list[Any]) -> list[str]:
    """The symbolic sizes among ``values``, as they stand now."""
    sizes = [s for v in values for s in (v.shape if isinstance(v, torch.Tensor) else (v,))]
    return [str(s.node.expr) for s in sizes if isinstance(s, torch.SymInt)]


def run_eagerly(piece: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """The piece as plain PyTorch."""
    return piece.forward
