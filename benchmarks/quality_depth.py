"""What skipping costs in quality: a skipper in plain PyTorch and as it is served, its thresholds, and skipping that nobody learned.

Used by ``quality.py --skipper``. The curve is over thresholds of the one skipper that is measured: another penalty would be another
training, of another skipper, and a threshold moves a trained one along quality against work. Shares of work count the products with weights
of all layers, router and adapter included, attention's own products and the LM head left out.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common
import torch

import depthfx
from depthfx.contracts import Decision, Policy, Rows, Skipper
from depthfx.skippers import load_skipper, make_skipper
from depthfx.skippers.policies.random_skip import MODULUS, hash_of
from depthfx.skippers.train import Sequences, routed_training, settle_skipper

COLUMNS = ["arm", "threshold", "skipped %", "of all %", "work %", "perplexity", "vs base %", "KL", "agreement %", "flips"]
THRESHOLDS = (0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.97)
_BATCH = 4  # windows of one forward in plain PyTorch


class Chance(Policy):
    """A share of the rows of each layer skips, by a hash of row and layer."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.limit = round(share * MODULUS)

    def forward(self, rows: Rows) -> Decision:
        """As in random_skip, but drawn anew in each layer."""
        runs = hash_of(rows.request_ids + 1_000_003 * rows.place, rows.positions, 1234) >= self.limit
        return Decision(runs, torch.ones_like(rows.normed[:, 0]))


class Fixed(Policy):
    """The layers at ``places`` skip, for all rows."""

    def __init__(self, places: tuple[int, ...]) -> None:
        super().__init__()
        self.places = places

    def forward(self, rows: Rows) -> Decision:
        """The same for all rows."""
        return Decision(torch.full_like(rows.ran, rows.place not in self.places), torch.ones_like(rows.normed[:, 0]))


@dataclass
class Score:
    """Sums over positions that have a next token, and over all rows what skipped."""

    loss: float = 0.0
    divergence: float = 0.0
    agreed: int = 0
    targets: int = 0
    rows: int = 0
    skipped: list[int] = field(default_factory=list)  # by routed layer
    flips: int | None = None

    def add(self, base: torch.Tensor, ours: torch.Tensor, ids: torch.Tensor, skipped: list[int]) -> None:
        """``base`` and ``ours`` [B, S, V] logits, ``ids`` [B, S]."""
        exact, found = (torch.log_softmax(x[:, :-1].float(), -1) for x in (base, ours))
        self.loss -= float(found.gather(-1, ids[:, 1:, None]).double().sum())
        self.divergence += float((exact.exp() * (exact - found)).sum())
        self.agreed += int((exact.argmax(-1) == found.argmax(-1)).sum())
        self.targets += ids[:, 1:].numel()
        self.rows += ids.numel()
        self.skipped = [a + b for a, b in zip(self.skipped or [0] * len(skipped), skipped, strict=True)]

    @property
    def share(self) -> float:
        """Of routed rows that skip."""
        return sum(self.skipped) / max(1, self.rows * len(self.skipped))

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss / self.targets)


