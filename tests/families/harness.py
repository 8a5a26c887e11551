"""What the acceptance tests share: prompts, Hugging Face's own answers, and further engines over a compiled program."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch

from depthfx.alloc.manager import MemoryManager
from depthfx.records import SamplingParams
from depthfx.runtime.engine import Engine
from depthfx.runtime.routes import RouteLog
from depthfx.runtime.runner import Runner
from depthfx.runtime.scheduler import Scheduler
from tests.families.configs import VOCABULARY

NEW_TOKENS = 12
GREEDY = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def prompts(lengths: tuple[int, ...], seed: int = 0, shared: int = 0) -> list[list[int]]:
    """Random prompts of these lengths without the padding id; the first ``shared`` ids are the same in all."""
    draw = random.Random(seed)
    common = [draw.randrange(1, VOCABULARY) for _ in range(shared)]
    return [(common + [draw.randrange(1, VOCABULARY) for _ in range(n)])[:n] for n in lengths]


def left_padded(rows: list[list[int]], device: str = "cpu") -> dict[str, torch.Tensor]:
    """``input_ids`` and ``attention_mask`` of a ragged batch, padded on the left with id 0."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(r)) + r for r in rows], device=device)
    mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows], device=device)
    return {"input_ids": ids, "attention_mask": mask}


def alone(model: Any, rows: list[list[int]], **options: Any) -> list[list[int]]:
    """What ``model.generate`` continues each prompt with when it is the only one."""
    answers = []
    for row in rows:
        out = model.generate(torch.tensor([row], device=model.device), **{**GREEDY, **options})
        answers.append(out[0, len(row) :].tolist())
    return answers


def engine_over(
    compiled: Any,
    kv_blocks: int = 64,
    prefix_reuse: bool = True,
    max_batch_size: int = 8,
    max_batch_tokens: int = 64,
    max_chunk_tokens: int = 16,
    lookahead: bool = False,
    buckets: tuple[int, ...] = (),
) -> Engine:
    """Another engine over the program of a compiled model, with a KV pool of its own; nothing is compiled again.

    Small steps by default, so that prompts are cut into chunks and share steps with decodes.
    """
    runner = compiled.engine._runner
    tokens, columns = runner.shape.kv.block_tokens, runner.shape.blocks_per_row
    shape = replace(runner.shape, num_blocks=kv_blocks, num_table_rows=max_batch_size + 1, max_batch_tokens=max_batch_tokens)
    manager = MemoryManager(kv_blocks, tokens, max_batch_size + 1, columns, prefix_reuse)
    scheduler = Scheduler(manager, max_batch_size, max_batch_tokens, max_chunk_tokens, columns * tokens)
    scheduler.route_reads = compiled.engine._scheduler.route_reads
    own = Runner(runner.program, shape, runner.device, buckets, routed=runner.routed)
    if buckets:
        own.graphs.capture()
    routes = None if runner.routed is None else RouteLog(runner.routed.routed_layers, compiled.engine.routes.default)
    return Engine(scheduler, own, shape.vocab_size, lookahead, check=True, layers=compiled.engine.layers, routes=routes)


def run_staggered(engine: Engine, rows: list[list[int]], every: int = 2, new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    """Tokens of each prompt when a new one arrives every ``every`` steps."""
    answers: dict[str, list[int]] = {}
    waiting, turn = list(rows), 0
    while waiting or engine.has_unfinished():
        if waiting and turn % every == 0:
            answers[engine.add(waiting.pop(0), SamplingParams(max_new_tokens=new_tokens))] = []
        for output in engine.step():
            assert output.error is None, output.error
            answers[output.request_id].extend(output.new_token_ids)
        turn += 1
    return list(answers.values())
