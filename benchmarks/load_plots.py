"""Pictures of the load benchmarks: latency against rate, KV occupancy with precision, memory by owner, skipped share; a map over r and d."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from depthfx.memory_picture import BANDS, COLOURS, OWNERS

MOST = 400  # samples of a course that are kept and drawn


def thinned(samples: Sequence[Any], most: int = MOST) -> list[Any]:
    """At most ``most`` of them, evenly, the last one included."""
    if len(samples) <= most:
        return list(samples)
    step = (len(samples) - 1) / (most - 1)
    return [samples[round(i * step)] for i in range(most)]


def bands(samples: Sequence[Any]) -> list[tuple[str, float, float]]:
    """``(mode, from, to)`` of the stretches in each mode, in seconds; a mode lasts until the next sample."""
    found: list[tuple[str, float, float]] = []
    for now, after in pairwise(samples):
        if found and found[-1][0] == now.mode:
            found[-1] = (now.mode, found[-1][1], after.time_s)
        else:
            found.append((now.mode, now.time_s, after.time_s))
    return found


def skip_course(samples: Sequence[Any]) -> list[tuple[float, float]]:
    """``(seconds, share)`` skipped between samples that follow each other, where rows were routed."""
    rows = [(b.time_s, b.run_rows - a.run_rows, b.project_rows - a.project_rows) for a, b in pairwise(samples)]
    return [(time, project / (run + project)) for time, run, project in rows if run + project]


def draw_load(path: Path, title: str, means: list[dict[str, Any]], series: dict[str, dict[str, Any]], slo_ttft_s: float) -> None:
    """Write the PNG. ``means``: averages by arm and rate; ``series``: by arm the course of its run at the highest rate."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ((latency, occupancy), (memory, skipped)) = plt.subplots(2, 2, figsize=(13, 8), dpi=120)
    colours = {arm: COLOURS[i % len(COLOURS)] for i, arm in enumerate(series)}
    _latency(latency, means, colours, slo_ttft_s)
    _occupancy(occupancy, series, colours)
    _memory(memory, series)
    _skipped(skipped, series, colours)
    for axes in (latency, occupancy, memory, skipped):
        axes.spines[["top", "right"]].set_visible(False)
        if axes is memory and axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7, loc="upper center", ncols=5, bbox_to_anchor=(0.5, -0.13), frameon=False)
        elif axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7, framealpha=0.7, edgecolor="none")
    figure.suptitle(textwrap.fill(title, 140), fontsize=11)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _none(axes: Any, text: str) -> None:
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, fontsize=9)
    axes.set_axis_off()


def _latency(axes: Any, means: list[dict[str, Any]], colours: dict[str, str], slo_ttft_s: float) -> None:
    """Mean E2E and p99 TTFT with their intervals."""
    if not means:
        return _none(axes, "only capacity was measured")
    for arm, colour in colours.items():
        for metric, style in (("mean E2E s", "-o"), ("p99 TTFT s", "--s")):
            rows = sorted((r for r in means if r["arm"] == arm and r.get(metric) is not None), key=lambda r: r["rate"])
            rates, values = [r["rate"] for r in rows], [r[metric] for r in rows]
            above = [r[f"{metric} +-"] or 0.0 for r in rows]
            widths = ([min(w, 0.9 * v) for w, v in zip(above, values)], above)  # a logarithmic axis has no place for 0
            axes.errorbar(rates, values, widths, fmt=style, color=colour, capsize=2, markersize=3, linewidth=1.2, label=f"{arm}, {metric}")
    axes.axhline(slo_ttft_s, color="black", linewidth=0.8, linestyle=":", label="SLO of TTFT")
    axes.set_yscale("log")
    axes.set_xlabel("requests a second")
    axes.set_ylabel("seconds")
    axes.set_title("Latency against rate", fontsize=9)
    return None


def _occupancy(axes: Any, series: dict[str, dict[str, Any]], colours: dict[str, str]) -> None:
    """Held blocks as a share of those open to KV; bands of the first arm that changes its precision."""
    switching = next((arm for arm, s in series.items() if len({x.mode for x in s["samples"]}) > 1), None)
    if switching is not None:
        for mode, start, end in bands(series[switching]["samples"]):
            if mode in BANDS:
                axes.axvspan(start, end, color=BANDS[mode], linewidth=0, alpha=0.6)
        for mode, colour in BANDS.items():
            axes.fill_between([], [], color=colour, alpha=0.6, label=f"{switching}: {mode}")
    for arm, colour in colours.items():
        samples = thinned(series[arm]["samples"])
        shares = [s.held_blocks / s.open_blocks * 100 for s in samples]
        axes.plot([s.time_s for s in samples], shares, color=colour, linewidth=1, label=f"{arm}, {series[arm]['rate']:.3g}/s")
    axes.set_xlabel("seconds")
    axes.set_ylabel("% of the KV blocks open then")
    axes.set_ylim(0, 105)
    axes.set_title("KV occupancy at the highest rate", fontsize=9)


