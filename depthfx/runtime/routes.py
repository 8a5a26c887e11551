"""What the skipper decided: counts by layer and by request, and for recorded requests the decision of every token."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from depthfx.errors import InvalidRequestError
from depthfx.records import Depth, SamplingParams, StepPlan

Seen = tuple[int, int]  # (Project-Only, all) pairs of row and routed layer
_FIRST_SLOTS = 256
_KEPT_REQUESTS = 4096  # counts of requests before these are forgotten


@dataclass(frozen=True)
class RouteCounts:
    """Rows of routed steps by routed layer, in the order of ``layers``."""

    layers: tuple[int, ...]
    run: tuple[int, ...]
    project: tuple[int, ...]

    @property
    def skipped_share(self) -> float:
        """Share of row and routed layer pairs that were Project-Only; 0 where nothing was routed."""
        total = sum(self.run) + sum(self.project)
        return sum(self.project) / total if total else 0.0


class RouteLog:
    """Counts of one engine; the engine alone adds to it."""

    def __init__(self, layers: Sequence[int], depth: tuple[Depth, Depth]) -> None:
        """``depth``: of prompt and answer of a request that says nothing."""
        self.layers = tuple(layers)
        self.default = depth
        self.observer: Callable[[Seen, Seen], None] = lambda answer, prompt: None  # told by :meth:`add`; settable
        self._all = np.zeros((2, len(self.layers)), dtype=np.int64)
        self._counts = np.zeros((_FIRST_SLOTS, 2, len(self.layers)), dtype=np.int64)  # of requests, by slot
        self._used = np.zeros(_FIRST_SLOTS, dtype=np.int64)  # the last step that named each
        self._slots: dict[str, int] = {}
        self._free = list(range(_FIRST_SLOTS - 1, -1, -1))
        self._num_steps = 0
        self._recording = False
        self._maps: dict[str, dict[int, np.ndarray]] = {}  # request -> position -> [places]

    def counts(self, request_id: str | None = None) -> RouteCounts:
        """Of all requests, or of one. Raises :class:`InvalidRequestError` for a request that was never routed, or long ago."""
        if request_id is not None and request_id not in self._slots:
            raise InvalidRequestError(
                f"request {request_id!r} has no routes: it is unknown, dense, or more than {_KEPT_REQUESTS} requests ago"
            )
        run, project = self._all if request_id is None else self._counts[self._slots[request_id]]
        return RouteCounts(self.layers, tuple(map(int, run)), tuple(map(int, project)))

    def record(self, recording: bool = True) -> None:
        """Keep every decision of requests from now on, for :meth:`depth_map` and :meth:`digest`; False: stop, and forget what was kept."""
        self._recording = recording
        if not recording:
            self._maps.clear()

    def depth_map(self, request_id: str) -> torch.Tensor:
        """Int8 ``[places, tokens]`` of a recorded request: 1 RUN, 0 Project-Only, -1 not routed. Raises :class:`InvalidRequestError`."""
        if request_id not in self._maps:
            raise InvalidRequestError(
                f"request {request_id!r} was not recorded: it is unknown, dense, or older than the last call of engine.routes.record()"
            )
        found = self._maps[request_id]
        result = np.full((len(self.layers), max(found) + 1), -1, dtype=np.int8)
        for position, column in found.items():
            result[:, position] = column
        return torch.from_numpy(result)

    def digest(self, request_id: str) -> str:
        """A hash of :meth:`depth_map`: equal for equal routes."""
        routes = self.depth_map(request_id)
        return hashlib.blake2b(repr(tuple(routes.shape)).encode() + routes.numpy().tobytes(), digest_size=16).hexdigest()

    def add(self, plan: StepPlan, tape: torch.Tensor) -> None:
        """The tape ``[places, T]`` of a booked step, or of its decodes alone; tells ``observer`` what was decided for rows of answers and
        of prompts, dense ones too.

        Of dense rows, which run every layer, the tape says what would have been decided; it is not counted here.
        """
        columns = tape.numpy()
        if columns.shape[1] < plan.num_tokens:  # prompts ran in a step of their own, which asked nobody
            plan = replace(plan, prefills=())
        skipped = (columns & 1) == 0
        self._count(plan, columns, np.stack((~skipped, skipped)))
        by_row, row = skipped.sum(0), len(plan.decodes)
        project, rows = {True: 0, False: int(by_row[:row].sum())}, {True: 0, False: row}  # of prompts, of answers
        for chunk in plan.prefills:
            project[chunk.is_prompt] += int(by_row[row : row + chunk.num_tokens].sum())
            rows[chunk.is_prompt] += chunk.num_tokens
            row += chunk.num_tokens
        places = len(self.layers)
        self.observer((project[False], rows[False] * places), (project[True], rows[True] * places))

    def _count(self, plan: StepPlan, columns: np.ndarray, both: np.ndarray) -> None:
        self._num_steps += 1
        routed = [row for row, chunk in enumerate(plan.decodes) if chunk.routed]
        if routed:
            slots = [self._slot(plan.decodes[row].request_id) for row in routed]  # all different
            mine = both[:, :, routed]
            self._all += mine.sum(-1)
            self._counts[slots] += mine.transpose(2, 0, 1)
            self._used[slots] = self._num_steps
        row = len(plan.decodes)
        for chunk in plan.prefills:
            if chunk.routed:
                slot, one = self._slot(chunk.request_id), both[:, :, row : row + chunk.num_tokens].sum(-1)
                self._all += one
                self._counts[slot] += one
                self._used[slot] = self._num_steps
            row += chunk.num_tokens
        while len(self._slots) > _KEPT_REQUESTS:
            oldest = min(self._slots, key=lambda name: self._used[self._slots[name]])
            self._free.append(self._slots.pop(oldest))
        if self._recording:
            self._record(plan, columns)

    def _record(self, plan: StepPlan, columns: np.ndarray) -> None:
        row = 0
        for chunk in plan.decodes + plan.prefills:
            if chunk.routed:
                kept = self._maps.setdefault(chunk.request_id, {})
                kept.update((chunk.start + i, columns[:, row + i].copy()) for i in range(chunk.num_tokens))
            row += chunk.num_tokens

    def _slot(self, name: str) -> int:
        """Where the counts of a request are; from 0 for a new one."""
        if name not in self._slots:
            if not self._free:
                size = len(self._counts)
                self._free += range(2 * size - 1, size - 1, -1)
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
                self._used = np.concatenate((self._used, np.zeros_like(self._used)))
            self._slots[name] = slot = self._free.pop()
            self._counts[slot] = 0
        return self._slots[name]


def depth_parts(sampling: SamplingParams, routes: RouteLog | None, measured: bool) -> tuple[Depth, Depth]:
    """The depth of prompt and answer of a request. Raises :class:`InvalidRequestError` where it asks for a skipper and there is none, or
    leaves open what nothing was ``measured`` for."""
    asked = sampling.depth
    if asked is None:
        return ("dense", "dense") if routes is None else routes.default
    prompt, answer = asked if isinstance(asked, tuple) else (asked, asked)
    wants = next((part for part in (prompt, answer) if part != "dense"), None)
    if routes is None and wants is not None:
        raise InvalidRequestError(
            f"depth={wants!r}: this model was compiled without a skipper; give depthfx.compile one, or leave depth out"
        )
    if not measured and "auto" in (prompt, answer):
        raise InvalidRequestError(
            "depth='auto': what routing costs was not measured; compile the model with depth='auto', or ask for 'dense' or 'routed'"
        )
    return prompt, answer
