"""One picture for each benchmark: grouped bars, one group for each size, one bar for each arm."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

# Colours that stay apart in print and for colour-blind readers; depthfx always has the first one.
_COLOURS = ["#0b6e4f", "#8d99ae", "#c8553d", "#6d597a", "#e9c46a", "#3d5a80"]


def bars(path: Path, title: str, unit: str, rows: list[dict[str, Any]], group: str, value: str, floor: float | None = None) -> None:
    """Write a PNG of ``rows``: groups by ``row[group]``, bars by ``row["arm"]``, heights ``row[value]``, ``floor`` as a line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups = list(dict.fromkeys(r[group] for r in rows))
    arms = sorted(dict.fromkeys(r["arm"] for r in rows), key=lambda a: a != "depthfx")
    figure, axes = plt.subplots(figsize=(max(6.5, 1.8 + 1.5 * len(groups)), 4), dpi=120)
    width = 0.8 / max(len(arms), 1)
    for number, arm in enumerate(arms):
        found = {g: [r[value] for r in rows if r["arm"] == arm and r[group] == g] for g in groups}
        places = [i + (number - (len(arms) - 1) / 2) * width for i, g in enumerate(groups) if found[g]]
        heights = [sum(v) / len(v) for v in (found[g] for g in groups) if v]
        drawn = axes.bar(places, heights, width * 0.92, label=arm, color=_COLOURS[number % len(_COLOURS)])
        axes.bar_label(drawn, labels=[f"{h:,.4g}" for h in heights], fontsize=7, padding=2)
    if floor is not None:
        axes.axhline(floor, color="black", linewidth=0.8, linestyle="--", label="weights at copy bandwidth")
    axes.set_xticks(range(len(groups)), [f"{group} {g}" for g in groups])
    axes.set_ylabel(unit)
    axes.set_title(textwrap.fill(title, 72), fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
