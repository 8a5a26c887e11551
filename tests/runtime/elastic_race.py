"""Random lends and restores beside running requests, and the same steps again in an engine that never lends: tokens must be equal.

Both engines see as many KV blocks, so the scheduler decides alike, and the second one runs each step in the precision that the first
one had at that step. So every token must be the same, bit for bit the same sums; a byte read after it changed its owner shows as another
token, a wrong residual as a wrong hash (`verify`), a block read before it was written as poison.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

import torch

import depthfx
from depthfx import ElasticMemory, SamplingParams
from tests.families.configs import build

SIZES = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 256,
}  # fmt: skip
REQUESTS = 64
BASE_BLOCKS = 200  # the requests of a round need about 320 at a time


def engines(device: str, dtype: torch.dtype, **settings: Any) -> tuple[Any, Any]:
    """A model that lends units of about 2 MiB and one with as many blocks that lends nothing."""
    common = {
        "weights": "nested", "inductor": False, "prefix_reuse": False, "max_batch_size": REQUESTS, "max_batch_tokens": 512,
        "max_model_len": 256, "lookahead": True, "program_cache": False, **settings,
    }  # fmt: skip
    memory = ElasticMemory(unit_mib=2.0, dwell_s=0.0, verify=True)
    elastic = depthfx.compile(build("llama", dtype, device, **SIZES), memory=memory, kv_blocks=BASE_BLOCKS, check=True, **common)
    blocks = elastic.engine.control.shared.layout.num_blocks
    plain = depthfx.compile(build("llama", dtype, device, **SIZES), kv_blocks=blocks, **common)
    return elastic, plain


class Schedule:
    """Notes the precision of every step of one engine, and imposes it on another."""

    def __init__(self, engine: Any) -> None:
        self.precisions: list[bytes] = []
        self._plan = engine._scheduler.plan
        self._first = engine._scheduler._next_step
        engine._scheduler.plan = self._noted

    def _noted(self) -> Any:
        plan = self._plan()
        if plan is not None:
            self.precisions.append(plan.precision)
        return plan

    def impose(self, engine: Any) -> None:
        """The next steps of ``engine`` run in the noted precisions."""
        scheduler, first, noted = engine._scheduler, engine._scheduler._next_step, list(self.precisions)
        scheduler.mask = lambda: noted[min(scheduler._next_step - first, len(noted) - 1)]


def requests(rng: random.Random) -> list[tuple[list[int], int]]:
    """Prompts and numbers of new tokens of one round."""
    return [([rng.randrange(3, 100) for _ in range(rng.randrange(1, 90))], rng.randrange(8, 60)) for _ in range(REQUESTS)]


def serve(engine: Any, asked: list[tuple[list[int], int]], before_step: Any = None) -> dict[str, list[int]]:
    """Tokens by request id; raises what a request ended with."""
    tokens: dict[str, list[int]] = {}
    for index, (prompt, new) in enumerate(asked):
        tokens[engine.add(prompt, SamplingParams(max_new_tokens=new), request_id=f"r{index}")] = []
    while engine.has_unfinished():
        if before_step is not None:
            before_step()
        for output in engine.step():
            if output.error is not None:
                raise output.error
            tokens[output.request_id] += output.new_token_ids
    return tokens


def race(elastic: Any, plain: Any, seconds: float, seed: int, delays: bool) -> Counter[str]:
    """Rounds of 64 requests until ``seconds`` are over; counts what happened, raises at the first difference."""
    rng, counts, engine = random.Random(seed), Counter[str](), elastic.engine
    control = engine.control

    def disturb() -> None:
        with engine._state:
            if rng.random() < 0.25:
                control.manager.lend(rng.randrange(1, 6))
                control.after_plan()
            if rng.random() < 0.25 and not control.region.num_restoring:
                if control.region.num_open_units and rng.random() < 0.5:
                    moved = control.region.state(control.region.num_open_units - 1) != "FREE"
                    control._empty_highest()
                    counts["emptied"] += moved and control.region.next_to_restore() is not None
                control._restore(forced=True)
        if delays and rng.random() < 0.1:
            time.sleep(rng.random() * 0.004)

    control.shared.worker.copier.disturb(seed + 1 if delays else 0, delay_share=1.0, most_us=3000)
    end = time.monotonic() + seconds
    while time.monotonic() < end or not counts["rounds"]:
        asked = requests(rng)
        schedule = Schedule(engine)
        got = serve(engine, asked, disturb)
        engine._scheduler.plan = schedule._plan
        schedule.impose(plain.engine)
        expected = serve(plain.engine, asked)
        wrong = [name for name in expected if got[name] != expected[name]]
        assert not wrong, f"round {counts['rounds']} (seed {seed}): other tokens in {wrong[:5]} and {len(wrong)} in all"
        counts["rounds"] += 1
        counts["tokens"] += sum(map(len, got.values()))
        counts["mixed steps"] += sum(0 < sum(p) < len(p) for p in schedule.precisions)
    stats = control.stats()
    counts.update(lends=stats.num_lends, restores=stats.num_restores, cancels=stats.num_cancels, failures=stats.num_failures)
    engine.restore()
    counts["hashed"] = control.shared.backup.verify(control._home)
    engine._scheduler.check()
    return counts