class Depth:
    """One base model, the windows, and rows of the table."""

    def __init__(self, model: Any, windows: list[list[int]]) -> None:
        self.model = model
        self.windows = torch.tensor(windows, device=model.device)
        self.rows: list[dict[str, Any]] = []
        self.base_perplexity: float | None = None
        self.base: dict[int, torch.Tensor] = {}  # logits of the model itself, by place of the batch

    @torch.no_grad()
    def plain(self, skipper: Skipper) -> tuple[Score, torch.Tensor]:
        """The skipper in plain PyTorch; its score, and all actions bool ``[windows, places, S]``."""
        score, actions = Score(), []
        kind: Any = "hard" if skipper.gate == "mlp" else "straight_through"
        with routed_training(self.model, skipper, kind) as routing, routing.served():
            for place, ids in enumerate(self.windows.split(_BATCH)):
                if place not in self.base:
                    with routing.off():
                        self.base[place] = self.model(input_ids=ids, use_cache=False).logits
                ours = self.model(input_ids=ids, use_cache=False).logits
                actions.append(torch.stack(routing.actions, 1).cpu())
                score.add(self.base[place], ours, ids, [int((~a).sum()) for a in routing.actions])
        return score, torch.cat(actions)

    def add(self, arm: str, score: Score, skipper: Skipper | None, threshold: float | None = None) -> None:
        """One row of the table; the first is the base."""
        config = self.model.config
        self.base_perplexity = self.base_perplexity or score.perplexity
        all_share = score.share * (len(score.skipped) / config.num_hidden_layers)
        row = {
            "arm": arm, "threshold": threshold, "skipped %": 100 * score.share, "of all %": 100 * all_share,
            "work %": 100 * (work_share(config, skipper, score.share) if skipper else 1.0), "perplexity": score.perplexity,
            "vs base %": 100 * (score.perplexity / self.base_perplexity - 1), "KL": score.divergence / score.targets,
            "agreement %": 100 * score.agreed / score.targets, "flips": score.flips,
            "decisions": score.rows * len(score.skipped), "skipped by layer": [s / max(1, score.rows) for s in score.skipped],
        }  # fmt: skip
        self.rows.append(row)
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items() if k in COLUMNS}, flush=True)


def work_share(config: Any, skipper: Skipper, share: float) -> float:
    """Products of a row with the weights of all layers where ``share`` of the routed ones are skipped, against the base's."""
    width, inner = config.hidden_size, config.intermediate_size
    head = getattr(config, "head_dim", None) or width // config.num_attention_heads
    keys = 2 * width * head * config.num_key_value_heads
    whole = keys + 2 * width * head * config.num_attention_heads + 3 * width * inner
    router, adapter = (sum(p.numel() for p in parts[0].parameters() if p.dim() == 2) for parts in (skipper.policies, skipper.projectors))
    routed = router + share * (keys + adapter) + (1 - share) * whole
    return ((config.num_hidden_layers - len(skipper.layers)) * whole + len(skipper.layers) * routed) / (config.num_hidden_layers * whole)


def with_threshold(skipper: Skipper, threshold: float) -> Skipper:
    """A copy whose rows run above another weight."""
    found = copy.deepcopy(skipper)
    for policy in found.policies:
        policy.threshold = threshold
    return found


def at_share(depth: Depth, skipper: Skipper, share: float) -> Skipper:
    """A copy that is settled on some of the windows, so that about ``share`` of the routed rows skips."""
    found, ids = copy.deepcopy(skipper), depth.windows[: 4 * _BATCH].cpu().int()
    settle_skipper(depth.model, found, Sequences(ids, torch.ones_like(ids).bool(), torch.full((len(ids),), ids.shape[1])), share, _BATCH)
    return found


def controls(depth: Depth, skipper: Skipper, score: Score) -> None:
    """Skipping of the same share that nobody learned, with the trained adapters and with nothing in their place."""
    nothing = make_skipper(depth.model, Chance(0.0), "identity", layers=skipper.layers)
    count = round(score.share * len(skipper.layers))
    order = sorted(range(len(skipper.layers)), key=lambda place: -score.skipped[place])
    for name, policy in (("random", Chance(score.share)), ("static", Fixed(tuple(sorted(order[:count]))))):
        for label, projectors in (("adapters", skipper.projectors), ("nothing added", nothing.projectors)):
            made = Skipper(skipper.layers, policy, list(projectors), "hard", name)
            found, _ = depth.plain(made)
            depth.add(f"{name}, {label}", found, made)


