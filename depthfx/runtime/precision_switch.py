"""Precision that follows load where nothing is lent: full weights and the KV cache have memory of their own."""

from __future__ import annotations

import time
from collections.abc import Callable

from depthfx.alloc.manager import MemoryManager
from depthfx.runtime.backlog import Backlog
from depthfx.settings import ElasticMemory


class PrecisionSwitch:
    """The policy ``nested_resident``: fast while held blocks are above ``high``, full again below ``low`` for a while; nothing is lent."""

    def __init__(
        self, manager: MemoryManager, num_entries: int, settings: ElasticMemory, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.manager, self.settings = manager, settings
        self._masks = {True: bytes([1] * num_entries), False: bytes(num_entries)}
        self._full = True
        self._clock = clock
        self._calm_since: float | None = None
        self._backlog = Backlog(settings.patience_s, settings.dwell_s, clock)

    def mask(self) -> bytes:
        """As that of ``ElasticControl``: which entries may be full in steps planned now."""
        return self._masks[self._full and not (self._backlog.hurried and self.manager.may_lend)]

    def restore(self, timeout: float) -> None:
        """Nothing was lent."""

    def collect(self) -> None:
        """Nothing is under way."""

    def weights_changed(self) -> None:
        """There is no copy of them."""

    def close(self) -> None:
        """Nothing to give back."""

    def check_wanted(self, state: bytes) -> None:
        """Every state is possible."""

    def before_plan(self, waiting_since: float | None) -> None:
        """Fast from here on if the KV cache is as full as ``high`` says or prompts wait, unless somebody runs who asks for full precision."""
        self._backlog.look(waiting_since, idle=not self.manager.held_blocks)
        if self._is_high() and self.manager.may_lend:
            self._full, self._calm_since = False, None

    def _is_high(self) -> bool:
        held = self.manager.held_blocks
        return held > 0 and held / self.manager.num_blocks >= min(self.settings.high, 1.0 - 1.0 / self.manager.num_blocks)

    def press(self, spare: int) -> str:
        """Full at once below ``high``; who waits for that waits for others to end, and never in vain."""
        self._full, self._calm_since = not self._is_high(), None
        self._backlog.rest()
        return ""

    def wait(self, seconds: float) -> None:
        """Nothing to wait for."""

    def after_plan(self) -> None:
        """Nothing to do."""

    def after_commit(self, waiting: bool, idle: bool) -> None:
        """Full again once pressure has been away for the dwell time."""
        if idle:
            self._backlog.rest()
        if self._full or waiting or self.manager.held_blocks > self.settings.low * self.manager.num_blocks:
            self._calm_since = None
            return
        now = self._clock()
        self._calm_since = now if self._calm_since is None else self._calm_since
        self._full = idle or now - self._calm_since >= self.settings.dwell_s
