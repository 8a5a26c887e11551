"""The README stays short, shows only commands that exist, and its example runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from depthfx.cli import build_parser
from tests.house import readme_block, rules

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
TARGETS = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
COMMANDS = set(build_parser()._subparsers._group_actions[0].choices)


def test_length():
    assert len(README.splitlines()) <= 150


@pytest.mark.parametrize("path", ["README.md", "CONTRIBUTING.md", "docs/map.md", "docs/decisions.md"])
def test_commands_exist(path):
    assert {"test", "demo", "check"} <= TARGETS
    assert {"demo", "explain", "generate", "inspect", "convert", "skipper", "tune", "bench", "version"} == COMMANDS
    assert rules.unknown_commands((ROOT / path).read_text(), TARGETS, COMMANDS) == []


@pytest.mark.parametrize("path", ["README.md", "CONTRIBUTING.md", "docs/map.md"])
def test_named_files_exist(path):
    named = set(re.findall(r"`((?:depthfx|tests|docs|examples|benchmarks)/[\w./-]*)`", (ROOT / path).read_text()))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_example_is_short():
    (example,) = rules.fenced(README, "python")
    assert len([line for line in example.splitlines() if line.strip()]) <= 12


@pytest.mark.timeout(250)  # it may have to make the copy of SmolLM2
def test_example_runs_and_explains_as_shown():
    (example,) = rules.fenced(README, "python")
    out = subprocess.run([sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert out.returncode == 0, out.stderr
    answer, explained = out.stdout.split("\n", 1)
    assert answer == "The capital of France is Paris."
    assert readme_block.steady(explained) == readme_block.shown(README), "run `make readme`"
