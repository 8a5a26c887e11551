"""Outputs on their way to whoever asked: one mailbox for each stream, shared ones for groups, and the rest for the next `Engine.step`."""

from __future__ import annotations

from collections import deque

from depthfx.runtime.request import RequestOutput


class Mailboxes:
    """Belongs to one engine, whose lock guards everything but ``abandoned``."""

    def __init__(self) -> None:
        self.unclaimed: list[RequestOutput] = []  # outputs for the next step()
        self.abandoned: deque[str] = deque()  # streams that were dropped; appended to without the lock
        self._boxes: dict[str, deque[RequestOutput]] = {}

    def __contains__(self, request_id: object) -> bool:
        return isinstance(request_id, str) and request_id in self._boxes

    def __getitem__(self, request_id: str) -> deque[RequestOutput]:
        return self._boxes[request_id]

    def open(self, request_id: str, mailbox: deque[RequestOutput]) -> None:
        """Outputs of a request go into ``mailbox`` from now on."""
        self._boxes[request_id] = mailbox

    def close(self, request_id: str) -> bool:
        """Nobody reads them any more; whether somebody did."""
        return self._boxes.pop(request_id, None) is not None

    def deliver(self, outputs: list[RequestOutput]) -> int:
        """Puts each output where it belongs; returns how many tokens they hold."""
        num_tokens = 0
        for output in outputs:
            num_tokens += len(output.new_token_ids)
            self._boxes.get(output.request_id, self.unclaimed).append(output)
        return num_tokens

    def take_unclaimed(self) -> list[RequestOutput]:
        """What :meth:`Engine.step` returns."""
        outputs, self.unclaimed = self.unclaimed, []
        return outputs
