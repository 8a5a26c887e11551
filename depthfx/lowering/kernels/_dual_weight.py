"""What the dual-precision ops share: stored bytes back to numbers in plain PyTorch, the precision of a call, test cases.

A stored weight is ``upper`` and ``lower`` [N, K] uint8 in fragment order (`depthfx.lowering.fragment_order`) and, for rows that were
divided by a power of two, ``shift`` [N] int8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from depthfx.errors import FormatError
from depthfx.lowering import native, native_stored
from depthfx.lowering.fragment_order import from_fragment_order, to_fragment_order
from depthfx.lowering.kernels._cases import BF16, DOT_TOLERANCE, F16, F32, randn
from depthfx.lowering.nested_format import FORMATS, NestedFormat, NestedWeight

# How the kernels know the formats: the coding of a byte pair, and whether rows carry a shift.
E4M3, E5M2 = 1, 2
CODINGS = {"nested_e4m3": E4M3, "nested_e4m3_scaled": E4M3, "nested_e5m2": E5M2}


def coding_of(name: str, shift: torch.Tensor | None) -> int:
    """:data:`E4M3` or :data:`E5M2`; :class:`FormatError` for a format without two bytes, or a shift that does not belong to it."""
    if name not in CODINGS:
        raise FormatError(f"format {name!r} has no dual-precision product; allowed: {', '.join(CODINGS)}; keep such a weight 16-bit")
    if (shift is not None) != (name == "nested_e4m3_scaled"):
        given = "no shift" if shift is None else f"a shift of shape {tuple(shift.shape)}"
        raise FormatError(f"format {name!r} came with {given}; pass the shift that its split returned, and None for other formats")
    return CODINGS[name]


def check_stored(upper: torch.Tensor, lower: torch.Tensor) -> None:
    """``ValueError`` unless both planes are contiguous [N, K] uint8 of one shape, which the kernels take for granted."""
    for plane, t in (("upper", upper), ("lower", lower)):
        if t.dtype is not torch.uint8 or t.shape != upper.shape or t.dim() != 2 or not t.is_contiguous():
            raise ValueError(
                f"the {plane} bytes are {t.dtype} of shape {list(t.shape)} and strides {t.stride()}; both planes of a stored weight must "
                f"be contiguous [N, K] uint8 (upper is {list(upper.shape)}): store them with to_fragment_order(...).contiguous()"
            )


def is_full(layer_precision: torch.Tensor, layer: int, precision: int) -> bool:
    """Whether ``layer`` runs in full precision; without a hint (``precision`` -1) this reads the device's flag and waits for it."""
    if precision not in (-1, 0, 1):
        raise ValueError(f"precision {precision} is not known; allowed: 1 (all layers full), 0 (all fast), -1 (ask the flags)")
    return bool(layer_precision[layer] != 0) if precision < 0 else precision == 1


def plain_weight(upper: torch.Tensor, lower: torch.Tensor, shift: torch.Tensor | None, name: str, full: bool) -> torch.Tensor:
    """The weight [N, K] in plain order by the format's own functions: joined float16, or the float32 values of fast mode."""
    coding_of(name, shift)
    nested = NestedWeight(name, from_fragment_order(upper), from_fragment_order(lower), shift)
    form: NestedFormat = FORMATS.get(name)
    return form.join(nested) if full else form.fast_values(nested)


def powers_of_two(shift: torch.Tensor, less: int = 0) -> torch.Tensor:
    """``2^(shift - less)`` in float32, exact, for ``shift`` [N] int8."""
    return (shift.to(torch.int32).add_(127 - less) << 23).view(torch.float32)


def takes_native(upper: torch.Tensor, lower: torch.Tensor, shift: torch.Tensor | None, x: torch.Tensor | None = None) -> bool:
    """Whether the native CPU kernels read these bytes and, if ``x`` [M, K] is given, have a product for its rows."""
    planes = upper.is_cpu and upper.is_contiguous() and lower.is_contiguous() and (shift is None or shift.is_contiguous())
    return planes and (x is None or x.shape[0] <= native.MAX_ROWS) and native.usable(x)


