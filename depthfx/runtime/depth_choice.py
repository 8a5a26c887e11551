"""What depth control asks of the requests of a scheduler, and how its decisions reach them.

A prompt's depth is settled at admission and kept, also when it is computed anew after a preemption. An answer begins dense and is
promoted at most once, from `Request.promoted_at` on; nothing makes it dense again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from depthfx.alloc.manager import MemoryManager
from depthfx.records import Chunk
from depthfx.runtime.depth_control import DepthControl
from depthfx.runtime.request import Request


def promote(control: DepthControl, decoding: Sequence[Request], pressed: bool) -> None:
    """Decides for a step in which ``decoding`` get a token each, and routes the answers of those that leave it open; see
    :meth:`DepthControl.decide_answers`."""
    routable = [r for r in decoding if r.may_route]
    if control.decide_answers(len(decoding), len(routable), sum([r.num_planned for r in routable]), pressed):
        for request in routable:
            if not request.routed[1]:
                request.promote()
                control.num_promotions += 1


def prompt_pays(control: DepthControl, manager: MemoryManager, request: Request, states: Sequence[bytes], rows: int) -> bool:
    """Whether to route the prompt of a request that shares a step of ``rows`` rows; ``states``: of its KV, dense and routed."""
    dense, routed = (len(request.token_ids) - manager.reusable_tokens(request.token_ids, state) for state in states)
    return control.decide_prompt(rows, dense, routed)


def rows_of_step(request: Request, running: Iterable[Request], waiting: Iterable[Request], limit: int) -> int:
    """Prompt rows that a request will share a step with, its own among them; at most ``limit``."""
    rows = len(request.token_ids)
    for other in chain((r for r in running if r.prefilling), waiting):
        if rows >= limit:
            break
        if other is not request:
            rows += len(other.token_ids) - other.num_planned
    return min(rows, limit)


def wants_probe(control: DepthControl, decoding: Sequence[Request], prefilling: Sequence[Request], chunks: Sequence[Chunk]) -> bool:
    """Whether the step of ``chunks``, first those of ``decoding``, is one to look at; see :meth:`DepthControl.probe`."""
    answers = sum([r.auto[1] for r in decoding])
    prompts = sum([c.num_tokens for r, c in zip(prefilling, chunks[len(decoding) :]) if r.auto[0] and c.is_prompt])
    return control.probe(answers, prompts, any(c.routed for c in chunks))
