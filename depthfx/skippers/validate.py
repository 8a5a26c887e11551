"""Whether a skipper keeps its contract: every policy and projector is run on random rows before it is compiled into a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from depthfx.contracts import ACTIONS, Decision, Policy, Projector, Rows, Skipper
from depthfx.errors import SkipperError
from depthfx.skippers.model_shape import check_layers
from depthfx.skippers.trace_alone import trace_alone

ROW_COUNTS = (17, 3, 1)  # most first: on one row a random policy often gives one answer twice, and would be blamed for something else
# Largest |a - b| / (1 + max |b|) of a row's weight or update in another order of rows: a matrix product may add up in another order.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
MAX_FLIPS = 2  # rows of 17 whose action may differ between alone and together
# What code that was not written for these rows raises.
_FAULTS = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError)


def validate(skipper: Skipper, hidden_size: int, num_layers: int, dtype: torch.dtype, device: torch.device) -> None:
    """Run every policy and projector of ``skipper`` on random rows ``[1, 3 and 17, hidden_size]`` of ``dtype`` on ``device``.

    Raises :class:`SkipperError`, with a reason, for a routed layer that the model of ``num_layers`` lacks; wrong shapes, dtypes or devices;
    actions that are none; a weight that is missing under the gate `mlp`, outside [0, 1] or NaN; an update that is not finite; results
    that differ between two runs, with the order or with the number of rows; state that changes; or a value that is read by the host.
    """
    check_layers(skipper.layers, num_layers)
    if dtype not in TOLERANCE:
        raise SkipperError(f"a skipper cannot run in {dtype}; allowed: {', '.join(map(str, TOLERANCE))}")
    check_traces(skipper, hidden_size, dtype, device)
    with torch.no_grad():
        for place, layer in enumerate(skipper.layers):
            _check_policy(skipper, place, f"policy {type(skipper.policies[place]).__name__} of layer {layer}", hidden_size, dtype, device)
            _check_projector(skipper.projectors[place], f"projector {type(skipper.projectors[place]).__name__} of layer {layer}",
                             hidden_size, dtype, device)  # fmt: skip


def check_traces(skipper: Skipper, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """The cheap part of :func:`validate`: shapes, dtypes, devices and host reads, without computing anything.

    Raises :class:`SkipperError`.
    """
    for place, layer in enumerate(skipper.layers):
        policy, projector = skipper.policies[place], skipper.projectors[place]
        rows = random_rows(5, place, len(skipper.layers), hidden_size, dtype, torch.device("cpu"))
        who = f"policy {type(policy).__name__} of layer {layer}"
        decision = trace_alone(policy, (rows,), device, who)
        _check_decision_form(decision, skipper.gate, 5, device, who)
        who = f"projector {type(projector).__name__} of layer {layer}"
        _check_update_form(trace_alone(projector, (rows.hidden, rows.normed), device, who), rows.hidden, device, who)


def random_rows(count: int, place: int, num_places: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> Rows:
    """``count`` rows of several requests, prompts and decodes, the same numbers for the same arguments on every device."""
    cpu = torch.device("cpu")  # said everywhere: a caller may have set another default device
    g = torch.Generator().manual_seed(7919 * place + count)

    def flags() -> torch.Tensor:
        return torch.rand(count, generator=g, device=cpu) < 0.5

    far = torch.randint(0, 128, (count,), generator=g, device=cpu)
    return Rows(
        hidden=torch.randn(count, hidden_size, generator=g, device=cpu).to(device, dtype),
        normed=torch.randn(count, hidden_size, generator=g, device=cpu).to(device, dtype),
        request_ids=torch.randint(0, 2**31, (count,), generator=g, device=cpu).to(device),
        positions=torch.where(flags(), torch.randint(0, 4, (count,), generator=g, device=cpu), far).to(device),  # first ones count
        is_prompt=flags().to(device),
        ran=(flags() if place else torch.ones(count, dtype=torch.bool, device=cpu)).to(device),
        place=place,
        num_places=num_places,
    )


def take_rows(rows: Rows, index: torch.Tensor) -> Rows:
    """The rows ``index`` [N] int64 of ``rows``, in that order."""
    names = ("hidden", "normed", "request_ids", "positions", "is_prompt", "ran")
    return replace(rows, **{name: getattr(rows, name)[index] for name in names})


def _check_policy(skipper: Skipper, place: int, who: str, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
    policy: Policy = skipper.policies[place]  # type: ignore[assignment]

    def decide(rows: Rows) -> Decision:
        decision = _guarded(policy, (rows,), who)
        _check_decision_form(decision, skipper.gate, rows.hidden.shape[0], device, who)
        return decision

    for count in ROW_COUNTS:
        rows = random_rows(count, place, len(skipper.layers), hidden_size, dtype, device)
        where = f"{who} on {count} rows"
        first, second = decide(rows), decide(rows)
        _check_decision_values(first, where)
        if not torch.equal(first.actions, second.actions) or _differs(first.weight, second.weight):
            raise SkipperError(f"{where}: two runs on the same rows differ; a policy may use no random numbers and keep no state")
        for order in _orders(count, device):
            moved = decide(take_rows(rows, order))
            if not torch.equal(moved.actions, first.actions[order]):
                raise SkipperError(f"{where}: the actions change with the order of the rows; a row's action may depend on that row alone")
            _check_close(moved.weight, None if first.weight is None else first.weight[order], dtype, f"{where}: the weights", "order")
    _check_alone(decide, random_rows(ROW_COUNTS[0], place, len(skipper.layers), hidden_size, dtype, device), dtype, who)


def _check_alone(decide: Callable[[Rows], Decision], rows: Rows, dtype: torch.dtype, who: str) -> None:
    """Each row by itself against the same row among the others."""
    among = decide(rows)
    alone = [decide(take_rows(rows, index)) for index in torch.arange(len(rows.positions), device=rows.positions.device).split(1)]
    weights = [d.weight for d in alone if d.weight is not None]
    whole = torch.cat(weights) if len(weights) == len(alone) else None
    _check_close(whole, among.weight, dtype, f"{who}: the weights", "number")
    # A product of another size may round differently, so that a row close to a threshold flips; many rows do not.
    if int((torch.cat([d.actions for d in alone]) != among.actions).sum()) > MAX_FLIPS:
        raise SkipperError(f"{who}: the actions change with the number of rows; a row's action may depend on that row alone")


def _check_projector(projector: nn.Module, who: str, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
    assert isinstance(projector, Projector)

    def project(rows: Rows) -> torch.Tensor | None:
        update = _guarded(projector, (rows.hidden, rows.normed), who)
        _check_update_form(update, rows.hidden, device, who)
        return update

    for count in ROW_COUNTS:
        rows = random_rows(count, 0, 1, hidden_size, dtype, device)
        where = f"{who} on {count} rows"
        first, second = project(rows), project(rows)
        if first is not None and not bool(first.isfinite().all()):
            raise SkipperError(f"{where}: the update holds NaN or infinity for hidden states of size one; check its weights")
        if _differs(first, second):
            raise SkipperError(f"{where}: two runs on the same rows differ; a projector may use no random numbers and keep no state")
        for order in _orders(count, device):
            moved = project(take_rows(rows, order))
            _check_close(moved, None if first is None else first[order], dtype, f"{where}: the updates", "order")
    few, many = torch.arange(3, device=device), random_rows(ROW_COUNTS[0], 0, 1, hidden_size, dtype, device)
    alone, among = project(take_rows(many, few)), project(many)
    _check_close(alone, None if among is None else among[few], dtype, f"{who}: the updates", "number")


def _orders(count: int, device: torch.device) -> Iterator[torch.Tensor]:
    yield torch.arange(count - 1, -1, -1, device=device)
    yield torch.randperm(count, generator=torch.Generator().manual_seed(count), device="cpu").to(device)


def _guarded(module: nn.Module, args: tuple[Any, ...], who: str) -> Any:
    """The module's result; what it raises becomes a :class:`SkipperError`, and so does a tensor of its own or of the rows that it changes."""
    watched = [*module.parameters(), *module.buffers(), *_tensors(args)]
    before = [_version(t) for t in watched]
    result = _call(module, args, who)
    if before != [_version(t) for t in watched]:
        raise SkipperError(f"{who} writes into a tensor of its own or of its rows; compute new tensors, and keep no state")
    return result


