"""The stored order of nested bytes: its formula, its inverse, and the weights that stay in plain order."""

from __future__ import annotations

import pytest
import torch

from depthfx.lowering.fragment_order import fragment_columns, from_fragment_order, is_fragment_order, to_fragment_order


@pytest.mark.parametrize("num_columns", [64, 192])
def test_places_hold_the_columns_of_the_formula(num_columns):
    columns = fragment_columns(num_columns)
    for group in range(num_columns // 64):
        for c in range(4):
            for s in range(4):
                for h in range(2):
                    for j in range(2):
                        assert columns[group * 64 + c * 16 + s * 4 + h * 2 + j] == group * 64 + s * 16 + h * 8 + c * 2 + j


@pytest.mark.parametrize("num_columns", [0, 63, 64, 200, 576])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16])
def test_ordering_is_undone(num_columns, dtype):
    plain = (torch.arange(5 * num_columns) % 251).to(dtype).view(num_columns, 5).t()  # strided
    stored = to_fragment_order(plain)
    assert torch.equal(from_fragment_order(stored), plain)
    assert torch.equal(stored, plain[:, fragment_columns(num_columns)])
    assert is_fragment_order(num_columns) == (num_columns in (64, 576))


def test_other_widths_stay_in_plain_order():
    plain = torch.arange(400).view(2, 200)
    assert to_fragment_order(plain) is plain and from_fragment_order(plain) is plain
