"""Compiled once, kept, and told in words when it fails; which products the cluster kernel takes and how it cuts them."""

from __future__ import annotations

import enum
import sys
import types

import pytest
import torch

from depthfx.errors import DriverError
from depthfx.lowering import nvrtc
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


def test_every_variant_has_a_text_of_its_own():
    texts = {cluster.source_of((coding, wide, activation)) for coding in (1, 2) for wide in (False, True) for activation in range(4)}
    assert len(texts) == 16 and not any("@MMA@" in text for text in texts)
    assert all(text.count("wgmma.mma_async") == 1 for text in texts)


def test_nothing_on_a_cpu():
    assert not cluster.uses_cluster(torch.zeros(200, 64, dtype=torch.float16), torch.zeros(64, 64, dtype=torch.uint8), gated=False)
