"""The hash of contents and the host's copy: what the hash must tell apart, pinning and its failures, memory given back."""

from __future__ import annotations

import gc
import mmap
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from depthfx import errors
from depthfx.alloc import backup
from depthfx.alloc.backup import HostBackup
from depthfx.alloc.content_hash import CHUNK_WORDS, content_hash

MASK = (1 << 64) - 1
UNIT = 4096


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def splitmix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def hash_in_plain_integers(data: bytes) -> int:
    """The formula of the module's text for one chunk, with words taken as signed."""
    words = [int.from_bytes(data[i : i + 4].ljust(4, b"\0"), "little", signed=True) for i in range(0, len(data), 4)]
    factors = [splitmix(((i + 1) * 0x9E3779B97F4A7C15 + 0x5DEECE66D) & MASK) | 1 for i in range(len(words))]
    state = splitmix((len(data) + 0x9E3779B97F4A7C15) & MASK)
    part = sum(w * f for w, f in zip(words, factors)) & MASK
    return splitmix(((state ^ part) + 0x9E3779B97F4A7C15) & MASK)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 127, 4096, 10_001])
def test_hash_is_the_formula(count):
    data = random_bytes(count, count)
    assert content_hash(data) == hash_in_plain_integers(bytes(data.tolist()))


def test_hash_reads_views_at_any_offset():
    data = random_bytes(1000)
    for first in range(5):
        assert content_hash(data[first : first + 401]) == content_hash(data[first : first + 401].clone())


def test_hash_tells_every_single_bit():
    data = random_bytes(96)
    seen = {content_hash(data)}
    for place in range(96):
        for bit in range(8):
            data[place] ^= 1 << bit
            seen.add(content_hash(data))
            data[place] ^= 1 << bit
    assert len(seen) == 1 + 96 * 8


def test_hash_tells_flipped_pairs_moves_and_lengths():
    """The cases that plain sums and sums with equal steps miss: the top bit twice, +1 -2 +1, words in another order."""
    rng = random.Random(0)
    data = random_bytes(4 * 64)
    original = content_hash(data)
    for _ in range(300):
        i, j = rng.sample(range(64), 2)
        flipped = data.clone()
        flipped[[4 * i + 3, 4 * j + 3]] ^= 0x80
        swapped = data.view(torch.int32).clone()
        swapped[[i, j]] = swapped[[j, i]]
        stepped = data.view(torch.int32).clone()
        start = rng.randrange(62)
        stepped[start : start + 3] += torch.tensor([1, -2, 1], dtype=torch.int32)
        for other in (flipped, swapped.view(torch.uint8), stepped.view(torch.uint8)):
            assert content_hash(other) != original
    lengths = [content_hash(torch.zeros(n, dtype=torch.uint8)) for n in range(1, 50)]
    assert len(set(lengths)) == 49


def test_hash_orders_chunks():
    step = 4 * CHUNK_WORDS
    data = random_bytes(2 * step + 12)
    original = content_hash(data)
    swapped = torch.cat([data[step : 2 * step], data[:step], data[2 * step :]])
    assert content_hash(swapped) != original
    data[step + 5] += 1
    assert content_hash(data) != original


@pytest.mark.parametrize(
    "data",
    [
        torch.zeros(4),
        torch.zeros(2, 2, dtype=torch.uint8),
        torch.zeros(8, dtype=torch.uint8)[::2],
        torch.zeros(8, dtype=torch.uint8, device="meta"),
    ],
    ids=["floats", "two dimensions", "a gap", "no bytes"],
)
def test_hash_refuses(data):
    with pytest.raises(errors.MemoryRequestError, match="contiguous uint8 bytes"):
        content_hash(data)


def test_backup_keeps_the_bytes_and_finds_what_changed():
    home = random_bytes(3 * UNIT)
    spans = [(0, 1000), (1024, UNIT + 512), (UNIT + 512, 2 * UNIT + 100)]
    host = HostBackup.take(home, 2 * UNIT + 100, UNIT, pin=False, spans=spans)
    original = home.clone()
    assert not host.pinned and host.num_units == 3 and sorted(host.hashes) == spans
    assert [host.unit(u).numel() for u in range(3)] == [UNIT, UNIT, 100]
    assert host.verify(home) == 3
    home[UNIT : 2 * UNIT] = 0x5A
    with pytest.raises(errors.InternalError, match=r"\(1024, 4608\).*units 0 to 1.*overwritten"):
        host.verify(home)
    assert host.verify(home, 0, UNIT) == 1  # the one tensor that lies within unit 0
    home[UNIT : 2 * UNIT] = host.unit(1)
    assert host.verify(home) == 3
    assert torch.equal(home, original)


