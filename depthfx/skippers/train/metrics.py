"""What a run reports: a line of JSON for each logged step and each evaluation, a progress bar, and a plot."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from depthfx.errors import SkipperError
from depthfx.skippers.train.state_file import write_whole

log = logging.getLogger("depthfx.train")


class Metrics:
    """The file of one run; only the main process writes. Lines have ``kind``, ``step`` and ``stage``, and numbers by name."""

    def __init__(self, path: Path, steps_done: int, steps: int, active: bool, progress: bool) -> None:
        """Lines of ``path`` beyond ``steps_done``, of a run that was stopped, are left out."""
        from tqdm import tqdm

        self.path, self.active = path, active
        if active:
            kept = [r for r in read_metrics(path) if r["step"] <= steps_done] if path.exists() and steps_done else []
            write_whole(path, lambda file: file.write("".join(json.dumps(r) + "\n" for r in kept).encode()))
        self.bar: Any = tqdm(total=steps, initial=steps_done, disable=not (active and progress), unit="step")

    def add(self, record: dict[str, Any]) -> None:
        """Append one line, and say it above the bar, or without one through the logger ``depthfx.train``."""
        if not self.active:
            return
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise SkipperError(
                f"{self.path} cannot be written ({error}); make room, and start again: the run goes on from its state"
            ) from error
        text = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in record.items() if k != "skipped")
        if self.bar.disable:
            log.info("%s", text)
        else:
            self.bar.write(text, file=sys.stderr)

    def advance(self, loss: float, skipped: float) -> None:
        """One step more on the bar."""
        self.bar.set_postfix(loss=f"{loss:.3f}", skipped=f"{skipped:.2f}", refresh=False)
        self.bar.update()

    def close(self) -> None:
        self.bar.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """All whole lines of a metrics file; a last line that was cut off is left out."""
    found = []
    for line in Path(path).read_text().split("\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "step" in record:
            found.append(record)
    return found


def plot_metrics(path: str | Path, image: str | Path, layers: Sequence[int]) -> None:
    """Loss, share of skipped rows in each of the routed ``layers``, and agreement with the frozen model, by step, as an image file.

    Raises :class:`SkipperError` where matplotlib is not installed or the file holds no step.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SkipperError("a plot needs the package matplotlib; install depthfx[train]") from error
    records = read_metrics(path)
    steps, checks = ([r for r in records if r["kind"] == kind] for kind in ("step", "evaluation"))
    if not steps:
        raise SkipperError(f"{path} holds no step, so there is nothing to plot")
    figure = Figure(figsize=(8, 9), layout="constrained")
    loss, skipped, agreement = figure.subplots(3, 1, sharex=True)
    loss.plot([r["step"] for r in steps], [r["lm"] for r in steps], label="training")
    for key, label in (("loss", "held out"), ("base_loss", "held out, frozen model")):
        if checks:
            loss.plot([r["step"] for r in checks], [r[key] for r in checks], marker="o", label=label)
    for place, layer in enumerate(layers):
        skipped.plot([r["step"] for r in steps], [r["skipped"][place] for r in steps], label=f"layer {layer}")
    if checks:
        agreement.plot([r["step"] for r in checks], [r["agreement"] for r in checks], marker="o")
    loss.set_ylabel("cross-entropy, nats a token")
    skipped.set_ylabel("share of skipped rows")
    agreement.set_ylabel("same next token as frozen model")
    agreement.set_xlabel("step")
    loss.legend()
    skipped.legend(ncols=4, fontsize="small")
    figure.savefig(image)
