"""Hand a piece of the graph to Inductor, or run it as it stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx


def compile_with_inductor(piece: fx.GraphModule, example_inputs: list[Any], fake_mode: Any) -> Callable[..., Any]:
    """Compile ``piece`` for any number of rows; ``example_inputs`` are fake tensors and symbolic sizes of ``fake_mode``.

    CUDA graphs are captured by the runner over whole steps, never here. Identical input text gives identical code.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx

    patches = {"triton.cudagraphs": False, "reorder_for_locality": False, "fx_graph_cache": True}
    with tracing(TracingContext(fake_mode)), torch.no_grad():
        return compile_fx(piece, example_inputs, config_patches=patches)


def run_eagerly(piece: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    """The piece as plain PyTorch."""
    return piece.forward
