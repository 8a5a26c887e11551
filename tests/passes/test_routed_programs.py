"""Dense and routed programs of one model: both read its weights, and both hold whatever policies and projectors read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import depthfx
from depthfx.contracts import Decision, Policy, Skipper
from depthfx.errors import SettingError, SkipperError, UnsupportedModelError
from depthfx.passes import traces
from depthfx.report import CompileReport
from depthfx.settings import Settings
from depthfx.skippers import make_skipper
from depthfx.skippers.plugins import POLICIES
from depthfx.skippers.projectors.identity import Identity
from tests.families.configs import build
from tests.passes.toys import toy, with_mlp

PLAIN = {"inductor": False, "program_cache": False, "kv_blocks": 16, "max_batch_size": 2}
IDS = torch.tensor([[5, 9, 2, 7]])
GREEDY = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}


class Head(Policy):
    """RUN where a head that it is given is not sure."""

    def __init__(self, head: torch.nn.Module, limit: float) -> None:
        super().__init__()
        self.head, self.limit = head, limit

    def forward(self, rows):
        return Decision(self.head(rows.hidden).amax(-1) < self.limit)


class Even(Policy):
    """RUN at even positions."""

    def forward(self, rows):
        return Decision(rows.positions % 2 == 0)


POLICY_CASES = [
    *((name, "lora") for name in sorted(set(POLICIES.names()) - {"unified"})),
    ("flexidepth", "identity"),
    ("random_skip", "identity"),
]


@pytest.mark.parametrize(("policy", "projector"), POLICY_CASES)
def test_every_policy_compiles_with_and_without_an_update(policy, projector):
    model = toy()
    compiled = depthfx.compile(model, skipper=make_skipper(model, policy, projector, layers=(0, 2)), **PLAIN)
    compiled.generate(IDS, **GREEDY)
    counts = compiled.engine.routes.counts()
    assert [a + b for a, b in zip(counts.run, counts.project)] == [6, 6]


@pytest.mark.parametrize("family", ["cohere2", "qwen2", "phi3"])
def test_both_programs_read_the_weights_of_the_model(family, monkeypatch):
    """Cohere's block is parallel: attention and MLP read one tensor, and a routed layer joins their linears otherwise."""
    skipper = Skipper((1,), Even(), Identity())
    gm, ctx = traces.capture(build(family, dtype=torch.float16, num_hidden_layers=2), Settings(), "cpu", CompileReport(), skipper)
    # the trace does not depend on how weights are stored, and both programs of either work on copies of it
    monkeypatch.setattr(traces, "capture", lambda model, settings, *rest: (gm, replace(ctx, settings=settings)))
    for weights in ("16bit", "nested"):
        model = build(family, dtype=torch.float16, num_hidden_layers=2)
        runner = depthfx.compile(model, skipper=skipper, weights=weights, **PLAIN).engine._runner
        assert runner.program.nested == (weights == "nested")
        # the embedding looks its weight up; whatever else has two dimensions and is no table is a matrix of a linear
        shared = [{t.untyped_storage().data_ptr() for n, t in p.module.weights.named_buffers() if t.dim() == 2 and "table" not in n}
                  for p in (runner.program, runner.routed)]  # fmt: skip
        assert shared[0] == shared[1], weights


def test_a_weight_that_is_changed_in_place_is_changed_for_dense_and_routed_steps():
    model = build("cohere2", num_hidden_layers=2)
    compiled = depthfx.compile(model, skipper=Skipper((0, 1), Even(), Identity()), depth="dense", **PLAIN)
    before = compiled.generate(IDS, output_logits=True, return_dict_in_generate=True, **GREEDY).logits[0]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.zero_()
            layer.mlp.up_proj.weight.mul_(-1)
    after = compiled.generate(IDS, output_logits=True, return_dict_in_generate=True, **GREEDY).logits[0]
    with torch.no_grad():
        expected = model.forward(IDS).logits[:, -1]
    assert not torch.allclose(before, after) and torch.allclose(after, expected, atol=1e-3)


def test_programs_that_would_part_are_refused(monkeypatch):
    monkeypatch.setattr("depthfx.passes.fuse_linears._closure", lambda ends, start: set())
    with pytest.raises(UnsupportedModelError, match=r"join .* with different weights.*compile with fuse=False"):
        depthfx.compile(build("cohere2", num_hidden_layers=2), skipper=Skipper((1,), Even(), Identity()), **PLAIN)


def test_a_policy_may_read_the_models_own_head():
    model = toy(tie_word_embeddings=False)
    policy = Head(model.lm_head, 1e9)
    compiled = depthfx.compile(model, skipper=Skipper((1, 2), policy, Identity()), **PLAIN)
    compiled.generate(IDS, **GREEDY)
    assert compiled.engine.routes.counts().project == (0, 0)
    with torch.no_grad():
        expected = model.forward(IDS).logits[0, -1].argmax()
    assert compiled.generate(IDS, **GREEDY)[0, 4] == expected


class Wide(Policy):
    """Its weight is in FP32, whatever the rows are in."""

    def forward(self, rows):
        odd = rows.positions % 2
        return Decision(odd, odd.float() * 0.5 + 0.25)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_weight_in_another_dtype_leaves_the_hidden_state_as_it_is(dtype):
    model = build("llama", dtype=dtype, num_hidden_layers=2)
    skipper = make_skipper(model, Wide(), "lora", layers=(1,), gate="mlp")
    compiled = depthfx.compile(model, skipper=skipper, **PLAIN)
    compiled.generate(IDS, **GREEDY)
    assert compiled.engine.routes.counts().project == (3,)


def test_a_model_that_drops_the_result_of_a_write_in_place_is_refused():
    def mlp(module, x):
        y = x * module.weight
        y.mul_(3.0)
        return y

    with pytest.raises(UnsupportedModelError, match=r"writes into a tensor with mul_ .*use what mul_ returns"):
        depthfx.compile(with_mlp(mlp), **PLAIN)


class InPlace(Policy):
    """Drops what it computes in place, as a trace that follows results would."""

    def forward(self, rows):
        run = torch.zeros_like(rows.ran)
        run.logical_or_(rows.positions < 2)
        return Decision(run)


def test_a_policy_that_writes_in_place_is_refused():
    with pytest.raises(SkipperError, match=r"InPlace of layer 0 writes into a tensor in place \(aten.logical_or_.*compute new tensors"):
        depthfx.compile(toy(), skipper=Skipper((0,), InPlace(), Identity()), **PLAIN)


def test_a_forward_that_somebody_put_into_a_layer_stays_there():
    model = toy()
    layer = model.model.layers[1]
    own = layer.forward

    def forward(*args, **kwargs):
        return own(*args, **kwargs)

    layer.forward = forward
    depthfx.compile(model, skipper=Skipper((1, 2), Even(), Identity()), **PLAIN)
    assert layer.forward is forward and "forward" not in vars(model.model.layers[2])


def test_more_rows_than_can_be_partitioned_are_refused():
    with pytest.raises(SettingError, match="max_batch_tokens=40000 must be at most 32767 with a skipper: lower it"):
        depthfx.compile(toy(), skipper=Skipper((1,), Even(), Identity()), max_batch_tokens=40000, **PLAIN)
