"""Capture: the Hugging Face forward over packed rows as one Dynamo graph with every weight as a named input."""

from __future__ import annotations

import itertools
import re
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from transformers import AttentionInterface, PreTrainedModel

from depthfx.contracts import Skipper
from depthfx.errors import FOREIGN_FAULTS, DepthfxError, UnsupportedModelError
from depthfx.passes import attention_marker
from depthfx.passes.context import SKIPPER, PassContext, Target
from depthfx.passes.route_markers import routed_layers
from depthfx.records import StepInputs
from depthfx.report import CompileReport
from depthfx.settings import DEFAULT_CONTEXT, Settings

# Row counts used while tracing. They only have to differ from each other and from 0 and 1.
_TRACE_ROWS, _TRACE_LOGIT_ROWS = 24, 6


class _PackedForward(torch.nn.Module):
    """The model as a child, so that every node carries a complete module stack."""

    def __init__(self, model: PreTrainedModel) -> None:
        torch.nn.Module.__init__(self)
        self.model = model

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor) -> torch.Tensor:
        places = positions.clamp(min=0).to(torch.int64)  # padding rows have position -1
        out = self.model(input_ids=token_ids[None], position_ids=places[None], use_cache=False, logits_to_keep=logit_rows)
        return out.logits[0]


_captures = itertools.count()


def _fresh_forward(model: PreTrainedModel) -> _PackedForward:
    """A wrapper with a code object of its own: Dynamo keeps its caches and its memory of sizes by code object."""
    forward = _PackedForward.forward
    code = forward.__code__.replace(co_filename=f"<depthfx capture {next(_captures)}>")
    cls = type("_PackedForward", (_PackedForward,), {"forward": types.FunctionType(code, forward.__globals__, "forward")})
    wrapper: _PackedForward = cls(model)
    return wrapper


class _StopCaptureError(Exception):
    """Raised in place of compiling the captured graph: Dynamo's guards and bytecode, which it would make next, are not needed."""


def capture(
    model: PreTrainedModel, settings: Settings, target: Target, report: CompileReport, skipper: Skipper | None = None
) -> tuple[fx.GraphModule, PassContext]:
    """Trace ``model`` over T packed rows, with the decisions of ``skipper`` where there is one.

    Returns a graph with inputs ``token_ids [T] int64``, ``positions [T] int32``, ``logit_rows [R] int64`` and one
    input for each weight (``context.weights`` names them), and output logits ``[R, vocabulary]``.
    Raises :class:`UnsupportedModelError` with the reason where the forward is not one graph.
    """
    with routed_layers(model, skipper):
        gm, example_inputs = _trace(model)
    context = PassContext(settings, target, report, _fake_mode(gm), None, skipper=skipper)
    context.num_positions = longest_context(model, settings)
    _name_inputs(gm, example_inputs, model, context)
    _drop_bookkeeping(gm)
    return gm, context


def longest_context(model: PreTrainedModel, settings: Settings) -> int:
    """Positions that a request may reach: the model's, or fewer where the settings say so."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or DEFAULT_CONTEXT
    return min(settings.max_model_len or longest, longest)


def _trace(model: PreTrainedModel) -> tuple[fx.GraphModule, list[Any]]:
    """Dynamo's graph of the forward and the values of its inputs, both row counts still open."""
    captured: list[tuple[fx.GraphModule, list[Any]]] = []

    def keep(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                node.meta["read_from"] = node.meta["grapharg"].source.name  # Dynamo takes `grapharg` away when it ends
        captured.append((gm, example_inputs))
        raise _StopCaptureError

    device = next(model.parameters()).device
    inputs = [
        torch.zeros(_TRACE_ROWS, dtype=torch.int64, device=device),
        torch.zeros(_TRACE_ROWS, dtype=torch.int32, device=device),
        torch.zeros(_TRACE_LOGIT_ROWS, dtype=torch.int64, device=device),
    ]
    for tensor in inputs:
        torch._dynamo.mark_dynamic(tensor, 0)
    with _attention_of(model), torch.no_grad(), torch._dynamo.config.patch(suppress_errors=False):
        try:
            torch.compile(_fresh_forward(model), backend=keep, fullgraph=True)(*inputs)
        except DepthfxError:
            raise
        except FOREIGN_FAULTS as error:
            if not isinstance(getattr(error, "inner_exception", None), _StopCaptureError):
                raise UnsupportedModelError(_why(model, error)) from error
    if not captured:
        raise UnsupportedModelError(
            "nothing was captured: torch.compile is switched off here (TORCHDYNAMO_DISABLE, or a stance); switch it on"
        )
    gm, example_inputs = captured.pop()  # Dynamo keeps `keep` for ever, which must not keep the weights
    _check_open(model, gm)
    return gm, example_inputs


# Row counts at which every condition that the trace relied on has to hold.
_TRIED_ROWS = (1, 2, 3, 7, 16, 23, 25, 100, 512, 8192)


def _check_open(model: PreTrainedModel, gm: fx.GraphModule) -> None:
    """Refuse a graph that holds for some numbers of rows only; Dynamo itself would notice a fixed number with its guards."""
    name = type(model).__name__
    inputs = {n.name: n.meta["example_value"] for n in gm.graph.nodes if n.op == "placeholder"}
    symbols: list[Any] = []
    for argument in ("token_ids", "logit_rows"):
        size = next((v.shape[0] for key, v in inputs.items() if key.startswith(f"l_{argument}")), None)
        if not isinstance(size, torch.SymInt) or not size.node.expr.is_Symbol or size.node.expr in symbols:
            raise UnsupportedModelError(
                f"the forward of {name} works for one number of rows only ({argument} has {size}); depthfx needs one for any number of tokens"
            )
        symbols.append(size.node.expr)
    environment = _fake_mode(gm).shape_env
    for guard in environment.guards:
        condition = environment.simplify(guard.expr)
        if any(condition.subs(dict.fromkeys(symbols, rows)) == False for rows in _TRIED_ROWS):  # noqa: E712 - a sympy value
            raise UnsupportedModelError(
                f"the forward of {name} takes another way unless {condition} holds for its number of rows; "
                "depthfx needs a forward that is the same for any number of tokens"
            )


def _why(model: PreTrainedModel, error: Exception) -> str:
    """The reason in an error of Dynamo: the refusal of our own attention function if that is what it wraps, else its first line."""
    text = str(error)
    ours = re.search(r"raised exception UnsupportedModelError\((['\"])(.*)\1\)", text)
    if ours:
        return f"{type(model).__name__}: {ours.group(2)}"
    first = next(iter(text.strip().splitlines()), type(error).__name__)[:300]
    return (
        f"the forward of {type(model).__name__} is not one graph: {first}; "
        "depthfx needs a forward without data-dependent Python (use on_unsupported='eager' to run Hugging Face's own code)"
    )


@contextmanager
def _attention_of(model: PreTrainedModel) -> Iterator[None]:
    """Route attention to the marker while tracing, and restore the model's own choice afterwards."""
    AttentionInterface.register(attention_marker.NAME, attention_marker.hf_attention)
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config") and hasattr(m.config, "_attn_implementation")}
    before = {key: config._attn_implementation for key, config in configs.items()}
    for config in configs.values():
        config._attn_implementation = attention_marker.NAME
    try:
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]


