"""A device's copy stream on a CPU: calls return at once, a second thread runs them in order, events end when it comes by."""

from __future__ import annotations

import queue
import threading

from depthfx.alloc.copy_stream import CopyStream


class FakeEvent:
    """What a CUDA event does: ends once; ``fail`` makes waiting for it raise, as a broken device does."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self.fail: Exception | None = None

    def end(self) -> None:
        self._ended.set()

    def query(self) -> bool:
        return self._ended.is_set()

    def synchronize(self) -> None:
        assert self._ended.wait(30), "the fake device did not come by"
        if self.fail is not None:
            raise self.fail


class FakeStream(CopyStream):
    """``log`` has what was queued; the device runs nothing while ``gate`` is clear; ``most`` is the most bytes ever queued at a time."""

    queues = True

    def __init__(self) -> None:
        self.log: list[tuple] = []
        self.gate = threading.Event()
        self.gate.set()
        self.most = self._queued = 0
        self._lock = threading.Lock()
        self._tasks: queue.Queue = queue.Queue()
        self._device = threading.Thread(target=self._run, daemon=True)
        self._device.start()

    def wait(self, after):
        self.log.append(("wait", after))
        self._tasks.put(after.synchronize)

    def copy(self, target, source, chunk_bytes):
        self.log.append(("copy", target.numel(), chunk_bytes))
        with self._lock:
            self._queued += target.numel()
            self.most = max(self.most, self._queued)

        def run() -> None:
            for to, data in zip(target.split(chunk_bytes), source.split(chunk_bytes)):
                self.gate.wait(30)
                to.copy_(data)
            with self._lock:
                self._queued -= target.numel()

        self._tasks.put(run)

    def record(self):
        event = FakeEvent()
        self.log.append(("record", event))
        self._tasks.put(lambda: (self.gate.wait(30), event.end()))
        return event

    def stop(self) -> None:
        self.gate.set()
        self._tasks.put(None)
        self._device.join(30)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
