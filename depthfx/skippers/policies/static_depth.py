"""Static depth: a fixed set of the routed layers is skipped by every row, or by every decoding row."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from depthfx.contracts import Decision, Policy, Rows
from depthfx.errors import SkipperError
from depthfx.skippers.model_shape import ModelShape
from depthfx.skippers.options import PHASES, check_choice
from depthfx.skippers.plugins import PolicySpec, register_policy


class StaticDepth(Policy):
    """Skips at ``places``, numbers among the routed layers from 0, in ``phases``: all, or decode (a prompt then runs everything)."""

    def __init__(self, places: Iterable[int], phases: str) -> None:
        super().__init__()
        self.places = tuple(sorted(places))
        self.phases = check_choice("phases", phases, PHASES)
        self.scope = "static" if phases == "all" else "phase"

    def forward(self, rows: Rows) -> Decision:
        """The same for all rows of a phase."""
        if rows.place not in self.places:
            return Decision(torch.ones_like(rows.is_prompt))
        return Decision(rows.is_prompt if self.phases == "decode" else torch.zeros_like(rows.is_prompt))


def make(shape: ModelShape, layers: tuple[int, ...], *, skip: Iterable[int] | None = None, phases: str = "all") -> Policy:
    """One for all layers: the decoder layers ``skip`` (all routed ones where None) are skipped in ``phases``."""
    skipped = tuple(layers if skip is None else skip)
    strangers = [i for i in skipped if i not in layers]
    if strangers:
        raise SkipperError(f"skip={list(skipped)}: the layers {strangers} are not routed; allowed: {list(layers)}")
    return StaticDepth((layers.index(i) for i in skipped), phases)


register_policy(
    PolicySpec(
        name="static_depth",
        description="a fixed set of layers is skipped by every row, or by every decoding row",
        make=make,
        cases=({}, {"phases": "decode"}, {"skip": ()}),
    )
)
