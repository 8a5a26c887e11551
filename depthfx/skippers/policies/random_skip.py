"""RandomSkip: a seeded hash of request and position skips a share of the tokens, each in the same layers (vSkipper's mock policy).

A row skips iff ``hash(id, position) mod 1,000,003 < rate * 1,000,003``, in the last ``depth`` of the routed layers; the hash is one of
``id xor position * 1,000,000,007 xor seed``. That key alone would give neighbouring requests and positions nearly the same number, so its
two halves are mixed first. Example: rate 0.25 and depth 0.5 over 16 routed layers skip the last 8 for a quarter of the tokens.
"""

from __future__ import annotations

import math

import torch

from depthfx.contracts import Decision, Policy, Rows
from depthfx.skippers.model_shape import ModelShape
from depthfx.skippers.options import check_count, check_share
from depthfx.skippers.plugins import PolicySpec, register_policy

STEP, MODULUS = 1_000_000_007, 1_000_003
_MASK = 0xFFFFFFFF


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A bijection of 32-bit numbers kept in int64; its products stay below 2^60, so that nothing overflows."""
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & _MASK
    return x ^ (x >> 16)


def hash_of(request_ids: torch.Tensor, positions: torch.Tensor, seed: int) -> torch.Tensor:
    """``[T]`` int64 in [0, 1,000,003) of ``request_ids`` and ``positions``, both [T] int64."""
    key = request_ids ^ (positions * STEP) ^ seed
    return _mix(_mix(key & _MASK) ^ ((key >> 32) & _MASK)) % MODULUS


class RandomSkip(Policy):
    """See the module's text."""

    scope = "token"

    def __init__(self, rate: float, depth: float, seed: int) -> None:
        super().__init__()
        self.rate, self.depth, self.seed = check_share("rate", rate), check_share("depth", depth), check_count("seed", seed, 0)
        self.limit = math.ceil(rate * MODULUS)

    def forward(self, rows: Rows) -> Decision:
        """RUN everywhere above the depth, by the hash below it."""
        if rows.place < rows.num_places - round(self.depth * rows.num_places):
            return Decision(torch.ones_like(rows.ran))
        return Decision(hash_of(rows.request_ids, rows.positions, self.seed) >= self.limit)


def make(shape: ModelShape, layers: tuple[int, ...], *, rate: float = 0.25, depth: float = 1.0, seed: int = 1234) -> Policy:
    """One for all layers: ``rate`` of the tokens skip the last ``depth`` of the routed layers."""
    return RandomSkip(rate, depth, seed)


register_policy(
    PolicySpec(
        name="random_skip",
        description="a seeded hash of request and position skips a share of the tokens",
        make=make,
        cases=({}, {"rate": 0.5, "depth": 0.5, "seed": 7}, {"rate": 0.0}, {"rate": 1.0}),
    )
)