def served(
    depth: Depth, skipper: Skipper, expected: torch.Tensor, fresh: Callable[[], Any], logits_of: Callable[..., Any], options: dict[str, Any]
) -> None:
    """Compiled with 16-bit and nested weights: dense and routed steps, full and fast, and how many decisions differ from ``expected``."""
    for weights, precisions in (("16bit", (None,)), ("nested", ("full", "fast"))):
        model = depthfx.compile(fresh(), skipper=copy.deepcopy(skipper), weights=weights, **options)
        for precision in precisions:
            if precision:
                model.set_precision(precision)
            for routed in (False, True):
                score = Score(skipped=[0] * len(skipper.layers), flips=0 if routed else None)
                for number, ids in enumerate(depth.windows):
                    ours = logits_of(model, ids.tolist(), routed)
                    actions = model.engine._runner.tape[:, : len(ids)].cpu().bool() if routed else torch.ones_like(expected[number])
                    with torch.no_grad():
                        base = depth.model(input_ids=ids[None], use_cache=False).logits
                    score.add(base, ours[None], ids[None], (~actions).sum(1).tolist())
                    if routed:
                        score.flips += int((actions != expected[number]).sum())
                name = f"served, {weights}{', ' + precision if precision else ''}, {'routed' if routed else 'dense'}"
                depth.add(name, score, skipper if routed else None, 0.5 if routed else None)
        del model
        common.release()


def measure_skipper(args: Any, windows: list[list[int]], fresh: Callable[[], Any], logits_of: Any, options: dict[str, Any]) -> None:
    """All arms, the table, its JSON and the curve."""
    depth = Depth(fresh(), windows)
    skipper = load_skipper(args.skipper, depth.model)
    everything, _ = depth.plain(with_threshold(skipper, -1.0))  # a weight may be rounded to 0
    assert everything.share == 0 or skipper.gate == "mlp", "below threshold 0 every row runs"
    depth.add("base" if skipper.gate == "hard" else "all run", everything, None)
    score, actions = depth.plain(skipper)
    depth.add("skipper", score, skipper, 0.5)
    if args.before:
        before = load_skipper(args.before, depth.model)
        depth.add("stage one", depth.plain(before)[0], before, 0.5)
        before = at_share(depth, before, score.share)
        depth.add("stage one, same share", depth.plain(before)[0], before, 0.5)
    controls(depth, skipper, score)
    for threshold in args.thresholds:
        if threshold != 0.5:
            depth.add("skipper, other threshold", depth.plain(with_threshold(skipper, threshold))[0], skipper, threshold)
    if not args.no_served:
        served(depth, skipper, actions, fresh, logits_of, options)
    common.print_table([{**r, "threshold": r["threshold"] and f"{r['threshold']:.3f}"} for r in depth.rows], COLUMNS)
    path = common.write_results(f"quality-skipper{'-' + args.name if args.name else ''}", depth.rows, depth.model.device)
    draw(path.parent / f"{path.name}.png", depth.rows, skipper.layers, args.name or "held-out text")


def draw(path: Path, rows: list[dict[str, Any]], layers: tuple[int, ...], title: str) -> None:
    """Perplexity against work, and the share of skipped rows by layer."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (curve, bars) = plt.subplots(1, 2, figsize=(11, 4), dpi=120, layout="constrained")
    learned = sorted((r for r in rows if r["arm"].startswith("skipper")), key=lambda r: r["work %"])
    curve.plot([r["work %"] for r in learned], [r["perplexity"] for r in learned], marker="o", label="skipper, by threshold")
    for row in rows:
        if row["arm"].startswith(("random", "static", "stage one, ", "served, nested, fast, routed")):
            curve.plot(row["work %"], row["perplexity"], marker="x", linestyle="", label=row["arm"])
    curve.axhline(rows[0]["perplexity"], color="black", linewidth=0.8, linestyle="--", label="base")
    curve.set_yscale("log")
    curve.set_xlabel("work of the layers, % of the base's")
    curve.set_ylabel("perplexity")
    curve.set_title(title, fontsize=10)
    curve.legend(fontsize=7, frameon=False)
    found = next(r for r in rows if r["arm"] == "skipper")
    bars.bar([str(i) for i in layers], [100 * s for s in found["skipped by layer"]])
    bars.set_xlabel("routed layer")
    bars.set_ylabel("skipped rows, %")
    figure.savefig(path)
    plt.close(figure)
