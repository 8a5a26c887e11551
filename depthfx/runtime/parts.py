"""What the engine asks of the parts that it drives, and a step on its way through them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

from depthfx.errors import DepthfxError, InternalError, InvalidRequestError
from depthfx.records import StepPlan, StepResult
from depthfx.runtime.metrics import StepClock

# What a runner may raise for one step without ending the engine. Anything else is a defect and comes straight through.
RUNNER_FAULTS = (RuntimeError, MemoryError, ArithmeticError, ValueError, OSError, DepthfxError)


class StepRunner(Protocol):
    """Computes steps; all of them in launch order, on one stream."""

    def launch(self, plan: StepPlan) -> Any:
        """Queues the step's work, returns a handle at once."""

    def release(self) -> None:
        """Gives memory back; called once, when nothing is queued any more."""

    def wait(self, handle: Any) -> StepResult:
        """Blocks until the step is done. May be called again with the same handle if it was interrupted."""


class MemoryControl(Protocol):
    """Lets memory follow load, see :mod:`depthfx.runtime.elastic`; called by the driver, in this order."""

    def mask(self) -> bytes:
        """Which entries may be full in steps planned now."""

    def restore(self, timeout: float) -> None:
        """Brings everything back that was lent."""

    def close(self) -> None:
        """Gives everything back; called once, after the runner's release."""

    def collect(self) -> None:
        """Takes in what came back."""

    def weights_changed(self) -> None:
        """Weights were written in place."""

    def check_wanted(self, state: bytes) -> None:
        """Raises where a state of precision can never be had."""

    def before_plan(self, waiting_since: float | None) -> None:
        """Takes in what came back, and lends ahead of need. ``waiting_since``: of the next request, see :class:`depthfx.runtime.backlog.Backlog`."""

    def after_plan(self) -> None:
        """Makes sure that what was lent can be written by the step that is launched next."""

    def after_commit(self, waiting: bool, idle: bool) -> None:
        """Gives back what is not needed."""

    def press(self, spare: int) -> str:
        """Instead of `after_commit` while somebody waits for full precision: brings back what leaves room for held and ``spare`` blocks.

        Returns why who waits should give up, or ""."""

    def wait(self, seconds: float) -> None:
        """Nothing can run before what was pressed for is back: waits for it, at most so long. Called without the engine's lock."""


class Booking:
    """Entered while tokens are booked, and stop checks with them: the requests must not change under the scheduler's hands."""

    def __init__(self) -> None:
        self._active = False

    def __enter__(self) -> None:
        self.refuse("push_token")
        self._active = True

    def __exit__(self, *error: object) -> None:
        self._active = False

    def refuse(self, what: str) -> None:
        """Raises :class:`InvalidRequestError` inside a booking."""
        if self._active:
            raise InvalidRequestError(
                f"{what} was called inside a stop_check; it may only add requests there: return True to end its own request"
            )


@dataclass
class Flight:
    """A planned step and its handle."""

    plan: StepPlan
    handle: Any = None
    error: BaseException | None = None  # the launch failed

    def wait(self, runner: StepRunner, clock: StepClock) -> tuple[StepResult | None, BaseException | None]:
        """The step's result, or what it failed with; anything but :data:`RUNNER_FAULTS` is raised."""
        if self.error is not None:
            return None, self.error
        start = time.perf_counter()
        try:
            result = runner.wait(self.handle)
        except InternalError:
            raise
        except RUNNER_FAULTS as error:
            return None, error
        clock.waited(time.perf_counter() - start)
        return result, None
