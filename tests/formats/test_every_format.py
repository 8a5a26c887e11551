"""Every nested format over all FP16 codes in its range: exact round trip, the FP8 byte against an independent rounding."""

from __future__ import annotations

import functools

import pytest
import torch

from depthfx.errors import FormatError, RegistryError
from depthfx.lowering.formats.nested_e4m3_scaled import row_shifts
from depthfx.lowering.nested_format import FORMATS, NestedFormat, choose_format, fast_error, to_float16

ALL = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.float16)[:, None]  # [65536, 1]: a row for each code
NESTED = [name for name, f in FORMATS.items() if f.fp8 is not None]


@functools.cache
def covered(form: NestedFormat) -> torch.Tensor:
    """The codes that the format covers, one row each."""
    return torch.stack([row for row in ALL.split(1) if form.covers(row)]).squeeze(1)


def bits(weight: torch.Tensor) -> torch.Tensor:
    return weight.contiguous().view(torch.int16)


def test_the_folder_holds_the_formats():
    assert FORMATS.names() == ["nested_e4m3", "nested_e4m3_scaled", "nested_e5m2", "plain16"]
    with pytest.raises(RegistryError, match="registered already"):
        FORMATS.add("plain16", FORMATS.get("plain16"))


# Codes of both signs below 1.875, below 61,440, and all of them. Scaled alone: finite codes that survive the division of their own row.
@pytest.mark.parametrize(("name", "count"), [("nested_e4m3", 32512), ("nested_e5m2", 63232), ("plain16", 65536)])
def test_range(name, count):
    expected = {"nested_e4m3": (ALL.abs() < 1.875), "nested_e5m2": (ALL.abs() < 61440), "plain16": torch.ones_like(ALL, dtype=torch.bool)}[
        name
    ]
    codes = covered(FORMATS.get(name))
    assert len(codes) == int(expected.sum()) == count


@pytest.mark.parametrize("name", FORMATS.names())
def test_round_trip_is_exact_over_the_whole_range(name):
    form = FORMATS.get(name)
    codes = covered(form)
    nested = form.split(codes)
    assert nested.format == name
    assert torch.equal(bits(form.join(nested)), bits(codes))
    if nested.lower is not None:
        assert nested.upper.dtype is nested.lower.dtype is torch.uint8
        assert (nested.persistent_bytes, nested.residual_bytes) == (len(codes) * (2 if nested.shift is not None else 1), len(codes))


def test_e5m2_joins_every_code_even_nan():
    form = FORMATS.get("nested_e5m2")
    assert torch.equal(bits(form.join(form.split_any(ALL))), bits(ALL))


def nearest(values: torch.Tensor, table: torch.Tensor, ties: str) -> torch.Tensor:
    """Round ``values`` to the sorted ``table`` in float64; a tie goes to the even position or away from zero."""
    at = torch.searchsorted(table, values).clamp(1, len(table) - 1)
    low, high = table[at - 1], table[at]
    down, up = values - low, high - values
    pick_up = (up < down) | ((up == down) & ((at % 2 == 0) if ties == "even" else torch.ones_like(at, dtype=torch.bool)))
    return torch.where(pick_up, high, low)


@pytest.mark.parametrize(("name", "scale", "ties"), [("nested_e4m3", 256.0, "even"), ("nested_e5m2", 1.0, "away")])
def test_the_upper_byte_is_the_nearest_fp8_number(name, scale, ties):
    form = FORMATS.get(name)
    magnitudes = covered(form).double().abs().flatten()
    top = 0x7F if name == "nested_e4m3" else 0x7C  # NaN, infinity: not in the table, so values beyond it saturate
    table = torch.arange(top, dtype=torch.uint8).view(form.fp8).double()
    fast = form.fast_values(form.split(magnitudes.to(torch.float16)[:, None])).double().flatten() * scale
    assert bool(fast.isfinite().all())
    assert torch.equal(fast, nearest((magnitudes * scale).clamp(max=float(table[-1])), table, ties))


