"""Engine: takes requests, drives scheduler and runner step by step, and hands each output to whoever asked for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from depthfx.errors import InternalError, InvalidRequestError
from depthfx.records import SamplingParams, StepResult
from depthfx.runtime.collect import Asked, Collection
from depthfx.runtime.mailboxes import Mailboxes
from depthfx.runtime.metrics import EngineStats, StepClock, StepCounts
from depthfx.runtime.parts import RUNNER_FAULTS, Booking, Flight, MemoryControl, StepRunner
from depthfx.runtime.precision import Modes, changed, named
from depthfx.runtime.request import (
    Request,
    RequestOutput,
    StopCheck,
    check_full,
    check_prompt,
    check_sampling,
    check_still_full,
    check_streamable,
    check_token,
)
from depthfx.runtime.routes import RouteLog, depth_parts
from depthfx.runtime.scheduler import Scheduler
from depthfx.runtime.stream import TokenStream
from depthfx.runtime.timeline import MemorySample, Timeline
from depthfx.runtime.weight_watch import WeightWatch

_RESTORE_SECONDS = 0.05  # of one wait for residuals, without which nothing can run


class Engine:
    """Serves many requests at once. All methods may be called from several threads.

    One thread at a time drives: it plans, launches, waits and commits; others may add, abort and read meanwhile.
    ``lookahead``: the next step is launched before the previous one is waited for. ``check``: prove the invariants of
    memory after every step. ``layers`` names the entries of precision that can be switched, all full at first; none by default.
    ``control`` moves memory, ``timeline`` keeps samples of who owned it, ``routes`` (None: no skipper) what the skipper decided.
    """

    def __init__(
        self, scheduler: Scheduler, runner: StepRunner, vocab_size: int, lookahead: bool, check: bool,
        layers: Sequence[int | str] = (), control: MemoryControl | None = None, timeline: Timeline | None = None,
        routes: RouteLog | None = None,
    ) -> None:  # fmt: skip
        self.routes, self.layers = routes, tuple(layers)
        self.vocab_size, self._scheduler, self._runner = vocab_size, scheduler, runner
        self._depth = 2 if lookahead else 1
        self._check = check
        self._state = threading.Condition()  # guards everything below; never held while waiting for the device
        self._driving = False
        self._booking = Booking()
        self._flights: deque[Flight] = deque()
        self._mail = Mailboxes()
        self._next_id = 0
        self.never_full = ""  # why no request can have full precision, if none can; settable
        self.watch: WeightWatch | None = None  # over the model whose weights are computed with; settable
        self.closed = False  # to read: whether `close` was called
        self._released = False
        self._num_faults = 0  # failed steps since the last good one
        scheduler.wanted = bytes([1] * len(self.layers))
        self.control = control
        if control is not None:
            scheduler.mask = control.mask
        self._timeline = timeline
        self._counts, self._clock = StepCounts(), StepClock()

    def add(
        self, prompt_token_ids: Iterable[int], sampling: SamplingParams | None = None, request_id: str | None = None,
        stop_check: StopCheck | None = None,
    ) -> str:  # fmt: skip
        """Queues a request and returns its id; its outputs come from :meth:`step`.

        ``stop_check`` gets the ids generated so far and ends the request by returning True; what it raises ends the request
        with that error. It may add requests, but not abort or read any. Raises :class:`InvalidRequestError` or
        :class:`RequestTooLargeError`; then nothing was queued.
        """
        self.follow_weights()
        return self._add(prompt_token_ids, sampling, request_id, stop_check, None)

    def step(self) -> list[RequestOutput]:
        """Runs one turn and returns what is new for requests made by :meth:`add`; empty if nothing came out.

        With lookahead the outputs are those of the step launched one turn ago. If the runner fails, the requests of that
        step end with the exception in their output and the others go on; if it fails again at once, the exception comes
        through. Parked requests need :meth:`push_token` before their next turn.
        """
        self._drive(lambda: bool(self._mail.unclaimed))
        with self._state:
            return self._mail.take_unclaimed()

    def has_unfinished(self) -> bool:
        """Whether there is work left, or an output that :meth:`step` has not returned yet."""
        with self._state:
            return bool(self._scheduler.has_unfinished() or self._mail.unclaimed)

    def stream(
        self, prompt_token_ids: Iterable[int], sampling: SamplingParams | None = None, request_id: str | None = None,
        stop_check: StopCheck | None = None,
    ) -> TokenStream:  # fmt: skip
        """Queues a request and returns an iterator over its tokens, which drives the engine as needed.

        Several streams may be read in turn or from several threads. Raises as :meth:`add`.
        """
        check_streamable(sampling)
        self.follow_weights()
        return TokenStream(self, self._add(prompt_token_ids, sampling, request_id, stop_check, deque()))

    def run(self, requests: Iterable[tuple[Iterable[int], SamplingParams | None]]) -> dict[str, RequestOutput]:
        """Serves (prompt, sampling) pairs to their end; one output with all tokens for each id, in the order given.

        If one pair is refused, none is served. A request that fails has its ``error`` set; nothing is raised for it.
        """
        streams: list[TokenStream] = []
        try:
            for prompt_token_ids, sampling in requests:
                streams.append(self.stream(prompt_token_ids, sampling))
            return {stream.request_id: stream.finish() for stream in streams}
        finally:
            for stream in streams:
                stream.close()

    def abort(self, request_id: str) -> bool:
        """Ends a request wherever it stands; False if there is no such unfinished request. It gets a last output."""
        with self._state:
            self._booking.refuse("abort")
            output = self._scheduler.abort(request_id)
            if output is not None:
                self._deliver([output])
                self._tidy_memory()
            return output is not None

    def push_token(self, request_id: str, token: int) -> RequestOutput:
        """Gives a parked request its next token; the output (also finished or not) is returned here and nowhere else.

        Raises :class:`InvalidRequestError` if the request is not parked or the id is outside the vocabulary.
        """
        value = check_token(token, self.vocab_size)
        with self._state, self._booking:
            output = self._scheduler.push_token(request_id, value)
            self._counts.num_tokens += 1
            self._tidy_memory()
            self._state.notify_all()
            return output

    def follow_weights(self) -> None:
        """Calls :meth:`weights_changed` if weights were changed in place since the last time; whoever adds requests does so first. Raises
        :class:`UnsupportedOptionError` if the model was changed in another way, see :class:`WeightWatch`. A closed engine sees nothing."""
        with self._state:
            if self.watch is not None:
                self.watch.follow(self.weights_changed)

    def forget_prefixes(self) -> None:
        """Computes every prompt, and what was tabulated, anew from here on: for weights that were changed through ``.data``, which nothing notices."""
        with self._state:
            if self.watch is not None:
                self.watch.refill()
            self._scheduler.manager.forget_content()

    def set_precision(self, modes: Modes) -> None:
        """``"full"`` or ``"fast"`` for all layers, or ``{layer: mode}`` for some; from the next step that is planned on.

        A step that is on its way keeps its precision. Raises :class:`UnsupportedOptionError` where the weights are not nested
        and :class:`InvalidRequestError` for an unknown layer or mode, or while a request asks for full precision; then nothing changes.
        """
        with self._state:
            wanted = changed(self._scheduler.wanted, modes, self.layers)
            check_still_full(wanted, self._scheduler.num_full)
            if self.control is not None:
                self.control.check_wanted(wanted)
            self._scheduler.wanted = wanted

    def precision(self) -> dict[int | str, str]:
        """The mode of each layer (and of the ``"head"``, where it is nested) in steps planned from now on; empty if none can switch.

        A layer whose residual is lent to the KV cache is fast, whatever :meth:`set_precision` asked for.
        """
        with self._state:
            if self.control is not None:
                self.control.collect()
            return named(self._scheduler.precision, self.layers)

    def restore(self, timeout: float = 60.0) -> None:
        """Brings all residual bytes back from the host now, so that the model's own weights can be read; nothing to do without lending.

        Raises :class:`MemoryStateError` while requests hold KV blocks in their memory, or after ``timeout`` seconds.
        """
        with self._state:
            if self.control is not None:
                self.control.restore(timeout)

    @contextmanager
    def writing_weights(self) -> Iterator[None]:
        """While the model's weights are written in place: after :meth:`restore`, and nothing is planned or lent meanwhile."""
        with self._state:
            self.restore()
            yield

    def weights_changed(self) -> None:
        """Makes what was computed with the old weights unfindable. Raises :class:`MemoryStateError` if residuals that are lent were written."""
        with self._state:
            if self.control is not None:
                self.control.weights_changed()
            self.forget_prefixes()

    def close(self) -> None:
        """Ends all requests and gives KV and shared memory back; the model's weights are whole again. Nothing can be served afterwards.

        Raises :class:`MemoryStateError` while somebody else holds a tensor over that memory; it can be called again then.
        """
        with self._state:
            self._booking.refuse("close")
            self.closed, self.watch = True, None  # it holds the weights
            for request_id in self._scheduler.unfinished():
                self.abort(request_id)
        while self._drive(lambda: False):
            pass  # what is on its way comes to its end
        with self._state:
            if not self._released:
                self._runner.release()
                self._released = True
            if self.control is not None:
                self.control.close()
                self.control = None

    def stats(self) -> EngineStats:
        """Counts and times so far."""
        with self._state:
            return self._counts.stats(self._scheduler, self._clock)

    def timeline(self) -> list[MemorySample]:
        """Who owned memory since the engine was made, oldest first, and now; empty unless compiled with ``memory`` settings."""
        with self._state:
            return [] if self._timeline is None else self._timeline.samples(self._scheduler)

    # -- requests and mailboxes

    def _add(
        self, prompt: Iterable[int], sampling: SamplingParams | None, request_id: str | None, stop_check: StopCheck | None,
        mailbox: deque[RequestOutput] | None,
    ) -> str:  # fmt: skip
        sampling = SamplingParams() if sampling is None else sampling
        check_sampling(sampling)
        token_ids = check_prompt(prompt, self.vocab_size)
        with self._state:
            if self.closed:
                raise InvalidRequestError("this engine is closed; load and compile the model again to serve requests")
            if request_id is None:
                request_id = self._unused_id()
            elif request_id in self._mail:
                raise InvalidRequestError(f"request id {request_id!r} belongs to a stream that is still read; choose another or close it")
            check_full(sampling, self.never_full, self._scheduler.wanted)
            depth = depth_parts(sampling, self.routes, measured=self._scheduler.depth is not None)
            self._scheduler.add(Request(request_id, token_ids, sampling, stop_check, depth=depth))
            if mailbox is not None:
                self._mail.open(request_id, mailbox)
        return request_id

    def _unused_id(self) -> str:
        while True:
            request_id = f"request-{self._next_id}"
            self._next_id += 1
            if request_id not in self._mail and not self._scheduler.knows(request_id):
                return request_id

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        self._counts.num_tokens += self._mail.deliver(outputs)
        self._state.notify_all()

    def _receive(self, request_id: str) -> RequestOutput:
        return self._receive_from(self._mail[request_id], request_id)

    def _receive_from(self, mailbox: deque[RequestOutput], owner: str) -> RequestOutput:
        while not mailbox:
            if not self._drive(lambda: bool(mailbox)):
                raise InternalError(f"{owner!r} is unfinished, but the engine has nothing to do")
        return mailbox.popleft()

    def collect(self, requests: Iterable[Asked]) -> Collection:
        """Queues ``(prompt, sampling, stop_check)`` requests and returns an iterator over ``(number, output)`` as they arrive.

        Use it as a context manager: requests that have not ended when it closes are aborted. Raises as :meth:`add`.
        """
        return Collection(self, requests)

    def _close_mailbox(self, request_id: str) -> None:
        with self._state:
            self._booking.refuse("close")
            if self._mail.close(request_id):
                self._scheduler.abort(request_id)
                self._tidy_memory()

    # -- driving

    def _drive(self, ready: Callable[[], bool]) -> bool:
        """Runs one turn, or waits for the turn of another thread, unless ``ready()``; False if there was nothing to do."""
        with self._state:
            self._booking.refuse("step or stream")
            while self._driving and not ready():
                self._state.wait()
            if ready():
                return True
            self._driving = True
        try:
            return self._turn() or ready()
        finally:
            with self._state:
                self._driving = False
                self._state.notify_all()

    def _turn(self) -> bool:
        """Plans and launches a step if one may be queued, then settles the oldest one if the queue is full or cannot grow."""
        with self._state:
            while self._mail.abandoned:
                self._close_mailbox(self._mail.abandoned.popleft())
            self._clock.start(in_flight=bool(self._flights))
            launched = self._launch_next()
            self._clock.stop()
            control = self.control if not self._flights and self._scheduler.presses else None
            if control is None and not self._flights:
                return False
            if launched and len(self._flights) < self._depth:
                return True
            if control is not None:
                self._tidy_memory(stuck=True)
            flight = self._flights[0] if self._flights else None
        if flight is None:
            assert control is not None
            control.wait(_RESTORE_SECONDS)
            return True
        result, error = flight.wait(self._runner, self._clock)
        with self._state:
            self._clock.start(in_flight=len(self._flights) > 1)
            self._settle(flight, result, error)
            self._clock.stop()
        return True

    def _launch_next(self) -> bool:
        if len(self._flights) >= self._depth or (self._flights and self._flights[-1].error is not None):
            return False
        if self.control is not None:
            if not self._flights and self._scheduler.presses:
                self._tidy_memory()  # who waits for full precision may be new: what is done for it comes before a plan without it
            self.control.before_plan(self._scheduler.waiting_since)
        plan = self._scheduler.plan()
        if self.control is not None:
            self.control.after_plan()
        if plan is None:
            return False
        flight = Flight(plan)
        self._flights.append(flight)
        try:
            flight.handle = self._runner.launch(plan)
        except BaseException as error:
            flight.error = error  # its requests end when its turn comes
            if isinstance(error, InternalError) or not isinstance(error, RUNNER_FAULTS):
                raise
        return True

    def _settle(self, flight: Flight, result: StepResult | None, error: BaseException | None) -> None:
        self._flights.popleft()
        if result is not None:
            with self._booking:
                outputs = self._scheduler.commit(result)
            self._num_faults = 0
            self._counts.add(flight.plan)
            if self.routes is not None and result.tape is not None:
                self.routes.add(flight.plan, result.tape)
            # a stop_check that was interrupted: whoever drives must notice
            error = next((o.error for o in outputs if o.error is not None and not isinstance(o.error, Exception)), None)
        else:
            assert error is not None
            outputs = self._scheduler.fail(flight.plan.step_id, error)
            if isinstance(error, RUNNER_FAULTS):
                self._num_faults += 1  # an interrupted launch is not one: it was raised at once
        self._deliver(outputs)
        self._tidy_memory()
        if self._timeline is not None:
            self._timeline.record(self._scheduler, flight.plan.precision)
        if self._check:
            self._scheduler.check()
        if error is not None and (result is not None or self._num_faults > 1):
            raise error

    def _tidy_memory(self, stuck: bool = False) -> None:
        """``stuck``: nothing can run, so nobody needs room to go on."""
        control, scheduler = self.control, self._scheduler
        pressed = control is not None and scheduler.presses
        if control is not None and pressed and (why := control.press(0 if stuck else scheduler.num_running)):
            self._deliver(scheduler.give_up(why))
        if control is not None and not (pressed and scheduler.has_unfinished()):
            control.after_commit(scheduler.num_waiting > 0, not scheduler.has_unfinished())
