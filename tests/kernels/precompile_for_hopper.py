"""Collect the launches of some kernels for sm_90, compile them in workers and print what happened as JSON; no GPU needed."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter

import torch
import triton

from depthfx.lowering import precompile
from depthfx.lowering.kernel_spec import KERNELS
from depthfx.report import CompileReport
from tests.kernels.compile_for_hopper import _Hopper


def _of_layers() -> dict[str, int]:
    """How many variants the merges of three layers that were decided at once take, in steps of five numbers of rows."""
    with precompile.collected() as found:
        for rows in (64, 65, 66, 67, 68):
            hidden, step = torch.zeros(rows, 64, dtype=torch.float16), torch.zeros(3, rows, dtype=torch.int32)
            for row, counts in enumerate(torch.zeros(3, 2, dtype=torch.int32)):
                KERNELS.get("scatter_rows").launch(hidden, hidden[:5], step[row], counts, 0)
                KERNELS.get("select_rows").launch(hidden, hidden, hidden, step[row])
    return dict(Counter(variant.function for variant in found))


def _beside() -> dict[str, list]:
    """What a thread that serves launches while this one collects the same variant, and whose turn it is where a third collects too."""
    launched, turns = [], []

    class Kernel:
        function, packed_metadata = "loaded", "known"

        def run(self, *args):
            launched.append([str(a) for a in args[:6]])

    def launch() -> None:
        spec = KERNELS.get("rms_norm")
        spec.launch(*spec.cases[0].inputs(torch.device("cpu"), torch.bfloat16, 0))

    def collect() -> None:
        with precompile.collected() as found:
            launch()
            turns.append(f"third, {len(found)} found")

    compile_now, triton.compile = triton.compile, lambda source, target, options: Kernel()
    with precompile.collected() as found:
        launch()
        serving, third = threading.Thread(target=launch), threading.Thread(target=collect)
        serving.start()
        serving.join()
        launch()
        third.start()
        third.join(0.2)
        turns.append(f"first, {len(found)} found")
    third.join()
    triton.compile = compile_now
    return {"launched": launched, "turns": turns}


def main() -> None:
    """``kill`` ends one of the workers first; ``broken`` adds a variant that no worker can compile."""
    triton.runtime.driver.set_active(_Hopper())
    with precompile.collected() as found:
        for name in ("rms_norm", "add_rms_norm", "kv_append", "gated_activation", "linear"):
            spec = KERNELS.get(name)
            spec.launch(*spec.cases[0].inputs(torch.device("cpu"), torch.float16, 0))
            spec.launch(*spec.cases[0].inputs(torch.device("cpu"), torch.float16, 0))
    variants = list(found)
    before = [v.is_cached() for v in variants]
    if "broken" in sys.argv:
        first = variants[0]
        variants.insert(0, precompile.Variant(first.module, "no_such_kernel", first.specialization, first.target))
        precompile.Variant.is_cached = lambda self: False
    os.cpu_count = lambda: 4
    report = CompileReport()
    with precompile.KernelWorkers(report, enabled=True) as workers:
        workers.start()
        processes = list(workers._processes)
        if "kill" in sys.argv:
            processes[0].kill()
            processes[0].wait()
        workers.compile(variants, launchers=False)
    hook = triton.knobs.runtime.jit_cache_hook
    loaded = []
    triton.knobs.compilation.listener = lambda **facts: loaded.append(facts["cache_hit"])
    for variant in found:
        source, options, target = variant.source()
        triton.compile(source, target=target, options=options)
    ended = [p.poll() is not None for p in processes]
    facts = {"before": before, "loaded": loaded, "ended": ended, "hook": hook is None, "lines": report.sections["caches"]}
    print(json.dumps({**facts, "of_layers": _of_layers(), **_beside()}))


if __name__ == "__main__":
    main()