def _call(module: nn.Module, args: tuple[Any, ...], who: str) -> Any:
    try:
        return module(*args)
    except _FAULTS as error:
        raise SkipperError(f"{who} fails on random rows: {_first_line(error)}") from error


def _tensors(args: tuple[Any, ...]) -> list[torch.Tensor]:
    values = [v for a in args for v in (vars(a).values() if isinstance(a, Rows) else (a,))]
    return [v for v in values if isinstance(v, torch.Tensor)]


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _check_decision_form(decision: Any, gate: str, count: int, device: torch.device, who: str) -> None:
    if not isinstance(decision, Decision):
        raise SkipperError(f"{who} returns {type(decision).__name__}; return a Decision(actions, weight)")
    actions, weight = decision.actions, decision.weight
    _check_vector(actions, "actions", count, device, who)
    if actions.dtype.is_floating_point or actions.dtype.is_complex:
        raise SkipperError(f"{who}: actions are {actions.dtype}; allowed: bool or an integer dtype")
    if weight is None:
        if gate == "mlp":
            raise SkipperError(
                f"{who} gives no weight, which the gate mlp multiplies with; return Decision(actions, weight), or use gate='hard'"
            )
        return
    _check_vector(weight, "weight", count, device, who)
    if not weight.dtype.is_floating_point:
        raise SkipperError(f"{who}: weight is {weight.dtype}; a floating dtype is needed")


