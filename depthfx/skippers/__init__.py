"""Which rows skip which layers, and what a skipped row gets instead: policies, projectors, checkpoints, checks."""

from __future__ import annotations

from depthfx.contracts import PROJECT_ONLY, RUN, Decision, Policy, Projector, Rows, Skipper
from depthfx.skippers.make import load_skipper, make_skipper
from depthfx.skippers.validate import validate

__all__ = [
    "PROJECT_ONLY", "RUN", "Decision", "Policy", "Projector", "Rows", "Skipper", "load_skipper", "make_skipper", "validate",
]  # fmt: skip
