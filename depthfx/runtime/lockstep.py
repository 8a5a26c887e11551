"""Generation in lockstep on the host: Hugging Face's own processors and criteria on the engine's logits."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation import GenerateDecoderOnlyOutput

from depthfx.records import SamplingParams

if TYPE_CHECKING:
    from depthfx.runtime.model import DepthModel


def decode(
    model: DepthModel,
    input_ids: torch.Tensor,
    prompts: list[list[int]],
    logits_processor: Any,
    stopping_criteria: Any,
    config: Any,
    streamer: Any,
    generator: torch.Generator | None,
) -> Any:
    """All rows take one token at a time; scores, draws and criteria are exactly Hugging Face's.

    ``input_ids [B, n]`` are the padded prompts. A row that has ended keeps its last logits in ``scores`` and ``logits``.
    """
    keep = config.return_dict_in_generate
    scores: tuple[torch.Tensor, ...] | None = () if keep and config.output_scores else None
    raw: tuple[torch.Tensor, ...] | None = () if keep and config.output_logits else None
    has_eos = any(hasattr(c, "eos_token_id") for c in stopping_criteria)
    unfinished = torch.ones(len(prompts), dtype=torch.long, device=input_ids.device)
    room = max((stopping_criteria.max_length or config.max_length) - input_ids.shape[1], 1)
    width, full = input_ids.shape[1], False
    pad = int(config._pad_token_tensor) if config._pad_token_tensor is not None else 0
    external = SamplingParams(max_new_tokens=room, external=True)
    with model.engine.collect([(prompt, external, None) for prompt in prompts]) as rows:
        logits: torch.Tensor | None = None
        while int(unfinished.max()):
            logits = _next_logits(rows, logits, unfinished, input_ids.device)
            step_scores = logits_processor(input_ids, logits.clone())
            if scores is not None:
                scores += (step_scores,)
            if raw is not None:
                raw += (logits,)
            tokens = _choose(step_scores, config.do_sample, generator)
            if has_eos or full:
                tokens = torch.where(unfinished.bool(), tokens, pad)
            input_ids = torch.cat([input_ids, tokens[:, None]], dim=-1)
            if streamer is not None:
                streamer.put(tokens.cpu())
            stopped = stopping_criteria(input_ids, scores)
            for number, token in enumerate(tokens.tolist()):
                if unfinished[number] and rows.push(number, token).finished and not stopped[number]:
                    warn_of_context(number, input_ids.shape[1] - width + len(prompts[number]))
                    stopped[number] = full = True
            unfinished = unfinished & ~stopped
            for number, going in enumerate(unfinished.tolist()):
                if not going:
                    rows.abort(number)
    if streamer is not None:
        streamer.end()
    return GenerateDecoderOnlyOutput(sequences=input_ids, scores=scores, logits=raw) if keep else input_ids


def _next_logits(rows: Any, before: torch.Tensor | None, unfinished: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Logits ``[B, V]`` float32 of every unfinished row; the last ones for rows that have ended."""
    waiting = {i for i, going in enumerate(unfinished.tolist()) if going}
    found: dict[int, torch.Tensor] = {}
    for number, output in rows:
        if output.error is not None:
            raise output.error
        if output.logits is not None:
            found[number] = output.logits.to(device)
        if waiting <= found.keys():
            break
    if before is None:
        return torch.stack([found[i] for i in range(len(unfinished))])
    after = before.clone()
    for number, row in found.items():
        after[number] = row
    return after


def _choose(scores: torch.Tensor, do_sample: bool, generator: torch.Generator | None) -> torch.Tensor:
    if not do_sample:
        return torch.argmax(scores, dim=-1)
    shares = torch.softmax(scores, dim=-1)
    if generator is not None:
        shares = shares.to(generator.device)
    return torch.multinomial(shares, num_samples=1, generator=generator).squeeze(1).to(scores.device)


def warn_of_context(number: int, length: int) -> None:
    """Say that a row ended because its context is full, which its tokens alone do not show."""
    warnings.warn(
        f"row {number} ended at {length} tokens: the context is full (the model's max_position_embeddings or the setting max_model_len)",
        stacklevel=2,
    )
