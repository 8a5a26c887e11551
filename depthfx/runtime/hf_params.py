"""Hugging Face's prepared processors and criteria, read back into the engine's sampling parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.generation import logits_process as lp
from transformers.generation import stopping_criteria as sc

from depthfx.records import SamplingParams

# Warpers and processors the device sampler knows, in the order in which Hugging Face applies them.
_KNOWN = (
    lp.RepetitionPenaltyLogitsProcessor,
    lp.MinLengthLogitsProcessor,
    lp.MinNewTokensLengthLogitsProcessor,
    lp.TemperatureLogitsWarper,
    lp.TopKLogitsWarper,
    lp.TopPLogitsWarper,
    lp.MinPLogitsWarper,
)


def sampling_params(config: Any, processors: Any, criteria: Any, prompt_width: int, padded: bool) -> SamplingParams | None:
    """The engine's parameters for a prepared call, or None where it has to run in lockstep on the host.

    Lockstep is needed for processors or criteria that are not Hugging Face's own standard ones, for several processors
    out of order, and for a repetition penalty over padded rows (Hugging Face penalises the padding token there too).
    """
    values: dict[str, Any] = {"max_new_tokens": config.max_length - prompt_width, "temperature": 1.0 if config.do_sample else 0.0}
    last = -1
    for processor in processors:
        if type(processor) not in _KNOWN or (place := _KNOWN.index(type(processor))) <= last:
            return None
        last = place
        read = _read_processor(processor, prompt_width, padded)
        if read is None or (place >= _KNOWN.index(lp.TemperatureLogitsWarper) and not config.do_sample):
            return None
        values["min_new_tokens"] = max(values.get("min_new_tokens", 0), read.pop("min_new_tokens", 0))
        values.update(read)
    for criterion in criteria:
        if type(criterion) is sc.EosTokenCriteria:
            values["eos_token_ids"] = tuple(criterion.eos_token_id.flatten().tolist())
        elif type(criterion) not in (sc.MaxLengthCriteria, sc.StopStringCriteria, sc.MaxTimeCriteria):
            return None
    if values.get("min_new_tokens") and not values.get("eos_token_ids"):
        values["min_new_tokens"] = 0
    return SamplingParams(**values)


def _read_processor(processor: Any, prompt_width: int, padded: bool) -> dict[str, Any] | None:
    if isinstance(processor, lp.RepetitionPenaltyLogitsProcessor):
        usual = not padded and getattr(processor, "prompt_ignore_length", None) is None
        return {"repetition_penalty": float(processor.penalty)} if usual else None
    if isinstance(processor, lp.MinLengthLogitsProcessor):
        return {"min_new_tokens": max(0, processor.min_length - prompt_width)}
    if isinstance(processor, lp.MinNewTokensLengthLogitsProcessor):
        return {"min_new_tokens": int(processor.min_new_tokens)}
    if isinstance(processor, lp.TemperatureLogitsWarper):
        return {"temperature": float(processor.temperature)}
    if isinstance(processor, lp.TopKLogitsWarper):
        return {"top_k": int(processor.top_k)}
    if isinstance(processor, lp.TopPLogitsWarper):
        return {"top_p": float(processor.top_p)} if processor.min_tokens_to_keep == 1 else None
    return {"min_p": float(processor.min_p)} if processor.min_tokens_to_keep == 1 else None


def per_row_stop_check(criteria: Any, prompt: list[int], device: torch.device) -> Callable[[list[int]], bool] | None:
    """Stop strings and time limits of a prepared call as a check on one row's generated ids; None if there are none."""
    checks = [c for c in criteria if type(c) in (sc.StopStringCriteria, sc.MaxTimeCriteria)]
    if not checks:
        return None

    def stop(generated: list[int]) -> bool:
        row = torch.tensor([prompt + list(generated)], device=device)
        return any(bool(c(row, None)[0]) for c in checks)

    return stop
