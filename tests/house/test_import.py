"""Importing depthfx is light: no CUDA, no Triton, no models of Hugging Face."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROBE = """
import json, sys
import depthfx
import torch
print(json.dumps({"modules": sorted(sys.modules), "cuda": torch.cuda.is_initialized()}))
"""


def _imported(extra: str = "") -> dict:
    out = subprocess.run([sys.executable, "-c", extra + PROBE], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout.splitlines()[-1])


HEAVY = ("triton", "transformers.modeling_utils", "transformers.generation.utils", "torch._inductor.compile_fx")


def _heavy(modules: list[str]) -> list[str]:
    return [m for m in modules if m in HEAVY]


def test_import_is_light():
    seen = _imported()
    assert not seen["cuda"]
    assert _heavy(seen["modules"]) == []


def test_the_probe_sees_heavy_modules():
    assert _heavy(_imported("import triton\n")["modules"]) == ["triton"]
    assert all(importlib.util.find_spec(name) for name in HEAVY), "the names are those of modules"
