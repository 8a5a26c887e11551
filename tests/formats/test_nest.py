"""Weights to stored form and back: every bit, the order of columns, slices, joined parts."""

from __future__ import annotations

import pytest
import torch

from depthfx.errors import FormatError
from depthfx.lowering import nest as nesting
from depthfx.lowering.nest import concatenate, fast_error_of, nest, nest_counted, split_rows, unnest
from depthfx.lowering.nested_format import FORMATS, NestedWeight, fast_error

# A largest value for each format, and the smallest subnormal where the scaled format shall not do.
CONTENT = {"nested_e4m3": [1.5], "nested_e4m3_scaled": [9.25], "nested_e5m2": [100.0, 2.0**-24], "plain16": [float("inf")]}


def weight_for(name: str, rows: int = 6, columns: int = 128, seed: int = 0) -> torch.Tensor:
    """Normal float16 weights ``[rows, columns]`` whose content asks for the format ``name``."""
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(rows, columns, generator=generator) * 0.02).to(torch.float16)
    weight[1, : len(CONTENT[name])] = torch.tensor(CONTENT[name], dtype=torch.float16)
    return weight


def check_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    kind = torch.int16 if a.element_size() == 2 else torch.int32
    assert a.dtype is b.dtype and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def column_of(place: int) -> int:
    """The column at a stored place: within 64 columns, place c*16 + s*4 + h*2 + j holds column s*16 + h*8 + c*2 + j."""
    group, p = divmod(place, 64)
    c, s, h, j = p // 16, p // 4 % 4, p // 2 % 2, p % 2
    return group * 64 + s * 16 + h * 8 + c * 2 + j


@pytest.mark.parametrize("name", FORMATS.names())
@pytest.mark.parametrize("columns", [128, 96, 37])
def test_every_bit_comes_back(name, columns):
    weight = weight_for(name, columns=columns)
    nested, changed = nest_counted(weight)
    assert (nested.format, changed) == (name, 0)
    assert nested.upper.is_contiguous()
    check_bits(unnest(nested, torch.float16), weight)


@pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if f.fp8 is not None])
def test_bytes_are_stored_in_fragment_order(name):
    weight = weight_for(name)
    nested, plain = nest(weight), FORMATS.get(name).split(weight)
    columns = [column_of(p) for p in range(128)]
    assert sorted(columns) == list(range(128)) and columns != list(range(128))
    assert torch.equal(nested.upper, plain.upper[:, columns]) and torch.equal(nested.lower, plain.lower[:, columns])
    odd = weight_for(name, columns=96)
    assert torch.equal(nest(odd).upper, FORMATS.get(name).split(odd).upper)


