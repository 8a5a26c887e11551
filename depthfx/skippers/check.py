"""Whether a skipper is served as it was trained: its own decisions and forced ones, in compiled steps against the training code.

Both sides see the same sequences, each a prompt of its own. Three rounds: every row runs, every row is Project-Only, and the skipper
decides. In the first two the logits behind each prompt are compared, in the second what stands in the KV pool, in the third each decision.
"""

from __future__ import annotations

import copy
import datetime
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from depthfx.contracts import Decision, Policy, Rows, Skipper
from depthfx.errors import SkipperError
from depthfx.skippers.make import load_skipper
from depthfx.skippers.train.routing import routed_training
from depthfx.skippers.train.sequences import Sequences, check_sequences

OWN, ALL_RUN, ALL_PROJECT = 0, 1, 2
# Largest |a - b| / (1 + max |b|) of logits: sums in another order, through all layers.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_MARK = 0.8125  # what the KV pool is filled with before it is looked at
_BATCH = 8


class Forced(Policy):
    """A policy that another hand can overrule between steps; weights stay its own."""

    mode: torch.Tensor

    def __init__(self, own: Policy) -> None:
        super().__init__()
        self.own, self.scope, self.monotone = own, own.scope, own.monotone
        self.register_buffer("mode", torch.zeros((), dtype=torch.int64))

    def forward(self, rows: Rows) -> Decision:
        """Its own actions in mode OWN, else all the same."""
        found = self.own(rows)
        return Decision(torch.where(self.mode == OWN, found.actions.bool(), self.mode == ALL_RUN), found.weight)


@dataclass(frozen=True)
class SkipperCheck:
    """What the check found; ``passed`` sums it up, ``lines`` say it."""

    layers: tuple[int, ...]
    tokens: int
    run_error: float  # of logits, all rows RUN, largest |difference| / (1 + largest |logit|)
    project_error: float  # the same, all rows Project-Only
    tolerance: float
    kv_missing: int  # (layer, token) pairs whose K or V was not written, all rows Project-Only
    kv_broken: int  # those that hold NaN, infinity or nothing but zeros
    decisions: int
    flips: int  # decisions that are served another way
    exact: bool  # in FP32, where no flip is allowed
    skipped_share: float

    @property
    def passed(self) -> bool:
        """Equal logits, complete K/V, and in FP32 equal routes."""
        errors = max(self.run_error, self.project_error)
        return errors <= self.tolerance and not (self.kv_missing or self.kv_broken) and not (self.exact and self.flips)

    def write(self, path: Path, model: Any, **beside: Any) -> None:
        """All of it as one JSON object, with where it was found, and what ``beside`` adds. Raises :class:`SkipperError` where it cannot."""
        device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else "CPU"
        where = {"device": device, "dtype": str(model.dtype), "torch": torch.__version__, "date": datetime.date.today().isoformat()}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({**beside, **where, "passed": self.passed, **asdict(self)}, indent=1) + "\n")
        except OSError as error:
            raise SkipperError(f"{path} cannot be written ({error}); name another file, or make room") from error

    def lines(self) -> list[str]:
        """For people, one finding a line."""
        allowed = f"(allowed {self.tolerance:g} of the largest)"
        kv = f"{self.kv_missing:,} keys and values not written, {self.kv_broken:,} not finite or empty"
        flips = f"{self.flips:,} of {self.decisions:,} decisions are served another way"
        reason = "" if self.exact else " (16-bit sums depend on their order)"
        return [
            f"routed layers {' '.join(map(str, self.layers))}; {self.tokens:,} tokens",
            f"forced RUN: logits differ from the training code's by {self.run_error:.1e} {allowed}: {_word(self.run_error <= self.tolerance)}",
            f"forced Project-Only: logits differ by {self.project_error:.1e} {allowed}: {_word(self.project_error <= self.tolerance)}",
            f"forced Project-Only: {kv}: {_word(not (self.kv_missing or self.kv_broken))}",
            f"routes: {flips}{reason}; {self.skipped_share:.1%} of routed rows skip: {_word(not (self.exact and self.flips))}",
        ]


