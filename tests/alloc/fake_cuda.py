"""A strict stand-in for ``cuda.bindings.driver`` over a memfd: CUDA's documented rules, checked with data of its own."""

from __future__ import annotations

from enum import IntEnum
from types import SimpleNamespace

from depthfx.alloc.physical.cuda_vmm import CudaVmm
from depthfx.alloc.physical.memfd import Memfd

GRANULARITY = 2 << 20


class Code(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_CONTEXT = 201


class FakeDevice:
    """The memory of one device, which several processes share: bytes in all and bytes taken."""

    def __init__(self, total: int = 1 << 40) -> None:
        self.total, self.taken = total, 0


class FakeDriver:
    """``fail`` maps a call's name to the code that it returns; ``calls`` lists the names of all calls; ``device`` has the memory."""

    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED=102, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED=110
    )
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAccess_flags = SimpleNamespace(
        CU_MEM_ACCESS_FLAGS_PROT_NONE=0, CU_MEM_ACCESS_FLAGS_PROT_READ=1, CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3
    )
    CUmemLocation = CUmemAccessDesc = SimpleNamespace

    def __init__(self, device: FakeDevice | None = None) -> None:
        self.device = FakeDevice() if device is None else device
        self.fail: dict[str, Code] = {}
        self.calls: list[str] = []
        self.has_vmm = True
        self.contexts = self.retained = 0
        self.ranges: dict[int, int] = {}
        self.handles: dict[int, int] = {}
        self.mappings: dict[int, tuple[int, int]] = {}
        self.properties: list[SimpleNamespace] = []
        self._memory = Memfd(GRANULARITY)

    @staticmethod
    def CUmemAllocationProp() -> SimpleNamespace:
        return SimpleNamespace(allocFlags=SimpleNamespace())

    def __getattr__(self, name: str):
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments):
            self.calls.append(name)
            if name in self.fail:
                return (self.fail[name], None)
            if name.startswith("cuMem") and name != "cuMemGetAllocationGranularity" and not self.contexts:
                return (Code.CUDA_ERROR_INVALID_CONTEXT, None)
            answer = getattr(self, f"do_{name}")(*arguments)
            if isinstance(answer, tuple):
                return (Code.CUDA_SUCCESS, *answer)
            if isinstance(answer, Code):
                return (answer, None)
            return (Code.CUDA_ERROR_INVALID_VALUE, None) if answer is False else (Code.CUDA_SUCCESS, *([] if answer is None else [answer]))

        return call

    def do_cuInit(self, flags):
        return None if flags == 0 else False

    def do_cuDeviceGet(self, index):
        return 70 + index

    def do_cuDeviceGetAttribute(self, attribute, device):
        return int(self.has_vmm) if attribute == 102 else 1

    def do_cuGetErrorString(self, code):
        return b"told by the driver"

    def do_cuDevicePrimaryCtxRetain(self, device):
        self.retained += 1
        return 900 + device

    def do_cuDevicePrimaryCtxRelease(self, device):
        self.retained -= 1

    def do_cuCtxPushCurrent(self, context):
        self.contexts += 1

    def do_cuCtxPopCurrent(self):
        self.contexts -= 1
        return 900

    def do_cuMemGetAllocationGranularity(self, properties, option):
        return GRANULARITY

    def do_cuMemAddressReserve(self, size, alignment, address, flags):
        if size % GRANULARITY or address or flags:
            return False
        base = self._memory._reserve(size)
        self.ranges[base] = size
        return base

    def do_cuMemAddressFree(self, address, size):
        if self.ranges.get(address) != size or any(address <= m < address + size for m in self.mappings):
            return False
        del self.ranges[address]
        self._memory._free(address, size)

    def do_cuMemCreate(self, size, properties, flags):
        if size % GRANULARITY or not size or flags:
            return False
        if self.device.taken + size > self.device.total:
            return Code.CUDA_ERROR_OUT_OF_MEMORY
        self.device.taken += size
        self.properties.append(properties)
        raw = self._memory._create(size) + GRANULARITY  # 0 is no handle
        self.handles[raw] = size
        return raw

    def do_cuMemRelease(self, raw):
        if raw not in self.handles:
            return False
        self.device.taken -= self.handles.pop(raw)
        self._memory._release(raw - GRANULARITY, GRANULARITY)

    def do_cuMemGetInfo(self):
        return self.device.total - self.device.taken, self.device.total

    def do_cuMemMap(self, address, size, offset, raw, flags):
        inside = any(base <= address and address + size <= base + length for base, length in self.ranges.items())
        free = all(address + size <= m or m + length <= address for m, (length, _) in self.mappings.items())
        if not inside or not free or offset or flags or self.handles.get(raw) != size:
            return False
        self._memory._map(address, size, raw - GRANULARITY, 0)
        self.mappings[address] = (size, raw)

    def do_cuMemUnmap(self, address, size):
        if self.mappings.get(address, (0,))[0] != size:
            return False
        self._memory._unmap(address, size)
        del self.mappings[address]

    def do_cuMemSetAccess(self, address, size, descriptions, count):
        end = address
        while end < address + size and end in self.mappings:
            end += self.mappings[end][0]
        if end != address + size or count != len(descriptions):
            return False
        self._memory._set_access(address, size, {0: "none", 1: "read", 3: "read_write"}[descriptions[0].flags])


class CudaOverFake(CudaVmm):
    """The CUDA backend with the stand-in below it; only finding the device and viewing its memory are replaced."""

    @classmethod
    def unavailable(cls):
        return None

    @staticmethod
    def _load_driver():
        return FakeDriver()

    def _current_device(self):
        return 0

    def _close(self):
        super()._close()
        self._driver._memory._close()

    _tensor = Memfd._tensor
