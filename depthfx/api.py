"""The public call: ``depthfx.compile`` builds program, memory, runner and engine, and attaches them to the model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from depthfx.alloc.manager import MemoryManager
from depthfx.alloc.units import SharedRegion
from depthfx.contracts import Skipper
from depthfx.errors import SettingError, SkipperError, UnsupportedModelError, UnsupportedOptionError
from depthfx.lowering import ops
from depthfx.lowering.fp8_weight import Fp8Linear
from depthfx.lowering.kernel_spec import is_hopper
from depthfx.lowering.kernels.partition_rows import MAX_ROWS as MAX_ROUTED_ROWS
from depthfx.lowering.nested_linear import nested_linears
from depthfx.lowering.nvrtc import has_nvrtc
from depthfx.lowering.precompile import KernelWorkers
from depthfx.lowering.tile_store import device_kind, use_stored_tiles
from depthfx.passes.pipeline import Program, build_program
from depthfx.passes.program_key import program_key
from depthfx.report import CompileReport
from depthfx.runtime.calibration import depth_costs
from depthfx.runtime.depth_control import DepthControl
from depthfx.runtime.elastic import ElasticControl
from depthfx.runtime.elastic_memory import SharedMemory, share_memory
from depthfx.runtime.engine import Engine
from depthfx.runtime.graphs import decode_buckets
from depthfx.runtime.kv_offload import offload
from depthfx.runtime.model import Compiled, as_depth_model
from depthfx.runtime.parts import MemoryControl
from depthfx.runtime.precision import entry_names
from depthfx.runtime.precision_switch import PrecisionSwitch
from depthfx.runtime.reclaim import close_with, reclaim
from depthfx.runtime.routes import RouteLog
from depthfx.runtime.runner import Runner
from depthfx.runtime.scheduler import Scheduler
from depthfx.runtime.sensitivity import measure_sensitivity as measure_sensitivity
from depthfx.runtime.sizing import Limits, derive_limits, one_block_runner, runner_shape, size_kv_blocks
from depthfx.runtime.step_form import MAX_CHUNKS, StepForm, decode_places, prompt_forms
from depthfx.runtime.timeline import Timeline
from depthfx.runtime.warmup import precompile_kernels
from depthfx.runtime.weight_offload import offload_weights
from depthfx.runtime.weight_watch import WeightWatch
from depthfx.settings import Settings, cache_dir
from depthfx.skippers import load_skipper, validate


def compile(
    model: PreTrainedModel, settings: Settings | None = None, *, skipper: Skipper | str | Path | None = None, **overrides: Any
) -> Any:
    """Compile a Hugging Face decoder model in place and return it.

    ``settings`` or single settings by name (see :class:`depthfx.Settings`) say how. The result is the same object: use
    ``generate`` as before, ``engine`` for continuous batching, ``explain()`` to see what was done. Do this after moving the
    model to its device and dtype. ``skipper`` (see :mod:`depthfx.skippers`, or the path of a checkpoint) lets tokens skip layers.

    Raises :class:`~depthfx.errors.UnsupportedModelError` with the reason for a model that depthfx cannot run (or, with
    ``on_unsupported="eager"``, leaves generation to Hugging Face's code and says so in ``explain()``), and
    :class:`~depthfx.errors.SettingError` or :class:`~depthfx.errors.MemoryBudgetError` for settings that do not fit, and
    :class:`~depthfx.errors.SkipperError` for a skipper that breaks its contract or does not fit the model.
    """
    resolved = Settings.build(settings, **overrides)
    if resolved.memory is not None and resolved.memory.budget_gib is not None:
        resolved = replace(resolved, memory_budget_gib=resolved.memory.budget_gib)
    if skipper is None and overrides.get("depth", "dense") != "dense":  # in Settings it may stand for many models
        raise SettingError(
            f"setting depth={resolved.depth!r} needs a skipper, and this call has none: give skipper=..., or leave depth out"
        )
    report = CompileReport()
    _check_model(model)
    model.eval()
    device = next(model.parameters()).device
    try:
        _check_architecture(model)
        _check_weights(model, resolved)
        with torch.autocast(device.type, enabled=False), _on_default_stream(device):  # the caller's would be compiled in for good
            engine, kv_block_bytes = _build_engine(model, resolved, report, _usable(skipper, model, resolved))
            compiled = Compiled(engine, report, resolved, kv_block_bytes)
    except UnsupportedModelError as error:
        if resolved.on_unsupported == "raise":
            raise
        report.add("not compiled, generation runs in Hugging Face's own code", str(error))
        compiled = Compiled(None, report, resolved)
    return as_depth_model(model, compiled)


def backend(
    gm: torch.fx.GraphModule, example_inputs: list[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """``torch.compile(model, backend="depthfx")``: a plain forward, compiled by Inductor as it stands.

    ``options`` are Inductor's. Serving (paged KV, captured steps, continuous batching) needs :func:`compile`, which owns the
    generation loop.
    """
    from torch._inductor.compile_fx import compile_fx

    if mode is not None:
        raise UnsupportedOptionError(
            f"torch.compile(backend='depthfx', mode={mode!r}): modes belong to the backend 'inductor'; use options"
        )
    compiled: Any = compile_fx(gm, example_inputs, config_patches=options)
    return compiled  # type: ignore[no-any-return]


def _on_default_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Make ``device`` and its default stream current, where it is a GPU: all steps run there."""
    return torch.cuda.stream(torch.cuda.default_stream(device)) if device.type == "cuda" else nullcontext()


def _usable(skipper: Skipper | str | Path | None, model: PreTrainedModel, settings: Settings) -> Skipper | None:
    """The skipper, loaded if it is a path, on the model's device, and proven to keep its contract."""
    if skipper is None:
        return None
    if settings.weights == "fp8":
        raise SettingError("a skipper needs weights='16bit' or 'nested'; weights='fp8' serves dense steps only: leave one of them out")
    if isinstance(skipper, (str, Path)):
        skipper = load_skipper(skipper, model)
    if not isinstance(skipper, Skipper):
        raise SkipperError(f"skipper is {skipper!r} of type {type(skipper).__name__}; give a depthfx Skipper or the path of its checkpoint")
    config, weight = model.config.get_text_config(), next(model.parameters())
    skipper = skipper.to(weight.device).eval()  # its dtype is its own affair: a router may well compute in float32
    others = {p.dtype for p in skipper.parameters()} - {weight.dtype}
    try:
        validate(skipper, config.hidden_size, config.num_hidden_layers, weight.dtype, weight.device)
    except SkipperError as error:
        if not others:
            raise
        names = ", ".join(sorted(map(str, others)))
        raise SkipperError(
            f"{error} (the model is {weight.dtype}, the skipper has weights in {names}: skipper.to({weight.dtype}) may help)"
        ) from error
    return skipper


def _build_engine(model: PreTrainedModel, settings: Settings, report: CompileReport, skipper: Skipper | None) -> tuple[Engine, int]:
    """Everything behind the model; also the bytes of one KV block."""
    reclaim()  # what engines that are gone have left
    device = next(model.parameters()).device
    cuda = device.type == "cuda"
    if settings.cuda_graphs and not cuda:
        raise SettingError(
            f"setting cuda_graphs=True needs a model on CUDA; this one is on {device}: move it there, or leave the setting out"
        )
    if settings.capture_prompts and (not cuda or settings.cuda_graphs is False):
        raise SettingError(
            f"setting capture_prompts=True needs a model on CUDA and captured graphs; this one is on {device}, cuda_graphs="
            f"{settings.cuda_graphs}: leave it out"
        )
    if settings.weight_offload_gib is not None and not cuda:
        raise SettingError(
            f"setting weight_offload_gib={settings.weight_offload_gib} needs a model on CUDA; this one is on {device}: leave it out"
        )
    if cuda:
        _report_portable(settings, device, report)
    limits = derive_limits(model.config, settings, device)
    if skipper is not None and limits.max_batch_tokens > MAX_ROUTED_ROWS:
        raise SettingError(f"setting max_batch_tokens={limits.max_batch_tokens} must be at most {MAX_ROUTED_ROWS} with a skipper: lower it")
    buckets = decode_buckets(limits.max_batch_size) if cuda and settings.cuda_graphs is not False else ()
    prompts = _prompt_forms(limits, settings, device)
    if cuda and settings.weights == "nested":
        use_stored_tiles(cache_dir(settings), device_kind(device), report)
    with KernelWorkers(report, enabled=cuda and settings.parallel_warmup) as workers:
        program = build_program(model, settings, "cuda" if cuda else "cpu", report, workers.start, skipper)
        if cuda and settings.parallel_warmup:
            with report.timed("compile kernels"):
                precompile_kernels(one_block_runner(program, limits, device), buckets, workers, settings.weights == "nested", prompts)
    if settings.weight_offload_gib is not None:
        offload_weights(model, program, settings.weight_offload_gib, device, report)
    modules, captured_rows = [model] if skipper is None else [model, skipper], max((form.rows for form in prompts), default=0)
    num_blocks = size_kv_blocks(modules, program, limits, settings, report, captured_rows)
    shared = _share(program, num_blocks, settings, device, report)
    try:
        return _assemble(model, program, limits, num_blocks, buckets, prompts, settings, report, shared, skipper)
    except BaseException as error:
        if shared is not None:
            shared.abandon(error)
        raise


def _prompt_forms(limits: Limits, settings: Settings, device: torch.device) -> tuple[StepForm, ...]:
    """Forms of the steps with prompts that are captured."""
    if not settings.capture_prompts:
        return ()
    fast = (limits.fast_chunk_tokens,) if settings.weights == "nested" and ops.has_fp8_rows(device) else ()
    return prompt_forms(limits.max_batch_size, limits.max_batch_tokens, (limits.max_chunk_tokens, *fast))


def _report_portable(settings: Settings, device: torch.device, report: CompileReport) -> None:
    """Say where a Hopper device takes slower kernels than it has, because of a library's version."""
    index = torch.cuda.current_device() if device.index is None else device.index
    if torch.cuda.get_device_capability(index)[0] != 9:
        return
    if not is_hopper(index):
        report.add("kernels", "prefill attention and nested products take the portable kernels: those for Hopper need Triton 3.6")
    if settings.weights == "nested" and not ops.has_fp8_rows(device):
        report.add("kernels", f"fast precision keeps 16-bit activations: FP8 ones need CUDA 12.9, this PyTorch has {torch.version.cuda}")
    if settings.weights == "nested" and not has_nvrtc():
        report.add(
            "kernels", "nested weights are joined in front of products of many rows, not inside: that needs NVRTC, install depthfx[cuda]"
        )


def _assemble(
    model: PreTrainedModel, program: Program, limits: Limits, num_blocks: int, buckets: tuple[int, ...], prompts: tuple[StepForm, ...],
    settings: Settings, report: CompileReport, shared: SharedMemory | None, skipper: Skipper | None,
) -> tuple[Engine, int]:  # fmt: skip
    device, region = next(model.parameters()).device, None
    if shared is not None:
        num_blocks, region = shared.layout.num_blocks, SharedRegion(shared.layout)
    runner = _build_runner(program, limits, num_blocks, device, buckets, prompts, report, shared)
    host = offload(runner, settings.kv_offload_gib, report)
    sizes = (num_blocks, settings.block_tokens, limits.num_table_rows, limits.blocks_per_row)
    manager = MemoryManager(*sizes, settings.prefix_reuse, region, host)
    control = _control(shared, manager, program, settings)
    scheduler = Scheduler(manager, limits.max_batch_size, limits.max_batch_tokens, limits.max_chunk_tokens, limits.max_model_len)
    if program.nested and ops.has_fp8_rows(device):
        scheduler.fast_chunk_tokens = limits.fast_chunk_tokens
    if prompts:
        scheduler.decode_places, scheduler.max_chunks = decode_places(limits.max_batch_size), MAX_CHUNKS
    if program.routed is not None:
        scheduler.route_reads = {n.name for n in program.routed.module.graph.nodes if n.op == "placeholder" and n.users}
    lookahead = settings.lookahead if settings.lookahead is not None else device.type == "cuda"
    report.add("engine", f"{limits}, lookahead {'on' if lookahead else 'off'}")
    layers = entry_names(program.kv_shape.num_layers, settings.nested_head) if settings.weights == "nested" else ()
    timeline = Timeline(program.kv_shape.block_bytes) if settings.memory is not None else None
    routes = None if program.routed is None else RouteLog(program.routed.routed_layers, (settings.depth,) * 2)
    engine = Engine(scheduler, runner, program.vocab_size, lookahead, settings.check, layers, control, timeline, routes)
    if settings.memory is not None and settings.memory.policy == "static_fast":
        engine.set_precision("fast")
        engine.never_full = "memory policy 'static_fast' lent all residual bytes to the KV cache for good"
    elif settings.weights == "fp8":
        engine.never_full = "weights='fp8' were rounded for good"
    if routes is not None and settings.depth == "auto":
        with report.timed("measure depth"):
            key = _costs_key(model, settings, "cuda" if device.type == "cuda" else "cpu", skipper)
            blocks = num_blocks if region is None else region.layout.num_base_blocks
            costs = depth_costs(runner, blocks, scheduler.precision, cache_dir(settings), key, settings.depth_rule, report)
        scheduler.depth = DepthControl(costs, settings.depth_rule, halves=bool(prompts))
        routes.observer = scheduler.depth.observe
    if shared is not None:
        close_with(engine, shared.resources)
    refills = [p.refill_tables for p in (program, program.routed) if p is not None]
    engine.watch = WeightWatch(model, refills, skipper)
    return engine, program.kv_shape.block_bytes


def _costs_key(model: PreTrainedModel, settings: Settings, target: str, skipper: Skipper | None) -> str:
    """What the time of a step follows from: the program, and of the settings that no pass reads those that say how it is run."""
    return repr((program_key(model, settings, target, skipper), settings.inductor, settings.weight_offload_gib))


def _share(program: Program, num_blocks: int, settings: Settings, device: torch.device, report: CompileReport) -> SharedMemory | None:
    """Residuals and KV over the same units, where the policy lends."""
    if settings.memory is None or settings.memory.policy not in ("elastic", "static_fast"):
        return None
    with report.timed("share memory"):
        shared = share_memory(program.stored, program.kv_shape, program.num_precisions, num_blocks, settings.memory, device, report)
        try:
            shared.lead(() if program.routed is None else program.routed.stored)
        except BaseException as error:
            shared.abandon(error)
            raise
        return shared


def _control(shared: SharedMemory | None, manager: MemoryManager, program: Program, settings: Settings) -> MemoryControl | None:
    """Who moves memory or precision by load."""
    if settings.memory is None or settings.memory.policy == "static_full":
        return None
    if shared is None:
        return PrecisionSwitch(manager, program.num_precisions, settings.memory)
    return ElasticControl(shared, manager, settings.memory)


def _build_runner(
    program: Program,
    limits: Limits,
    num_blocks: int,
    device: torch.device,
    buckets: tuple[int, ...],
    prompts: tuple[StepForm, ...],
    report: CompileReport,
    shared: SharedMemory | None,
) -> Runner:
    with report.timed("allocate"):
        kv_pool = None if shared is None else shared.kv_pool(program.kv_shape, program.kv_dtype)
        runner = Runner(program, runner_shape(program, limits, num_blocks), device, buckets, kv_pool, program.routed, prompts)
    if buckets:
        with report.timed("capture graphs"):
            runner.graphs.capture()
        report.add("compiled", f"CUDA graphs of decode steps for batch sizes {', '.join(map(str, runner.graphs.buckets))}")
        if prompts:
            sizes = ", ".join(map(str, sorted({form.rows for form in prompts})))
            report.add("compiled", f"CUDA graphs of dense steps with up to {MAX_CHUNKS} chunks of prompts, of {sizes} rows")
    if program.routed is not None:
        captured = f"{runner.graphs.cohorts()}; " if buckets else ""
        report.add("depth", f"cohorts: {captured}gathered, with counts read by the host, in other steps")
    return runner


def _check_model(model: Any) -> None:
    """Refuse what can never be compiled, whatever the settings."""
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"depthfx.compile takes a transformers PreTrainedModel; got {type(model).__module__}.{type(model).__name__}"
        )
    if hasattr(model, "_depthfx"):
        raise UnsupportedModelError(f"this {type(model).__name__} is compiled already; load it again to compile with other settings")
    devices = {p.device for p in model.parameters()}
    if any(d.type == "meta" for d in devices):
        raise UnsupportedModelError(
            "the model is on the meta device and has no weights; load it with from_pretrained or move it with to_empty first"
        )
    if len(devices) != 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        raise UnsupportedModelError(f"the model is on {sorted(map(str, devices))}; depthfx needs all of it on one CPU or CUDA device")


