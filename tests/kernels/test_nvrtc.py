"""Compiled once, kept, loaded in any thread, and told in words when it fails; which products the cluster kernel takes and how it cuts them."""

from __future__ import annotations

import enum
import importlib.util
import sys
import threading
import types

import pytest
import torch

from depthfx.errors import DriverError
from depthfx.lowering import cuda_function, nvrtc
from depthfx.lowering.kernels import _cluster_linear as cluster


class Code(enum.IntEnum):
    """Results of the compiler's calls."""

    OK = 0
    NVRTC_ERROR_COMPILATION = 6


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """Stands in for ``cuda.bindings.nvrtc``; ``sources`` are what it was asked to compile."""
    fake = types.ModuleType("cuda.bindings.nvrtc")
    fake.sources = []

    def fill(buffer_size):
        return lambda program, buffer: (Code.OK,)

    fake.nvrtcVersion = lambda: (Code.OK, 13, 0)
    fake.nvrtcCreateProgram = lambda source, name, n, headers, names: (Code.OK, source)
    fake.nvrtcCompileProgram = lambda program, n, options: (
        fake.sources.append((program, options)) or (Code.NVRTC_ERROR_COMPILATION if b"bad" in program else Code.OK),
    )
    fake.nvrtcGetProgramLogSize = lambda program: (Code.OK, 10)
    fake.nvrtcGetProgramLog = fill(10)
    fake.nvrtcGetCUBINSize = lambda program: (Code.OK, 4)
    fake.nvrtcGetCUBIN = fill(4)
    fake.nvrtcDestroyProgram = lambda program: (Code.OK,)
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", fake)
    monkeypatch.setenv("DEPTHFX_CACHE", str(tmp_path))
    return fake


def test_code_is_compiled_once_and_kept(compiler, tmp_path):
    first = nvrtc.machine_code("good", "sm_90a", ("-std=c++17",))
    assert nvrtc.machine_code("good", "sm_90a", ("-std=c++17",)) == first
    assert compiler.sources == [(b"good", [b"--gpu-architecture=sm_90a", b"-std=c++17"])]
    nvrtc.machine_code("good", "sm_90a")  # other options
    nvrtc.machine_code("good too", "sm_90a")
    assert len(compiler.sources) == 3 and len(list((tmp_path / "cuda").glob("*.cubin"))) == 3
    assert len(list((tmp_path / "cuda").iterdir())) == 3, "nothing half written stays"


def test_a_cache_that_cannot_be_written_does_no_harm(compiler, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DEPTHFX_CACHE", str(tmp_path / "file"))
    nvrtc.machine_code("good", "sm_90a")
    nvrtc.machine_code("good", "sm_90a")
    assert len(compiler.sources) == 2


def test_what_cannot_be_read_or_is_empty_is_compiled_again(compiler, tmp_path):
    """Another user's file, or one that a crash left without its bytes."""
    first = nvrtc.machine_code("good", "sm_90a")
    (kept,) = (tmp_path / "cuda").iterdir()
    kept.write_bytes(b"")
    assert nvrtc.machine_code("good", "sm_90a") == first and kept.read_bytes() == first and len(compiler.sources) == 2
    kept.unlink()
    kept.mkdir()  # refuses to be read, and to be replaced
    assert nvrtc.machine_code("good", "sm_90a") == first and len(compiler.sources) == 3
    assert list((tmp_path / "cuda").iterdir()) == [kept], "nothing half written stays"


@pytest.mark.parametrize(("driver", "served"), [(12090, False), (13000, True), (13020, True)])
def test_code_of_a_later_cuda_than_the_drivers_is_not_made(compiler, driver, served, monkeypatch):
    fake = types.ModuleType("cuda.bindings.driver")
    fake.cuDriverGetVersion = lambda: (Code.OK, driver)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fake)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert nvrtc.has_nvrtc.__wrapped__() is served


def test_a_thread_that_has_used_no_device_gets_the_context(monkeypatch):
    """The driver, unlike the runtime, launches nothing where no context is current."""
    calls, current = [], threading.local()

    class Driver:
        def __getattr__(self, name):
            def call(*args):
                calls.append(name)
                if name == "cuCtxGetCurrent":
                    args[0]._obj.value = getattr(current, "context", 0)
                if name == "cuDevicePrimaryCtxRetain":
                    args[0]._obj.value = 77
                if name == "cuCtxSetCurrent":
                    current.context = args[0].value
                if name == "cuLaunchKernel":
                    assert current.context == 77
                return 0

            return call

    monkeypatch.setattr(cuda_function, "_driver", Driver)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=0))
    function = cuda_function.CudaFunction(b"code", "name", 384, 1 << 17)
    errors = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: [function.launch(2, None, 3), function.launch(2, torch.ones(1), 3)])
        monkeypatch.setattr(threading, "excepthook", errors.append)
        thread.start()
        thread.join()
    assert not errors and calls.count("cuLaunchKernel") == 4 and calls.count("cuCtxSetCurrent") == 3


def test_a_refused_source_is_told(compiler, tmp_path):
    with pytest.raises(DriverError, match="nvrtcCompileProgram failed with NVRTC_ERROR_COMPILATION"):
        nvrtc.machine_code("bad", "sm_90a")
    assert not (tmp_path / "cuda").exists()


def test_ranges_fill_the_device_with_clusters():
    assert [cluster.num_ranges(m, 4096, 4096, 132) for m in (129, 256, 257, 512, 513, 1024, 4096)] == [4, 4, 2, 2, 1, 1, 1]
    assert cluster.num_ranges(200, 4096, 14336, 132) == 4 and cluster.num_ranges(200, 28672, 4096, 132) == 1
    assert cluster.num_ranges(200, 256, 128, 132) == 1  # two steps
    for rows in (129, 300, 2000):
        for outputs in (8, 520, 6144, 28672):
            splits = cluster.num_ranges(rows, outputs, 4096, 132)
            assert splits == 1 or splits * -(-rows // 256) * -(-outputs // 256) <= 66


@pytest.mark.parametrize("splits", [0, 3])
def test_no_range_is_without_columns(splits):
    x, plane, flags = torch.zeros(200, 128, dtype=torch.float16), torch.zeros(64, 128, dtype=torch.uint8), torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=rf"splits is {splits}; 128 columns can be cut in 1 to 2 ranges of 64 columns or more"):
        cluster.launch_cluster(x, plane, plane, None, flags, 0, "nested_e4m3", splits=splits)


def test_every_variant_has_a_text_of_its_own():
    texts = {cluster.source_of((coding, wide, activation)) for coding in (1, 2) for wide in (False, True) for activation in range(4)}
    assert len(texts) == 16 and not any("@MMA@" in text for text in texts)
    assert all(text.count("wgmma.mma_async") == 1 for text in texts)


def test_nothing_on_a_cpu():
    assert not cluster.uses_cluster(torch.zeros(200, 64, dtype=torch.float16), torch.zeros(64, 64, dtype=torch.uint8), gated=False)
