"""Weights of two bytes in the native CPU kernels: every code, both precisions, and the bits of the product over the joined weight."""

from __future__ import annotations

import pytest
import torch

from depthfx.lowering import native, native_stored
from depthfx.lowering.fragment_order import from_fragment_order, to_fragment_order
from depthfx.lowering.kernels._dual_weight import coding_of, draw_weight
from depthfx.lowering.nested_format import FORMATS, NestedWeight

pytestmark = pytest.mark.skipif(not native.available()[0], reason=f"native kernels: {native.available()[1]}")
NAMES = ("nested_e4m3", "nested_e4m3_scaled", "nested_e5m2")


def all_codes(name: str, columns: int) -> NestedWeight:
    """Every pair of bytes that the format's split makes, [N, columns], and what is left over cut off."""
    codes = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.float16)
    if name != "nested_e5m2":
        codes = codes[codes.abs() < 1.875]
    codes = codes[: codes.numel() // columns * columns].view(-1, columns)
    if name == "nested_e5m2":
        return FORMATS.get(name).split_any(codes)
    if name == "nested_e4m3":
        return FORMATS.get(name).split(codes)
    inner = FORMATS.get("nested_e4m3").split(codes)
    shift = torch.arange(codes.shape[0]).remainder(9).sub(2).to(torch.int8)
    return NestedWeight(name, inner.upper, inner.lower, shift)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("columns", [64, 192, 200, 33, 1])
@pytest.mark.parametrize("name", NAMES)
def test_every_code_is_joined_and_read_in_fast_mode(name, columns):
    nested = all_codes(name, columns)
    form, coding = FORMATS.get(name), coding_of(name, nested.shift)
    upper, lower = to_fragment_order(nested.upper).contiguous(), to_fragment_order(nested.lower).contiguous()
    full = form.join(nested).float()
    if nested.shift is not None:  # the format's own join rounds to float16, where a shift may leave its range
        full = FORMATS.get("nested_e4m3").join(nested).float() * (2.0 ** nested.shift.float())[:, None]
    assert same(native_stored.join_weight(upper, lower, nested.shift, coding, True), full)
    assert same(native_stored.join_weight(upper, lower, nested.shift, coding, False), form.fast_values(nested))
    noise = torch.randint(0, 256, lower.shape, dtype=torch.uint8)
    assert same(native_stored.join_weight(upper, noise, nested.shift, coding, False), form.fast_values(nested)), "fast mode reads one plane"
    assert torch.equal(from_fragment_order(upper), nested.upper)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("outputs", "inputs"), [(66, 200), (130, 576), (34, 64), (2, 7)])
@pytest.mark.parametrize("name", NAMES)
def test_products_have_the_bits_of_the_joined_weight(name, outputs, inputs, threads):
    g = torch.Generator().manual_seed(outputs)
    nested = draw_weight(g, torch.float32, outputs, inputs, name)
    stored = nested.upper, nested.lower, nested.shift, coding_of(name, nested.shift)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for full in (True, False):
            weight = native_stored.join_weight(*stored, full)
            for rows in (1, 2, 5, 13, 32):
                x = torch.randn(rows, inputs + 3, generator=g)[:, :inputs]
                bias = torch.randn(outputs, generator=g)
                assert torch.equal(native_stored.stored_linear(x, *stored, full, bias), native.small_linear(x, weight, bias))
                for activation in native.ACTIVATIONS:
                    found = native_stored.stored_linear(x, *stored, full, activation=activation)
                    assert torch.equal(found, native.small_linear(x, weight, activation=activation))
    finally:
        torch.set_num_threads(before)


def test_no_rows_and_wrong_tensors():
    nested = draw_weight(torch.Generator().manual_seed(0), torch.float32, 6, 64, "nested_e4m3")
    x, upper, lower = torch.randn(2, 64), nested.upper, nested.lower
    assert native_stored.stored_linear(x[:0], upper, lower, None, 1, True).shape == (0, 6)
    for wrong, text in (
        ((x[:, :32], upper, lower, None, 1), r"x \(2, 32\) and the bytes \(6, 64\)"),
        ((torch.randn(native.MAX_ROWS + 1, 64), upper, lower, None, 1), "M <= 32"),
        ((x.half(), upper, lower, None, 1), "must be float32"),
        ((x, upper[:, :32], lower[:, :32], None, 1), "contiguous"),
        ((x, upper.int(), lower, None, 1), "torch.int32"),
        ((x, upper, lower, torch.zeros(5, dtype=torch.int8), 1), r"int8 \[6\]"),
        ((x, upper, lower, None, 3), "coding 3"),
    ):
        with pytest.raises(ValueError, match=text):
            native_stored.stored_linear(*wrong, True)
