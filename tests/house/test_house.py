"""The rules over every file of the repository."""

import subprocess
from pathlib import Path

import pytest

from tests.house import rules

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".json", ".csv", ".cfg", ""}


def _tracked() -> list[str]:
    out = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if out.returncode == 0:
        return sorted(p for p in out.stdout.splitlines() if (ROOT / p).is_file())
    folders = ("depthfx", "tests", "docs", "examples", "benchmarks")  # an archive of the checkout, without git
    return sorted(str(p.relative_to(ROOT)) for f in folders for p in (ROOT / f).rglob("*") if p.is_file() and "__pycache__" not in p.parts)


FILES = _tracked()
PACKAGE = [p for p in FILES if p.startswith("depthfx/") and p.endswith(".py")]
TESTS = [p for p in FILES if p.startswith("tests/") and Path(p).name.startswith("test_") and p.endswith(".py")]
PYTHON = [p for p in FILES if p.endswith(".py")]


def _faults(check, paths):
    assert paths
    return [f"{path}:{fault}" for path in paths for fault in check(path, (ROOT / path).read_text())]


@pytest.mark.parametrize(
    "check",
    [rules.check_layering, rules.check_docstrings, rules.check_excepts, rules.check_environment, rules.check_uploads],
    ids=lambda check: check.__name__,
)
def test_package(check):
    assert _faults(check, PACKAGE) == []


def test_plug_ins_register():
    plugins = [p for p in PACKAGE if p.startswith(rules.PLUGIN_FOLDERS)]
    imported = {name.rsplit(".", 1)[0] for p in plugins for _, name in rules.imports(p, (ROOT / p).read_text())}
    assert _faults(lambda path, source: rules.check_registers(path, source, frozenset(imported)), plugins) == []


def test_sizes():
    assert _faults(rules.check_sizes, PYTHON) == []


def test_every_test_can_fail():
    assert _faults(rules.check_asserts, TESTS) == []


def test_no_places():
    texts = [p for p in FILES if Path(p).suffix in SUFFIXES and p != "LICENSE"]
    assert _faults(rules.check_places, texts) == []


def test_files_of_a_step_exist():
    assert set(rules.STEP_FILES) <= set(PACKAGE)


def test_every_part_has_a_place():
    parts = {rules.part_of(p) for p in PACKAGE}
    assert parts <= set(rules.MAY_IMPORT), "a new part needs an entry in MAY_IMPORT"
    order = list(rules.MAY_IMPORT)
    downward = {("api", "package"), ("server", "package"), ("demo", "package"), ("cli", "package"), ("demo", "cli"), ("demo_burst", "cli"),
                ("demo_burst", "package")}  # fmt: skip
    for part, allowed in rules.MAY_IMPORT.items():
        for other in allowed - {part}:
            assert order.index(other) < order.index(part) or (part, other) in downward, f"{part} -> {other} makes a cycle"
