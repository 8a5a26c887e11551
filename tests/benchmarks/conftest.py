"""The benchmarks are scripts that import each other by name, from their own folder."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
