"""A device with streams on a CPU: ``fake_streams.c`` as a driver library, its streams and events as tests use them."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

_P, _Z, _I, _L = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_long
_SIGNATURES = {
    "gate": ([_I], None),
    "delay": ([ctypes.c_uint64, ctypes.c_uint], None),
    "pace": ([ctypes.c_double], None),
    "catch": ([_L], None),
    "caught": ([], _I),
    "fail": ([ctypes.c_char_p, _L, _I], None),
    "count": ([ctypes.c_char_p], _L),
    "violations": ([], _L),
    "most_bytes": ([], _Z),
    "left": ([], _I),
    "log_size": ([], _L),
    "log_kind": ([_L], _L),
    "log_bytes": ([_L], _L),
    "stream": ([_I], _P),
    "event": ([], _P),
    "fill": ([_P, _P, _Z, _I], None),
    "check": ([_P, _P, _Z, _I], None),
    "block": ([_P], None),
    "unblock": ([_P], None),
    "record": ([_P, _P], None),
    "ended": ([_P], _I),
    "synchronize": ([_P], None),
}
_KINDS = ("copy", "wait", "record")
_copies = itertools.count()


@functools.cache
def _built() -> tuple[tempfile.TemporaryDirectory, Path]:
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name) / "libstreams.so"
    source = Path(__file__).with_name("fake_streams.c")
    subprocess.run(["cc", "-O2", "-std=gnu11", "-fPIC", "-shared", str(source), "-o", str(path), "-lpthread"], check=True)
    return folder, path


class FakeEvent:
    """What a ``torch.cuda.Event`` shows of itself."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.cuda_event = device.call["event"]()

    def query(self) -> bool:
        return bool(self._device.call["ended"](self.cuda_event))


class FakeStream:
    """A stream of the tests, for the steps; ``cuda_stream`` is 0 for the default stream, as in PyTorch."""

    def __init__(self, device: FakeDevice, is_default: bool) -> None:
        self._device, self._handle = device, device.call["stream"](is_default)
        self.cuda_stream = 0 if is_default else self._handle

    def fill(self, target: torch.Tensor, value: int) -> None:
        self._device.call["fill"](self._handle, target.data_ptr(), target.numel(), value)

    def check(self, target: torch.Tensor, value: int) -> None:
        """When the stream comes to it, all bytes must be ``value``, or a violation is counted."""
        self._device.call["check"](self._handle, target.data_ptr(), target.numel(), value)

    def block(self) -> None:
        """Stops the stream here, until :meth:`unblock`."""
        self._device.call["block"](self._handle)

    def unblock(self) -> None:
        self._device.call["unblock"](self._handle)

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self._device)
        self._device.call["record"](self._handle, event.cuda_event)
        return event

    def wait_event(self, event) -> None:
        event.wait(self)

    def synchronize(self) -> None:
        self._device.call["synchronize"](self._handle)


class FakeDevice:
    """One loaded copy of the driver; :attr:`path` is what a worker takes as ``driver``."""

    def __init__(self) -> None:
        folder, built = _built()
        self.path = str(Path(folder.name) / f"libstreams-{os.getpid()}-{next(_copies)}.so")
        shutil.copyfile(built, self.path)
        library = ctypes.CDLL(self.path)
        self.call = {}
        for name, (arguments, result) in _SIGNATURES.items():
            self.call[name] = getattr(library, f"fake_{name}")
            self.call[name].argtypes, self.call[name].restype = arguments, result

    def stream(self, is_default: bool = False) -> FakeStream:
        return FakeStream(self, is_default)

    def open_gate(self) -> None:
        self.call["gate"](1)

    def close_gate(self) -> None:
        """Copies stay where they are in the queue."""
        self.call["gate"](0)

    def delay(self, seed: int, most_us: int) -> None:
        """Everything on the device takes a random time more."""
        self.call["delay"](seed, most_us)

    def pace(self, factor: float) -> None:
        """By the time that events tell, copies take so many times as long from now on; nobody waits longer."""
        self.call["pace"](factor)

    def fail(self, name: str, nth: int = 1, code: int = 700) -> None:
        """The ``nth`` call of a driver function from now on fails, once."""
        self.call["fail"](name.encode(), nth, code)

    def catch(self, nth: int) -> None:
        """The ``nth`` copy from now on does not return to the host before this is called again with 0."""
        self.call["catch"](nth)

    @property
    def caught(self) -> bool:
        return bool(self.call["caught"]())

    def calls(self, name: str) -> int:
        return self.call["count"](name.encode())

    @property
    def violations(self) -> int:
        return self.call["violations"]()

    @property
    def most(self) -> int:
        """The most bytes of copies that were ever queued at a time."""
        return self.call["most_bytes"]()

    @property
    def left(self) -> int:
        """Contexts, streams and events that were not given back."""
        return self.call["left"]()

    def log(self) -> list[tuple[str, int]]:
        """What was queued on the worker's streams: kinds and bytes."""
        return [(_KINDS[self.call["log_kind"](i)], self.call["log_bytes"](i)) for i in range(self.call["log_size"]())]