def test_backup_is_page_aligned_and_goes_with_its_last_view():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    gc.collect()
    before, size = resident(), 256 << 20
    host = HostBackup(size, size, pin=False)
    host._content().fill_(1)
    assert host.unit(0).data_ptr() % mmap.PAGESIZE == 0
    assert resident() - before > size // 2
    view = host.unit(0)
    host.close()
    host.close()
    assert int(view[-1]) == 1
    with pytest.raises(errors.MemoryStateError, match="closed"):
        host.unit(0)
    del view
    gc.collect()
    assert resident() - before < size // 4


def test_backup_refuses():
    home = random_bytes(UNIT)
    for used in (0, UNIT + 1):
        with pytest.raises(errors.MemoryRequestError, match="cannot back up"):
            HostBackup.take(home, used, UNIT, pin=False)
    for span in ((5, 5), (-1, 4), (0, 101)):
        with pytest.raises(errors.MemoryRequestError, match="not within the 100 bytes"):
            HostBackup.take(home, 100, UNIT, pin=False, spans=[span])
    with pytest.raises(errors.MemoryRequestError, match="0 to 0"):
        HostBackup.take(home, UNIT, UNIT, pin=False).unit(1)
    with pytest.raises(errors.MemoryRequestError, match="positive"):
        HostBackup(0, UNIT, pin=False)
    with pytest.raises(errors.HostMemoryError, match=r"cannot give .* MiB"):
        HostBackup(1 << 62, UNIT, pin=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
def test_pinning_needs_a_device():
    with pytest.raises(errors.HostMemoryError, match="pin=False"):
        HostBackup(UNIT, UNIT, pin=True)


class FakeCudart:
    """Counts what is pinned; ``code`` is what the next calls return."""

    def __init__(self) -> None:
        self.code = 0
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address, size, flags):
        if not self.code:
            assert address % mmap.PAGESIZE == 0 and size % mmap.PAGESIZE == 0 and flags == 0 and address not in self.pinned
            self.pinned[address] = size
        return self.code

    def cudaHostUnregister(self, address):
        if not self.code:
            del self.pinned[address]
        return self.code

    def cudaGetErrorString(self, code):
        return "out of memory"


@pytest.fixture
def cudart(monkeypatch):
    fake = FakeCudart()
    monkeypatch.setattr(backup, "_cudart", lambda: fake)
    cleared = []
    monkeypatch.setattr(backup, "_clear_last_error", lambda: cleared.append(True))
    return SimpleNamespace(fake=fake, cleared=cleared)


def test_pinned_and_unpinned_once(cudart):
    host = HostBackup.take(random_bytes(5000), 5000, UNIT, pin=True)
    assert host.pinned and list(cudart.fake.pinned.values()) == [8192]
    host.close()
    host.close()
    assert not cudart.fake.pinned and not cudart.cleared


def test_memory_that_cannot_be_pinned(cudart):
    cudart.fake.code = 2
    with pytest.raises(errors.HostMemoryError, match=r"cannot pin 1 MiB.*error 2 \(out of memory\).*ulimit -l") as caught:
        HostBackup(1 << 20, UNIT, pin=True)
    assert "now " in str(caught.value)
    assert cudart.cleared == [True]
    cudart.fake.code = 0
    HostBackup(1 << 20, UNIT, pin=True).close()
    assert not cudart.fake.pinned


def test_a_failed_copy_unpins(cudart):
    with pytest.raises(NotImplementedError):
        HostBackup.take(torch.empty(UNIT, dtype=torch.uint8, device="meta"), UNIT, UNIT, pin=True)
    assert not cudart.fake.pinned


def test_a_failed_unpin_is_told(cudart):
    host = HostBackup(UNIT, UNIT, pin=True)
    cudart.fake.code = 2
    with pytest.raises(errors.HostMemoryError, match="stays pinned"):
        host.close()
    assert cudart.cleared == [True]
