"""The picture of ``engine.timeline()``: owners of memory over time, precision, requests, and when each request got its first token."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

# Colours that stay apart in print and for colour-blind readers; depthfx always has the first one.
COLOURS = ["#0b6e4f", "#8d99ae", "#c8553d", "#6d597a", "#e9c46a", "#3d5a80"]
# Owners of the memory that KV and residuals share, from the bottom up: field of the sample, label, colour.
OWNERS = (
    ("kv_held_bytes", "KV, held", "#c8553d"),
    ("kv_cached_bytes", "KV, cached prefixes", "#e9c46a"),
    ("kv_free_bytes", "KV, free", "#e5e5e5"),
    ("restoring_bytes", "residuals coming back", "#8ecae6"),
    ("residual_bytes", "residuals in place", "#0b6e4f"),
)
BANDS = {"fast": "#f2b134", "mixed": "#f7dfa5"}
MIB = 1 << 20


def bands(samples: Sequence[Any]) -> list[tuple[str, float, float]]:
    """``(mode, from, to)`` of the stretches in each mode, in seconds since the first sample; a sample tells the mode of the time before it.

    "full" is the largest number of entries in full precision that occurs, "fast" none.
    """
    most, start = max(s.num_full_entries for s in samples), samples[0].time_s
    found: list[tuple[str, float, float]] = []
    for before, now in pairwise(samples):
        full = now.num_full_entries
        mode = "fast" if not full else "full" if full == most else "mixed"
        if found and found[-1][0] == mode:
            found[-1] = (mode, found[-1][1], now.time_s - start)
        else:
            found.append((mode, before.time_s - start, now.time_s - start))
    return found


def draw_memory(
    samples: Sequence[Any],
    path: Path,
    title: str = "Owners of the memory that KV and residuals share",
    first_tokens: Sequence[tuple[float, float]] = (),
) -> None:
    """Write a PNG of ``samples`` of ``engine.timeline()``: bytes by owner stacked over time, full layers, requests, with bands of precision.

    ``first_tokens``: ``(arrival, seconds from there to the first token)`` of requests, arrivals in seconds since the first sample; another panel. Raises
    ``ValueError`` for fewer than two samples, and ``ImportError`` where matplotlib is missing.
    """
    if len(samples) < 2:
        raise ValueError(f"{len(samples)} samples are no course of time; compile with memory settings and serve requests first")
    from matplotlib.figure import Figure  # without pyplot: no backend to choose, no figure to close

    heights = [3.0, 1.0, 1.4, 1.4][: 4 if first_tokens else 3]
    figure = Figure(figsize=(8, 2.2 + 0.8 * sum(heights)), dpi=120, layout="constrained")
    panels = figure.subplots(len(heights), 1, sharex=True, gridspec_kw={"height_ratios": heights})
    times = [s.time_s - samples[0].time_s for s in samples]
    _owners(panels[0], times, samples)
    panels[0].set_title(textwrap.fill(title, 100), fontsize=10)
    _layers(panels[1], times, samples)
    _requests(panels[2], times, samples)
    if first_tokens:
        _first_tokens(panels[3], first_tokens)
    panels[-1].set_xlabel("seconds")
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(0, times[-1])
        axes.set_ylim(bottom=0)
    figure.savefig(path)


def _owners(axes: Any, times: list[float], samples: Sequence[Any]) -> None:
    owners = [[getattr(s, name) / MIB for s in samples] for name, _, _ in OWNERS]
    large = max(map(sum, zip(*owners))) > 4096
    if large:
        owners = [[size / 1024 for size in owner] for owner in owners]
    axes.stackplot(times, owners, labels=[o[1] for o in OWNERS], colors=[o[2] for o in OWNERS], step="post")
    axes.set_ylabel("GiB" if large else "MiB")
    axes.legend(fontsize=7, loc="upper center", ncols=5, bbox_to_anchor=(0.5, -0.02), frameon=False)


def _layers(axes: Any, times: list[float], samples: Sequence[Any]) -> None:
    found = bands(samples)
    for mode, start, end in found:
        if mode in BANDS:
            axes.axvspan(start, end, color=BANDS[mode], linewidth=0)
    for mode in sorted({mode for mode, _, _ in found} & set(BANDS)):
        axes.fill_between([], [], color=BANDS[mode], label=f"steps in {mode} precision")
    full = [s.num_full_entries for s in samples]
    axes.step(times, full, where="pre", color=COLOURS[0])  # of the step that had just ended
    axes.set_ylim(0, 1.08 * max(full) or 1)
    axes.set_yticks([0, max(full)])
    axes.set_ylabel("layers in full\nprecision")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7, loc="upper center", ncols=2, bbox_to_anchor=(0.5, -0.04), frameon=False)


def _requests(axes: Any, times: list[float], samples: Sequence[Any]) -> None:
    first = samples[0].num_preemptions
    for label, values, colour in (
        ("running", [s.num_running for s in samples], COLOURS[5]),
        ("waiting", [s.num_waiting for s in samples], COLOURS[2]),
        ("preemptions so far", [s.num_preemptions - first for s in samples], COLOURS[1]),
    ):
        axes.step(times, values, where="post", label=label, color=colour)
    axes.set_ylabel("requests")
    axes.legend(fontsize=7, frameon=False)


def _first_tokens(axes: Any, first_tokens: Sequence[tuple[float, float]]) -> None:
    arrivals, waits = zip(*first_tokens)
    axes.vlines(arrivals, 0, waits, color=COLOURS[1], linewidth=0.8)
    axes.plot(arrivals, waits, "o", color=COLOURS[5], markersize=3.5)
    axes.set_ylabel("seconds to first\ntoken, by arrival")
