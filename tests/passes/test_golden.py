"""The whole program of two models, and of one with a skipper, after all passes, as text. ``GOLDEN=accept`` in the environment rewrites the files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from depthfx.passes.capture import capture
from depthfx.passes.pipeline import run_passes
from depthfx.passes.print_graph import print_graph
from depthfx.report import CompileReport
from depthfx.settings import Settings
from depthfx.skippers import make_skipper
from tests.families.configs import build

FOLDER = Path(__file__).parent / "golden"


def program_text(name: str) -> str:
    family, _, routed = name.partition("-")
    model = build(family, num_hidden_layers=2)
    skipper = make_skipper(model, "flexidepth", "adapter", layers=(1,), gate="mlp") if routed else None
    gm, ctx = capture(model, Settings(), "cpu", CompileReport(), skipper)
    run_passes(gm, ctx)
    return print_graph(gm)


@pytest.mark.parametrize("name", ["llama", "gemma2", "llama-routed"])
def test_program_text(name):
    text = program_text(name)
    path = FOLDER / f"{name}.txt"
    if os.environ.get("GOLDEN") == "accept":
        path.write_text(text)
    assert text == path.read_text(), "review the change, then run this test with GOLDEN=accept"
    assert program_text(name) == text, "two runs in one process give the same text"
    assert "0x" not in text and "s0" not in text
