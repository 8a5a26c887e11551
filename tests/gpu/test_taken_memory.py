"""Device memory that another process takes, nearly all of it: before an engine is built, and while it serves."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

pytest.importorskip("cuda.bindings.driver")

import depthfx
from depthfx import ElasticMemory
from depthfx.errors import MemoryBudgetError
from depthfx.runtime.reclaim import reclaim
from tests.families.configs import build
from tests.runtime.elastic_race import SIZES, engines, race

MIB, GIB = 1 << 20, 1 << 30
SLACK = 8 * MIB
WAIT = 30.0

# Takes ordinary memory until about so many bytes are free, says so, and holds it until its input ends.
OTHER = """
import sys, torch
torch.zeros(1, device="cuda")
leave, held = int(sys.argv[1]), []
while (more := torch.cuda.mem_get_info()[0] - leave) > 64 << 20:
    held.append(torch.empty(min(more, 8 << 30), dtype=torch.uint8, device="cuda"))
print("taken", flush=True)
sys.stdin.read()
"""


@contextmanager
def other_process(leave: int) -> Iterator[None]:
    """While it lives, ``leave`` bytes of the device are free, more or less."""
    before = torch.cuda.mem_get_info()[0]
    with subprocess.Popen([sys.executable, "-c", OTHER, str(leave)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "taken\n"
        assert torch.cuda.mem_get_info()[0] < leave + 128 * MIB
        yield
        other.stdin.close()
        assert other.wait(WAIT) == 0
    deadline = time.monotonic() + WAIT
    while torch.cuda.mem_get_info()[0] < before - GIB and time.monotonic() < deadline:
        time.sleep(0.05)  # the driver takes its time


def free_bytes(enough: float = float("inf")) -> int:
    """Free memory of the device, as soon as it is ``enough`` or no longer grows.

    What engines leave behind is closed by a thread, and the memory of another process comes back a while after its end.
    """
    deadline, readings = time.monotonic() + WAIT, [-1]
    while readings[-1] < enough and not (len(readings) > 10 and len(set(readings[-10:])) == 1) and time.monotonic() < deadline:
        gc.collect()
        reclaim()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        readings.append(torch.cuda.mem_get_info()[0])
        time.sleep(0.1)
    return readings[-1]


def compiled(model):
    """With a KV pool of about 7 GiB."""
    return depthfx.compile(
        model, weights="nested", inductor=False, cuda_graphs=False, max_batch_size=256, max_batch_tokens=2048, program_cache=False,
        memory=ElasticMemory(budget_gib=8.0, unit_mib=2.0),
    )  # fmt: skip


def tokens(model) -> list[int]:
    return model.generate(torch.tensor([[5, 6, 7]], device="cuda"), max_new_tokens=8, do_sample=False)[0].tolist()


@pytest.mark.alone
@pytest.mark.timeout(300)
def test_taken_before_an_engine_is_built():
    sizes = SIZES | {"max_position_embeddings": 8192}
    model = compiled(build("llama", torch.float16, "cuda", **sizes))  # what libraries keep for good
    expected = tokens(model)
    model.engine.close()
    del model
    start = free_bytes()
    model = build("llama", torch.float16, "cuda", **sizes)
    with other_process(leave=4 * GIB):
        words = r"a KV pool of [67]\.\d\d GiB does not fit the [34]\.\d\d GiB that are free on cuda:0, of \d+\.\d\d GiB: end the processes"
        with pytest.raises(MemoryBudgetError, match=words):
            compiled(model)
        assert torch.ones(4, device="cuda").sum().item() == 4
    assert tokens(compiled(model)) == expected
    model.engine.close()
    del model
    assert free_bytes(start - SLACK) >= start - SLACK


@pytest.mark.alone
@pytest.mark.timeout(400)
def test_taken_while_it_serves():
    """Graphs, units and KV are there from the start, and what large steps need in between PyTorch keeps after the first of them."""

    def serve_beside(seconds: float) -> None:
        pair = engines("cuda", torch.float16)
        race(*pair, seconds, seed=0, delays=False)
        before = pair[0].engine.control.stats()
        with other_process(leave=GIB // 2):
            counts = race(*pair, 3 * seconds, seed=1, delays=True)
            assert torch.cuda.mem_get_info()[0] < GIB
        print(dict(counts))
        assert counts["failures"] == 0 and counts["hashed"] == 4 * SIZES["num_hidden_layers"]
        assert counts["lends"] > before.num_lends and counts["restores"] > before.num_restores and counts["cancels"] > before.num_cancels
        for model in pair:
            model.engine.close()

    serve_beside(1.5)
    start, allocated = free_bytes(), torch.cuda.memory_allocated()  # the first time loads libraries, and kernels of every shape
    serve_beside(1.5)
    assert free_bytes(start - SLACK) >= start - SLACK
    assert torch.cuda.memory_allocated() <= allocated
