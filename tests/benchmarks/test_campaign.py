"""The parts of the campaign on the smallest model: that they begin, keep what they have and are packed."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(part, out):
    environment = {**os.environ, "TINY": "1", "OUT": str(out), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "LIMIT": "100"}
    environment.pop("TRITON_INTERPRET", None)  # the CPU's own kernels are twenty times faster
    return subprocess.run(
        ["bash", "benchmarks/campaign.sh", part], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150, check=False
    )


@pytest.mark.slow
@pytest.mark.timeout(160)
def test_mixed_steps(tmp_path):
    done = run("mixed", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(tmp_path / "mixed.tgz") as packed:
        names = {Path(name).name for name in packed.getnames()}
    assert "log" in names and any("-mixed-smollm2" in name for name in names), done.stdout


def test_an_unknown_part_is_refused(tmp_path):
    done = run("mixd", tmp_path)
    assert done.returncode == 2 and "no part mixd: see the head of this file" in done.stderr
