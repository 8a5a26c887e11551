"""Semi-unified memory on a CUDA device: lends and restores beside captured graphs, and memory given back."""

from __future__ import annotations

import gc
import os

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

pytest.importorskip("cuda.bindings.driver")

import depthfx
from depthfx import ElasticMemory
from depthfx.runtime.reclaim import reclaim
from tests.families.configs import build
from tests.runtime.elastic_race import SIZES, engines, race

RACE_SECONDS = float(os.environ.get("RACE_SECONDS", "10"))  # of each race; 120 for a thorough run


@pytest.fixture(scope="module")
def pair():
    elastic, plain = engines("cuda", torch.float16)
    yield elastic, plain
    elastic.engine.close()


@pytest.mark.timeout(RACE_SECONDS * 2 + 300)
@pytest.mark.parametrize("delays", [False, True], ids=["", "delays"])
def test_tokens_equal_those_of_an_engine_that_never_lends(pair, delays):
    counts = race(*pair, RACE_SECONDS / 2, seed=int(delays), delays=delays)
    print(dict(counts))
    assert counts["failures"] == 0 and counts["hashed"] == 4 * SIZES["num_hidden_layers"]
    assert min(counts[what] for what in ("lends", "restores", "cancels", "mixed steps")) > 0, counts


@pytest.mark.alone
def test_memory_returns_to_the_driver():
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()

    def free_bytes() -> int:
        gc.collect()
        reclaim()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def once(close: bool) -> None:
        model = depthfx.compile(
            build("llama", torch.float16, "cuda", **SIZES), weights="nested", inductor=False, kv_blocks=4096, max_batch_size=4,
            memory=ElasticMemory(unit_mib=2.0), program_cache=False,
        )  # fmt: skip
        model.generate(torch.tensor([[5, 6, 7]], device="cuda"), max_new_tokens=4, do_sample=False)
        if close:
            before = model.model.layers[0].mlp.up_proj.weight.clone()
            model.engine.close()
            assert torch.equal(model.model.layers[0].mlp.up_proj.weight, before)

    once(close=True)  # what libraries keep for good
    start = free_bytes()
    for close in (True, False):
        once(close)
        assert free_bytes() >= start - (4 << 20), f"closed: {close}"
