"""Device memory through CUDA's virtual memory management: handles of ``cuMemCreate`` mapped into reserved addresses.

Every return code becomes an exception with the call's name; no error state is kept. Calls run in the primary context of the device, which is
PyTorch's, whatever thread they come from. Nothing of CUDA is touched when this file is imported. CUDA maps a handle from its start only.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from depthfx.alloc.mapping_ledger import Access, in_words
from depthfx.alloc.physical_backend import PHYSICAL, PhysicalBackend, retype
from depthfx.errors import BackendUnavailableError, DriverError, InternalError, OutOfPhysicalMemoryError

ACCESS_FLAGS = {"none": "PROT_NONE", "read": "PROT_READ", "read_write": "PROT_READWRITE"}


class CudaVmm(PhysicalBackend):
    """See the module's text; ``rdma_capable`` says whether the handles may be registered for GPUDirect RDMA."""

    name = "cuda_vmm"
    maps_from_offset = False

    @classmethod
    def unavailable(cls) -> str | None:
        if not torch.cuda.is_available():
            return "PyTorch sees no CUDA device"
        if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
            return "the package cuda-bindings is missing; install depthfx[cuda]"
        return None

    def __init__(self, granularity: int | None = None, capacity: int | None = None, device: int | None = None) -> None:
        """``device`` is the CUDA device's index (None: the current one); the rest as in :class:`PhysicalBackend`."""
        self._wanted = device
        super().__init__(granularity, capacity)

    @staticmethod
    def _load_driver() -> Any:
        return importlib.import_module("cuda.bindings.driver")

    def _current_device(self) -> int:
        torch.cuda.init()
        return torch.cuda.current_device()

    def _device_granularity(self) -> int:
        self._driver = driver = self._load_driver()
        self._index = self._current_device() if self._wanted is None else self._wanted
        self._call("cuInit", 0)
        (self._device,) = self._call("cuDeviceGet", self._index)
        attribute = driver.CUdevice_attribute
        if not self._call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED, self._device)[0]:
            raise BackendUnavailableError(f"CUDA device {self._index} has no virtual memory management; use another device")
        rdma = attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
        self.rdma_capable = bool(self._call("cuDeviceGetAttribute", rdma, self._device)[0])
        location = driver.CUmemLocation()
        location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = self._index
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location = location
        self._properties.allocFlags.gpuDirectRDMACapable = int(self.rdma_capable)
        self._access = driver.CUmemAccessDesc()
        self._access.location = location
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granularity = int(self._call("cuMemGetAllocationGranularity", self._properties, minimum)[0])
        (self._context,) = self._call("cuDevicePrimaryCtxRetain", self._device)  # last: nothing fails behind it but a bad request
        return granularity

    def _reserve(self, size: int) -> int:
        with self._in_context():  # alignment 0: that of the device
            return int(self._call("cuMemAddressReserve", size, 0, 0, 0)[0])

    def _free(self, address: int, size: int) -> None:
        with self._in_context():
            self._call("cuMemAddressFree", address, size)

    def _create(self, size: int) -> Any:
        with self._in_context():
            return self._call("cuMemCreate", size, self._properties, 0)[0]

    def _release(self, raw: Any, size: int) -> None:
        with self._in_context():
            self._call("cuMemRelease", raw)

    def _map(self, address: int, size: int, raw: Any, handle_offset: int) -> None:
        with self._in_context():
            self._call("cuMemMap", address, size, handle_offset, raw, 0)

    def _set_access(self, address: int, size: int, access: Access) -> None:
        with self._in_context():
            self._access.flags = getattr(self._driver.CUmemAccess_flags, f"CU_MEM_ACCESS_FLAGS_{ACCESS_FLAGS[access]}")
            self._call("cuMemSetAccess", address, size, [self._access], 1)

    def _unmap(self, address: int, size: int) -> None:
        with self._in_context():
            self._call("cuMemUnmap", address, size)

    def _tensor(self, address: int, shape: tuple[int, ...], dtype: torch.dtype, nbytes: int) -> tuple[torch.Tensor, object]:
        owner = _DeviceBytes(address, nbytes)
        flat = torch.as_tensor(owner, device=torch.device("cuda", self._index))
        if flat.data_ptr() != address:
            raise InternalError(f"PyTorch copied the memory at {address:#x} instead of viewing it; report its version")
        return retype(flat, shape, dtype), owner

    def _close(self) -> None:
        self._call("cuDevicePrimaryCtxRelease", self._device)

    @contextmanager
    def _in_context(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    def _call(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        """The results of one driver call without its return code."""
        code, *results = getattr(self._driver, name)(*arguments)
        if int(code) == 0:
            return tuple(results)
        label = getattr(code, "name", str(code))
        if label == "CUDA_ERROR_OUT_OF_MEMORY":
            raise OutOfPhysicalMemoryError(
                f"{name} found no memory{f' for {in_words(arguments[0])}' if name == 'cuMemCreate' else ''} on CUDA device {self._index}"
                f"{self._left()}; release handles, call torch.cuda.empty_cache() or end other processes"
            )
        told, text = self._driver.cuGetErrorString(code)
        what = text.decode() if int(told) == 0 and text else "unknown to this driver"
        raise DriverError(name, label, f"{what} (CUDA device {self._index})")

    def _left(self) -> str:
        """What the device has left, for a message; in the context. Empty where the driver does not tell."""
        code, *sizes = self._driver.cuMemGetInfo()
        return "" if int(code) else ", of whose {1:,} MiB {0:,} MiB are free".format(*(size >> 20 for size in sizes))


class _DeviceBytes:
    """Device bytes for PyTorch, which keeps this object alive as long as the storage. Not for bfloat16 and FP8: the interface lacks them."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3}


PHYSICAL.add(CudaVmm.name, CudaVmm)
