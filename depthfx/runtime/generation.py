"""Hugging Face's generation contract on the engine: arguments to requests, tokens back to tensors."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation import GenerateDecoderOnlyOutput, UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from depthfx.errors import InvalidRequestError
from depthfx.records import SamplingParams
from depthfx.runtime import lockstep
from depthfx.runtime.hf_params import per_row_stop_check, read_processors, sampling_params
from depthfx.runtime.request import RequestOutput

if TYPE_CHECKING:
    from depthfx.runtime.model import DepthModel

_generator: ContextVar[torch.Generator | None] = ContextVar("depthfx_generator", default=None)

# Arguments of `generate` that the engine does not serve, checked before Hugging Face prepares anything.
_UNSUPPORTED_ARGUMENTS = {
    "past_key_values": "past_key_values given by hand",
    "inputs_embeds": "inputs_embeds",
    "custom_generate": "custom_generate",
    "assistant_model": "assistant_model (assisted decoding)",
    "encoder_outputs": "encoder_outputs",
}
# What Hugging Face hands to the decoding loop beside the tokens; any other argument would change the forward.
_LOOP_ARGUMENTS = frozenset(
    ("attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position", "synced_gpus", "streamer",
     "logits_processor", "stopping_criteria", "tokenizer", "assistant_tokenizer", "return_dict", "output_attentions", "output_hidden_states")
)  # fmt: skip


@contextmanager
def seeded_by(generator: torch.Generator | None) -> Iterator[None]:
    """Draw the seeds of sampled requests from ``generator``; None: from torch's default generator."""
    token = _generator.set(generator)
    try:
        yield
    finally:
        _generator.reset(token)


def given_generator() -> torch.Generator | None:
    """The caller's generator for the present call."""
    return _generator.get()


def unsupported_argument(kwargs: dict[str, Any]) -> str | None:
    """The first argument of ``generate`` that the engine cannot serve, by name; None if there is none."""
    if kwargs.get("cache_implementation") == "paged":
        return "cache_implementation='paged' (the engine's KV is paged already; generate_batch takes many prompts)"
    return next((text for name, text in _UNSUPPORTED_ARGUMENTS.items() if kwargs.get(name) is not None), None)


def unsupported_call(model: Any, input_ids: torch.Tensor, *args: Any, generation_config: Any = None, **kwargs: Any) -> str | None:
    """The first option of a prepared call that the engine cannot serve; None if there is none."""
    config = generation_config if generation_config is not None else args[2]
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        return "output_attentions or output_hidden_states"
    unknown = sorted(name for name, value in kwargs.items() if name not in _LOOP_ARGUMENTS and value is not None and value is not False)
    if unknown:
        return ", ".join(unknown)
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if positions is not None and not _counts_from_zero(positions, mask if mask is not None else torch.ones_like(input_ids)):
        return "position_ids that do not count the tokens from 0"
    return None


def _counts_from_zero(positions: torch.Tensor, mask: torch.Tensor) -> bool:
    if positions.dim() != 2 or mask.dim() != 2 or positions.shape[1] != mask.shape[1]:
        return False
    usual = (mask.long().cumsum(-1) - 1).clamp(min=0)
    return not bool(((positions != usual) & mask.bool()).any())


def prompts_of(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[list[int]]:
    """Token ids of each row ``[B, n]`` without its left padding; raises for holes and right padding."""
    if not input_ids.shape[0]:
        raise InvalidRequestError(f"input_ids has shape {tuple(input_ids.shape)}; it must have at least one row: leave the call out")
    rows = input_ids.tolist()
    if attention_mask is None:
        return rows
    if attention_mask.dim() != 2 or attention_mask.shape != input_ids.shape:
        raise InvalidRequestError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; it must be the shape of input_ids, {tuple(input_ids.shape)}"
        )
    prompts = []
    for number, (row, mask) in enumerate(zip(rows, attention_mask.tolist(), strict=True)):
        first = next((i for i, m in enumerate(mask) if m), len(mask))
        if not all(mask[first:]):
            raise InvalidRequestError(
                f"attention_mask of row {number} is 0 after its first 1; pad on the left only (tokenizer.padding_side='left'), and give the mask "
                "where a prompt holds pad_token_id: Hugging Face derives one from it otherwise"
            )
        prompts.append(row[first:])
    return prompts


def draw_seed() -> int:
    """A seed for one request, from the caller's generator or torch's default one."""
    generator = _generator.get()
    device = generator.device if generator is not None else "cpu"
    return int(torch.randint(0, 2**62, (1,), generator=generator, device=device).item())


