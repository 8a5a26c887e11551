"""The tokens of one request as an iterator that drives the engine as needed."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from depthfx.runtime.request import RequestOutput

if TYPE_CHECKING:
    from depthfx.runtime.engine import Engine


class TokenStream:
    """Iterator over the tokens of one request. Closing or dropping it early aborts the request."""

    def __init__(self, engine: Engine, request_id: str) -> None:
        self.request_id = request_id
        self.last: RequestOutput | None = None  # the output that ended the request
        self._engine = engine
        self._tokens: deque[int] = deque()
        self._closed = False

    def __iter__(self) -> TokenStream:
        return self

    def __next__(self) -> int:
        """The next token. Raises the request's error if it failed."""
        while not self._tokens:
            if self._closed:
                raise StopIteration
            if self.last is not None:
                self.close()
                if self.last.error is not None:
                    raise self.last.error
                raise StopIteration
            output = self._engine._receive(self.request_id)
            self._tokens.extend(output.new_token_ids)
            if output.finished:
                self.last = output
        return self._tokens.popleft()

    def finish(self) -> RequestOutput:
        """Reads to the end; one output with all tokens that were not read yet. Raises nothing for a failed request."""
        token_ids: list[int] = list(self._tokens)
        self._tokens.clear()
        while self.last is None:
            output = self._engine._receive(self.request_id)
            token_ids.extend(output.new_token_ids)
            if output.finished:
                self.last = output
        self.close()
        return RequestOutput(self.request_id, tuple(token_ids), True, self.last.finish_reason, self.last.error)

    def close(self) -> None:
        """Aborts the request if it has not ended; harmless otherwise."""
        if not self._closed:
            self._engine._close_mailbox(self.request_id)
            self._closed = True

    def __del__(self) -> None:
        if not self._closed:
            self._engine._mail.abandoned.append(self.request_id)  # no lock: this may run inside any other call
