"""Runner: a step plan becomes step inputs, one forward (a graph replay where a captured form holds it) and sampled tokens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace

import torch

from depthfx.alloc.host_blocks import HostBlocks
from depthfx.lowering import ops
from depthfx.records import Chunk, KvShape, StepInputs, StepPlan, StepResult
from depthfx.runtime.graphs import StepGraphs, greedy
from depthfx.runtime.host_ring import HostRing
from depthfx.runtime.precision import PrecisionFlags
from depthfx.runtime.sampler import SamplingTensors, new_seen, reset_seen, sample
from depthfx.runtime.staging import Staging, Uploaded
from depthfx.runtime.step_form import StepForm

Program = Callable[[StepInputs], torch.Tensor]
_WORDS_A_ROW = 32  # of sampling parameters, with some end-of-sequence ids; more make the buffers grow


@dataclass(frozen=True)
class RunnerShape:
    """Sizes that are fixed when the engine starts."""

    kv: KvShape
    num_heads: int  # query heads
    kv_dtype: torch.dtype
    num_blocks: int
    num_table_rows: int  # requests that hold KV at the same time
    blocks_per_row: int
    max_batch_tokens: int
    vocab_size: int
    num_precisions: int = 1  # entries of `StepInputs.layer_precision`
    nested: bool = False  # weights of layers are nested
    num_places: int = 0  # routed layers


def is_plain_greedy(chunk: Chunk) -> bool:
    """Whether the token is the argmax of the raw logits, or nobody asks the engine for it."""
    s = chunk.sampling
    return s.external or (s.temperature == 0.0 and s.repetition_penalty == 1.0 and chunk.sample_index >= s.min_new_tokens)


@dataclass
class Launched:
    """A step whose work is queued; ``tokens`` is on its way to the host."""

    plan: StepPlan
    sampled: tuple[Chunk, ...]  # of the plan, in the order of the tokens
    tokens: torch.Tensor  # [R] int64 on the host, -1 where the logits were not finite
    done: torch.cuda.Event | None
    logits: dict[str, torch.Tensor]
    tape: torch.Tensor | None = None  # [places, T] int8 on the host


class Runner:
    """Runs steps of one program on one device, routed ones of another; one stream, steps in the order of ``launch``."""

    def __init__(
        self, program: Program, shape: RunnerShape, device: torch.device, buckets: tuple[int, ...], kv_pool: torch.Tensor | None = None,
        routed: Program | None = None, prompts: tuple[StepForm, ...] = (),
    ) -> None:  # fmt: skip
        """``buckets`` are the decode batch sizes to capture as CUDA graphs; empty: every step runs eagerly. ``kv_pool``: one made elsewhere.

        ``prompts``: forms of steps with prompts to capture as well.
        """
        self.program, self.routed, self.shape, self.device = program, routed, shape, device
        self.tape = torch.zeros(shape.num_places, shape.max_batch_tokens, dtype=torch.int8, device=device)
        if kv_pool is None:
            kv_pool = torch.zeros(shape.kv.pool_shape(shape.num_blocks), dtype=shape.kv_dtype, device=device)
        self.kv_pool = kv_pool
        self.host_blocks: HostBlocks | None = None  # where evicted KV blocks go; see `depthfx.runtime.kv_offload`
        # one element more than the tables need: padding writes go there
        self._tables_flat = torch.zeros(shape.num_table_rows * shape.blocks_per_row + 1, dtype=torch.int32, device=device)
        self.block_tables = self._tables_flat[:-1].view(shape.num_table_rows, shape.blocks_per_row)
        self.flags = PrecisionFlags(shape.num_precisions, device)
        self.staging = Staging(shape.max_batch_tokens, shape.num_table_rows, shape.blocks_per_row, device)
        self._sampling = HostRing(_WORDS_A_ROW * max(shape.num_table_rows, 1), device)
        self._histories = HostRing(shape.max_batch_tokens, device)
        self._stream = torch.cuda.default_stream(device) if device.type == "cuda" else None
        if device.type == "cuda":
            ops.reserve_scratch(device, shape.num_table_rows, shape.num_heads, shape.kv.head_dim)  # before any capture
        self._seen: torch.Tensor | None = None  # made when the first request with a repetition penalty samples
        # tokens of the last step, read by the next one's decode rows; never reallocated (captured graphs hold it)
        self.last_tokens = torch.zeros(max(shape.num_table_rows, 1), dtype=torch.int64, device=device)
        self.graphs = StepGraphs(self, buckets, prompts)

    def release(self) -> None:
        """Waits for the device and lets go of graphs and KV pool; nothing can be launched afterwards."""
        if self._stream is not None:
            self._stream.synchronize()
        self.graphs = StepGraphs(self, ())
        del self.kv_pool
        if self.host_blocks is not None:
            self.host_blocks.close()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Queue the work of ``plan`` and return at once; on a CPU the work is done when this returns.

        Every step runs on the device's default stream, whatever stream or device is current where the caller stands: the order
        of steps is what keeps their shared buffers and KV blocks apart. The caller's autocast is left aside: program and KV
        have the dtype that they were compiled with.
        """
        with torch.autocast(self.device.type, enabled=False):
            with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
                try:
                    return self._launch(plan)
                except BaseException:
                    if self._stream is not None:
                        with suppress(RuntimeError):  # the first error tells more
                            self._stream.synchronize()  # nobody waits for this step, and the host buffers that it reads come round again
                    raise

    def _launch(self, plan: StepPlan) -> Launched:
        if plan.saves or plan.loads:
            assert self.host_blocks is not None, "the plan moves KV blocks to or from a host that has no memory for them"
            self.host_blocks.move(self.kv_pool, plan.saves, plan.loads)
        plan = self._write_surplus(plan)
        self._take_histories(plan)
        sampled = plan.sampled
        precision = self.flags.send(plan.precision)  # after all steps before, which read the old flags
        routed = self.routed is not None and plan.routed
        halves = self._halves(plan, precision) if routed else None
        best: torch.Tensor | None
        if halves is not None:
            # graphs share memory: the second one may overwrite what the first one has left
            found = [[part.clone() for part in self._compute(*half, precision) if part is not None] for half in halves]
            logits, best = (torch.cat(parts) for parts in zip(*found, strict=True))
        else:
            logits, best = self._compute(plan, routed, precision)
        is_chosen = best is not None and all(is_plain_greedy(c) for c in sampled)
        tokens = best if best is not None and is_chosen else self._sample(sampled, logits)
        if halves is not None or not is_chosen:  # else the graph has stored them itself
            self.last_tokens[: tokens.shape[0]].copy_(tokens)
        with torch.inference_mode(False):  # copies of their own, which the caller may write to
            wanted = {c.request_id: logits[i].to(torch.float32, copy=True) for i, c in enumerate(sampled) if c.sampling.external}
        num_taped = len(plan.decodes) if halves is not None else plan.num_tokens if routed else 0
        return self._to_host(Launched(plan, sampled, tokens, None, wanted), num_taped)

    def _compute(self, plan: StepPlan, routed: bool, precision: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits ``[R, V]`` of a step; from a graph, whose next replay or that of another overwrites them, with their greedy choice ``[R]``."""
        graph, count = self.graphs.find(plan, precision, routed), len(plan.sampled)
        uploaded = self.staging.upload(plan, graph.form if graph else None, routed)
        if graph is None:
            return self.forward(uploaded, precision, routed), None
        graph.replay()
        return graph.logits[:count], graph.tokens[:count]

    def _halves(self, plan: StepPlan, precision: int) -> tuple[tuple[StepPlan, bool], tuple[StepPlan, bool]] | None:
        """(plan, routed) of the decodes and of the prompts, where both are captured, routed and dense; the step as a whole would not be.

        The weights are read twice, which takes less than launching every operation of the step; not measured yet.
        """
        if not self.graphs.prompts or plan.probe or not plan.decodes or not plan.prefills or any(c.routed for c in plan.prefills):
            return None
        rows = {chunk.table_row for chunk in plan.prefills}
        writes = [tuple(w for w in plan.table_writes if (w[0] in rows) == of_prompts) for of_prompts in (False, True)]
        decodes, prompts = replace(plan, prefills=(), table_writes=writes[0]), replace(plan, decodes=(), table_writes=writes[1])
        if self.graphs.find(decodes, precision, True) is None or self.graphs.find(prompts, precision) is None:
            return None
        return (decodes, True), (prompts, False)

    def wait(self, launched: Launched) -> StepResult:
        """Wait until the tokens of ``launched`` are on the host."""
        if launched.done is not None:
            launched.done.synchronize()
        picked = launched.tokens[: len(launched.sampled)].tolist()
        tokens = tuple(-1 if c.sampling.external else t for c, t in zip(launched.sampled, picked, strict=True))
        return StepResult(launched.plan.step_id, tokens, tuple(t >= 0 for t in picked), launched.logits, launched.tape)

    def forward(self, uploaded: Uploaded, precision: int = -1, routed: bool = False, captured: bool = False) -> torch.Tensor:
        """Logits ``[R, V]`` of one step; what a graph captures, and then with -1: the flags on the device decide at replay."""
        inputs = self.prepare(uploaded, precision)
        if not routed:
            return self.program(inputs)
        assert self.routed is not None, "a routed step needs a skipper"
        routed_inputs = replace(
            inputs,
            request_ids=uploaded.request_ids.long(),
            is_prompt=uploaded.is_prompt.bool(),
            forced_run=uploaded.forced_run,
            route_tape=self.tape,
            captured=captured,
        )
        return self.routed(routed_inputs)

    def prepare(self, uploaded: Uploaded, precision: int = -1) -> StepInputs:
        """Apply the block-table writes and pick the token of each row; runs inside a captured graph as well."""
        self._tables_flat.index_copy_(0, uploaded.write_places.long(), uploaded.write_blocks)
        known = uploaded.source < 0
        token_ids = torch.where(known, uploaded.token_ids.long(), self.last_tokens[uploaded.source.clamp(min=0).long()].clamp(min=0))
        return StepInputs(
            token_ids=token_ids,
            positions=uploaded.positions,
            table_rows=uploaded.table_rows,
            block_tables=self.block_tables,
            logit_rows=uploaded.logit_rows.long(),
            kv_pool=self.kv_pool,
            chunk_starts=uploaded.chunk_starts,
            tile_chunks=uploaded.tile_chunks,
            tile_starts=uploaded.tile_starts,
            num_decode_rows=uploaded.num_decode_rows,
            layer_precision=self.flags.tensor,
            precision=precision,
        )

    def _sample(self, sampled: tuple[Chunk, ...], logits: torch.Tensor) -> torch.Tensor:
        """Tokens ``[R]`` int64 of the step, -1 where the logits hold NaN."""
        if all(is_plain_greedy(c) for c in sampled):
            return greedy(logits)
        params = SamplingTensors.build(sampled, self.shape.vocab_size, self._sampling.to_device)
        tokens, finite = sample(logits, params, self._seen)
        return torch.where(finite, tokens, -1)

    def _take_histories(self, plan: StepPlan) -> None:
        """Start the seen tokens of requests just admitted; their first chunk may well sample nothing, so before any sampling."""
        if any(chunk.history is not None for chunk in plan.prefills):
            if self._seen is None:
                self._seen = new_seen(self.shape.num_table_rows, self.shape.vocab_size, self.device)
            reset_seen(self._seen, plan.prefills, self._histories.to_device)

    def _write_surplus(self, plan: StepPlan) -> StepPlan:
        """Apply block-table writes beyond what one upload holds (a very long reused prefix) beforehand."""
        limit = self.staging.max_writes
        while len(plan.table_writes) > limit:
            first = StepPlan(plan.step_id, (), (), plan.table_writes[:limit])
            plan = replace(plan, table_writes=plan.table_writes[limit:])
            uploaded = self.staging.upload(first)
            self._tables_flat.index_copy_(0, uploaded.write_places.long(), uploaded.write_blocks)
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()  # the buffers in rotation are for one upload a step
        return plan

    def _to_host(self, launched: Launched, num_taped: int) -> Launched:
        """``launched`` with its tokens, and the tape of its first ``num_taped`` rows, on the way to the host."""
        tape = self.tape[:, :num_taped] if num_taped else None
        if self.device.type != "cuda":
            return replace(launched, tape=None if tape is None else tape.clone())
        host = self.staging.token_buffer()
        host[: launched.tokens.shape[0]].copy_(launched.tokens, non_blocking=True)
        if tape is not None:
            tape = self.staging.tape_buffer(tape.shape).copy_(tape, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return replace(launched, tokens=host, done=done, tape=tape)