def decode(
    model: DepthModel,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """The decoding loop behind ``generate``: same arguments and results as Hugging Face's ``_sample``.

    Options that the device sampler knows run in the engine, free of each other's pace. Any other logits processor or
    stopping criterion, and scores or logits as output, run in lockstep on the host with Hugging Face's own objects.
    """
    prompts = prompts_of(input_ids, model_kwargs.get("attention_mask"))
    padded = any(len(p) != input_ids.shape[1] for p in prompts)
    config = generation_config
    in_step = config.return_dict_in_generate and (config.output_scores or config.output_logits)
    in_step = in_step or (streamer is not None and len(prompts) > 1)  # a streamer gets one token of every row at a time
    sampling = None if in_step else sampling_params(config, logits_processor, stopping_criteria, input_ids.shape[1], padded)
    if sampling is None:
        if any(isinstance(p, UnbatchedClassifierFreeGuidanceLogitsProcessor) for p in logits_processor):
            model._note_hugging_face("the unconditional pass of guidance_scale")
        return lockstep.decode(model, input_ids, prompts, logits_processor, stopping_criteria, config, streamer, _generator.get())
    stop_checks = [per_row_stop_check(stopping_criteria, prompt, input_ids.device) for prompt in prompts]
    requests = []
    for prompt, stop_check in zip(prompts, stop_checks, strict=True):
        seed = draw_seed() if config.do_sample else 0
        requests.append((prompt, replace(sampling, seed=seed), stop_check))
    outputs = run_requests(model, requests, streamer)
    sequences = _assemble(input_ids, outputs, config._pad_token_tensor)
    if streamer is not None:
        streamer.end()
    return GenerateDecoderOnlyOutput(sequences=sequences) if config.return_dict_in_generate else sequences


def run_requests(model: DepthModel, requests: list[tuple[list[int], SamplingParams, Any]], streamer: Any = None) -> list[list[int]]:
    """Generated ids of each request, in order; an error of one request is raised after the others were aborted."""
    outputs: list[list[int]] = [[] for _ in requests]
    with model.engine.collect(requests) as rows:
        for number, output in rows:
            outputs[number].extend(output.new_token_ids)
            if streamer is not None:
                for token in output.new_token_ids:
                    streamer.put(torch.tensor([token], device="cpu"))
            if output.error is not None:
                raise output.error
            if output.finish_reason == "length" and len(outputs[number]) < requests[number][1].max_new_tokens:
                lockstep.warn_of_context(number, len(requests[number][0]) + len(outputs[number]))
    return outputs


def _assemble(input_ids: torch.Tensor, outputs: list[list[int]], pad: torch.Tensor | None) -> torch.Tensor:
    longest = max(len(o) for o in outputs)
    fill = int(pad) if pad is not None else 0
    new = torch.tensor([o + [fill] * (longest - len(o)) for o in outputs], dtype=torch.int64, device=input_ids.device)
    return torch.cat([input_ids, new.view(len(outputs), longest)], dim=1)


def generate_batch(
    model: Any,
    inputs: list[list[int]],
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    record_timestamps: bool = False,
    progress_bar: bool = False,
    persistent_manager: bool = False,
    warmup: bool = True,
    **kwargs: Any,
) -> dict[str, GenerationOutput]:
    """See :meth:`DepthModel.generate_batch`; options that tune Hugging Face's own engine have no effect here."""
    config, unknown = model._prepare_generation_config(generation_config, **kwargs)
    if unknown:
        raise InvalidRequestError(f"generate_batch: unknown arguments {sorted(unknown)}; allowed are those of GenerationConfig")
    model._prepare_special_tokens(config, True, device="cpu")
    processors = model._get_logits_processor(config, input_ids_seq_length=1, device="cpu")
    eos = config._eos_token_tensor.flatten().tolist() if config._eos_token_tensor is not None else []
    reason = _unsupported_batch(config, processors, eos)
    if reason is not None:
        return model._without_engine(reason, "generate_batch", inputs, generation_config, **kwargs)
    flat = next((p for p in inputs if not isinstance(p, Iterable)), None)
    if flat is not None:
        raise InvalidRequestError(
            f"generate_batch: inputs holds {flat!r} of type {type(flat).__name__}; it must be a list of prompts, each a list of token ids: "
            "wrap a single prompt in a list"
        )
    prompts = [list(p) for p in inputs for _ in range(config.num_return_sequences or 1)]
    results = [
        GenerationOutput(request_id=f"req_{n}", prompt_ids=p, timestamps=[] if record_timestamps else None) for n, p in enumerate(prompts)
    ]
    with model.engine.collect([]) as rows:
        for number, prompt in enumerate(prompts):
            room = config.max_new_tokens or max(1, (config.max_length or 20) - len(prompt))
            sampling = read_processors(config.do_sample, processors, eos, len(prompt), 1, False)
            assert sampling is not None
            seed = draw_seed() if config.do_sample else 0
            one = replace(sampling, max_new_tokens=room, seed=seed)
            try:
                rows.add(number, prompt, one)
            except InvalidRequestError as error:
                results[number].status, results[number].error = RequestStatus.FAILED, str(error)
        for number, output in rows:
            _book(results[number], output)
    return {result.request_id: result for result in results}


def _unsupported_batch(config: Any, processors: Any, eos: list[int]) -> str | None:
    """The first option that the engine cannot serve in a continuous batch; None if there is none."""
    if config.num_beams and config.num_beams > 1:
        return "num_beams > 1 (beam search)"
    if config.stop_strings:
        return "stop_strings in generate_batch (use generate, or engine.stream with a stop_check)"
    if config.max_time is not None:
        return "max_time in generate_batch (use generate, or engine.stream with a stop_check)"
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH):
        return f"{mode.value} in generate_batch"
    if read_processors(config.do_sample, processors, eos, 0, 1, False) is None:
        return f"one of {', '.join(type(p).__name__ for p in processors)} in generate_batch (use generate)"
    return None


def _book(result: GenerationOutput, output: RequestOutput) -> None:
    now = time.perf_counter()
    if result.lifespan[0] < 0:
        result.lifespan, result.status = (now, -1), RequestStatus.DECODING
    result.generated_tokens.extend(output.new_token_ids)
    if result.timestamps is not None:
        result.timestamps.extend([now] * len(output.new_token_ids))
    if output.finished:
        result.status = RequestStatus.FAILED if output.error is not None else RequestStatus.FINISHED
        result.error = str(output.error) if output.error is not None else None
        result.lifespan = (result.lifespan[0], now)
