"""A pool over the fake driver, for the tests."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from depthfx.alloc.pool.pool_library import PoolLibrary

MIB = 1 << 20
GRANULE = 2 * MIB
_copies = itertools.count()


@functools.cache
def _fake_driver() -> tuple[tempfile.TemporaryDirectory, Path]:
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name) / "libfake.so"
    source = Path(__file__).with_name("fake_libcuda.c")
    subprocess.run(["cc", "-O2", "-std=gnu11", "-fPIC", "-shared", str(source), "-o", str(path), "-lpthread"], check=True)
    return folder, path


class FakeDriver:
    """One loaded copy of ``fake_libcuda.c``; its ``fake_*`` functions are attributes without the prefix."""

    def __init__(self) -> None:
        folder, built = _fake_driver()
        self.path = Path(folder.name) / f"libfake-{os.getpid()}-{next(_copies)}.so"
        shutil.copyfile(built, self.path)
        self._handle = ctypes.CDLL(str(self.path))
        for name in ("count", "count_all", "used"):
            getattr(self._handle, f"fake_{name}").restype = ctypes.c_size_t
        self._handle.fake_set_memory.argtypes = [ctypes.c_int, ctypes.c_size_t]

    def __getattr__(self, name: str):
        return getattr(self._handle, f"fake_{name}")

    def fail(self, call: str, nth: int, code: int) -> None:
        """The ``nth`` call from now on returns ``code``, once."""
        self._handle.fake_fail(call.encode(), ctypes.c_long(nth), code)

    def calls(self, name: str) -> int:
        return self._handle.fake_count(name.encode())


class FakePool:
    """A pool of its own on a fake driver of its own."""

    def __init__(self, capacity: int | None = None, range_bytes: int = 1024 * MIB, device: int = 0) -> None:
        self.driver = FakeDriver()
        self.library = PoolLibrary(driver=str(self.driver.path))
        self.library.forget_file()
        self.library.open(device, capacity, range_bytes)
        self.device = device

    def malloc(self, size: int, stream: int = 0) -> int:
        return self.library.malloc(size, self.device, stream)

    def free(self, address: int, size: int) -> None:
        self.library.free(address, size, self.device)

    def stats(self):
        return self.library.stats(self.device)

    def states(self) -> list[tuple[str, int]]:
        """State and MiB of each segment, by address."""
        return [(s.state, s.size // MIB) for s in self.library.snapshot(self.device)]

    def check(self) -> None:
        """Counts and segments agree with each other and with the driver."""
        found, segments = self.stats(), self.library.snapshot(self.device)
        by_state = {state: sum(s.size for s in segments if s.state == state) for state in ("live", "cached", "pending", "lost")}
        assert by_state == {state: getattr(found, f"{state}_bytes") for state in by_state}
        assert sum(by_state.values()) == found.mapped_bytes == self.driver.used(self.device)
        assert found.num_mappings == self.driver.num_mappings()
        assert found.num_live == found.num_mallocs - found.num_frees == sum(s.state == "live" for s in segments)
        assert found.live_bytes <= found.peak_live_bytes and found.mapped_bytes <= found.peak_mapped_bytes
        assert all(a.address + a.size <= b.address for a, b in itertools.pairwise(segments))
        assert self.driver.violations() == 0
