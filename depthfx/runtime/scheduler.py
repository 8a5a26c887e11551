"""Scheduler: decides what each step computes, and books what came out; `plan` and `commit` are all the runtime uses.

Order is first come, first served. Every running decode gets its token in each step, then unfinished prefills go on, then
waiting requests are admitted. When blocks run out, the newest running request gives up its blocks and waits again with
its tokens kept; the oldest one is therefore never held up.

Full precision: a request that asks for it is admitted once every entry is full, and nothing is lent while it runs: others wait or are
preempted. While it waits at the head of the queue (`presses`) nobody is admitted past it, those who run may still lend what they need
to end, and residuals return as they do. So it waits for the requests before it and for the copies, and never for one that came later. Where
the copies fail again and again it ends with an error (`give_up`), and those behind it go on.

Lookahead: `plan` may be called once more before the previous step is committed. Three rules keep that exact.

1. A decode whose token is still on the device names the sampled row it comes from. It is planned unless the request ends
   there by length. Requests that pick their tokens outside are never planned ahead.
2. A request that ends while a planned step names it keeps its blocks until the last such step is committed, and that
   step's result for it is dropped.
3. Nothing is preempted while a step is outstanding: `plan` then returns None, the caller commits and plans again. So a
   preempted request has no token under way.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from operator import and_, attrgetter

from depthfx.alloc.manager import MemoryManager
from depthfx.errors import InternalError, InvalidRequestError
from depthfx.records import Chunk, StepPlan, StepResult
from depthfx.runtime.chunks import decode_chunk, prefill_chunk, room_for_prompts, state_of
from depthfx.runtime.depth_choice import promote, prompt_pays, rows_of_step, wants_probe
from depthfx.runtime.depth_control import DepthControl
from depthfx.runtime.request import FinishReason, Request, RequestOutput, Status, check_limits, fit_request, never_full, not_finite

_by_arrival = attrgetter("arrival")


@dataclass(frozen=True)
class _Step:
    plan: StepPlan
    requests: tuple[Request, ...]  # of plan.decodes + plan.prefills


class Scheduler:
    """Plans steps over the requests it was given.

    ``max_batch_size`` requests are admitted at a time, ``max_batch_tokens`` rows make a step, and only
    ``max_chunk_tokens`` if it both decodes and prefills (a quarter of them at least for prefill); prompt and output of one request together have
    at most ``max_model_len`` tokens. Raises :class:`SettingError` if these do not fit each other.
    """

    def __init__(
        self, manager: MemoryManager, max_batch_size: int, max_batch_tokens: int, max_chunk_tokens: int, max_model_len: int
    ) -> None:
        check_limits(max_batch_size, max_batch_tokens, max_chunk_tokens, max_model_len, manager.num_table_rows)
        self.manager = manager
        self.max_batch_size = max_batch_size
        self.max_batch_tokens = max_batch_tokens
        self.max_chunk_tokens = self.fast_chunk_tokens = max_chunk_tokens  # the second where all layers are fast; settable
        self.max_model_len = max_model_len
        self.decode_places: Collection[int] = ()  # of captured steps with prompts, and how many chunks these take; settable
        self.max_chunks = max_batch_size
        self.wanted = b""  # precision that the user asks for; see `depthfx.runtime.precision`
        self.route_reads: Collection[str] = ()  # what policies read of a row, see `state_of`; settable
        self.mask: Callable[[], bytes] = bytes  # which entries may be full now; empty: all
        self.depth: DepthControl | None = None  # decides where requests leave their depth open; settable
        self.num_full = self._num_full_running = 0  # unfinished requests that ask for full precision
        self.num_preemptions = self.num_reused_tokens = 0
        self._requests: dict[str, Request] = {}  # all that have not ended
        self._waiting: deque[Request] = deque()  # by arrival
        self._running: list[Request] = []  # all that hold blocks and have not ended, by arrival
        self._steps: deque[_Step] = deque()  # planned and not committed
        self._next_step = self._next_arrival = 0
        self._blocked: tuple[str, int] | None = None  # the request that found no room, and the manager's release count then

    @property
    def precision(self) -> bytes:
        """Of a step whose blocks are all taken: what is wanted, where memory allows it."""
        mask = self.mask()
        return bytes(map(and_, self.wanted, mask)) if mask else self.wanted

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place."""
        return len(self._waiting)

    @property
    def waiting_since(self) -> float | None:
        """When the next request that has not begun (who was preempted has) was added, where fast steps would let it begin sooner."""
        return next((None if r.full else r.added_s for r in self._waiting if r.full or r.last_step < 0), None)

    @property
    def presses(self) -> bool:
        """Whether the next request to be admitted waits for full precision."""
        return self.num_full > 0 and bool(self._waiting) and self._waiting[0].full and not all(self.precision)

    def has_unfinished(self) -> bool:
        """Whether a request has not ended, or a step has not been committed."""
        return bool(self._requests or self._steps)

    def unfinished(self) -> list[str]:
        """The ids of all requests that have not ended."""
        return list(self._requests)

    def knows(self, request_id: str) -> bool:
        """Whether an unfinished request has this id."""
        return request_id in self._requests

    def add(self, request: Request) -> None:
        """Queues a request. Raises :class:`InvalidRequestError`, or :class:`RequestTooLargeError` if it could never be served."""
        if request.request_id in self._requests:
            raise InvalidRequestError(
                f"request id {request.request_id!r} is in use; ids must be unique among unfinished requests: choose another"
            )
        fit_request(request, self.max_model_len, self.manager.max_full_tokens if request.full else self.manager.max_request_tokens)
        request.arrival = self._next_arrival
        self._next_arrival += 1
        self._requests[request.request_id] = request
        self._waiting.append(request)
        self.num_full += request.full

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request at once, whatever it is doing; None if there is no such unfinished request."""
        request = self._requests.get(request_id)
        return None if request is None else self._end(request, "abort")

    def give_up(self, why: str) -> list[RequestOutput]:
        """Ends the requests that wait for nothing but full precision, which ``why`` keeps from them."""
        outputs = []
        while self.presses:
            outputs.append(self._end(self._waiting[0], "error", never_full(self._waiting[0], why)))
        return outputs

    def push_token(self, request_id: str, token: int) -> RequestOutput:
        """Gives a parked request its next token. Raises :class:`InvalidRequestError` if it is not parked."""
        request = self._requests.get(request_id)
        if request is None or request.status is not Status.PARKED:
            state = "not known or has ended" if request is None else f"{request.status.value}, not parked"
            raise InvalidRequestError(f"request {request_id!r} is {state}; push a token once for each logits that step() delivers")
        if request.holds_blocks:
            request.status = Status.RUNNING
        else:
            self._enqueue(request)
        return self._produce(request, token)

    def plan(self) -> StepPlan | None:
        """The next step, or None if nothing can be done now (or not before the outstanding step is committed)."""
        if len(self._steps) > 1:
            raise InternalError(f"two steps are outstanding ({[s.plan.step_id for s in self._steps]}); commit one before planning")
        num_preemptions = self.num_preemptions
        decoding = self._grow_decodes()
        if decoding is None:
            return None
        preempted = self.num_preemptions > num_preemptions
        if self.depth is not None and decoding:
            promote(self.depth, decoding, pressed=self._blocked is not None and bool(self._waiting))
        decodes = tuple(decode_chunk(request, row, self._next_step) for row, request in enumerate(decoding))
        chunk_tokens = self.max_chunk_tokens if any(self.precision) else self.fast_chunk_tokens
        budget = room_for_prompts(len(decodes), self.max_batch_tokens, chunk_tokens, self.decode_places)
        prefilling: list[Request] = []
        prefills: list[Chunk] = []
        for request in self._prefill_candidates(may_admit=not preempted, idle=not decodes) if budget else ():
            chunk = prefill_chunk(request, budget, len(decodes) + sum(c.samples for c in prefills), self._next_step)
            budget -= chunk.num_tokens
            prefilling.append(request)
            prefills.append(chunk)
            if budget == 0 or (decodes and len(prefills) == self.max_chunks):
                break
        if not decodes and not prefills:
            return self.plan() if preempted else None  # all who ran were preempted: one of them can be admitted again
        precision = self.precision  # now that no more blocks are taken
        if self._num_full_running and not all(precision):
            raise InternalError("a layer is fast although a request runs that asks for full precision")
        for request, chunk in zip((*decoding, *prefilling), (*decodes, *prefills)):
            state = state_of(precision, True, self.route_reads, request.number, chunk.is_prompt) if chunk.routed else precision
            request.plan_under(state, chunk.start)
        probe = self.depth is not None and wants_probe(self.depth, decoding, prefilling, (*decodes, *prefills))
        writes, moves = self.manager.take_table_writes(), self.manager.take_moves()
        plan = StepPlan(self._next_step, decodes, tuple(prefills), writes, precision, *moves, probe)
        self._next_step += 1
        self._steps.append(_Step(plan, (*decoding, *prefilling)))
        return plan

    def commit(self, result: StepResult) -> list[RequestOutput]:
        """Books the oldest outstanding step; the outputs are in the order of its rows."""
        step = self._take_step(result.step_id)
        chunks = step.plan.decodes + step.plan.prefills
        num_sampled = sum(chunk.samples for chunk in chunks)
        if not len(result.token_ids) == len(result.finite) == num_sampled:
            raise InternalError(f"step {result.step_id} samples {num_sampled} rows, but its result has {len(result.token_ids)}")
        self.manager.moves_done()
        outputs: list[RequestOutput] = []
        block_tokens = self.manager.block_tokens
        row = -1
        for chunk, request in zip(chunks, step.requests):
            row += chunk.samples
            if request.finish_reason is not None:
                self._release_if_unnamed(request)
                continue
            num_tokens = len(chunk.token_ids) or 1
            request.num_computed += num_tokens
            if chunk.samples:
                request.num_pending -= 1
                if not result.finite[row]:
                    request.keep_content = False
                    outputs.append(self._end(request, "error", not_finite(request)))
                    continue
            if request.num_computed % block_tokens < num_tokens:  # a block became full
                self.manager.register(request.request_id, request.token_ids, request.num_sharable)
            if not chunk.samples:
                continue
            if request.sampling.external:
                request.status = Status.PARKED
                outputs.append(RequestOutput(request.request_id, (), logits=result.logits[request.request_id]))
            elif (token := result.token_ids[row]) >= 0:
                outputs.append(self._produce(request, token))
            else:
                raise InternalError(f"step {result.step_id} gave token {token} for request {request.request_id!r}; ids start at 0")
        return outputs

    def fail(self, step_id: int, error: BaseException) -> list[RequestOutput]:
        """Books the oldest outstanding step as failed: its requests end with ``error``, all others go on."""
        step = self._take_step(step_id)
        outputs = []
        for request in step.requests:
            if request.finish_reason is None:
                outputs.append(self._end(request, "error", error))
            else:
                self._release_if_unnamed(request)
        self.manager.moves_failed()
        self.manager.resend_tables()  # the step's table writes may not have been applied
        return outputs

    def check(self) -> None:
        """Proves that memory and requests agree; raises :class:`InternalError`."""
        self.manager.check()
        for queue in (self._running, self._waiting):
            if any(a.arrival >= b.arrival for a, b in zip(list(queue), list(queue)[1:])):
                raise InternalError("requests are not in the order of their arrival")
        ended = {r.request_id for step in self._steps for r in step.requests if r.finish_reason is not None}
        holders = {r.request_id for r in self._running} | ended
        for request_id in self.manager.usage().by_request:
            if request_id not in holders:
                raise InternalError(f"request {request_id!r} holds KV blocks, but is neither running nor named by a planned step")

    # -- planning

    def _grow_decodes(self) -> list[Request] | None:
        """The requests whose decode is due, with room for its KV; None if that takes a preemption and a step is outstanding."""
        ready: list[Request] = []
        running = Status.RUNNING
        for request in list(self._running):
            if request.prefilling or request.status is not running:
                continue
            pending = request.num_pending
            if pending and (request.sampling.external or len(request.output_ids) + pending >= request.max_new_tokens):
                continue
            while request.num_planned >= request.num_backed and not self._grow(request):
                if self._steps:
                    return None
                victim = self._running[-1]  # this request or a newer one
                self._preempt(victim)
                if victim is request:
                    break
            else:
                ready.append(request)
        return ready

    def _grow(self, request: Request) -> bool:
        if not self.manager.grow(request.request_id, request.num_backed + 1):
            return False
        request.num_backed += self.manager.block_tokens
        return True

    def _prefill_candidates(self, may_admit: bool, idle: bool) -> Iterator[Request]:
        """Running requests with prompt left, then new admissions, one at a time as the caller asks for them."""
        for request in list(self._running):
            if request.prefilling:
                idle = False
                yield request
        while may_admit and self._waiting:
            request = self._waiting[0]
            if not self._admit(request):
                # Nothing else can run: a parked request makes room, or the waiting one might wait for ever.
                parked, manager = [r for r in self._running if r.status is Status.PARKED], self.manager
                if not (idle and parked and not self._steps) or (self.presses and manager.region and not manager.num_lent_units):
                    return
                self._preempt(parked[-1])
                continue
            idle = False
            yield request

    def _admit(self, request: Request) -> bool:
        manager = self.manager
        if len(self._running) >= self.max_batch_size or manager.holds(request.request_id):
            return False
        if self._blocked == (request.request_id, manager.num_releases):
            return False
        precision = self.precision
        if request.full and not all(precision):
            return False
        routed = request.routed[0] if request.settled else self._prompt_pays(request, precision)
        state = state_of(precision, routed, self.route_reads, request.number)
        manager.may_lend = not (request.full or self._num_full_running)
        # One block of headroom for each running request, so that the newcomer is not preempted right away.
        alike = request.num_alike("is_prompt" in self.route_reads)
        place = manager.admit(request.request_id, request.token_ids, state + request.salt, len(self._running), alike)
        if place is None:
            manager.may_lend = not self._num_full_running
            self._blocked = (request.request_id, manager.num_releases)
            return False
        self._blocked = None
        self._num_full_running += request.full
        request.settle(routed)
        self._waiting.popleft()
        request.status = Status.RUNNING
        request.holds_blocks = True
        request.state = state
        request.table_row = place.table_row
        request.num_planned = request.num_computed = place.reused_tokens + place.reloaded_tokens
        request.num_backed = -(-len(request.token_ids) // manager.block_tokens) * manager.block_tokens
        self.num_reused_tokens += place.reused_tokens
        insort(self._running, request, key=_by_arrival)
        return True

    def _prompt_pays(self, request: Request, precision: bytes) -> bool:
        states = [state_of(precision, routed, self.route_reads, request.number) + request.salt for routed in (False, True)]
        limit = self.max_chunk_tokens if self._running else self.max_batch_tokens
        rows = rows_of_step(request, self._running, self._waiting, limit)
        return self.depth is not None and prompt_pays(self.depth, self.manager, request, states, rows)

    def _leave(self, request: Request) -> None:
        """A request that runs no longer."""
        self._running.remove(request)
        self._num_full_running -= request.full
        self.manager.may_lend = not self._num_full_running

    def _preempt(self, request: Request) -> None:
        if len(self._running) == 1 and request.status is not Status.PARKED:
            raise InternalError(f"request {request.request_id!r} is alone and has no room for its next token; it should have been refused")
        self.num_preemptions += 1
        self._leave(request)
        self.manager.release(request.request_id)
        request.forget_place()
        if request.status is not Status.PARKED:
            self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        request.status = Status.WAITING
        insort(self._waiting, request, key=_by_arrival)

    # -- booking

    def _take_step(self, step_id: int) -> _Step:
        if not self._steps or self._steps[0].plan.step_id != step_id:
            raise InternalError(f"step {step_id} is booked, but the outstanding ones are {[s.plan.step_id for s in self._steps]}")
        return self._steps.popleft()

    def _produce(self, request: Request, token: int) -> RequestOutput:
        request.token_ids.append(token)
        request.output_ids.append(token)
        try:
            reason = request.end_of_output()
        except BaseException as error:  # the user's: it must not keep the other rows of the step from being booked
            if isinstance(error, InternalError):
                raise
            return self._end(request, "error", error, (token,))
        if reason is None:
            return RequestOutput(request.request_id, (token,))
        return self._end(request, reason, None, (token,))

    def _end(
        self, request: Request, reason: FinishReason, error: BaseException | None = None, token_ids: tuple[int, ...] = ()
    ) -> RequestOutput:
        del self._requests[request.request_id]
        self.num_full -= request.full
        request.finish_reason, request.error = reason, error
        if request.holds_blocks:
            self._leave(request)
            self._release_if_unnamed(request)
        elif request.status is Status.WAITING:
            self._waiting.remove(request)
            self._blocked = None  # another one may come with the same id
        request.status = Status.FINISHED
        return RequestOutput(request.request_id, token_ids, True, reason, error)

    def _release_if_unnamed(self, request: Request) -> None:
        if self._steps and request.last_step >= self._steps[0].plan.step_id:
            return  # released when that step is committed
        self.manager.release(request.request_id, reuse=request.keep_content)
        request.forget_place()
