"""Capture stops Dynamo early and so judges by itself whether the graph holds for every number of rows."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.guards import CheckFunctionManager

from depthfx.errors import UnsupportedModelError
from tests.passes.toys import captured, toy, with_mlp


def test_row_counts_stay_open():
    gm, ctx = captured(toy())
    shapes = {
        n.name: n.meta["example_value"].shape[0] for n in gm.graph.nodes if n.op == "placeholder" and n.name in ("token_ids", "logit_rows")
    }
    assert all(isinstance(size, torch.SymInt) for size in shapes.values())
    assert shapes["token_ids"].node.expr == ctx.row_symbol != shapes["logit_rows"].node.expr


def fixed(module, x):
    return x.reshape(1, 24, 32) * 1.0


def compared(module, x):
    return x * 2 if x.shape[1] == 24 else x


def divided(module, x):
    return x * 2 if x.shape[1] % 8 == 0 else x


def long_only(module, x):
    return x * 2 if x.shape[1] > 20 else x


@pytest.mark.parametrize("function", [fixed, compared])
def test_one_number_of_rows_is_refused(function):
    with pytest.raises(UnsupportedModelError, match="one number of rows only"):
        captured(with_mlp(function))


@pytest.mark.parametrize("function", [divided, long_only])
def test_a_branch_on_the_number_of_rows_is_refused(function):
    with pytest.raises(UnsupportedModelError, match="takes another way unless"):
        captured(with_mlp(function))


def test_suppressed_errors_do_not_run_the_model():
    with torch._dynamo.config.patch(suppress_errors=True):
        gm, _ = captured(toy())
    assert gm.graph is not None


def test_guards_are_never_built(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("Dynamo built guards")

    monkeypatch.setattr(CheckFunctionManager, "__init__", fail)
    assert len(captured(toy())[1].layers) == 3
