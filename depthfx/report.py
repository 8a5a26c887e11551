"""What compilation recognised, rewrote, compiled and refused; the text behind ``model.explain()``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

# The section of what differs from run to run of the same compilation; the text ends with it.
CACHES = "caches"


@dataclass
class CompileReport:
    """Lines under headings, in the order in which they were added, and the seconds of each stage."""

    sections: dict[str, list[str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, section: str, line: str) -> None:
        """Append ``line`` under ``section``."""
        self.sections.setdefault(section, []).append(line)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the wall time of the block to ``stage``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start

    def text(self) -> str:
        """The whole report as text."""
        lines: list[str] = []
        for name, section in self.sections.items():
            if name != CACHES:
                lines += [name, *(f"  {line}" for line in section)]
        if self.seconds:
            lines += ["seconds", *(f"  {stage:<24} {value:8.2f}" for stage, value in self.seconds.items())]
        if CACHES in self.sections:
            lines += [CACHES, *(f"  {line}" for line in self.sections[CACHES])]
        return "\n".join(lines)
