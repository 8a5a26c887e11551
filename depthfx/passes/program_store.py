"""Keep rewritten programs on disk, so that the second compilation of a model neither traces nor rewrites; and traces beside them.

An entry is one JSON file: a digest of the body, then the graph as plain data, where each weight comes from, the recipes of
the position tables and the lines of the report. Weights are never stored. A file that cannot be read is a miss. The layouts of
what nodes yield are kept as well: computing them from the inputs, with sizes that are symbols, would take most of the time of a hit.

A trace is what the passes start from. It does not depend on most settings, so that a model which was compiled with other ones is
rewritten anew but not traced again.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from depthfx.contracts import Skipper
from depthfx.errors import GraphError
from depthfx.passes.check_graph import check_graph
from depthfx.passes.context import PassContext, Target, refresh_values
from depthfx.passes.graph_data import NotPlainError, from_data, to_data
from depthfx.records import KvShape
from depthfx.report import CACHES, CompileReport
from depthfx.settings import Settings, cache_dir
from depthfx.whole_file import write_whole

_FORMAT = 2
# What reading an entry that is not one may raise.
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError, GraphError)
_CALLS = ("call_function", "call_method")
# Example numbers of rows, as in the capture; they only have to differ from each other and from 0 and 1.
_ROWS = {"T": 24, "R": 6}


def program_file(key: str, settings: Settings) -> Path:
    """Where the program of ``key`` is kept."""
    return cache_dir(settings) / "programs" / f"{key}.json"


def trace_file(key: str, settings: Settings) -> Path:
    """Where the trace of ``key`` is kept."""
    return cache_dir(settings) / "traces" / f"{key}.json"


def load_program(
    path: Path, settings: Settings, target: Target, report: CompileReport, skipper: Skipper | None = None
) -> tuple[fx.GraphModule, PassContext] | None:
    """Graph and context as :func:`save_program` stored them, with fresh fake values; None where there is no good entry.

    Says in ``report`` what was found. The graph has passed the verifier.
    """
    try:
        text = path.read_text()
    except FileNotFoundError:
        report.add(CACHES, f"program cache: miss: nothing is kept under {path.name[:12]}")
        return None
    except (OSError, ValueError) as error:
        report.add(CACHES, f"program cache: miss: {path} cannot be read ({error})")
        return None
    try:
        body = _body(text)
        context = PassContext(settings, target, report, None, None, skipper=skipper)
        gm = _restore(body, context)
        check_graph(gm, context, after="the program cache")
    except _DAMAGE as error:
        report.add(CACHES, f"program cache: miss: {path} is damaged ({type(error).__name__}: {str(error)[:120]}) and is written anew")
        return None
    for section, lines in body["sections"].items():
        for line in lines:
            report.add(section, line)
    report.add(CACHES, f"program cache: hit: {path.name[:12]}, capture and passes were skipped")
    return gm, context


def save_program(path: Path, gm: fx.GraphModule, ctx: PassContext, sections: dict[str, list[str]]) -> None:
    """Write the program in one step, so that a reader sees all of it or nothing; says in the report where it cannot."""
    try:
        _write(path, _plain(gm, ctx, sections))
    except NotPlainError as error:
        ctx.report.add(CACHES, f"program cache: not kept: the program holds {error}, which plain data cannot name")
    except OSError as error:
        ctx.report.add(CACHES, f"program cache: not kept: {error}")


def load_trace(path: Path, settings: Settings, target: Target, report: CompileReport) -> tuple[fx.GraphModule, PassContext] | None:
    """Graph and context as :func:`~depthfx.passes.capture.capture` yielded them to :func:`save_trace`; None where there is no good entry."""
    context = PassContext(settings, target, report, None, None)
    try:
        body = _body(path.read_text())
        gm = _restore_graph(body, context)
        for node, number in zip(gm.graph.nodes, body["stack_of"], strict=True):
            if number >= 0:
                node.meta["nn_module_stack"] = {path: (path, name) for path, name in body["stacks"][number]}
    except FileNotFoundError:
        return None
    except (OSError, *_DAMAGE) as error:
        report.add(CACHES, f"trace: {path} is damaged ({type(error).__name__}: {str(error)[:120]}) and is written anew")
        return None
    report.add(CACHES, f"trace: found: {path.name[:12]}, capture was skipped")
    return gm, context


def save_trace(path: Path, gm: fx.GraphModule, ctx: PassContext) -> None:
    """Write what :func:`load_trace` reads: graph, weights, and the modules (path and class name) that each node runs in."""
    stacks: dict[tuple[tuple[str, str], ...], int] = {}
    stack_of = []
    for node in gm.graph.nodes:
        stack = tuple((path, c.__name__) for path, c in node.meta.get("nn_module_stack", {}).values())
        stack_of.append(stacks.setdefault(stack, len(stacks)) if stack else -1)
    try:
        _write(path, {**_plain_graph(gm, ctx), "stacks": list(stacks), "stack_of": stack_of})
    except NotPlainError as error:
        ctx.report.add(CACHES, f"trace: not kept: it holds {error}, which plain data cannot name")
    except OSError as error:
        ctx.report.add(CACHES, f"trace: not kept: {error}")


def _write(path: Path, plain: dict[str, Any]) -> None:
    body = json.dumps(plain)
    write_whole(path, f"{_FORMAT} {_digest(body)}\n{body}")


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()


def _body(text: str) -> dict[str, Any]:
    head, _, body = text.partition("\n")
    if head != f"{_FORMAT} {_digest(body)}":
        raise ValueError("its digest does not fit its content")
    return json.loads(body)  # type: ignore[no-any-return]


def _plain(gm: fx.GraphModule, ctx: PassContext, sections: dict[str, list[str]]) -> dict[str, Any]:
    assert ctx.kv_shape is not None
    return {
        **_plain_graph(gm, ctx),
        "tables": {name: to_data(recipe.graph) for name, recipe in ctx.tables.items()},
        "kv_shape": asdict(ctx.kv_shape),
        "num_heads": ctx.num_heads,
        "sections": sections,
    }


def _plain_graph(gm: fx.GraphModule, ctx: PassContext) -> dict[str, Any]:
    inputs = {n.name: n.meta["example_value"] for n in gm.graph.nodes if n.op == "placeholder"}
    symbols = {ctx.row_symbol: "T", inputs["logit_rows"].shape[0].node.expr: "R"}
    return {
        "nodes": to_data(gm.graph),
        "inputs": {name: _layout(name, value, symbols) for name, value in inputs.items()},
        "values": [_known_layout(n, symbols) for n in gm.graph.nodes if n.op in _CALLS],
        "weights": ctx.weights,
        "num_positions": ctx.num_positions,
    }


def _layout(name: str, value: Any, symbols: dict[Any, str]) -> Any:
    """``[shape, stride, dtype, device]`` with multiples of T and R as ``[name, factor]``; a number as it is."""
    if isinstance(value, int):
        return value

    def size(number: Any) -> Any:
        if isinstance(number, int):
            return number
        factor, symbol = number.node.expr.as_coeff_Mul()
        if symbol not in symbols or not factor.is_Integer:
            raise NotPlainError(f"a value {name} with a size of {number}")
        return [symbols[symbol], int(factor)]

    if not isinstance(value, torch.Tensor):
        raise NotPlainError(f"a value {name} of type {type(value).__name__}")
    return [[size(s) for s in value.shape], [size(s) for s in value.stride()], str(value.dtype).removeprefix("torch."), str(value.device)]


def _known_layout(node: fx.Node, symbols: dict[Any, str]) -> Any:
    """The layout of what ``node`` yields; None for what :func:`_layout` does not cover, and for parts of another tensor."""
    value = node.meta["example_value"]
    if not isinstance(value, torch.Tensor) or not isinstance(value.storage_offset(), int) or value.storage_offset():
        return None
    try:
        return _layout(node.name, value, symbols)
    except NotPlainError:
        return None


def _restore(body: dict[str, Any], ctx: PassContext) -> fx.GraphModule:
    ctx.tables = {name: fx.GraphModule(torch.nn.Module(), from_data(data)) for name, data in body["tables"].items()}
    ctx.num_heads = body["num_heads"]
    ctx.kv_shape = KvShape(**body["kv_shape"])
    return _restore_graph(body, ctx)


def _restore_graph(body: dict[str, Any], ctx: PassContext) -> fx.GraphModule:
    gm = fx.GraphModule(torch.nn.Module(), from_data(body["nodes"]))
    ctx.weights = {name: tuple(sources) for name, sources in body["weights"].items()}
    ctx.num_positions = body["num_positions"]
    ctx.fake_mode = FakeTensorMode(shape_env=ShapeEnv())
    sizes = {name: _open_size(name, rows, ctx.fake_mode) for name, rows in _ROWS.items()}
    ctx.row_symbol = sizes["T"].node.expr
    calls = [n for n in gm.graph.nodes if n.op in _CALLS]
    layouts = dict(zip(calls, body["values"], strict=True))
    layouts |= {n: body["inputs"][n.name] for n in gm.graph.nodes if n.op == "placeholder"}
    made: dict[str, Any] = {}  # one object for each layout, as the passes share them
    with ctx.fake_mode:
        for layout in layouts.values():
            if repr(layout) not in made:
                made[repr(layout)] = None if layout is None else _value(layout, sizes)
    known = {node: made[repr(layout)] for node, layout in layouts.items() if layout is not None}
    for node, value in known.items():
        node.meta["example_value"] = value
    refresh_values(gm, ctx, known)
    return gm


def _open_size(name: str, rows: int, fake_mode: FakeTensorMode) -> Any:
    """A symbolic number of rows, made the way Dynamo makes one for an input."""
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC], constraint_sizes=[None])
    example = fake_mode.from_tensor(torch.empty(rows), symbolic_context=context, source=ConstantSource(name))
    return example.shape[0]


def _value(layout: Any, sizes: dict[str, Any]) -> Any:
    if isinstance(layout, int):
        return layout
    shape, stride, dtype, device = layout
    found = getattr(torch, dtype)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{dtype} is no dtype")
    shape, stride = ([s if isinstance(s, int) else sizes[s[0]] * s[1] for s in numbers] for numbers in (shape, stride))
    return torch.empty_strided(shape, stride, dtype=found, device=device)
