"""CPU memory with real aliasing: handles are pieces of one memfd, mapped with MAP_FIXED into reserved addresses.

The file is sparse and grows; each handle is a new piece of it, allocated at once, so that a lack of memory shows in ``create`` and
not as a signal later. A released piece is punched out of the file. Python's own ``mmap`` cannot map at a fixed address, so libc's is called.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys

import torch

from depthfx.alloc.mapping_ledger import Access
from depthfx.alloc.physical_backend import PHYSICAL, PhysicalBackend, retype
from depthfx.errors import DriverError, OutOfPhysicalMemoryError

MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000
PUNCH_HOLE_KEEP_SIZE = 0x03
PROTECTION = {"none": 0, "read": mmap.PROT_READ, "read_write": mmap.PROT_READ | mmap.PROT_WRITE} if sys.platform == "linux" else {}
RESERVED = 0x22 | MAP_NORESERVE  # private, anonymous
MAP_FAILED = ctypes.c_void_p(-1).value


class Memfd(PhysicalBackend):
    """See the module's text."""

    name = "memfd"

    @classmethod
    def unavailable(cls) -> str | None:
        return None if hasattr(os, "memfd_create") else "os.memfd_create exists on Linux only"

    def _device_granularity(self) -> int:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        self._file = -1  # opened by the first create
        self._file_size = 0
        return mmap.PAGESIZE

    def _reserve(self, size: int) -> int:
        step = self._granularity
        first = self._mmap(None, size + step, 0, RESERVED, -1, 0)
        address = -(-first // step) * step  # so that large pages and offsets agree as on a device
        for start, end in ((first, address), (address + size, first + size + step)):  # what alignment left over
            if end > start:
                self._checked("munmap", start, end - start)
        return address

    def _free(self, address: int, size: int) -> None:
        self._checked("munmap", address, size)

    def _create(self, size: int) -> int:
        start = self._file_size
        try:
            if self._file < 0:
                self._file = os.memfd_create("depthfx", os.MFD_CLOEXEC)
            os.posix_fallocate(self._file, start, size)
        except OSError as error:
            if self._file >= 0:
                os.ftruncate(self._file, start)  # what was allocated before the failure
            if error.errno in (errno.ENOMEM, errno.ENOSPC):
                raise OutOfPhysicalMemoryError(f"the system has no {size:,} bytes of shared memory left; release handles first") from error
            raise DriverError(
                "posix_fallocate", errno.errorcode.get(error.errno or 0, "?"), f"{error.strerror} ({size:,} bytes)"
            ) from error
        self._file_size += size
        return start

    def _release(self, raw: int, size: int) -> None:
        self._checked("fallocate", self._file, PUNCH_HOLE_KEEP_SIZE, raw, size)

    def _map(self, address: int, size: int, raw: int, handle_offset: int) -> None:
        self._mmap(address, size, 0, mmap.MAP_SHARED | MAP_FIXED, self._file, raw + handle_offset)

    def _set_access(self, address: int, size: int, access: Access) -> None:
        self._checked("mprotect", address, size, PROTECTION[access])

    def _unmap(self, address: int, size: int) -> None:
        self._mmap(address, size, 0, RESERVED | MAP_FIXED, -1, 0)  # reserved again, in one step

    def _tensor(self, address: int, shape: tuple[int, ...], dtype: torch.dtype, nbytes: int) -> tuple[torch.Tensor, object]:
        owner = (ctypes.c_uint8 * nbytes).from_address(address)
        return retype(torch.frombuffer(owner, dtype=torch.uint8), shape, dtype), owner

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _mmap(self, address: int | None, size: int, protection: int, flags: int, file: int, offset: int) -> int:
        result = self._libc.mmap(address, size, protection, flags, file, offset)
        if result == MAP_FAILED:
            self._raise("mmap", ctypes.get_errno(), size)
        return int(result)

    def _checked(self, call: str, *arguments: int) -> None:
        if getattr(self._libc, call)(*arguments):
            self._raise(call, ctypes.get_errno(), arguments[-1])

    @staticmethod
    def _raise(call: str, code: int, size: int) -> None:
        hint = "; the limit of mappings (vm.max_map_count) or of memory is reached" if code == errno.ENOMEM else ""
        raise DriverError(call, errno.errorcode.get(code, str(code)), f"{os.strerror(code)} (last argument {size:,}){hint}")


PHYSICAL.add(Memfd.name, Memfd)
