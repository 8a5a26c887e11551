"""Warm-up: have the kernels of all captured steps compiled side by side before the first of them is launched."""

from __future__ import annotations

import torch

from depthfx.lowering.graph_switch import switching
from depthfx.lowering.precompile import KernelWorkers, Variant, collected
from depthfx.records import StepPlan
from depthfx.runtime.graphs import StepGraphs, dependent_launch
from depthfx.runtime.runner import Runner
from depthfx.runtime.sizing import prefill_plan
from depthfx.runtime.step_form import StepForm

# Rows of the short prefill step of the dry run: too many for the kernels of decode steps, too few for those of long prompts.
_PREFILL_ROWS = 256


def precompile_kernels(
    runner: Runner, buckets: tuple[int, ...], workers: KernelWorkers, nested: bool = False, prompts: tuple[StepForm, ...] = ()
) -> None:
    """Compile what prefill steps, one decode step of each bucket and one step of each form ``prompts`` need and Triton's cache lacks.

    Where no worker runs yet, the program was known, and so its kernels most likely are: two buckets are asked first. ``nested``:
    prefill steps have kernels of their own where precision is known on the host.
    """
    hints = (1, 0, -1) if nested else (-1,)
    if not workers.started:
        variants = _variants(runner, buckets[:1] + buckets[-1:], prompts[-1:], hints)
        if all(v.is_cached() for v in variants):
            workers.compile(variants)
            return
    workers.compile(_variants(runner, buckets, prompts, hints))


@torch.inference_mode()
def _variants(runner: Runner, buckets: tuple[int, ...], prompts: tuple[StepForm, ...], hints: tuple[int, ...]) -> list[Variant]:
    """The kernels of a long and a short prefill step and of each captured step, from steps that run without any kernel.

    Values are garbage meanwhile: nothing may read them on the host, and no index may come from them.
    """
    longest = min(runner.shape.max_batch_tokens, runner.shape.blocks_per_row * runner.shape.kv.block_tokens)
    depths = (False, True) if runner.routed is not None else (False,)
    graphs = StepGraphs(runner, buckets, prompts)  # those of the runner to come
    with collected() as found:
        for rows in (longest, min(_PREFILL_ROWS, longest)):
            for precision in hints:
                for routed in depths:
                    runner.forward(runner.staging.upload(prefill_plan((rows,)), None, routed), precision, routed)
                    _settle(runner)
        for form, precision, routed in graphs.steps:
            with dependent_launch(form, runner.shape.nested, runner.device), switching(graphs.switch):
                runner.forward(runner.staging.upload(StepPlan(-1, (), (), ()), form, routed), precision, routed, captured=True)
            _settle(runner)
    return list(found)


def _settle(runner: Runner) -> None:
    """Wait for the step: the host buffers of uploads are for one step at a time, and a later upload must not overtake a copy."""
    if runner.device.type == "cuda":
        torch.cuda.current_stream(runner.device).synchronize()
