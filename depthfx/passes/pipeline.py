"""The one ordered list of passes, and the loop that runs, checks and times them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import fx

from depthfx.contracts import Skipper
from depthfx.errors import UnsupportedModelError
from depthfx.lowering.codegen import compile_with_inductor, run_eagerly
from depthfx.lowering.nested_linear import nested_linears, plain_linears
from depthfx.lowering.stored_weight import StoredWeight
from depthfx.passes.check_graph import check_graph
from depthfx.passes.check_rows import check_rows
from depthfx.passes.context import Pass, PassContext, Target, refresh_values
from depthfx.passes.form_cohorts import form_cohorts
from depthfx.passes.fuse_linears import fuse_linears
from depthfx.passes.fuse_norms import fuse_norms
from depthfx.passes.fuse_rotary import fuse_rotary
from depthfx.passes.order_decisions import order_decisions
from depthfx.passes.outline_cohorts import outline_cohorts
from depthfx.passes.program_key import program_key
from depthfx.passes.program_store import load_program, program_file, save_program
from depthfx.passes.recognise_layers import recognise_layers
from depthfx.passes.split_pieces import split_pieces
from depthfx.passes.tabulate_positions import tabulate_positions
from depthfx.passes.traces import Traces
from depthfx.passes.use_dual_linear import use_dual_linear, use_fp8_linear
from depthfx.passes.use_linear_ops import drop_batch_dim, use_gated_linear, use_linear, use_linear_add
from depthfx.passes.use_paged_attention import use_paged_attention
from depthfx.passes.weights import bind_weights
from depthfx.records import KvShape, StepInputs
from depthfx.report import CACHES, CompileReport
from depthfx.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PASSES: tuple[Pass, ...] = (
    recognise_layers,
    check_rows,
    use_paged_attention,
    form_cohorts,
    fuse_linears,
    fuse_rotary,
    fuse_norms,
    use_gated_linear,
    use_linear,
    use_dual_linear,
    use_fp8_linear,
    use_linear_add,
    drop_batch_dim,
    tabulate_positions,
    order_decisions,
)
# Passes that only make the graph faster; `Settings.fuse=False` leaves them out.
FUSIONS = frozenset({fuse_linears, fuse_rotary, fuse_norms, use_gated_linear, use_linear, use_linear_add, tabulate_positions})


@dataclass(frozen=True)
class Program:
    """A compiled step: :class:`StepInputs` in, logits ``[R, vocabulary]`` out; writes KV of its rows into the pool."""

    module: fx.GraphModule
    kv_shape: KvShape
    kv_dtype: torch.dtype
    num_heads: int
    num_precisions: int  # entries of `StepInputs.layer_precision`
    vocab_size: int  # width of the logits
    nested: bool  # weights of layers are nested
    refill_tables: Callable[[], None]  # to be called after weights were changed in place
    stored: tuple[StoredWeight, ...]  # nested weights, in the order of the program
    routed_layers: tuple[int, ...] = ()  # where the skipper is asked; empty: the dense program
    routed: Program | None = None  # of the dense program: the one of steps that ask the skipper

    def __call__(self, inputs: StepInputs) -> torch.Tensor:
        names = StepInputs.names() if self.routed_layers else _DENSE_INPUTS
        logits: torch.Tensor = self.module(**{name: getattr(inputs, name) for name in names})
        return logits


_DENSE_INPUTS = tuple(n for n in StepInputs.names() if n not in ("request_ids", "is_prompt", "forced_run", "route_tape", "captured"))


def run_passes(gm: fx.GraphModule, ctx: PassContext) -> None:
    """Run :data:`PASSES` in order, each followed by the verifier."""
    for run in PASSES:
        needed = run is use_linear and ctx.settings.weights != "16bit"  # the passes for weights start from its op
        if run in FUSIONS and not ctx.settings.fuse and not needed:
            ctx.report.add("skipped", f"{run.__name__}: setting fuse=False")
            continue
        with ctx.report.timed(f"pass {run.__name__}"):
            run(gm, ctx)
        check_graph(gm, ctx, after=run.__name__)
    refresh_values(gm, ctx)
    gm.recompile()


def build_program(
    model: PreTrainedModel, settings: Settings, target: Target, report: CompileReport, on_miss: Callable[[], None] = lambda: None,
    skipper: Skipper | None = None,
) -> Program:  # fmt: skip
    """Capture, rewrite, split and compile the forward of ``model``; ``on_miss`` is called where the capture is not skipped.

    With ``skipper`` the result has a second program, ``routed``, over the same weights; both come from one trace.
    Raises :class:`~depthfx.errors.UnsupportedModelError` with the reason for a model that does not fit.
    """
    traces = Traces(model, settings, target, skipper)
    program = _finished(traces, model, settings, report, on_miss, routed=False)
    if skipper is None:
        return program
    details = CompileReport()  # most of it would say the same again
    with report.timed("routed program"):
        routed = _finished(traces, model, settings, details, on_miss, routed=True)
    for line in details.sections["depth"]:
        report.add("depth", line)
    report.add("depth", f"routed steps: {details.sections['compiled'][-1]}")
    for line in details.sections[CACHES]:
        report.add(CACHES, f"routed {line}")
    return replace(program, routed=routed)


def _finished(
    traces: Traces, model: PreTrainedModel, settings: Settings, report: CompileReport, on_miss: Callable[[], None], routed: bool
) -> Program:
    with plain_linears(model):  # a model that was loaded nested is captured like any other
        gm, ctx = _rewritten(traces, settings, report, on_miss, routed)
    vocab_size = int(next(n for n in gm.graph.nodes if n.op == "output").args[0].meta["example_value"].shape[-1])
    kv_dtype = next(n.meta["example_value"].dtype for n in gm.graph.nodes if n.name == "kv_pool")
    with report.timed("bind weights"):
        places = _places(model)
        refill_tables = bind_weights(gm, ctx, model)
        if routed and (moved := sorted(name for name, place in _places(model).items() if places.get(name) != place)):
            raise UnsupportedModelError(
                f"dense and routed steps of this {type(model).__name__} join {moved[0]} with different weights, so one of them would keep an old "
                "copy; compile with fuse=False, or without a skipper"
            )
    compiler = partial(compile_with_inductor, fake_mode=ctx.fake_mode, rounds=routed) if settings.inductor else run_eagerly
    with report.timed("compile pieces"):
        outline_cohorts(gm, ctx, lambda body: split_pieces(body, ctx, compiler))
        split_pieces(gm, ctx, compiler)
    assert ctx.kv_shape is not None
    num_precisions = ctx.kv_shape.num_layers + settings.nested_head
    return Program(
        gm,
        ctx.kv_shape,
        kv_dtype,
        ctx.num_heads,
        num_precisions,
        vocab_size,
        settings.weights == "nested",
        refill_tables,
        tuple(ctx.stored),
        () if ctx.skipper is None else ctx.skipper.layers,
    )


def _places(model: PreTrainedModel) -> dict[str, int]:
    """Addresses of all weights of ``model``, as they are stored."""
    nested = {f"{path}.weight": module.upper for path, module in nested_linears(model).items()}
    return {name: t.data_ptr() for name, t in (*model.named_parameters(), *nested.items())}


def _rewritten(
    traces: Traces, settings: Settings, report: CompileReport, on_miss: Callable[[], None], routed: bool
) -> tuple[fx.GraphModule, PassContext]:
    """The program before it is split: from the program cache, or captured, rewritten and put there."""
    skipper = traces.skipper if routed else None
    if not settings.program_cache:
        report.add(CACHES, "program cache: off, setting program_cache=False")
        on_miss()
        return _captured(traces, report, routed)
    with report.timed("program cache"):
        path = program_file(program_key(traces.model, settings, traces.target, skipper), settings)
        found = load_program(path, settings, traces.target, report, skipper)
    if found is not None:
        return found
    on_miss()
    before = {section: len(lines) for section, lines in report.sections.items()}
    gm, ctx = _captured(traces, report, routed, stored=True)
    with report.timed("program cache"):
        added = {section: lines[before.get(section, 0) :] for section, lines in report.sections.items()}
        save_program(path, gm, ctx, {section: lines for section, lines in added.items() if lines and section != CACHES})
    return gm, ctx


def _captured(traces: Traces, report: CompileReport, routed: bool, stored: bool = False) -> tuple[fx.GraphModule, PassContext]:
    with report.timed("capture"):
        gm, ctx = traces.get(report, routed, stored)
    run_passes(gm, ctx)
    return gm, ctx
