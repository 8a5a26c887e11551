"""A routed step of many decodes over KV that nobody computed, for tests of cohorts of chosen size."""

from __future__ import annotations

import torch

import depthfx
from depthfx.contracts import Decision, Policy, Rows
from depthfx.records import Chunk, SamplingParams, StepPlan
from depthfx.runtime.step_form import decode_form
from depthfx.skippers import make_skipper
from depthfx.skippers.policies.random_skip import MODULUS, hash_of
from tests.families.configs import build

ROWS, BUCKET = 70, 80


class Dial(Policy):
    """RandomSkip whose share can be changed between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("limit", torch.zeros((), dtype=torch.int64))

    def forward(self, rows: Rows) -> Decision:
        """RUN where the hash reaches the limit, another one in each layer."""
        return Decision(hash_of(rows.request_ids, rows.positions + 1000 * rows.place, 1234) >= self.limit)


class Case:
    """A compiled model of three layers, two of them routed, and one step of :data:`ROWS` decodes."""

    def __init__(self, family: str, dtype: torch.dtype, device: str, weights: str = "16bit", projector: str = "adapter") -> None:
        model = build(family, dtype, device, num_hidden_layers=3)
        self.dial = Dial()
        torch.manual_seed(3)
        skipper = make_skipper(model, self.dial, projector, layers=(1, 2))
        sizes = {"kv_blocks": ROWS, "max_batch_size": BUCKET, "max_model_len": 16}
        self.model = depthfx.compile(model, skipper=skipper, inductor=False, weights=weights, **sizes)
        self.runner = self.model.engine._runner
        noise = torch.randn(self.runner.kv_pool.shape, generator=torch.Generator().manual_seed(0))
        self.runner.kv_pool.copy_(noise)
        self.runner.block_tables[:ROWS, 0] = torch.arange(ROWS, dtype=torch.int32)
        chunks = (Chunk(str(i), i, 3 + i % 9, (i + 5,), -1, True, 0, SamplingParams(), None, True, i) for i in range(ROWS))
        self.plan = StepPlan(-1, tuple(chunks), (), ())

    def skip(self, share: float) -> None:
        """About ``share`` of the rows of each routed layer."""
        self.dial.limit.fill_(round(share * MODULUS))

    def result(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``(logits, tape, KV pool)`` of the step that has run."""
        return logits[:ROWS].float(), self.runner.tape[:, :ROWS].clone(), self.runner.kv_pool.clone()

    @torch.inference_mode()
    def step(self, captured: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run without a graph, with cohorts as a captured step of :data:`BUCKET` rows has them or gathered."""
        uploaded = self.runner.staging.upload(self.plan, decode_form(BUCKET) if captured else None, True)
        return self.result(self.runner.forward(uploaded, -1, routed=True, captured=captured))

    @torch.inference_mode()
    def replay(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Replay the captured step."""
        graph = self.runner.graphs.find(self.plan, -1, True)
        assert graph is not None and graph.form == decode_form(BUCKET)
        self.runner.staging.upload(self.plan, graph.form, True)
        graph.replay()
        return self.result(graph.logits)


def check_same(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], share: float, tolerance: float) -> None:
    """Routes are the same, logits and KV within ``tolerance`` of the largest: products of another number of rows may sum in another order."""
    assert torch.equal(found[1], expected[1])
    for count in (expected[1] == 1).sum(1).tolist():
        assert count == round((1 - share) * ROWS) if share in (0.0, 1.0) else 0 < count < ROWS
    for a, b in zip(found[::2], expected[::2], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * float(b.abs().max()))
