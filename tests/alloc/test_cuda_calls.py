"""How the CUDA backend calls its driver, over a stand-in: codes to errors, contexts, properties of handles."""

from __future__ import annotations

import pytest

from depthfx import errors
from tests.alloc.fake_cuda import Code, CudaOverFake, FakeDriver
from tests.alloc.physical_cases import mapped

CREATES_UNDER = {"cuMemCreate": lambda b: b.create(b.granularity()), "cuMemAddressReserve": lambda b: b.reserve(b.granularity())}


@pytest.mark.parametrize("call", [*CREATES_UNDER, "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease", "cuMemAddressFree"])
@pytest.mark.parametrize("code", [Code.CUDA_ERROR_OUT_OF_MEMORY, Code.CUDA_ERROR_INVALID_VALUE])
def test_each_cuda_code_names_its_call(call, code):
    backend = CudaOverFake()
    step = backend.granularity()
    at, (handle,) = mapped(backend, 1, spare=1)
    spare, empty = backend.create(step), backend.reserve(step)
    calls = CREATES_UNDER | {
        "cuMemMap": lambda b: b.map(at, step, handle),
        "cuMemSetAccess": lambda b: b.set_access(at, 0, step, "read"),
        "cuMemUnmap": lambda b: b.unmap(at, 0, step),
        "cuMemRelease": lambda b: b.release(spare),
        "cuMemAddressFree": lambda b: b.free(empty),
    }
    before = backend.snapshot()
    backend._driver.fail[call] = code
    with pytest.raises(errors.OutOfPhysicalMemoryError if code == 2 else errors.DriverError, match=call) as caught:
        calls[call](backend)
    if code != 2:
        assert (caught.value.call, caught.value.code) == (call, "CUDA_ERROR_INVALID_VALUE")
        assert "told by the driver" in str(caught.value)
    assert backend.snapshot() == before
    backend._driver.fail.clear()
    backend.map(at, step, spare)  # a refused release leaves the handle as it was
    backend.unmap(at, step, step)
    calls[call](backend)
    assert backend.snapshot() != before, "one failed call poisons no other"
    driver = backend._driver
    backend.close()
    assert (driver.contexts, driver.retained, driver.ranges, driver.handles, driver.mappings) == (0, 0, {}, {}, {})


def test_cuda_properties(monkeypatch):
    with CudaOverFake(device=3) as backend:
        backend.create(backend.granularity())
        (made,) = backend._driver.properties
        assert (made.type, made.location.type, made.location.id, made.allocFlags.gpuDirectRDMACapable) == (1, 1, 3, 1)
    bare = FakeDriver()
    bare.has_vmm = False
    monkeypatch.setattr(CudaOverFake, "_load_driver", staticmethod(lambda: bare))
    with pytest.raises(errors.BackendUnavailableError, match="no virtual memory management"):
        CudaOverFake()
    assert bare.retained == 0