def _fake_mode(gm: fx.GraphModule) -> Any:
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch._subclasses.FakeTensor):
            return value.fake_mode
    raise UnsupportedModelError("the captured graph holds no tensors")


def _name_inputs(gm: fx.GraphModule, example_inputs: list[Any], model: PreTrainedModel, context: PassContext) -> None:
    """Rename inputs: step inputs by their argument, weights by their name in the model; drop symbolic-size inputs."""
    names = {id(t): n for n, t in [*model.named_parameters(remove_duplicate=True), *model.named_buffers()]}
    if context.skipper is not None:  # what it borrows of the model, its LM head say, keeps the model's name
        own = {id(t): SKIPPER + n for n, t in [*context.skipper.named_parameters(), *context.skipper.named_buffers()]}
        names = own | names
    arguments = ("token_ids", "positions", "logit_rows")
    sizes: dict[Any, fx.Node] = {}
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for node in gm.graph.nodes:
        if node.name in StepInputs.names():
            node.name = f"model_{node.name}"  # a local variable of the model's code that is called like a step input
    for node, value in zip(placeholders, example_inputs, strict=True):
        if isinstance(node.meta["example_value"], torch.SymInt):
            continue
        if id(value) in names:
            new = "w_" + names[id(value)].replace(".", "_")
            context.weights[new] = (names[id(value)],)
        else:
            new = next((a for a in arguments if node.name.startswith(f"l_{a}")), None)
            if new is None:
                raise UnsupportedModelError(
                    f"the forward of {type(model).__name__} reads {node.meta['read_from']} which is neither a parameter nor a buffer"
                )
            sizes[node.meta["example_value"].shape[0].node.expr] = node
        node.name = node.target = new
    first_compute = next(n for n in gm.graph.nodes if n.op != "placeholder")
    for node in placeholders:
        value = node.meta["example_value"]
        if isinstance(value, torch.SymInt):
            if node.users:
                with gm.graph.inserting_before(first_compute):
                    size = gm.graph.call_function(torch.ops.aten.sym_size.int, (sizes[value.node.expr], 0))
                size.meta["example_value"] = value
                node.replace_all_uses_with(size)
            gm.graph.erase_node(node)
    by_name = {n.name: n for n in gm.graph.nodes if n.op == "placeholder"}
    context.row_symbol = by_name["positions"].meta["example_value"].shape[0].node.expr


def _drop_bookkeeping(gm: fx.GraphModule) -> None:
    """Remove nodes that only log, set grad mode, drop nothing or enter a disabled autocast; yield the logits themselves."""
    for node in reversed(list(gm.graph.nodes)):
        name = getattr(node.target, "__name__", str(node.target))
        entered = node.args[0] if node.args else None
        disabled = name == "_enter_autocast" and node.args[2] is False
        leaves = name == "_exit_autocast" and isinstance(entered, fx.Node) and entered.args[2] is False
        if name in ("_log_api_usage_once", "_set_grad_enabled") or disabled or leaves:
            gm.graph.erase_node(node)
        elif name == "dropout" and not node.kwargs.get("training", node.args[2] if len(node.args) > 2 else True):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
        elif name.endswith("_") and not name.endswith("__") and not node.users:
            raise UnsupportedModelError(
                f"the forward writes into a tensor with {name} ({node.name}) and drops the result, which a graph loses; use what {name} returns"
            )
    output = next(n for n in gm.graph.nodes if n.op == "output")
    output.args = (output.args[0][0],)  # Dynamo returns a tuple of one
    gm.graph.eliminate_dead_code()
    gm.recompile()