def check_skipper(path: str | Path | Skipper, model: nn.Module, sequences: Sequences, compile: Callable[..., Any]) -> SkipperCheck:
    """Check the skipper at ``path`` (or one at hand) for the plain Hugging Face ``model`` on full ``sequences`` [N, S], S a multiple of 16.

    ``compile`` is :func:`depthfx.compile`; ``model`` is compiled by it at the end and stays so. Raises :class:`SkipperError` for a
    checkpoint that does not load and sequences that do not fit, and whatever ``compile`` raises.
    """
    count, length = sequences.ids.shape
    check_sequences("sequences", sequences, model, targets=False)
    if length % 16 or not count or int(sequences.lengths.min()) < length:
        raise SkipperError(f"{count} sequences of up to {length} tokens are not allowed; give full ones whose length is a multiple of 16")
    found = path if isinstance(path, Skipper) else load_skipper(path, model)
    forced = Skipper(found.layers, [Forced(copy.deepcopy(p)) for p in found.policies], list(found.projectors), found.gate, found.name)  # type: ignore[arg-type]
    forced.to(next(model.parameters()).device)
    dtype, ids = next(model.parameters()).dtype, sequences.ids.long()
    expected = [_trained(model, forced, mode, ids) for mode in (ALL_RUN, ALL_PROJECT, OWN)]
    served = compile(
        model, skipper=forced, inductor=False, cuda_graphs=False, prefix_reuse=False, max_model_len=length + 16, kv_blocks=_BATCH * (length // 16 + 1),
    )  # fmt: skip
    run_logits, _ = _served(served, forced, ALL_RUN, ids)
    project_logits, _ = _served(served, forced, ALL_PROJECT, ids)
    missing, broken = _pool_faults(served, forced, ids[:1])
    _, actions = _served(served, forced, OWN, ids)
    wanted = expected[2][1]
    return SkipperCheck(
        layers=found.layers, tokens=ids.numel(), run_error=_error(run_logits, expected[0][0]),
        project_error=_error(project_logits, expected[1][0]), tolerance=TOLERANCE.get(dtype, 0.0), kv_missing=missing, kv_broken=broken,
        decisions=wanted.numel(), flips=int((actions != wanted).sum()), exact=dtype is torch.float32,
        skipped_share=float((wanted == 0).float().mean()),
    )  # fmt: skip


def _set(skipper: Skipper, mode: int) -> None:
    for policy in skipper.policies:
        assert isinstance(policy, Forced)
        policy.mode.fill_(mode)


@torch.no_grad()
def _trained(model: nn.Module, skipper: Skipper, mode: int, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits ``[N, V]`` behind each sequence and actions int8 ``[N, places, S]`` of the training code."""
    _set(skipper, mode)
    logits, actions = [], []
    device = next(model.parameters()).device
    with routed_training(model, skipper, "hard" if skipper.gate == "mlp" else "straight_through") as routing, routing.served():
        for part in ids.split(_BATCH):
            logits.append(model(input_ids=part.to(device), use_cache=False).logits[:, -1].float().cpu())
            actions.append(torch.stack(routing.actions, 1).to("cpu", torch.int8))
    return torch.cat(logits), torch.cat(actions)


def _served(model: Any, skipper: Skipper, mode: int, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of compiled steps."""
    _set(skipper, mode)
    engine, logits, maps = model.engine, [], []
    engine.routes.record()
    for part in ids.split(_BATCH):
        first = engine._next_id
        out = model.generate(
            part.to(model.device), attention_mask=torch.ones_like(part).to(model.device), max_new_tokens=1, do_sample=False,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        logits.append(out.logits[0].float().cpu())
        maps += [engine.routes.depth_map(f"request-{first + i}") for i in range(len(part))]
    engine.routes.record(False)
    return torch.cat(logits), torch.stack(maps)


def _pool_faults(model: Any, skipper: Skipper, ids: torch.Tensor) -> tuple[int, int]:
    """How many (layer, token) pairs have no K or V of their own after one prompt, and how many have one that is of no use."""
    pool: torch.Tensor = model.engine._runner.kv_pool  # [blocks, L, 2, Hkv, B, D]
    pool.fill_(_MARK)
    _served(model, skipper, ALL_PROJECT, ids)
    slots = pool.float().permute(1, 2, 0, 4, 3, 5).flatten(4).flatten(2, 3)  # [L, 2, slots, Hkv * D]
    written = (slots != _MARK).any(-1)
    useful = slots.isfinite().all(-1) & slots.any(-1)
    num_layers = slots.shape[0]
    missing = num_layers * ids.numel() - int(written.all(1).sum().clamp(max=num_layers * ids.numel()))
    return missing, int((written & ~useful).any(1).sum())


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    error = float((found - wanted).abs().max() / (1 + wanted.abs().max()))
    return error if math.isfinite(error) else math.inf


def _word(good: bool) -> str:
    return "good" if good else "WRONG"