@pytest.mark.parametrize("name", FORMATS.names())
def test_slices_do_not_show(name, monkeypatch):
    weight = weight_for(name, rows=11)
    whole = nest(weight)
    monkeypatch.setitem(nesting._SLICE, "cpu", 2 * 128)
    sliced = nest(weight)
    assert sliced.format == whole.format == name  # the row that decides is in the first slice only
    for a, b in ((whole.upper, sliced.upper), (whole.lower, sliced.lower), (whole.shift, sliced.shift)):
        assert (a is None and b is None) or torch.equal(a, b)
    check_bits(unnest(sliced, torch.float16), weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_dtypes_come_back_where_fp16_holds_them(dtype):
    weight = weight_for("nested_e4m3_scaled").to(torch.bfloat16).to(dtype)  # normal numbers with eight bits
    weight[weight.abs() < 2.0**-17] = 0
    nested, changed = nest_counted(weight)
    assert changed == 0
    check_bits(unnest(nested, dtype), weight)


@pytest.mark.parametrize("elements", [64, 1 << 20])
def test_changes_of_the_cast_are_counted(elements, monkeypatch):
    monkeypatch.setitem(nesting._SLICE, "cpu", elements)
    weight = torch.full((3, 64), 0.5)
    weight[0, :2], weight[2, 0] = 0.1, 1 / 3
    nested, changed = nest_counted(weight)
    assert changed == 3
    assert torch.equal(unnest(nested, torch.float32), weight.to(torch.float16).float())


def test_plain16_keeps_bfloat16_as_it_is():
    weight = torch.tensor([[1e38, 1e-30], [float("nan"), 1.0]], dtype=torch.bfloat16)
    nested, changed = nest_counted(weight)
    assert (nested.format, nested.lower, changed) == ("plain16", None, 0)
    check_bits(unnest(nested, torch.bfloat16), weight)


def test_refusals():
    for wrong in (torch.ones(4), torch.ones(2, 2, dtype=torch.float64), torch.ones(2, 2, dtype=torch.uint8)):
        with pytest.raises(FormatError, match=r"must be \[N, K\] in float16, bfloat16 or float32; got"):
            nest(wrong)
    with pytest.raises(FormatError, match=r"weight of 70000 is beyond FP16"):
        nest(torch.tensor([[70000.0, 1.0]]))
    with pytest.raises(FormatError, match=r"one number of columns; got \[64, 128\]"):
        concatenate([nest(torch.ones(2, 64)), nest(torch.ones(2, 128))])
    with pytest.raises(FormatError, match="no weight"):
        concatenate([])


def test_not_contiguous_and_empty():
    weight = weight_for("nested_e4m3_scaled", rows=128, columns=6).t()
    check_bits(unnest(nest(weight), torch.float16), weight)
    for shape in ((0, 64), (3, 0)):
        assert unnest(nest(torch.empty(shape)), torch.float16).shape == shape


@pytest.mark.parametrize("first", FORMATS.names())
@pytest.mark.parametrize("second", FORMATS.names())
def test_joined_rows_are_those_of_the_parts(first, second):
    a, b = weight_for(first, seed=1), weight_for(second, rows=4, seed=2)
    whole = concatenate([nest(a), nest(b)])
    check_bits(unnest(whole, torch.float16), torch.cat([a, b]))
    ranks = {name: f.preference for name, f in FORMATS.items()}
    assert ranks[whole.format] >= max(ranks[first], ranks[second])
    if whole.format == "nested_e4m3_scaled":
        assert whole.shift.shape == (10,) and whole.shift.dtype is torch.int8


def test_joining_does_not_transcode_where_bytes_fit(monkeypatch):
    a, b = nest(weight_for("nested_e4m3")), nest(weight_for("nested_e4m3_scaled"))
    monkeypatch.setattr(nesting, "unnest", None)
    whole = concatenate([a, b])
    assert whole.shift.tolist() == [0] * 6 + b.shift.tolist()
    assert torch.equal(whole.upper, torch.cat([a.upper, b.upper])) and torch.equal(whole.lower, torch.cat([a.lower, b.lower]))
    assert concatenate([a, a]).shift is None


def test_one_part_is_itself():
    part = nest(weight_for("nested_e4m3"))
    assert concatenate([part]) is part and isinstance(part, NestedWeight)


@pytest.mark.parametrize("name", FORMATS.names())
def test_rows_of_a_weight_share_its_memory(name):
    weight = weight_for(name)
    whole = nest(weight)
    parts = split_rows(whole, [4, 2])
    assert parts[0].upper.data_ptr() == whole.upper.data_ptr()
    for part, rows in zip(parts, weight.split([4, 2]), strict=True):
        check_bits(unnest(part, torch.float16), rows)
    with pytest.raises(FormatError, match=r"rows \[4, 1\] do not add up to the 6 rows"):
        split_rows(whole, [4, 1])


@pytest.mark.parametrize("name", FORMATS.names())
def test_error_of_the_stored_bytes(name, monkeypatch):
    weight = weight_for(name, rows=11)
    monkeypatch.setitem(nesting._SLICE, "cpu", 3 * 128)
    expected = 0.0 if name == "plain16" else fast_error(weight, FORMATS.get(name).split(weight))
    assert fast_error_of(nest(weight)) == pytest.approx(expected, rel=1e-5)