def _check_weights(model: PreTrainedModel, settings: Settings) -> None:
    """Refuse weights that are stored already in another form than the settings ask for."""
    if settings.weights != "nested" and nested_linears(model):
        raise UnsupportedModelError(
            f"this {type(model).__name__} has nested weights; compile it with weights='nested', or load it with from_pretrained "
            f"for weights={settings.weights!r}"
        )
    if any(isinstance(m, Fp8Linear) for m in model.modules()):
        raise UnsupportedModelError(f"the weights of this {type(model).__name__} were rounded to FP8 already; load it again")


def _check_architecture(model: PreTrainedModel) -> None:
    """Refuse known kinds of models with a clear reason before any tracing."""
    config, name = model.config, type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder; depthfx compiles decoder-only models")
    if getattr(model, "hf_quantizer", None) is not None or getattr(model, "is_quantized", False):
        method = getattr(getattr(config, "quantization_config", None), "quant_method", "unknown")
        raise UnsupportedModelError(f"{name} is quantised ({method}); load the original 16-bit or 32-bit weights")
    if not model.can_generate() or model.get_output_embeddings() is None:
        raise UnsupportedModelError(f"{name} cannot generate text; load it with AutoModelForCausalLM")
    if any(hasattr(m, "_hf_hook") for m in model.modules()):
        raise UnsupportedModelError(
            f"{name} carries accelerate hooks (several devices or offloading); load it on one device, without device_map"
        )
    text = config.get_text_config()
    experts = next((n for n in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts") if getattr(text, n, None)), None)
    if experts is not None and any("experts" in n.rsplit(".", 1)[-1] for n, _ in model.named_modules()):
        raise UnsupportedModelError(
            f"{name} is a mixture of experts ({experts}={getattr(text, experts)}); depthfx supports dense decoders so far"
        )
    if getattr(text, "kv_lora_rank", None):
        raise UnsupportedModelError(
            f"{name} uses latent attention (MLA, kv_lora_rank={text.kv_lora_rank}); depthfx supports plain K and V so far"
        )
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention", "attention"}
    if kinds:
        raise UnsupportedModelError(
            f"{name} has layers of kind {', '.join(sorted(kinds))}; depthfx supports full and sliding attention so far"
        )
    dtypes = {p.dtype for p in model.parameters()}
    if len(dtypes) != 1 or next(iter(dtypes)) not in (torch.float32, torch.float16, torch.bfloat16):
        raise UnsupportedModelError(f"{name} has parameters in {sorted(map(str, dtypes))}; depthfx needs one of float32, float16, bfloat16")
    if next(iter(dtypes)) is torch.float32 and next(model.parameters()).device.type == "cuda":
        raise UnsupportedModelError(
            f"{name} is float32 on CUDA; depthfx attends in float16 or bfloat16 there: load it with dtype=torch.float16"
        )
