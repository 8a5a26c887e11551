"""Decisions that follow from no token stand in front, joined where they can be; a router's in front of its layer's keys and values."""

from __future__ import annotations

import pytest

from depthfx.contracts import Decision, Policy, Rows, Skipper
from depthfx.lowering import ops
from depthfx.passes.capture import capture
from depthfx.passes.match import is_append
from depthfx.passes.order_decisions import partition_of
from depthfx.passes.pipeline import run_passes
from depthfx.report import CompileReport
from depthfx.settings import Settings
from depthfx.skippers import make_skipper
from depthfx.skippers.projectors.identity import Identity
from tests.families.configs import build


class Constant(Policy):
    """Every second position runs."""

    def forward(self, rows: Rows) -> Decision:
        """Of the positions alone."""
        return Decision(rows.positions % 2 == 0)


class Stays(Policy):
    """A row that skipped a layer skips the ones behind it."""

    def forward(self, rows: Rows) -> Decision:
        """RUN where the row ran in the layer before."""
        return Decision(rows.ran & (rows.positions % 3 != rows.place))


class Reads(Policy):
    """Looks at the hidden state."""

    def forward(self, rows: Rows) -> Decision:
        """By its first feature."""
        return Decision(rows.hidden[:, 0] > 0)


def program(policies, layers):
    """``(nodes, report)`` of the routed program of a model of five layers."""
    model, report = build("llama", num_hidden_layers=5), CompileReport()
    if isinstance(policies, list):
        skipper = Skipper(layers, policies, Identity())
    else:
        skipper = make_skipper(model, policies, "identity", layers=layers)
    gm, ctx = capture(model, Settings(), "cpu", report, skipper)
    run_passes(gm, ctx)
    return list(gm.graph.nodes), "\n".join(report.sections["depth"])


def place(nodes, target):
    """Where nodes of ``target`` stand."""
    return [i for i, n in enumerate(nodes) if n.target is target]


@pytest.mark.parametrize("policy", [Constant(), "random_skip"])
def test_decisions_from_no_token_come_first_and_at_once(policy):
    nodes, report = program(policy, (2, 3, 4))
    (partition,) = place(nodes, ops.PARTITION_ROWS)
    assert partition < min(place(nodes, ops.LINEAR)) and partition < place(nodes, ops.ROTARY_APPEND)[0]
    assert nodes[partition].args[4] == 0 and nodes[partition].meta["example_value"][1].shape == (3, 2)
    merges = [nodes[i] for i in place(nodes, ops.SELECT_ROWS)]
    assert [partition_of(m.args[3]) for m in merges] == [(nodes[partition], row) for row in range(3)]
    assert "3 decisions follow from no token: made at the start of a step, 3 of them at once" in report


def test_a_router_decides_before_keys_and_values_of_its_layer():
    nodes, report = program(Reads(), (3, 4))
    partitions = place(nodes, ops.PARTITION_ROWS)
    appends = [i for i, n in enumerate(nodes) if is_append(n)]
    attends, merges = place(nodes, ops.PAGED_ATTENTION), place(nodes, ops.SELECT_ROWS)
    for number, layer in enumerate((3, 4)):
        assert appends[layer - 1] < partitions[number] < appends[layer] < attends[layer] < merges[number]
    assert "follow from no token" not in report


def test_those_that_follow_from_others_are_early_too_but_apart():
    nodes, report = program([Constant(), Constant(), Stays()], (2, 3, 4))
    partitions = place(nodes, ops.PARTITION_ROWS)
    assert len(partitions) == 2 and max(partitions) < min(place(nodes, ops.LINEAR))
    assert [nodes[i].args[4] for i in partitions] == [0, 2]
    assert "3 decisions follow from no token: made at the start of a step, 2 of them at once" in report


def test_neighbours_on_the_tape_alone_are_joined():
    nodes, report = program([Constant(), Reads(), Constant()], (1, 2, 4))
    partitions = place(nodes, ops.PARTITION_ROWS)
    assert [nodes[i].args[4] for i in partitions] == [0, 2, 1]
    assert "2 decisions follow from no token: made at the start of a step" in report and "at once" not in report
