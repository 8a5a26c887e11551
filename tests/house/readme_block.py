"""The README's `explain()` block: cut it out of an output, compare it, or write it anew (``make readme``)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
_BLOCK = re.compile(r"(?<=```text\n).*?(?=```)", re.DOTALL)


def steady(explained: str) -> str:
    """The part of an explanation that is the same on every run: all but the seconds."""
    return explained.split("\nseconds\n")[0].rstrip() + "\n"


def shown(readme: str) -> str:
    """The block as the README has it."""
    return _BLOCK.search(readme).group()


def main() -> None:
    """Run ``depthfx explain smollm2`` on the CPU and put its text into the README."""
    command = [sys.executable, "-m", "depthfx", "explain", "smollm2", "--device", "cpu"]
    text = steady(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    README.write_text(_BLOCK.sub(lambda _: text, README.read_text(), count=1))


if __name__ == "__main__":
    main()
