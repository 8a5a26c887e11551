"""Device memory that another process takes, rehearsed over the stand-in for CUDA's driver: before an engine is built, and while it serves.

`tests/gpu/test_taken_memory.py` does the same with a process and a device.
"""

from __future__ import annotations

import pytest
import torch

import depthfx
from depthfx.errors import MemoryBudgetError, OutOfPhysicalMemoryError
from depthfx.runtime.sizing import GIB, check_free
from tests.alloc.fake_cuda import CudaOverFake, FakeDevice, FakeDriver
from tests.families.harness import engine_over
from tests.families.test_nested_families import exact
from tests.runtime.elastic_race import Schedule
from tests.runtime.test_elastic import elastic, serve

MIB = 1 << 20
IDS = torch.tensor([[5, 6, 7]])


@pytest.fixture
def device(monkeypatch):
    """64 MiB, of which an engine takes 8: a unit of 6 MiB and 12 base blocks, rounded to what CUDA maps."""
    made = FakeDevice(64 * MIB)

    class OnDevice(CudaOverFake):
        @staticmethod
        def _load_driver():
            return FakeDriver(made)

    monkeypatch.setattr("depthfx.runtime.elastic_memory._backend", lambda _: OnDevice())
    return made


@pytest.mark.parametrize("free", [4, 6])
def test_taken_before_an_engine_is_built(device, free):
    """With 4 MiB the unit finds none, with 6 the base blocks."""
    model = exact("llama")
    expected = model(IDS).logits
    device.taken = (64 - free) * MIB
    asked, left = (6, 4) if free == 4 else (2, 0)
    words = rf"8 MiB for 1 units of 6 MiB and 73,728 bytes of base KV blocks cannot be had: .*{asked} MiB on CUDA device 0, of whose 64 MiB {left} MiB are free"
    with pytest.raises(OutOfPhysicalMemoryError, match=words):
        elastic(model)
    assert device.taken == (64 - free) * MIB and torch.equal(model(IDS).logits, expected)
    device.taken = 0
    elastic(model)
    assert device.taken == 8 * MIB and model.generate(IDS, max_new_tokens=3, do_sample=False).shape == (1, 6)
    model.engine.close()
    assert device.taken == 0 and torch.equal(model(IDS).logits, expected)


def test_taken_while_it_serves(device):
    """Whatever a step or a switch needs was made at the start: no call reaches the driver, and the tokens are right."""
    model = elastic(exact("llama"), prefix_reuse=False)
    engine, driver = model.engine, model.engine.control.shared.memory.backend._driver
    schedule, calls = Schedule(engine), len(driver.calls)

    def take(turn: int) -> None:
        device.taken = device.total if turn >= 5 else device.taken

    tokens = serve(engine, take)
    engine.restore()
    stats = engine.control.stats()
    assert stats.num_lends and stats.num_restores and len(driver.calls) == calls and device.taken == device.total
    plain = engine_over(
        model, engine._scheduler.manager.num_blocks, prefix_reuse=False, max_batch_size=8, max_batch_tokens=64, max_chunk_tokens=16
    )
    schedule.impose(plain)
    assert serve(plain) == tokens
    del plain
    engine.close()
    assert device.taken == device.total - 8 * MIB, "the other process has the rest"


def test_a_pool_larger_than_what_is_left_is_refused_by_name(monkeypatch):
    for name, value in {"mem_get_info": (3 * GIB, 80 * GIB), "memory_reserved": 2 * GIB, "memory_allocated": GIB}.items():
        monkeypatch.setattr(f"torch.cuda.{name}", lambda _, value=value: value)
    cuda = torch.device("cuda", 0)
    check_free(4 * GIB, cuda)  # 3 GiB are free, and 1 GiB is kept by PyTorch
    check_free(4 * GIB + 1, torch.device("cpu"))
    with pytest.raises(
        MemoryBudgetError, match=r"4\.50 GiB does not fit the 4\.00 GiB that are free on cuda:0, of 80\.00 GiB: .*budget_gib"
    ):
        check_free(4 * GIB + GIB // 2, cuda)
    model = exact("llama")
    monkeypatch.setattr("depthfx.runtime.sizing.check_free", lambda pool, _: check_free(pool << 20, cuda))
    with pytest.raises(MemoryBudgetError, match=r"a KV pool of 72\.00 GiB"):  # 12 blocks of 6 KiB, a million times
        elastic(model)
    with pytest.raises(MemoryBudgetError, match="a KV pool of"):
        depthfx.compile(model, memory_budget_gib=1.0, weights="nested", inductor=False)
