"""Hugging Face's prepared processors and criteria, read back into the engine's sampling parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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
    out of order, for a least length that forbids other ids than those that end a row, and for a repetition penalty over
    padded rows (Hugging Face penalises the padding token there too).
    """
    eos: list[int] = []
    limits: list[int] = []  # a criterion given by the caller stands in place of Hugging Face's own
    for criterion in criteria:
        if type(criterion) is sc.EosTokenCriteria:
            eos += criterion.eos_token_id.flatten().tolist()
        elif type(criterion) is sc.MaxLengthCriteria:
            limits.append(criterion.max_length)
        elif type(criterion) not in (sc.StopStringCriteria, sc.MaxTimeCriteria):
            return None
    read = read_processors(config.do_sample, processors, eos, prompt_width, prompt_width, padded)
    room = max(1, min(limits or [config.max_length]) - prompt_width)
    return None if read is None else replace(read, max_new_tokens=room)


def read_processors(
    do_sample: bool, processors: Any, eos: list[int], prompt_width: int, skipped: int, padded: bool
) -> SamplingParams | None:
    """What ``processors`` do to a row that ``eos`` ends, as parameters of the device sampler; None where it cannot do all of it in their order.

    ``skipped``: the prompt length from which a processor that counts new tokens alone has to count.
    """
    values: dict[str, Any] = {"temperature": 1.0 if do_sample else 0.0, "eos_token_ids": tuple(eos)}
    last = -1
    for processor in processors:
        if type(processor) not in _KNOWN or (place := _KNOWN.index(type(processor))) <= last:
            return None
        last = place
        read = _read_processor(processor, eos, prompt_width, skipped, padded)
        if read is None or (place >= _KNOWN.index(lp.TemperatureLogitsWarper) and not do_sample):
            return None
        values["min_new_tokens"] = max(values.get("min_new_tokens", 0), read.pop("min_new_tokens", 0))
        values.update(read)
    return SamplingParams(**values)


def _read_processor(processor: Any, eos: list[int], prompt_width: int, skipped: int, padded: bool) -> dict[str, Any] | None:
    if isinstance(processor, lp.RepetitionPenaltyLogitsProcessor):
        usual = not padded and getattr(processor, "prompt_ignore_length", None) is None
        return {"repetition_penalty": float(processor.penalty)} if usual else None
    if isinstance(processor, (lp.MinLengthLogitsProcessor, lp.MinNewTokensLengthLogitsProcessor)):
        if isinstance(processor, lp.MinLengthLogitsProcessor):
            least = processor.min_length - prompt_width
        else:
            least = processor.min_new_tokens + processor.prompt_length_to_skip - skipped
        same = set(processor.eos_token_id.flatten().tolist()) == set(eos)
        return {"min_new_tokens": max(0, least)} if same else None
    if isinstance(processor, lp.TemperatureLogitsWarper):
        return {"temperature": float(processor.temperature)}
    if processor.filter_value != -float("inf"):
        return None
    if isinstance(processor, lp.TopKLogitsWarper):
        return {"top_k": int(processor.top_k)}
    if isinstance(processor, lp.TopPLogitsWarper):
        usual = processor.min_tokens_to_keep == 1 and processor.top_p > 0.0
        return {"top_p": float(processor.top_p)} if usual else None
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
