"""One trace of a model for both of its programs: the dense one is the routed one without its routes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import fx

from depthfx.contracts import Skipper
from depthfx.passes.capture import capture
from depthfx.passes.context import SKIPPER, PassContext, Target
from depthfx.passes.program_key import trace_key
from depthfx.passes.program_store import load_trace, save_trace, trace_file
from depthfx.passes.route_markers import ROUTE
from depthfx.report import CompileReport
from depthfx.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Traces:
    """Captures when it is first asked; every :meth:`get` is a graph of its own, for passes to rewrite."""

    def __init__(self, model: PreTrainedModel, settings: Settings, target: Target, skipper: Skipper | None) -> None:
        self.model, self.settings, self.target, self.skipper = model, settings, target, skipper
        self._kept: tuple[fx.GraphModule, PassContext] | None = None

    def get(self, report: CompileReport, routed: bool, stored: bool = False) -> tuple[fx.GraphModule, PassContext]:
        """Graph and context as :func:`~depthfx.passes.capture.capture` yields them; ``routed``: with the decisions of the skipper.

        ``stored``: without a skipper, from the cache folder where they are kept there, else kept there for the next time.
        """
        if self.skipper is None:
            return self._stored(report) if stored else capture(self.model, self.settings, self.target, report)
        if self._kept is None:
            self._kept = capture(self.model, self.settings, self.target, report, self.skipper)
        kept, context = self._kept
        gm = _copy(kept)
        own = replace(
            context, report=report, weights=dict(context.weights), layers=[], tables={}, stored=[], fake_values={},
            skipper=self.skipper if routed else None,
        )  # fmt: skip
        if not routed:
            _drop_routes(gm, own)
        return gm, own

    def _stored(self, report: CompileReport) -> tuple[fx.GraphModule, PassContext]:
        path = trace_file(trace_key(self.model, self.settings, self.target), self.settings)
        found = load_trace(path, self.settings, self.target, report)
        if found is None:
            found = capture(self.model, self.settings, self.target, report)
            save_trace(path, *found)
        return found


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].name = node.name
    return fx.GraphModule(torch.nn.Module(), graph)


def _drop_routes(gm: fx.GraphModule, ctx: PassContext) -> None:
    """Every row runs every layer as it is; what only the skipper computes goes, and its weights."""
    for node in [n for n in gm.graph.nodes if n.target is ROUTE]:
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code()
    for node in [n for n in gm.graph.nodes if n.op == "placeholder" and n.name in ctx.weights]:
        if ctx.weights[node.name][0].startswith(SKIPPER):
            gm.graph.erase_node(node)
            del ctx.weights[node.name]
    gm.recompile()
