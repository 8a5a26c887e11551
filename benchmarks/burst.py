"""Requests that arrive at once, then a few one after another: what one memory policy makes of them. Run by elastic.py."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from serve import prompts

import depthfx


class Watch:
    """Counts sampled tokens by the precision of their step, by listening to the engine's own counts."""

    def __init__(self, engine: Any) -> None:
        self.tokens = self.all_full = 0
        self.full_share = 0.0
        self._engine, self._add = engine, engine._counts.add
        engine._counts.add = self._count

    def _count(self, plan: Any) -> None:
        self._add(plan)
        tokens = len(plan.sampled)
        share = sum(plan.precision) / len(plan.precision)
        self.tokens += tokens
        self.all_full += tokens * (share == 1.0)
        self.full_share += tokens * share

    def stop(self) -> None:
        """Let go of the engine."""
        del self._engine._counts.add


def burst(model: Any, policy: str, args: argparse.Namespace) -> dict[str, Any]:
    """``--requests`` at once; when few of them are left, ``--trickle`` more, one every ``--gap`` seconds."""
    engine, vocabulary = model.engine, model.config.vocab_size
    if policy == "elastic":
        engine.restore()
    engine.forget_prefixes()
    sampling = depthfx.SamplingParams(max_new_tokens=args.new)
    many, few = (prompts(n, args.prompt, vocabulary, seed) for n, seed in ((args.requests, 7), (args.trickle, 8)))
    preempted, watch = engine.stats().num_preemptions, Watch(engine)
    moved = engine.control.stats() if hasattr(engine.control, "stats") else None
    start = time.perf_counter()
    due = {engine.add(prompt, sampling): start for prompt in many}
    news: dict[str, float] = {}
    first: list[float] = []
    gaps: list[float] = []
    ended = 0
    after: tuple[int, float] | None = None  # tokens, and their share of full layers, when the trickle began
    burst_end, next_at = 0.0, 0.0
    while engine.has_unfinished() or few:
        now = time.perf_counter()
        if few and ended >= 0.97 * args.requests and now >= next_at:
            due[engine.add(few.pop(), sampling)] = now
            after, next_at = after or (watch.tokens, watch.full_share), now + args.gap
        for output in engine.step():
            assert output.error is None, output.error
            now = time.perf_counter()
            if output.request_id in news:
                gaps.append(now - news[output.request_id])
            else:
                first.append(now - due[output.request_id])
            news[output.request_id] = now
            ended += output.finished
            burst_end = now if output.finished and ended <= args.requests else burst_end
    watch.stop()
    assert after is not None and watch.tokens >= (args.requests + args.trickle) * args.new
    first.sort()
    gaps.sort()
    row = {
        "policy": policy, "tokens/s": args.requests * args.new / (burst_end - start), "seconds": burst_end - start,
        "preemptions": engine.stats().num_preemptions - preempted, "mean TTFT s": statistics.mean(first),
        "p99 TTFT s": first[int(0.99 * (len(first) - 1))], "p99 gap ms": gaps[int(0.99 * (len(gaps) - 1))] * 1e3,
        "tokens all full %": watch.all_full / watch.tokens * 100, "layers full %": watch.full_share / watch.tokens * 100,
        "trickle layers full %": (watch.full_share - after[1]) / (watch.tokens - after[0]) * 100,
    }  # fmt: skip
    if moved is None:
        return row
    end = engine.control.stats()
    row |= {name: getattr(end, f"num_{name}") - getattr(moved, f"num_{name}") for name in ("lends", "restores", "cancels")}
    seconds = end.restore_seconds - moved.restore_seconds
    return row | {"restore GB/s": (end.restored_bytes - moved.restored_bytes) / seconds / 1e9 if seconds else None}
