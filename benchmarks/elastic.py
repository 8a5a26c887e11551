"""Semi-unified memory on one device: capacity, cost of lending, restoring beside decode, cost of the machinery, a burst under each policy.

``python3 benchmarks/elastic.py [--parts capacity lend restore steps map burst]`` from the root of the repository. To try it on a CPU:
``--shape smollm2 --layers 2 --kv-blocks 48 --unit-mib 0.25 --max-batch 8 --batch 4 --batches 1 4 --prompt 40 --new 24 --requests 12
--trickle 4 --steps 16 --map-gib 0.25 --no-inductor``. Results go to $OUT, or to benchmarks/results/.

    capacity   KV blocks that the budget gives: none of the residuals lent, all of them, and what units waste
    lend       host microseconds from the decision to blocks that can be handed out (lend, admit), and until the bytes are cleared
    restore    GB/s of restoring, idle and beside decode; time between tokens meanwhile and otherwise, all in fast precision
    steps      milliseconds of a decode step without pressure against the same model without memory settings
    map        seconds to reserve, create and map so many GiB in units, and to give them back
    burst      requests that arrive at once, then a few one after another, under each policy
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import common
import decode
import torch
from burst import burst
from serve import prompts

import depthfx
from depthfx.alloc.physical_backend import PHYSICAL
from depthfx.alloc.unified_memory import UnifiedMemory
from depthfx.alloc.units import UnitLayout
from depthfx.memory_picture import draw_memory

PARTS = ("capacity", "lend", "restore", "steps", "map", "burst")
POLICIES = ("elastic", "static_full", "static_fast", "nested_resident")
GIB, MIB = 1 << 30, 1 << 20
COLUMNS = {
    "capacity": ["what", "blocks", "GiB", "of static_full", "waste %"],
    "lend": ["what", "units", "blocks", "us", "us until cleared"],
    "restore": ["what", "GB/s", "ms a step", "p99 ms", "steps", "halved"],
    "steps": ["batch", "elastic ms", "plain ms", "ratio"],
    "map": ["backend", "GiB", "MiB of a unit", "units", "s to build", "s to close"],
    "burst": ["policy", "tokens/s", "seconds", "preemptions", "mean TTFT s", "p99 TTFT s", "p99 gap ms", "tokens all full %", "layers full %",
              "trickle layers full %", "lends", "restores", "cancels", "restore GB/s"],
}  # fmt: skip
Rows = list[dict[str, Any]]


def build(args: argparse.Namespace, device: torch.device, policy: str, kv_blocks: int | None) -> Any:
    """A compiled model under ``policy``, warmed up; ``kv_blocks`` base blocks, None: what the budget gives."""
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    start = time.perf_counter()
    model = common.make_model(args.shape, device, dtype, args.layers)
    memory = depthfx.ElasticMemory(policy=policy, unit_mib=args.unit_mib, budget_gib=args.budget_gib)
    size = {"max_batch_size": args.max_batch, "kv_blocks": kv_blocks}
    depthfx.compile(model, weights="nested", memory=memory, inductor=not args.no_inductor, **size)
    print(f"{policy}: compiled in {time.perf_counter() - start:.1f} s", flush=True)
    for prompt in prompts(min(16, args.max_batch), args.prompt, model.config.vocab_size, 99):
        model.engine.add(prompt, depthfx.SamplingParams(max_new_tokens=4))
    drain(model.engine)
    return model


def drain(engine: Any) -> None:
    """Serve what there is to its end."""
    while engine.has_unfinished():
        for output in engine.step():
            assert output.error is None, output.error


# capacity


def capacity(model: Any) -> Rows:
    """Blocks without lending, with all units lent, and if units had no waste."""
    layout, host = model.engine.control.shared.layout, model.engine.control.shared.backup
    base, most = layout.num_base_blocks, layout.num_blocks
    ideal = base + host.num_bytes / layout.block_bytes
    spare = 1 - host.num_bytes / (layout.num_units * layout.unit_bytes)

    def row(what: str, blocks: float, waste: float | None) -> dict[str, Any]:
        return {
            "what": what,
            "blocks": int(blocks),
            "GiB": blocks * layout.block_bytes / GIB,
            "of static_full": blocks / base,
            "waste %": waste,
        }

    sizes = {
        "unit MiB": layout.unit_bytes / MIB,
        "units": layout.num_units,
        "block MiB": layout.block_bytes / MIB,
        "host GiB": host.num_bytes / GIB,
    }
    rows = [
        row("static_full", base, None), row("elastic, static_fast", most, spare * 100), row("residual bytes without waste", ideal, 0.0)
    ]  # fmt: skip
    return [{**r, **sizes} for r in rows]


# lend


def lend(model: Any, repeats: int = 7) -> Rows:
    """Median host time of lending 1, 10 and 100 units by itself, and inside the admission of a request that needs them."""
    engine, rows = model.engine, []
    layout = engine.control.shared.layout
    row_units = engine.control.manager.blocks_per_row // layout.blocks_per_unit
    for wanted in (1, 10, 100):
        alone, both = min(wanted, layout.num_units), min(wanted, layout.num_units, row_units)
        times = [lend_alone(engine, alone) for _ in range(repeats)]
        rows.append(lend_row("lend", alone, layout, times))
        blocks = layout.num_base_blocks
        for what, opened, units in (("admit, blocks are free", both, 0), ("admit, lends", 0, both)):
            if both < 1:
                continue
            times = [admit_once(model, both * layout.blocks_per_unit, blocks, opened, units) for _ in range(repeats)]
            rows.append(lend_row(what, both, layout, times))
    return rows


def lend_row(what: str, units: int, layout: UnitLayout, times: list[tuple[float, float]]) -> dict[str, Any]:
    decided, cleared = (statistics.median(column) * 1e6 for column in zip(*times, strict=True))
    return {"what": what, "units": units, "blocks": units * layout.blocks_per_unit, "us": decided, "us until cleared": cleared}


def lend_once(engine: Any, decide: Callable[[], Any], units: int) -> tuple[float, float]:
    """Seconds of ``decide`` with what makes its blocks usable by the next step, and until the device has cleared them."""
    control = engine.control
    with engine._state:
        before = control.region.num_lends
        common.synchronize(control._device)
        start = time.perf_counter()
        decide()
        control.after_plan()
        decided = time.perf_counter() - start
        common.synchronize(control._device)
        cleared = time.perf_counter() - start
        assert control.region.num_lends - before == units, f"{control.region.num_lends - before} units were lent, not {units}"
    return decided, cleared


def lend_alone(engine: Any, units: int) -> tuple[float, float]:
    """As :func:`lend_once` for lending alone; everything is given back first and afterwards."""
    engine.restore()
    times = lend_once(engine, lambda: engine.control.manager.lend(units), units)
    engine.restore()
    return times


def admit_once(model: Any, blocks: int, filled: int, opened: int, units: int) -> tuple[float, float]:
    """As :func:`lend_once` for the admission of a request of ``blocks`` blocks where ``filled`` others are taken and ``opened`` units lent before."""
    engine, vocabulary = model.engine, model.config.vocab_size
    manager, most = engine.control.manager, engine.control.manager.blocks_per_row
    engine.restore()
    engine.forget_prefixes()
    with engine._state:
        names = []
        while filled:
            names.append(f"filler {len(names)}")
            take = min(filled, most)
            assert manager.admit(names[-1], prompts(1, take * manager.block_tokens, vocabulary, len(names))[0]) is not None
            filled -= take
        if opened:
            manager.lend(opened)
            engine.control.after_plan()
        asked = prompts(1, blocks * manager.block_tokens, vocabulary, 1000)[0]
        times = lend_once(engine, lambda: manager.admit("asked", asked), units)
        for name in (*names, "asked"):
            manager.release(name, reuse=False)
    engine.restore()
    return times


# restore


def restore(model: Any, batch: int, prompt: int) -> Rows:
    """The link's rate while nothing runs and beside ``batch`` decodes, and what the decodes notice; fast precision throughout."""
    engine = model.engine
    slow = [engine.control.stats().num_slow]  # how often the worker kept less in flight; of the last worker, if one ended
    rates = [restore_idle(engine) for _ in range(3)]
    slow.append(engine.control.stats().num_slow)
    rows: Rows = [{"what": "idle", "GB/s": statistics.median(rates) / 1e9, "halved": slow[1] - slow[0]}]
    engine.set_precision("fast")
    settings = engine.control.settings
    engine.control.settings = replace(settings, dwell_s=0.1)  # more rounds of lending and restoring in the same time
    try:
        beside, calm, rate = restore_beside(model, batch, prompt)
    finally:
        for request_id in engine._scheduler.unfinished():
            engine.abort(request_id)
        drain(engine)
        engine.set_precision("full")
        engine.control.settings = settings
        engine.restore()
    slow.append(engine.control.stats().num_slow)
    for what, times, speed in ((f"batch {batch}, restoring", beside, rate / 1e9), (f"batch {batch}, not restoring", calm, None)):
        ordered = sorted(times)
        p99 = ordered[int(0.99 * (len(ordered) - 1))] * 1e3
        rows.append({"what": what, "GB/s": speed, "ms a step": statistics.mean(times) * 1e3, "p99 ms": p99, "steps": len(times)})
    rows[1]["halved"] = slow[2] - slow[1]
    ratio = {key: rows[1][key] / rows[2][key] for key in ("ms a step", "p99 ms")}
    return [*rows, {"what": "ratio", **ratio}]


