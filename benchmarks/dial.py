"""RandomSkip with a rate and a depth that can be changed on a compiled model, so that one of them serves every arm."""

from __future__ import annotations

import math

import torch

from depthfx.contracts import Decision, Policy, Rows
from depthfx.skippers.policies.random_skip import MODULUS, hash_of

SEED = 1234  # as RandomSkip's own


class Dial(Policy):
    """A row skips the layers whose limit is above its hash; limits are a tensor that the compiled step reads. At first nothing is skipped.

    Rows skip as with RandomSkip; without ``by_request`` the hash is one of the position alone, and requests can share the KV of a routed prefix.
    What it costs more: the hash is asked for in layers above the depth too, where RandomSkip knows its answer.
    """

    def __init__(self, num_places: int, by_request: bool = True) -> None:
        super().__init__()
        self.by_request = by_request
        self.register_buffer("limits", torch.zeros(num_places, dtype=torch.int64))

    def forward(self, rows: Rows) -> Decision:
        """RUN where the hash reaches the limit of the layer."""
        ids = rows.request_ids if self.by_request else torch.zeros_like(rows.positions)
        return Decision(hash_of(ids, rows.positions, SEED) >= self.limits[rows.place])

    def turn(self, rate: float, depth: float) -> int:
        """``rate`` of the rows skip the last ``depth`` of the routed layers (both 0 to 1) from the next step on; returns of how many.

        No request may be under way: what it was promised would change.
        """
        places = len(self.limits)
        skipped = round(places * depth)
        self.limits.zero_()
        self.limits[places - skipped :] = math.ceil(rate * MODULUS)
        return skipped
