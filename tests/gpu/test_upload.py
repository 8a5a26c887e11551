"""A step's data reach the device while the copy engine is busy, in order and in time."""

import time

import pytest
import torch

from depthfx.alloc.restore_worker import RestoreWorker
from depthfx.lowering import ops
from depthfx.runtime.host_ring import TURNS, HostRing

DEVICE = torch.device("cuda")


@pytest.mark.parametrize("num_words", [1, 31, 1024, 1025, 100_001])
def test_every_word_arrives_and_none_beside(num_words):
    source = torch.randint(-(1 << 31), 1 << 31, (num_words,), dtype=torch.int32, generator=torch.Generator().manual_seed(7)).pin_memory()
    target = torch.full((num_words + 3,), -7, dtype=torch.int32, device=DEVICE)
    ops.upload_words(target[:num_words], source)
    assert torch.equal(target[:num_words].cpu(), source) and (target[num_words:] == -7).all()


def test_unpinned_memory_is_refused():
    with pytest.raises(ValueError, match="not pinned"):
        ops.upload_words(torch.zeros(4, dtype=torch.int32, device=DEVICE), torch.zeros(4, dtype=torch.int32))


def test_the_ring_sends_each_turn_and_grows():
    ring = HostRing(8, DEVICE)
    sent = []
    for turn in range(4 * TURNS):
        words = torch.arange(turn, turn + (5 if turn % 5 else 5000), dtype=torch.int32)
        sent.append((words, ring.to_device(words)))
        if turn >= TURNS - 1:
            torch.cuda.synchronize()  # as the engine waits for the step before the last
    assert all(torch.equal(there.cpu(), words) for words, there in sent)


@pytest.mark.alone
def test_a_restore_under_way_holds_nothing_up():
    """By the copy engine the same few words take as long as the whole restore: more than 10 ms."""
    size = 1 << 30
    source, target = torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.empty(size, dtype=torch.uint8, device=DEVICE)
    ring = HostRing(64, DEVICE)
    ring.to_device(torch.ones(64, dtype=torch.int32))
    torch.cuda.synchronize()
    worker = RestoreWorker(DEVICE)
    worker.submit(0, target, source, None)
    while worker.copied_bytes == 0:
        pass
    start = time.perf_counter()
    there = ring.to_device(torch.full((64,), 5, dtype=torch.int32))
    torch.cuda.default_stream().synchronize()
    seconds = time.perf_counter() - start
    under_way = not worker.idle()
    worker.wait_idle(10.0)
    worker.close()
    assert under_way and seconds < 2e-3, f"{seconds * 1e3:.2f} ms, restore under way: {under_way}"
    assert (there == 5).all()
