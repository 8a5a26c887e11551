"""How large things get: limits from settings and model, KV blocks from the memory budget."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from depthfx.errors import MemoryBudgetError, SettingError
from depthfx.records import Chunk, KvShape, SamplingParams, StepPlan
from depthfx.report import CompileReport
from depthfx.runtime.runner import Runner, RunnerShape
from depthfx.settings import DEFAULT_CONTEXT, Settings

GIB = 1 << 30
# Kept free on CUDA beside weights, KV and the measured activations: graphs, cuBLAS workspaces, fragmentation.
_CUDA_RESERVE_BYTES = 768 << 20
_CPU_DEFAULT_KV_BYTES = 1 << 30


@dataclass(frozen=True)
class Limits:
    """Sizes of the engine; the block table has one row for each request of a batch and one to spare."""

    max_batch_size: int
    max_batch_tokens: int
    max_chunk_tokens: int
    max_model_len: int
    block_tokens: int

    @property
    def num_table_rows(self) -> int:
        return self.max_batch_size + 1

    @property
    def blocks_per_row(self) -> int:
        return -(-self.max_model_len // self.block_tokens)

    @property
    def fast_chunk_tokens(self) -> int:
        """Rows that take about the time of ``max_chunk_tokens`` in full precision where all layers are fast."""
        return min(2 * self.max_chunk_tokens, self.max_batch_tokens)

    def __str__(self) -> str:
        return (
            f"batches of {self.max_batch_size} requests and {self.max_batch_tokens} rows ({self.max_chunk_tokens} when decoding "
            f"and prefilling), contexts of {self.max_model_len} tokens"
        )


def derive_limits(config: Any, settings: Settings, device: torch.device) -> Limits:
    """Fill in what ``settings`` leaves open, for ``device`` and the model's context length.

    Raises :class:`SettingError` for sizes that do not fit the model or each other.
    """
    cuda = device.type == "cuda"
    batch = settings.max_batch_size or min(256 if cuda else 32, settings.max_batch_tokens or 256)
    tokens = settings.max_batch_tokens or max(8192 if cuda else 512, batch)
    if tokens < batch:
        raise SettingError(f"setting max_batch_tokens={tokens} must be at least max_batch_size={batch}, one row for each decode: raise it")
    context = getattr(config.get_text_config(), "max_position_embeddings", None) or DEFAULT_CONTEXT
    if settings.max_model_len is not None and settings.max_model_len > context:
        raise SettingError(
            f"setting max_model_len={settings.max_model_len} must be at most {context}, the context of the model "
            "(max_position_embeddings in its config); lower it, or leave it out"
        )
    limits = Limits(
        max_batch_size=batch,
        max_batch_tokens=tokens,
        max_chunk_tokens=min(settings.max_chunk_tokens or (2048 if cuda else 256), tokens),
        max_model_len=settings.max_model_len or context,
        block_tokens=settings.block_tokens,
    )
    table = 4 * limits.num_table_rows * limits.blocks_per_row + 40 * tokens  # the inputs of a row take about 40 bytes
    total = torch.cuda.mem_get_info(device)[1] if cuda else _host_bytes("SC_PHYS_PAGES")
    if table > total:
        raise SettingError(
            f"settings max_batch_size={batch}, max_batch_tokens={tokens} and max_model_len={limits.max_model_len}: block table and rows of a step "
            f"need {table / GIB:.2f} GiB, and {device} has {total / GIB:.2f} GiB: lower them"
        )
    return limits


def size_kv_blocks(
    modules: Sequence[torch.nn.Module], program: Any, limits: Limits, settings: Settings, report: CompileReport, captured_rows: int = 0
) -> int:
    """Number of KV blocks that fit: ``kv_blocks`` if set, else the budget less the weights of ``modules`` (model, skipper) and activations.

    Captured steps have activations of their own, which count for those with prompts, of up to ``captured_rows`` rows.

    Raises :class:`MemoryBudgetError` if not even one request of one block fits, or if the device has not that much memory left.
    """
    kv: KvShape = program.kv_shape
    useful = limits.max_batch_size * limits.blocks_per_row  # more could never be named by the block table
    device = next(modules[0].parameters()).device
    if settings.kv_blocks is not None:
        check_free(settings.kv_blocks * kv.block_bytes, device)
        report.add("memory", f"KV pool: {settings.kv_blocks} blocks of {kv.block_tokens} tokens, as set")
        return settings.kv_blocks
    weights = _weight_bytes(modules)
    activations = 0
    if device.type == "cuda":
        with report.timed("measure activations"):
            activations = _measure_activations(program, limits, device, settings.weights == "nested")
            activations += activations * captured_rows // limits.max_batch_tokens
        free, total = torch.cuda.mem_get_info(device)
        taken = total - free - torch.cuda.memory_reserved(device)  # by others and by the CUDA context
        budget = settings.memory_budget_gib * GIB if settings.memory_budget_gib else total * settings.gpu_memory_utilization - taken
        room = budget - torch.cuda.memory_allocated(device) - activations - _CUDA_RESERVE_BYTES
    elif settings.memory_budget_gib:
        room = settings.memory_budget_gib * GIB - weights
    else:
        room = min(_CPU_DEFAULT_KV_BYTES, _host_bytes("SC_AVPHYS_PAGES") // 2)
    blocks = min(int(room // kv.block_bytes), useful)
    if blocks < 1:
        raise MemoryBudgetError(
            f"the memory budget leaves {max(room, 0) / GIB:.2f} GiB for KV beside {weights / GIB:.2f} GiB of weights and {activations / GIB:.2f} GiB of "
            f"activations; one block needs {kv.block_bytes / GIB:.4f} GiB: raise memory_budget_gib or lower max_batch_tokens"
        )
    check_free(blocks * kv.block_bytes, device)
    report.add("memory", f"weights {weights / GIB:.2f} GiB, activations {activations / GIB:.2f} GiB")
    report.add("memory", f"KV pool: {blocks} blocks of {kv.block_tokens} tokens, {blocks * kv.block_bytes / GIB:.2f} GiB")
    return blocks


def check_free(pool: int, device: torch.device) -> None:
    """Raises :class:`MemoryBudgetError` where a KV pool of ``pool`` bytes is more than a CUDA device has left, by whatever process it was taken.

    On a CPU, where memory is given when it is written to: more than the machine has.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # PyTorch's cache gives way
    else:
        free = total = _host_bytes("SC_PHYS_PAGES")
    if pool > free:
        raise MemoryBudgetError(
            f"a KV pool of {pool / GIB:.2f} GiB does not fit the {free / GIB:.2f} GiB that are free on {device}, of {total / GIB:.2f} GiB: "
            "end the processes that hold the rest, or lower memory_budget_gib (budget_gib of memory) or kv_blocks"
        )