@pytest.mark.parametrize("name", NESTED)
def test_signs_mirror(name):
    form = FORMATS.get(name)
    codes = covered(form)
    assert torch.equal(form.fast_values(form.split(-codes)), -form.fast_values(form.split(codes)))


def test_guard_keeps_nan_out_of_fast_mode():
    form = FORMATS.get("nested_e4m3")
    edge = ALL[(ALL.abs() >= 1.75) & (ALL.abs() < 1.875)][:, None]
    nested = form.split(edge)
    assert set((nested.upper & 0x7F).flatten().tolist()) == {0x7E}
    assert torch.equal(form.fast_values(nested).abs(), torch.full_like(edge, 1.75).float())


def test_scaled_rows_use_the_smallest_shift():
    weight = torch.tensor([[0.5, 1.8740234375], [1.875, 0.25], [3.75, 1.0], [9.25, -0.125], [0.0, 0.0]], dtype=torch.float16)
    assert row_shifts(weight).tolist() == [0, 1, 2, 3, 0]
    form = FORMATS.get("nested_e4m3_scaled")
    assert torch.equal(form.join(form.split(weight)), weight)
    assert fast_error(weight, form.split(weight)) < 0.04


def test_scaled_refuses_a_shift_that_loses_bits():
    weight = torch.tensor([[4.0, 2.0**-24]], dtype=torch.float16)  # the small one is FP16's last subnormal
    form = FORMATS.get("nested_e4m3_scaled")
    assert not form.covers(weight)
    with pytest.raises(FormatError, match=r"nested_e4m3_scaled cannot hold .*largest magnitude is 4 .*choose_format"):
        form.split(weight)
    assert choose_format(weight).name == "nested_e5m2"


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ([[0.02, -1.5]], "nested_e4m3"), ([[1.875, 1.0]], "nested_e4m3_scaled"), ([[100.0, 2.0**-24]], "nested_e5m2"),
        ([[61440.0, 1.0]], "nested_e4m3_scaled"), ([[61440.0, 2.0**-24]], "plain16"), ([[float("inf"), 1.0]], "plain16"), ([[float("nan"), 1.0]], "plain16"),
    ],
)  # fmt: skip
def test_choice_by_content(values, name):
    assert choose_format(torch.tensor(values, dtype=torch.float16)).name == name


def test_choice_refuses_other_tensors():
    for wrong in (torch.ones(2, 2), torch.ones(2, dtype=torch.float16)):
        with pytest.raises(FormatError, match=r"must be \[N, K\] float16"):
            choose_format(wrong)


def test_odd_shapes_and_strides():
    torch.manual_seed(0)
    weight = (torch.randn(37, 3, 5) * 0.02).to(torch.float16)[:, 1].t()  # [5, 37], not contiguous
    for name in NESTED:
        form = FORMATS.get(name)
        assert torch.equal(form.join(form.split(weight)), weight)
    empty = torch.empty(3, 0, dtype=torch.float16)
    assert all(FORMATS.get(n).join(FORMATS.get(n).split(empty)).shape == (3, 0) for n in FORMATS.names())


def test_bf16_changes_are_counted():
    codes = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    exact = codes[(codes.float().abs() >= 2.0**-17) & (codes.float().abs() <= 65504)]
    assert to_float16(exact)[1] == 0
    assert to_float16(torch.tensor([2.0**-25, 1.0, 70000.0, 0.0], dtype=torch.bfloat16))[1] == 2


def test_fast_errors_are_those_of_eight_bits():
    torch.manual_seed(0)
    weight = (torch.randn(256, 256) * 0.02).to(torch.float16)
    errors = {name: fast_error(weight, FORMATS.get(name).split(weight)) for name in FORMATS.names()}
    # 31.5 dB and 25.6 dB of signal to noise on normal weights
    assert errors["nested_e4m3"] == pytest.approx(10 ** (-31.5 / 20), rel=0.03)
    assert errors["nested_e5m2"] == pytest.approx(10 ** (-25.6 / 20), rel=0.03)
    assert errors["plain16"] == 0.0 and errors["nested_e4m3_scaled"] == errors["nested_e4m3"]
