"""Pictures of the benchmarks: grouped bars, one group for each size, one bar for each arm; and decisions by layer and token."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from depthfx.memory_picture import COLOURS


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
        drawn = axes.bar(places, heights, width * 0.92, label=arm, color=COLOURS[number % len(COLOURS)])
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


def draw_depth(actions: Any, layers: tuple[int, ...], num_prompt: int, path: Path, title: str = "Layers of each token") -> None:
    """Write a PNG of one request's decisions: int8 ``[places, tokens]`` as ``engine.routes.depth_map`` gives it, the prompt's end as a line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    colours = ["#ffffff", COLOURS[4], COLOURS[0]]  # not routed, Project-Only, RUN
    figure, axes = plt.subplots(figsize=(max(6.5, 1.5 + actions.shape[1] / 16), max(2.2, 1 + 0.16 * len(layers))), dpi=120)
    axes.imshow(actions.numpy(), cmap=ListedColormap(colours), vmin=-1, vmax=1, aspect="auto", interpolation="nearest", origin="lower")
    axes.axvline(num_prompt - 0.5, color="black", linewidth=0.8)
    axes.set_yticks(range(0, len(layers), max(1, len(layers) // 8)), [str(i) for i in layers[:: max(1, len(layers) // 8)]])
    axes.set_ylabel("routed layer")
    axes.set_xlabel("token; the line is the end of the prompt")
    share = float((actions == 0).sum()) / max(1, int((actions >= 0).sum()))
    axes.set_title(f"{title}: {100 * share:.0f} % skipped", fontsize=10)
    labels = ("not routed", "Project-Only", "RUN")
    handles = [Patch(facecolor=c, edgecolor="#8d99ae", label=text) for c, text in zip(colours, labels, strict=True)]
    axes.legend(handles=handles, fontsize=8, frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.28))
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