def _weight_bytes(modules: Sequence[torch.nn.Module]) -> int:
    storages = [t.untyped_storage() for module in modules for t in (*module.parameters(), *module.buffers())]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def one_block_runner(program: Any, limits: Limits, device: torch.device) -> Runner:
    """A runner of full size except for its KV pool of one block: for measuring and for a dry run before memory is divided."""
    return Runner(program, runner_shape(program, limits, 1), device, (), routed=program.routed)


def runner_shape(program: Any, limits: Limits, num_blocks: int) -> RunnerShape:
    """Sizes of a runner over ``num_blocks`` blocks of KV."""
    return RunnerShape(
        program.kv_shape,
        program.num_heads,
        program.kv_dtype,
        num_blocks,
        limits.num_table_rows,
        limits.blocks_per_row,
        limits.max_batch_tokens,
        program.vocab_size,
        program.num_precisions,
        program.nested,
        0 if program.routed is None else len(program.routed.routed_layers),
    )


def prefill_plan(lengths: tuple[int, ...], precision: bytes = b"", routed: bool = False) -> StepPlan:
    """A step that prefills prompts of these lengths under ``precision``, all into the block that empty block tables name."""
    sampling = SamplingParams()
    return StepPlan(
        -1,
        (),
        tuple(Chunk(f"warm-up {i}", 0, 0, (0,) * n, -1, True, 0, sampling, None, routed) for i, n in enumerate(lengths)),
        (),
        precision,
    )


def _measure_activations(program: Any, limits: Limits, device: torch.device, nested: bool) -> int:
    """Peak bytes of the largest prefill step, measured by running it over one block of KV (also compiles its kernels).

    Nested weights make it run in all three states of precision, since each has kernels of its own; a skipper, dense and routed.
    """
    runner = one_block_runner(program, limits, device)
    longest = min(limits.max_model_len, limits.max_batch_tokens)
    full, fast = bytes([1] * program.num_precisions), bytes(program.num_precisions)
    states = (fast, bytes([0, *full[1:]]), full) if nested else (b"",)
    depths = (False,) if program.routed is None else (False, True)
    plans = [prefill_plan((longest,) * (limits.max_batch_tokens // longest), state, depth) for state in states for depth in depths]
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    for plan in plans:
        runner.wait(runner.launch(plan))
    peak = torch.cuda.max_memory_allocated(device)
    return peak - before


def _host_bytes(pages: str) -> int:
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