def joined_weight(
    upper: torch.Tensor, lower: torch.Tensor, shift: torch.Tensor | None, name: str, full: bool, dtype: torch.dtype
) -> torch.Tensor:
    """The same numbers in ``dtype``, columns in plain order, with few passes over the bytes.

    In plain order, so that the sums of a product run as over a 16-bit weight: full precision has the same bits as the dense path.
    """
    if dtype is torch.float32 and takes_native(upper, lower, shift):
        return native_stored.join_weight(upper, lower, shift, coding_of(name, shift), full)
    coding, code = coding_of(name, shift), upper.to(torch.int16)
    if coding == E4M3:
        sign = (code & 0x80).bitwise_left_shift_(8)
        code.bitwise_and_(0x7F)
    if full:
        low = lower.view(torch.int8).to(torch.int16)  # negative where its first bit is set
        if coding == E4M3:
            code.add_(low >> 7).bitwise_right_shift_(1).bitwise_left_shift_(8).add_(low.bitwise_and_(0xFF))
        else:
            code.bitwise_left_shift_(8).add_(low)
    else:
        code.bitwise_left_shift_(7 if coding == E4M3 else 8)  # an E4M3 number has 2^-8 times its value in these bits
    weight = from_fragment_order((code.bitwise_or_(sign) if coding == E4M3 else code).view(torch.float16))
    if shift is None:
        return weight.to(dtype)
    return weight.float().mul_(powers_of_two(shift)[:, None]).to(dtype)


# A scaled row has a weight of up to 48, and a gate multiplies two such sums.
DUAL_TOLERANCE = {**DOT_TOLERANCE, F32: 1e-4}
# Many rows in fast precision: on compute capability 9 the activations are FP8 too.
FP8_TOLERANCE = {F32: 2e-5, F16: 0.3, BF16: 0.3}
FP8_REASON = (
    "activations rounded to three bits are off by 2.6 % (rms), the largest of some 20,000 outputs by five times that; the FP8 tensor "
    "cores keep sums in about 13 bits, and a gated output is the product of two such sums"
)

# Cases: rows, outputs, inputs, format, the flag of layer 1 of three (the others have the opposite one) and the hint.
DualShape = tuple[int, int, int, str, int, int]
SHAPES: tuple[DualShape, ...] = (
    (1, 66, 576, "nested_e4m3", 1, -1),
    (1, 66, 576, "nested_e4m3", 0, -1),
    (2, 34, 200, "nested_e5m2", 1, 1),
    (2, 34, 200, "nested_e4m3_scaled", 0, 0),
    (3, 128, 1024, "nested_e4m3_scaled", 1, -1),
    (3, 128, 1024, "nested_e5m2", 0, -1),
    (17, 70, 200, "nested_e4m3", 1, -1),
    (33, 64, 576, "nested_e5m2", 0, 0),
    (40, 64, 640, "nested_e4m3", 1, 1),
    (65, 48, 64, "nested_e4m3_scaled", 1, 1),
    (66, 48, 200, "nested_e5m2", 1, -1),
    (70, 66, 128, "nested_e4m3_scaled", 0, -1),
)


def shape_label(shape: DualShape, outputs: int) -> str:
    """``1x66x576-nested_e4m3-full-hint-1`` for example."""
    rows, _, inputs, name, flag, hint = shape
    return f"{rows}x{outputs}x{inputs}-{name}-{'full' if flag else 'fast'}-hint{hint}"


def draw_weight(g: torch.Generator, dtype: torch.dtype, outputs: int, inputs: int, name: str) -> NestedWeight:
    """A random weight that ``name`` covers and ``dtype`` holds exactly, split; the bytes are in stored order."""
    weight = (torch.randn(outputs, inputs, generator=g) * inputs**-0.5).to(dtype).to(torch.float16)
    if name == "nested_e4m3_scaled":
        weight = weight / 16  # rounds its smallest numbers; what follows keeps every bit
        weight[torch.arange(outputs), torch.randint(0, inputs, (outputs,), generator=g)] = 1.5  # else few rows need a shift
        weight = (weight * 2.0 ** torch.randint(0, 6, (outputs, 1), generator=g)).to(torch.float16)
    nested = FORMATS.get(name).split(weight)
    assert nested.lower is not None
    return replace(nested, upper=to_fragment_order(nested.upper).contiguous(), lower=to_fragment_order(nested.lower).contiguous())


def draw_inputs(shape: DualShape, extra: int = 0) -> Callable[[torch.Generator, torch.dtype], tuple]:
    """Makes ``x, upper, lower, shift, layer_precision, layer, precision, format`` of a case. In fast mode ``lower`` holds noise."""
    rows, outputs, inputs, name, flag, hint = shape

    def make(g: torch.Generator, dtype: torch.dtype) -> tuple:
        x = randn(g, dtype, rows, inputs + extra)[:, :inputs]
        nested = draw_weight(g, dtype, outputs, inputs, name)
        lower = nested.lower if flag else torch.randint(0, 256, (outputs, inputs), generator=g, dtype=torch.uint8)
        flags = torch.tensor([1 - flag, flag, 1 - flag], dtype=torch.int32)
        return x, nested.upper, lower, nested.shift, flags, 1, hint, name

    return make
