"""Pictures of the benchmarks: grouped bars, one group for each size, one bar for each arm; and memory over time."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

# Colours that stay apart in print and for colour-blind readers; depthfx always has the first one.
COLOURS = ["#0b6e4f", "#8d99ae", "#c8553d", "#6d597a", "#e9c46a", "#3d5a80"]


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


# Owners of the memory that KV and residuals share, from the bottom up: field of the sample, label, colour.
OWNERS = (
    ("kv_held_bytes", "KV, held", "#c8553d"),
    ("kv_cached_bytes", "KV, cached prefixes", "#e9c46a"),
    ("kv_free_bytes", "KV, free", "#e5e5e5"),
    ("restoring_bytes", "residuals coming back", "#8ecae6"),
    ("residual_bytes", "residuals in place", "#0b6e4f"),
)


def draw_memory(samples: list[Any], path: Path, title: str = "Owners of the memory that KV and residuals share") -> None:
    """Write a PNG of ``engine.timeline()``: bytes by owner stacked over time, full layers below, requests at the bottom.

    Raises ``ValueError`` for fewer than two samples: there is no course to draw.
    """
    if len(samples) < 2:
        raise ValueError(f"{len(samples)} samples are no course of time; compile with memory settings and serve requests first")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    times = [s.time_s - samples[0].time_s for s in samples]
    figure, (memory, layers, requests) = plt.subplots(
        3, 1, figsize=(8, 6.5), dpi=120, sharex=True, gridspec_kw={"height_ratios": [3, 1, 1.4]}
    )
    owners = [[getattr(s, name) / 2**30 for s in samples] for name, _, _ in OWNERS]
    memory.stackplot(times, owners, labels=[o[1] for o in OWNERS], colors=[o[2] for o in OWNERS], step="post")
    memory.set_ylabel("GiB")
    memory.set_title(textwrap.fill(title, 90), fontsize=10)
    layers.fill_between(times, [s.num_full_entries for s in samples], step="post", color=COLOURS[0], linewidth=0)
    layers.set_ylabel("layers in full\nprecision")
    requests.step(times, [s.num_running for s in samples], where="post", label="running", color=COLOURS[5])
    requests.step(times, [s.num_waiting for s in samples], where="post", label="waiting", color=COLOURS[2])
    first = samples[0].num_preemptions
    requests.step(times, [s.num_preemptions - first for s in samples], where="post", label="preemptions so far", color=COLOURS[1])
    requests.set_ylabel("requests")
    requests.set_xlabel("seconds")
    for axes in (memory, layers, requests):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=0)
        axes.margins(x=0)
    memory.legend(fontsize=7, loc="upper center", ncols=5, bbox_to_anchor=(0.5, -0.02), frameon=False)
    requests.legend(fontsize=7, frameon=False)
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
