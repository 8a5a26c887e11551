"""Logits of every position of a prompt, from one prefill step of the compiled program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch

from depthfx.errors import InvalidRequestError
from depthfx.records import Chunk, SamplingParams, StepPlan
from depthfx.runtime.engine import Engine

if TYPE_CHECKING:
    from depthfx.runtime.runner import Runner


@torch.inference_mode()
def prompt_logits(engine: Engine, token_ids: Sequence[int], routed: bool = False) -> torch.Tensor:
    """Logits ``[T, V]`` float32 of all ``token_ids``, dense or ``routed``, in the precision that the engine has now.

    Nothing may be under way, and the tokens must fit one step and the KV blocks that are never lent: :class:`InvalidRequestError`. Prefixes are
    forgotten, since the step writes into blocks that the engine believes free.
    """
    runner, manager = cast("Runner", engine._runner), engine._scheduler.manager
    if engine.has_unfinished():
        raise InvalidRequestError("logits of a prompt are computed by an idle engine; finish or abort its requests first")
    most = min(runner.shape.max_batch_tokens, manager.max_full_tokens)
    if not 0 < len(token_ids) <= most:
        raise InvalidRequestError(
            f"{len(token_ids)} tokens do not fit one step; 1 to {most} are allowed, for max_batch_tokens={runner.shape.max_batch_tokens} and "
            f"{manager.max_full_tokens} tokens of KV: shorten the prompt or compile with more of them"
        )
    num_blocks = -(-len(token_ids) // runner.shape.kv.block_tokens)
    manager.forget_content()
    chunk = Chunk("text", 0, 0, tuple(token_ids), -1, True, 0, SamplingParams(), routed=routed)
    precision = engine._scheduler.precision
    plan = StepPlan(-1, (), (chunk,), tuple((0, column, column) for column in range(num_blocks)), precision)
    hint = runner.flags.send(precision)
    uploaded = runner.staging.upload(plan, None, routed)
    inputs = runner.prepare(uploaded, hint)
    everything = torch.arange(len(token_ids), device=runner.device)
    manager.resend_tables()
    if not routed:
        return runner.program(replace(inputs, logit_rows=everything)).float()
    assert runner.routed is not None
    return runner.routed(
        replace(
            inputs, logit_rows=everything, route_tape=runner.tape, captured=False, request_ids=uploaded.request_ids.long(),
            is_prompt=uploaded.is_prompt.bool(), forced_run=uploaded.forced_run,
        )
    ).float()  # fmt: skip
