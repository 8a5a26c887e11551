"""What the skipper decided: counts by layer and by request, and for recorded requests the decision of every token."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from depthfx.errors import InvalidRequestError
from depthfx.records import SamplingParams, StepPlan

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

    def __init__(self, layers: Sequence[int], depth: tuple[bool, bool]) -> None:
        """``depth``: whether prompt and answer of a request that says nothing are routed."""
        self.layers = tuple(layers)
        self.default = depth
        self._all = self._none()
        self._requests: OrderedDict[str, np.ndarray] = OrderedDict()
        self._recording = False
        self._maps: dict[str, dict[int, np.ndarray]] = {}  # request -> position -> [places]

    def counts(self, request_id: str | None = None) -> RouteCounts:
        """Of all requests, or of one. Raises :class:`InvalidRequestError` for a request that was never routed, or long ago."""
        if request_id is not None and request_id not in self._requests:
            raise InvalidRequestError(
                f"request {request_id!r} has no routes: it is unknown, dense, or more than {_KEPT_REQUESTS} requests ago"
            )
        run, project = self._all if request_id is None else self._requests[request_id]
        return RouteCounts(self.layers, tuple(map(int, run)), tuple(map(int, project)))

    def record(self, recording: bool = True) -> None:
        """Keep every decision of requests from now on, for :meth:`depth_map` and :meth:`digest`; False: stop, and forget what was kept."""
        self._recording = recording
        if not recording:
            self._maps.clear()

    def depth_map(self, request_id: str) -> torch.Tensor:
        """Int8 ``[places, tokens]`` of a recorded request: 1 RUN, 0 Project-Only, -1 not routed. Raises :class:`InvalidRequestError`."""
        if request_id not in self._maps:
            raise InvalidRequestError(f"request {request_id!r} was not recorded; call engine.routes.record() before it is added")
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
        """The tape ``[places, T]`` of a booked step."""
        columns, row = tape.numpy(), 0
        for chunk in plan.decodes + plan.prefills:
            if chunk.routed:
                mine = columns[:, row : row + chunk.num_tokens]
                project = (mine == 0).sum(1)
                both = np.stack((mine.shape[1] - project, project))
                self._all += both
                self._requests.setdefault(chunk.request_id, self._none())[:] += both
                self._requests.move_to_end(chunk.request_id)
                if self._recording:
                    kept = self._maps.setdefault(chunk.request_id, {})
                    kept.update((chunk.start + i, mine[:, i].copy()) for i in range(mine.shape[1]))
            row += chunk.num_tokens
        while len(self._requests) > _KEPT_REQUESTS:
            self._requests.popitem(last=False)

    def _none(self) -> np.ndarray:
        return np.zeros((2, len(self.layers)), dtype=np.int64)


def routed_parts(sampling: SamplingParams, routes: RouteLog | None) -> tuple[bool, bool]:
    """Whether prompt and answer of a request ask the skipper. Raises :class:`InvalidRequestError` where it asks and there is none."""
    asked = sampling.depth
    if asked is None:
        return (False, False) if routes is None else routes.default
    prompt, answer = asked if isinstance(asked, tuple) else (asked, asked)
    if routes is None and "routed" in (prompt, answer):
        raise InvalidRequestError("depth='routed': this model was compiled without a skipper; give depthfx.compile one, or leave depth out")
    return prompt == "routed", answer == "routed"