def _check_vector(found: Any, what: str, count: int, device: torch.device, who: str) -> None:
    if not isinstance(found, torch.Tensor):
        raise SkipperError(f"{who}: {what} is a {type(found).__name__}; a tensor [T] is needed")
    if tuple(found.shape) != (count,):
        raise SkipperError(f"{who}: {what} has shape {list(found.shape)} for {count} rows; expected [{count}]")
    _check_device(found, what, device, who)


def _check_device(found: torch.Tensor, what: str, device: torch.device, who: str) -> None:
    if found.device.type != device.type:
        raise SkipperError(
            f"{who}: {what} is on {found.device}, the rows are on {device}; keep tensors in buffers and make new ones like a row's"
        )


def _check_decision_values(decision: Decision, where: str) -> None:
    actions, weight = decision.actions, decision.weight
    strangers = sorted({int(a) for a in actions.unique()} - set(ACTIONS))
    if strangers:
        raise SkipperError(f"{where}: actions {strangers} are not allowed; allowed: 0 (PROJECT_ONLY) and 1 (RUN)")
    if weight is not None and not bool(((weight >= 0) & (weight <= 1)).all()):
        raise SkipperError(
            f"{where}: weights from {float(weight.min()):g} to {float(weight.max()):g} are not allowed; allowed: 0 to 1, no NaN"
        )


def _check_update_form(update: Any, hidden: torch.Tensor, device: torch.device, who: str) -> None:
    if update is None:
        return
    if not isinstance(update, torch.Tensor):
        raise SkipperError(f"{who} returns {type(update).__name__}; return a tensor [T, H], or None where nothing is added")
    if update.shape != hidden.shape or update.dtype != hidden.dtype:
        raise SkipperError(f"{who}: the update is {list(update.shape)} {update.dtype}; expected {list(hidden.shape)} {hidden.dtype}")
    _check_device(update, "the update", device, who)


def _differs(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is not b
    return not torch.equal(a, b)


def _check_close(found: torch.Tensor | None, expected: torch.Tensor | None, dtype: torch.dtype, what: str, with_what: str) -> None:
    advice = f"{what} change with the {with_what} of rows; what a row gets may depend on that row alone"
    if found is None or expected is None:
        if found is not expected:
            raise SkipperError(advice)
        return
    scale = 1 + float(expected.abs().max())
    error = float((found.double() - expected.double()).abs().max())
    if not error <= TOLERANCE[dtype] * scale:
        raise SkipperError(f"{advice} (difference {error:.3g})")


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no text'}"
