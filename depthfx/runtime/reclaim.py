"""Memory of engines that were forgotten without being closed: given back as soon as no tensor sees it any more.

A finalizer runs while the garbage collector is at work, when tensors of the same garbage are still alive, and in whatever thread that strikes.
Dynamo takes any Python function that runs inside its thread for the one it was to compile, finalizers and callbacks of the collector
included. So the finalizer is a C function that only hands over, and a thread of its own does the rest.

That thread ends before the interpreter does: a daemon thread that is inside a call of PyTorch then would abort the process.
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from typing import Protocol

from depthfx.errors import DepthfxError

_FIRST_WAIT, _LONGEST_WAIT = 0.01, 60.0  # seconds between two tries; each collects garbage


class Closable(Protocol):
    """Something to give back."""

    def close(self) -> None:
        """Raises a :class:`DepthfxError` while it is still in use; may be called again."""


_forgotten: queue.SimpleQueue[Closable | None] = queue.SimpleQueue()  # None: the thread is to end
_left_over: list[Closable] = []
_lock = threading.Lock()  # of what follows and of closing
_thread: threading.Thread | None = None
_ending = False
_end = threading.Event()


def close_with(owner: object, left: Closable) -> None:
    """Close ``left`` once ``owner`` is forgotten; ``left`` must not lead to ``owner``. Nothing happens when the interpreter ends."""
    _start()
    weakref.finalize(owner, _forgotten.put, left).atexit = False


def close_later(left: Closable) -> None:
    """Close ``left`` as soon as that is possible."""
    _start()
    _forgotten.put(left)


def reclaim() -> bool:
    """Close now what can be closed of all that is left over; whether nothing is left."""
    with _lock:
        while True:
            try:
                left = _forgotten.get_nowait()
            except queue.Empty:
                break
            if left is not None:
                _left_over.append(left)
        for left in list(_left_over):
            try:
                left.close()
            except DepthfxError:
                continue  # tried again
            _left_over.remove(left)
        return not _left_over


def _start() -> None:
    global _thread
    with _lock:
        if not _ending and (_thread is None or not _thread.is_alive()):
            _thread = threading.Thread(target=_work, name="depthfx-reclaim", daemon=True)
            _thread.start()


def _work() -> None:
    while not _ending:
        _forgotten.put(_forgotten.get())
        wait = _FIRST_WAIT
        while not _ending and not reclaim():
            _end.wait(wait)
            wait = min(2 * wait, _LONGEST_WAIT)


@atexit.register
def _finish() -> None:
    """What is being closed is closed to its end; the process gives back the rest."""
    global _ending
    _ending = True
    _end.set()
    _forgotten.put(None)
    if _thread is not None:
        _thread.join()
