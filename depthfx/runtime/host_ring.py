"""Host buffers in rotation, from which a step's own data go to the device."""

from __future__ import annotations

import torch

from depthfx.lowering import ops

# The step in flight, the one being planned, one spare. What a step sends is read before its tokens are, so a buffer is free again
# once the step after next is planned.
TURNS = 3


class HostRing:
    """Buffers of int32 words, pinned on CUDA, ``TURNS`` for each of the ``sends`` that a step makes at most.

    On CUDA a kernel fetches the words (`depthfx.lowering.kernels._upload`), so that no restore on the copy engine holds a step up.
    """

    def __init__(self, capacity: int, device: torch.device, sends: int = 1) -> None:
        self.device, self._num_buffers = device, TURNS * sends
        self._pins = device.type == "cuda"
        self._turn = 0
        self._buffers = self._make(capacity)

    def next(self) -> torch.Tensor:
        """The buffer whose turn it is, ``[capacity]`` int32, to be written and then sent."""
        self._turn = (self._turn + 1) % self._num_buffers
        return self._buffers[self._turn]

    def send(self, words: torch.Tensor, target: torch.Tensor) -> None:
        """Queues the copy of ``words``, the first of :meth:`next`'s buffer, to ``target``, both int32 ``[n]``."""
        if self._pins:
            ops.upload_words(target, words)
        else:
            target.copy_(words)

    def to_device(self, words: torch.Tensor) -> torch.Tensor:
        """``words``, int32 ``[n]`` of any host memory, as a new tensor on the device; buffers grow where they are too small."""
        if not self._pins:
            return words
        if words.numel() > self._buffers[0].numel():
            torch.cuda.current_stream(self.device).synchronize()  # nothing may still read the buffers that go
            self._buffers = self._make(2 * words.numel())
        staged = self.next()[: words.numel()].copy_(words)
        target = torch.empty_like(words, device=self.device)
        self.send(staged, target)
        return target

    def _make(self, capacity: int) -> list[torch.Tensor]:
        return [torch.zeros(capacity, dtype=torch.int32, device="cpu", pin_memory=self._pins) for _ in range(self._num_buffers)]
