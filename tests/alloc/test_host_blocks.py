"""Host memory for KV blocks: copies, their order, and memory that cannot be had or pinned."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from depthfx.alloc import backup, host_blocks
from depthfx.alloc.host_blocks import HostBlocks, runs
from depthfx.errors import HostMemoryError

CPU = torch.device("cpu")


def test_neighbours_go_in_one_copy():
    assert list(runs(((1, 4), (2, 5), (3, 7), (5, 8), (6, 9)))) == [(1, 4, 2), (3, 7, 1), (5, 8, 2)]
    assert list(runs(())) == []


def test_bytes_are_moved_saves_first():
    pool = torch.randint(-100, 100, (6, 2, 8), dtype=torch.int16, generator=torch.Generator().manual_seed(0))
    before = pool.clone()
    host = HostBlocks(4, 32, CPU)
    host.move(pool, ((0, 1), (1, 2), (4, 0)), ())
    pool[0:2] = 7
    host.move(pool, ((5, 3),), ((1, 5), (2, 0), (0, 1)))
    assert torch.equal(pool[[5, 0, 1]], before[[0, 1, 4]])
    host.move(pool, (), ((3, 2),))
    assert torch.equal(pool[2], before[5])
    host.close()
    host.close()


def test_memory_that_the_host_does_not_have():
    with pytest.raises(HostMemoryError, match=r"cannot hold .* of evicted KV blocks; lower kv_offload_gib"):
        HostBlocks(1 << 40, 1 << 20, CPU)


def test_memory_that_cannot_be_mapped(monkeypatch):
    def refuse(*args, **options):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(backup.mmap, "mmap", refuse)
    with pytest.raises(HostMemoryError, match=r"for evicted KV blocks .*Cannot allocate memory"):
        HostBlocks(2, 4096, CPU)


def test_memory_that_cannot_be_pinned(monkeypatch):
    fake = SimpleNamespace(cudaHostRegister=lambda *args: 2, cudaGetErrorString=lambda code: "out of memory")
    monkeypatch.setattr(backup, "_cudart", lambda: fake)
    monkeypatch.setattr(backup, "_clear_last_error", lambda: None)
    with pytest.raises(HostMemoryError, match=r"cannot pin .* for evicted KV blocks: .*error 2 .out of memory."):
        HostBlocks(2, 4096, torch.device("cuda"))


def test_pinned_memory_is_unpinned_with_its_owner(monkeypatch):
    calls: list[str] = []
    fake = SimpleNamespace(
        cudaHostRegister=lambda *args: calls.append("pin") or 0, cudaHostUnregister=lambda *args: calls.append("unpin") or 0
    )
    monkeypatch.setattr(backup, "_cudart", lambda: fake)
    monkeypatch.setattr(host_blocks.torch.cuda, "synchronize", lambda device: calls.append("wait"))
    host = HostBlocks(2, 4096, torch.device("cuda"))
    assert host.pinned
    del host
    assert calls == ["pin", "wait", "unpin"]
