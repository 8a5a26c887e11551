"""A small model's shape, random rows, and policies of every kind of fault."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from depthfx.contracts import Rows
from depthfx.skippers.validate import random_rows

CPU = torch.device("cpu")
LAYERS, HIDDEN, INTERMEDIATE = 8, 64, 192


def config(**changes):
    """What skippers read of a Hugging Face config."""
    sizes = {
        "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "rms_norm_eps": 1e-5, "model_type": "llama",
    }  # fmt: skip
    return SimpleNamespace(**{**sizes, **changes})


def model(dtype=torch.float32, **changes):
    """What skippers read of a Hugging Face model."""
    return SimpleNamespace(config=config(**changes), dtype=dtype, device=CPU)


def rows(count=17, place=1, num_places=4, dtype=torch.float32, **changes):
    """Random rows, some fields replaced."""
    drawn = random_rows(count, place, num_places, HIDDEN, dtype, CPU)
    return Rows(**{**vars(drawn), **changes})


def grid(num_requests, num_positions, place=0, num_places=1):
    """Rows of all pairs of the first request ids and positions, request by request; hidden states of one number."""
    pairs = torch.cartesian_prod(torch.arange(num_requests), torch.arange(num_positions))
    hidden, flags = torch.zeros(len(pairs), 1), torch.ones(len(pairs), dtype=torch.bool)
    return Rows(hidden, hidden, pairs[:, 0], pairs[:, 1], ~flags, flags, place, num_places)
