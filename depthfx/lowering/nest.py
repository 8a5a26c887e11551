"""Weights to their stored form and back: format by content, two bytes for each weight, columns in fragment order.

The formats split and join in plain order; here the order of columns is applied and undone. Rows are worked on a slice at a
time, so that the temporaries of a large weight stay small.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from depthfx.errors import FormatError
from depthfx.lowering.fragment_order import from_fragment_order, to_fragment_order
from depthfx.lowering.nested_format import FORMATS, NestedFormat, NestedWeight, to_float16

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Elements of a slice. Splitting holds about 30 bytes of temporaries for each: 480 MiB on a GPU. On a CPU they stay in its caches, and
# torch runs so few elements on one thread, which is faster than waiting for the others after every operation.
_SLICE = {"cuda": 16 << 20, "cpu": 32 << 10}


def nest(weight: torch.Tensor, first: str | None = None) -> NestedWeight:
    """``weight`` ``[N, K]`` float16, bfloat16 or float32 in stored order: the preferred format that covers its float16 cast.

    ``first`` names a format to take where it covers the weight, whatever the preference.

    Bytes are in fragment order where K is a multiple of 64. ``plain16`` (what no FP8 format covers) keeps plain order and a
    bfloat16 weight its dtype. Raises :class:`FormatError` for other tensors, and for float32 beyond FP16 (finite values above 65,504).
    """
    return nest_counted(weight, first)[0]


@torch.no_grad()
def nest_counted(weight: torch.Tensor, first: str | None = None) -> tuple[NestedWeight, int]:
    """:func:`nest`, and how many elements the cast to float16 changed (0: :func:`unnest` gives back every bit)."""
    if weight.dim() != 2 or weight.dtype not in DTYPES:
        raise FormatError(f"a weight to nest must be [N, K] in float16, bfloat16 or float32; got {list(weight.shape)} {weight.dtype}")
    form = _choose(weight, first)
    if form.fp8 is None:
        return _keep(weight)
    upper = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    lower = torch.empty_like(upper)
    shifts, changed = [], 0
    for rows in _slices(weight):
        cast, count = _to_float16(weight[rows])
        part = form.split(cast)
        assert part.lower is not None
        upper[rows], lower[rows] = to_fragment_order(part.upper), to_fragment_order(part.lower)
        changed += count
        if part.shift is not None:
            shifts.append(part.shift)
    return NestedWeight(form.name, upper, lower, torch.cat(shifts) if shifts else None), changed


@torch.no_grad()
def unnest(nested: NestedWeight, dtype: torch.dtype) -> torch.Tensor:
    """The weight ``[N, K]`` in ``dtype`` and plain order: every bit of the float16 weight, widened or cast."""
    if nested.lower is None:
        return nested.upper.to(dtype)
    form = FORMATS.get(nested.format)
    out = torch.empty(nested.upper.shape, dtype=dtype, device=nested.upper.device)
    for rows in _slices(out):
        shift = None if nested.shift is None else nested.shift[rows]
        out[rows] = form.join(
            NestedWeight(nested.format, from_fragment_order(nested.upper[rows]), from_fragment_order(nested.lower[rows]), shift)
        )
    return out


@torch.no_grad()
def concatenate(parts: Sequence[NestedWeight]) -> NestedWeight:
    """The rows of ``parts`` (each ``[N_i, K]`` in stored order, on one device) one below the other, in one format.

    Bytes are joined as they are where the formats allow it: the same one, or `nested_e4m3` with `nested_e4m3_scaled` (rows of the first
    get a shift of 0). Other mixtures are nested anew from the joined weight. Raises :class:`FormatError` for different K.
    """
    widths = {p.upper.shape[1] for p in parts}
    if len(widths) != 1:
        raise FormatError(f"weights to concatenate need one number of columns; got {sorted(widths) or 'no weight'}")
    if len(parts) == 1:
        return parts[0]
    names = {p.format for p in parts}
    if len(names) == 1 and len({p.upper.dtype for p in parts}) == 1:
        (name,) = names
        return NestedWeight(
            name, torch.cat([p.upper for p in parts]), _cat_or_none([p.lower for p in parts]), _cat_or_none([p.shift for p in parts])
        )
    if names == {"nested_e4m3", "nested_e4m3_scaled"}:
        shift = torch.cat([_shift_of(p) for p in parts])
        return NestedWeight("nested_e4m3_scaled", torch.cat([p.upper for p in parts]), _cat_or_none([p.lower for p in parts]), shift)
    dtype = torch.bfloat16 if any(p.upper.dtype is torch.bfloat16 for p in parts) else torch.float16
    return nest(torch.cat([unnest(p, dtype) for p in parts]))


@torch.no_grad()
def fast_error_of(nested: NestedWeight) -> float:
    """Relative error of fast mode: the norm of what the persistent bytes miss over the norm of the joined weight."""
    if nested.lower is None:
        return 0.0
    form = FORMATS.get(nested.format)
    missed = norm = 0.0
    for rows in _slices(nested.upper):
        shift = None if nested.shift is None else nested.shift[rows]
        part = NestedWeight(nested.format, nested.upper[rows], nested.lower[rows], shift)
        exact = form.join(part).float()
        norm += float(exact.square().sum(dtype=torch.float64))
        missed += float((form.fast_values(part) - exact).square().sum(dtype=torch.float64))
    return (missed / norm) ** 0.5 if norm else 0.0


def split_rows(nested: NestedWeight, counts: Sequence[int]) -> list[NestedWeight]:
    """``nested`` ``[N, K]`` as weights of ``counts`` rows each (their sum is N), one after the other; they share its memory."""
    if sum(counts) != nested.upper.shape[0]:
        raise FormatError(f"rows {list(counts)} do not add up to the {nested.upper.shape[0]} rows of the weight")
    uppers = nested.upper.split(list(counts))
    lowers = nested.lower.split(list(counts)) if nested.lower is not None else [None] * len(counts)
    shifts = nested.shift.split(list(counts)) if nested.shift is not None else [None] * len(counts)
    return [NestedWeight(nested.format, *parts) for parts in zip(uppers, lowers, shifts, strict=True)]


def rule() -> str:
    """How formats are chosen, as text."""
    names = [f.name for f in sorted((f for _, f in FORMATS.items()), key=lambda f: f.preference)]
    return f"the first format that holds every value of a weight: {', '.join(names)}"


def _choose(weight: torch.Tensor, first: str | None) -> NestedFormat:
    """The preferred format that covers every slice of rows; formats treat rows independently."""
    for form in sorted((f for _, f in FORMATS.items()), key=lambda f: (f.name != first, f.preference)):
        if all(form.covers(weight[rows].to(torch.float16)) for rows in _slices(weight)):
            return form
    raise FormatError(f"no nested format covers this weight of shape {list(weight.shape)}; known: {', '.join(FORMATS.names())}")


def _keep(weight: torch.Tensor) -> tuple[NestedWeight, int]:
    """``plain16``: a 16-bit weight as it is, a float32 one as float16."""
    if weight.dtype is not torch.float32:
        return NestedWeight("plain16", weight.detach().contiguous(), None), 0
    kept = torch.empty(weight.shape, dtype=torch.float16, device=weight.device)
    changed = 0
    for rows in _slices(weight):
        kept[rows], count = to_float16(weight[rows])
        changed += count
        if bool((kept[rows].isinf() & weight[rows].isfinite()).any()):
            largest = float(weight[rows].abs().nan_to_num(0.0, posinf=0.0).max())
            raise FormatError(
                f"a float32 weight of {largest:g} is beyond FP16 (at most 65,504); keep this weight in float32, or use bfloat16"
            )
    return NestedWeight("plain16", kept, None), changed


def _to_float16(weight: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (weight, 0) if weight.dtype is torch.float16 else to_float16(weight)


def _slices(weight: torch.Tensor) -> Iterator[slice]:
    if torch.compiler.is_compiling():  # a graph would hold every slice, and fused kernels hold no temporaries
        return iter((slice(0, weight.shape[0]),))
    step = max(1, _SLICE.get(weight.device.type, _SLICE["cpu"]) // max(1, weight.shape[1]))
    return (slice(start, start + step) for start in range(0, weight.shape[0], step))


def _shift_of(part: NestedWeight) -> torch.Tensor:
    return part.shift if part.shift is not None else part.upper.new_zeros(part.upper.shape[0], dtype=torch.int8)


def _cat_or_none(tensors: list[torch.Tensor | None]) -> torch.Tensor | None:
    present = [t for t in tensors if t is not None]
    return torch.cat(present) if present else None
