"""Precision by backlog: prompts that wait too long make whole steps fast, whether or not the KV cache is full.

KV pressure is one way to be overloaded; too many prompt tokens for the arithmetic is another, and there fast steps, which compute a prompt in
about half the time, help as much as lent memory does. Once steps have to be fast, all layers are: a layer that stays full because its own
residual happens to be there only makes the wait longer. Nothing is lent for this, so full precision is back with the next step.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Backlog:
    """Watches how long the next request has waited for its prompt to begin."""

    def __init__(self, patience_s: float, calm_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """A wait of more than ``patience_s`` makes steps fast (inf: never); waits of at most half of that for ``calm_s`` end it."""
        self.hurried = False  # steps planned now should be fast
        self._patience_s, self._calm_s, self._clock = patience_s, calm_s, clock
        self._calm_since: float | None = None
        self._serving_since = float("-inf")

    def look(self, waiting_since: float | None, idle: bool = False) -> None:
        """Before each plan: the time at which the next request was added, None if there is none that fast steps would help.

        ``idle``: nobody is being served, so who waits has waited for nobody but the caller; that does not count.
        """
        now = self._clock()
        self._serving_since = now if idle else self._serving_since
        waited = 0.0 if waiting_since is None else now - max(waiting_since, self._serving_since)
        if waited > self._patience_s:
            self.hurried = True
        if waited > self._patience_s / 2:
            self._calm_since = None
        elif self._calm_since is None:
            self._calm_since = now
        elif now - self._calm_since >= self._calm_s:
            self.hurried = False

    def rest(self) -> None:
        """Nobody is left, or somebody waits for full precision: no hurry from here on."""
        self.hurried, self._calm_since = False, None