def restore_idle(engine: Any) -> float:
    """Bytes a second of restoring everything while no request runs."""
    control = engine.control
    with engine._state:
        control.manager.lend(control.shared.layout.num_units)
        control.after_plan()
    common.synchronize(control._device)
    start = time.perf_counter()
    engine.restore()
    return float(control.shared.backup.num_bytes / (time.perf_counter() - start))


def restore_beside(model: Any, batch: int, prompt: int) -> tuple[list[float], list[float], float]:
    """Seconds of the engine's turns while units come back and while none does, and bytes a second while there was something to copy.

    Every unit is lent as if a burst had come and gone, over and over, while ``batch`` requests decode in blocks that are always KV.
    """
    engine = model.engine
    control, layout = engine.control, engine.control.shared.layout
    length = int(0.9 * control.settings.low * layout.num_base_blocks / batch) * engine._scheduler.manager.block_tokens
    prompt = min(prompt, length // 4)
    if prompt < 1:
        raise SystemExit(f"--batch {batch} is too much for {layout.num_base_blocks} base blocks: nothing would be restored beside it")
    waiting = {engine.add(p, depthfx.SamplingParams(max_new_tokens=length)) for p in prompts(batch, prompt, model.config.vocab_size, 5)}
    while waiting:
        waiting -= {output.request_id for output in engine.step()}
    beside: list[float] = []
    calm: list[float] = []
    moved = control.stats()
    steps = min(length, engine._scheduler.max_model_len) - prompt - 8
    while steps > 0:
        with engine._state:
            control.manager.lend(layout.num_units)
        for _ in range(3):
            engine.step()  # the device clears what was lent beside one of these
        while steps > 0 and (control.region.num_open_units or control.region.num_restoring):
            restoring, start = control.region.num_restoring, time.perf_counter()
            engine.step()
            (beside if restoring else calm).append(time.perf_counter() - start)  # what begins in a turn begins at its end
            steps -= 1
        for _ in range(min(steps, 16)):
            start = time.perf_counter()
            engine.step()
            calm.append(time.perf_counter() - start)
        steps -= 19
    end = control.stats()
    seconds = end.restore_seconds - moved.restore_seconds
    if not beside or not calm or not seconds:
        raise SystemExit(f"no restore came to its end beside {batch} decodes of up to {length} tokens; lower --batch or raise --budget-gib")
    return beside, calm, (end.restored_bytes - moved.restored_bytes) / seconds


# steps


def steps(elastic: Any, plain: Any, args: argparse.Namespace) -> Rows:
    """Medians of decode steps of both models, measured in turn; the plain one has the policy static_full and its timeline off: no control at all."""
    kept, plain.engine._timeline = plain.engine._timeline, None
    rows: Rows = []
    for batch in args.batches:
        times: dict[str, list[float]] = {"elastic": [], "plain": []}
        for arm, model in (("elastic", elastic), ("plain", plain)) * 2:
            model.engine.forget_prefixes()
            times[arm] += decode.time_depthfx(model, batch, args.prompt // 4, args.steps)[0]
        assert elastic.engine.control.region.num_open_units == 0, f"batch {batch} put the memory under pressure; use a larger budget"
        a, b = (statistics.median(times[arm]) * 1e3 for arm in ("elastic", "plain"))
        rows.append({"batch": batch, "elastic ms": a, "plain ms": b, "ratio": a / b})
    plain.engine._timeline = kept
    return rows


# map


def map_units(gib: float, unit_mib: float, device: torch.device) -> Rows:
    """Seconds to reserve both ranges and to create and map ``gib`` of units of about ``unit_mib``, and to give them back; no base blocks."""
    backend = PHYSICAL.get("cuda_vmm" if device.type == "cuda" else "memfd")()
    used = int(gib * GIB)
    unit = max(1, round(unit_mib * MIB / backend.granularity())) * backend.granularity()
    layout = UnitLayout(unit, 1, 0, ((0, used),))
    start = time.perf_counter()
    memory = UnifiedMemory.build(backend, layout, 0)
    built = time.perf_counter()
    memory.close()
    seconds = {"s to build": built - start, "s to close": time.perf_counter() - built}
    return [{"backend": backend.name, "GiB": used / GIB, "MiB of a unit": unit / MIB, "units": layout.num_units, **seconds}]


# all of it


def parse_arguments() -> argparse.Namespace:
    """Arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES), help="of the part burst")
    parser.add_argument("--shape", choices=sorted(common.SHAPES), default="llama3-8b")
    parser.add_argument("--layers", type=int, default=None, help="fewer layers, to try the script")
    parser.add_argument("--budget-gib", type=float, default=24.0)
    parser.add_argument("--kv-blocks", type=int, default=None, help="base blocks, instead of what the budget gives")
    parser.add_argument("--unit-mib", type=float, default=64.0)
    parser.add_argument("--max-batch", type=int, default=192)
    parser.add_argument("--batch", type=int, default=64, help="of the part restore")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 128], help="of the part steps")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--trickle", type=int, default=12)
    parser.add_argument("--gap", type=float, default=0.2)
    parser.add_argument("--map-gib", type=float, default=64.0)
    parser.add_argument("--no-inductor", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    device = common.default_device()
    rows: Rows = []

    def show(part: str, found: Rows) -> Path:
        rows.extend({"part": part, **row} for row in found)
        print(f"\n{part}, {time.perf_counter() - begin:.0f} s so far")
        common.print_table(found, COLUMNS[part])
        return common.write_results(f"elastic-{args.shape}", rows, device)  # after each part: a later one may fail

    begin = time.perf_counter()
    torch.zeros(1, device=device)  # PyTorch's context first
    if "map" in args.parts:
        show("map", map_units(args.map_gib, args.unit_mib, device))
    policies = args.policies if "burst" in args.parts else []
    elastic = plain = None
    blocks, results = args.kv_blocks, []
    if "elastic" in policies or {"capacity", "lend", "restore", "steps"} & set(args.parts):
        elastic = build(args, device, "elastic", blocks)
        blocks = elastic.engine.control.shared.layout.num_base_blocks  # the other policies start from the same
        print(elastic.memory(), flush=True)
        for part, measure in (("capacity", capacity), ("lend", lend), ("restore", lambda m: restore(m, args.batch, args.prompt))):
            if part in args.parts:
                show(part, measure(elastic))
    if "steps" in args.parts:
        plain = build(args, device, "static_full", blocks)
        show("steps", steps(elastic, plain, args))
    ready = {"elastic": elastic, "static_full": plain}
    del elastic, plain
    for policy in policies:
        model = ready.pop(policy) if ready.get(policy) is not None else build(args, device, policy, blocks)
        begun = model.engine.timeline()[-1].time_s
        results.append(burst(model, policy, args))
        samples = [s for s in model.engine.timeline() if s.time_s >= begun]
        print(results[-1], model.memory(), sep="\n", flush=True)
        if policy == "elastic":
            path = common.write_results(f"elastic-{args.shape}", rows, device).with_suffix(".png")
            title = f"{args.shape}: {args.requests} requests of {args.prompt} + {args.new} tokens at once, then {args.trickle} one by one"
            draw_memory(samples, path, title)
        model.engine.close()
        del model
        common.release()
    for model in ready.values():
        if model is not None:
            model.engine.close()
    if results:
        show("burst", results)


if __name__ == "__main__":
    main()
