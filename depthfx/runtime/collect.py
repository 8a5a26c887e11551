"""A group of requests made by one caller, whose outputs are read together as they arrive."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from depthfx.errors import InvalidRequestError
from depthfx.records import SamplingParams
from depthfx.runtime.request import RequestOutput, StopCheck

if TYPE_CHECKING:
    from depthfx.runtime.engine import Engine

Asked = tuple[Iterable[int], SamplingParams | None, StopCheck | None]


class Collection:
    """Iterator over ``(number, output)`` of a group's requests; as a context manager it aborts what is left at the end.

    A request that somebody else ended, by `Engine.abort` or `Engine.close`, has its output's ``error`` set: what it has is not the answer.
    """

    def __init__(self, engine: Engine, requests: Iterable[Asked]) -> None:
        self._engine = engine
        self._numbers: dict[str, int] = {}
        self._ids: dict[int, str] = {}
        self._open: set[str] = set()
        self._mailbox: deque[RequestOutput] = deque()  # shared by all requests of the group
        engine.follow_weights()  # once for the group
        try:
            for number, (prompt, sampling, stop_check) in enumerate(requests):
                self.add(number, prompt, sampling, stop_check)
        except BaseException:
            self.close()
            raise

    def add(self, number: int, prompt: Iterable[int], sampling: SamplingParams | None, stop_check: StopCheck | None = None) -> None:
        """One more request, known to the caller as ``number``. Raises as :meth:`Engine.add`."""
        request_id = self._engine._add(prompt, sampling, None, stop_check, self._mailbox)
        self._numbers[request_id] = number
        self._ids[number] = request_id
        self._open.add(request_id)

    def __iter__(self) -> Iterator[tuple[int, RequestOutput]]:
        return self

    def __next__(self) -> tuple[int, RequestOutput]:
        while self._open:
            output = self._engine._receive_from(self._mailbox, "a group of requests")
            if output.request_id not in self._open:
                continue  # came out before the caller aborted it
            if output.finished:
                self._open.discard(output.request_id)
            if output.finish_reason == "abort":
                output = replace(output, error=self._ended_by_others(output.request_id))
            return self._numbers[output.request_id], output
        self.close()
        raise StopIteration

    def push(self, number: int, token: int) -> RequestOutput:
        """Give request ``number``, which waits with its logits, its next token. Raises as :meth:`Engine.push_token`."""
        request_id = self._id_of(number)
        try:
            output = self._engine.push_token(request_id, token)
        except InvalidRequestError:
            if any(o.request_id == request_id and o.finish_reason == "abort" for o in list(self._mailbox)):
                raise self._ended_by_others(request_id) from None
            raise
        if output.finished:
            self._open.discard(request_id)
        return output

    def abort(self, number: int) -> None:
        """End request ``number``; nothing more comes from it."""
        request_id = self._id_of(number)
        self._open.discard(request_id)
        self._engine._close_mailbox(request_id)

    def close(self) -> None:
        """Abort every request that has not ended."""
        for request_id in self._numbers:
            self._engine._close_mailbox(request_id)
        self._open.clear()

    def _ended_by_others(self, request_id: str) -> InvalidRequestError:
        who = "the engine was closed" if self._engine.closed else "engine.abort was called for it"
        return InvalidRequestError(
            f"request {request_id!r} (row {self._numbers[request_id]} of this call) was ended before its answer was complete: {who}; ask again"
            + (" after loading and compiling the model again" if self._engine.closed else "")
        )

    def _id_of(self, number: int) -> str:
        return self._ids[number]

    def __enter__(self) -> Collection:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