def _memory(axes: Any, series: dict[str, dict[str, Any]]) -> None:
    """Owners of the memory of the first arm that lends."""
    arm = next((a for a, s in series.items() if len(s["memory"]) > 1), None)
    if arm is None:
        return _none(axes, "no arm of this run lends memory")
    samples = thinned(series[arm]["memory"])
    times = [s.time_s - series[arm]["memory_begun"] for s in samples]  # of a long run the engine keeps the end alone
    owners = [[getattr(s, name) / 2**30 for s in samples] for name, _, _ in OWNERS]
    axes.stackplot(times, owners, labels=[o[1] for o in OWNERS], colors=[o[2] for o in OWNERS], step="post")
    axes.set_xlabel("seconds")
    axes.set_ylabel("GiB")
    axes.set_xlim(0, times[-1])
    axes.set_title(f"Owners of the memory that KV and residuals share: {arm}, {series[arm]['rate']:.3g}/s", fontsize=9)
    return None


def _skipped(axes: Any, series: dict[str, dict[str, Any]], colours: dict[str, str]) -> None:
    """Project-Only pairs of row and routed layer, by time."""
    courses = {arm: skip_course(thinned(s["samples"], 100)) for arm, s in series.items()}
    if not any(courses.values()):
        return _none(axes, "no arm of this run skips layers")
    for arm, course in courses.items():
        if course:
            axes.plot([t for t, _ in course], [share * 100 for _, share in course], color=colours[arm], linewidth=1, label=arm)
    axes.set_xlabel("seconds")
    axes.set_ylabel("% of rows x routed layers")
    axes.set_ylim(0, 105)
    axes.set_title("Share that is skipped", fontsize=9)
    return None


def draw_map(path: Path, title: str, cells: list[dict[str, Any]], rates: Sequence[float], depths: Sequence[float]) -> None:
    """Write a PNG: for each rate of requests two maps over r and d, switch off (``routed %``) and on (``auto %``), with half widths (``+-``).

    What ``cells`` lack stays grey. Blue is quicker than dense, red slower; one scale for all maps.
    """
    from matplotlib.figure import Figure

    arrivals = sorted({c["rate"] for c in cells})
    most = max([1.0, *(abs(c[f"{arm} %"]) for c in cells for arm in ("routed", "auto"))])
    figure = Figure(figsize=(3.2 + 2.2 * len(depths), 1.4 + (0.8 + 0.75 * len(rates)) * len(arrivals)), dpi=120, layout="constrained")
    panels = figure.subplots(len(arrivals), 2, squeeze=False, sharex=True, sharey=True)
    for row, arrival in enumerate(arrivals):
        for axes, arm, switch in zip(panels[row], ("routed", "auto"), ("off: always routed", "on: auto")):
            found = {(c["r"], c["d"]): c for c in cells if c["rate"] == arrival}
            values = [[found[r, d][f"{arm} %"] if (r, d) in found else float("nan") for d in depths] for r in rates]
            axes.set_facecolor("#d9d9d9")
            image = axes.imshow(values, cmap="RdBu_r", vmin=-most, vmax=most, aspect="auto", origin="lower")
            for (r, d), cell in found.items():
                value, width = cell[f"{arm} %"], cell[f"{arm} +-"]
                text = f"{value:+.1f} %" + ("" if width is None else f"\n± {width:.1f}")
                colour = "white" if abs(value) > 0.6 * most else "black"
                axes.text(depths.index(d), rates.index(r), text, ha="center", va="center", fontsize=9, color=colour)
            for r, d in {(r, d) for r in rates for d in depths} - set(found):
                axes.text(depths.index(d), rates.index(r), "not run", ha="center", va="center", fontsize=9, color="#555555")
            axes.set_xticks(range(len(depths)), [f"{d:.0%}" for d in depths])
            axes.set_yticks(range(len(rates)), [f"{r:.0%}" for r in rates])
            axes.set_title(f"switch {switch}, {arrival:.3g} requests/s", fontsize=9)
            axes.spines[:].set_visible(False)
        panels[row][0].set_ylabel("r: rows that skip")
    for axes in panels[-1]:
        axes.set_xlabel("d: routed layers that they skip")
    figure.colorbar(image, ax=panels, label="change of mean E2E, %", shrink=0.9)
    figure.suptitle(textwrap.fill(title, 30 + 22 * len(depths)), fontsize=10)
    figure.savefig(path)
