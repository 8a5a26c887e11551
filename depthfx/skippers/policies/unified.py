"""Unified layer skipping: a target share of the model's layers is left out of decode, the first and the last kept, the rest evenly spaced.

Of L layers, K = max(2, round(L * (1 - share))) are kept: those nearest to ``j * (L - 1) / (K - 1)`` for j = 0 .. K - 1. A prompt runs every
layer. The published method copies K and V of the layer below; here every layer writes its own, so the numbers differ from it.
Example: L = 8 and share = 0.5 keep 0, 2, 5, 7.
"""

from __future__ import annotations

from depthfx.contracts import Policy
from depthfx.errors import SkipperError
from depthfx.skippers.model_shape import ModelShape
from depthfx.skippers.options import check_share
from depthfx.skippers.plugins import PolicySpec, register_policy
from depthfx.skippers.policies.static_depth import StaticDepth


def skipped_layers(num_layers: int, share: float) -> tuple[int, ...]:
    """Indices of the decoder layers that are left out; raises :class:`SkipperError` where ``share`` leaves none out."""
    kept_count = max(2, round(num_layers * (1 - check_share("share", share))))
    if kept_count >= num_layers:
        raise SkipperError(f"share={share!r} leaves out none of {num_layers} layers; give at least {1 / num_layers:.3g}")
    gaps = kept_count - 1
    kept = {(2 * j * (num_layers - 1) + gaps) // (2 * gaps) for j in range(kept_count)}
    return tuple(i for i in range(num_layers) if i not in kept)


def default_layers(shape: ModelShape, share: float = 0.25) -> tuple[int, ...]:
    """Exactly the layers that are left out: the others need no decision."""
    return skipped_layers(shape.num_layers, share)


def make(shape: ModelShape, layers: tuple[int, ...], *, share: float = 0.25) -> Policy:
    """One for all layers: ``share`` of the model's layers is skipped in decode."""
    skipped = skipped_layers(shape.num_layers, share)
    missing = [i for i in skipped if i not in layers]
    if missing:
        raise SkipperError(f"share={share!r} skips the layers {list(skipped)}, but {missing} are not routed; leave `layers` out")
    return StaticDepth((layers.index(i) for i in skipped), "decode")


register_policy(
    PolicySpec(
        name="unified",
        description="a target share of layers, evenly spaced, is left out of decode",
        make=make,
        cases=({}, {"share": 0.5}),
        default_layers=default_layers,
    )
)
