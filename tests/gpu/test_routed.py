"""Layer skipping on a CUDA device: captured graphs and eager steps against the slow reference, for several families and both precisions."""

from __future__ import annotations

from functools import cache

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import depthfx
from depthfx.contracts import Decision, Policy, Rows
from depthfx.records import SamplingParams
from depthfx.skippers import make_skipper
from tests.families.configs import build
from tests.families.harness import prompts
from tests.families.routed_cases import Router
from tests.families.routed_reference import routed_answer

PROMPTS = prompts((40, 33, 20, 7))
NEW = 6


class Parity(Policy):
    """Skips at odd positions, and one position later in the next layer: every row flips at every step."""

    def forward(self, rows: Rows) -> Decision:
        return Decision((rows.positions + rows.place) % 2 == 0)


def skipper_for(model, policy):
    torch.manual_seed(3)
    own = {"parity": Parity, "router": lambda: Router(model.config.hidden_size, 5)}
    options = {"rate": 0.5, "seed": 3} if policy == "random_skip" else {}
    return make_skipper(model, own[policy]() if policy in own else policy, "adapter", layers=(1, 2), **options)


@cache
def compiled(name, policy="random_skip", graphs=True, weights="16bit"):
    model = build(name, torch.float16, "cuda", num_hidden_layers=3)
    return depthfx.compile(
        model, skipper=skipper_for(model, policy), inductor=False, kv_blocks=96, max_batch_size=9,
        max_batch_tokens=128, cuda_graphs=graphs, weights=weights,
    )  # fmt: skip


def served(model, depth="routed", tag="r"):
    """``(tokens, logits [n, V])`` of each prompt, decoded side by side, each token the caller's choice of the largest logit."""
    engine = model.engine
    answers = {f"{tag}{i}": ([], []) for i in range(len(PROMPTS))}
    for i, prompt in enumerate(PROMPTS):
        engine.add(prompt, SamplingParams(max_new_tokens=NEW, external=True, depth=depth), request_id=f"{tag}{i}")
    while engine.has_unfinished():
        for output in engine.step():
            assert output.error is None, output.error
            if output.logits is not None:
                tokens, logits = answers[output.request_id]
                tokens.append(int(output.logits.argmax()))
                logits.append(output.logits)
                engine.push_token(output.request_id, tokens[-1])
    return {key: (tokens, torch.stack(logits)) for key, (tokens, logits) in answers.items()}


def distance(a, b):
    return float(((a - b).abs() / (1 + b.abs().amax())).max())


def check(name, model, policy, depth="routed", tag="r", slack=0.03):
    """Logits against fp32 arithmetic over the same fp16 weights: ``slack`` of the largest, some ten roundings of fp16."""
    reference = build(name, torch.float16, "cuda", num_hidden_layers=3).float()
    skipper = skipper_for(reference, policy)
    for (key, (tokens, logits)), prompt in zip(served(model, depth, tag).items(), PROMPTS, strict=True):
        routed = (depth == "routed",) * 2
        expected = routed_answer(reference, name, skipper, prompt + tokens[:-1], len(prompt), key, routed).logits[len(prompt) - 1 :]
        assert logits.isfinite().all()
        assert distance(logits, expected) < slack, key


@pytest.mark.parametrize("graphs", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "gpt_neox", "phi3"])
def test_routed_logits(name, graphs):
    check(name, compiled(name, graphs=graphs), "random_skip")


def test_dense_requests_are_the_base_model():
    check("llama", compiled("llama"), "random_skip", depth="dense", tag="d")


def test_routes_change_from_step_to_step_in_one_graph():
    model = compiled("llama", "parity")
    model.engine.routes.record()
    check("llama", model, "parity", tag="p")
    for i, prompt in enumerate(PROMPTS):
        found = model.engine.routes.depth_map(f"p{i}")
        positions = torch.arange(found.shape[1])
        assert found.shape[1] == len(prompt) + NEW - 1
        assert all(torch.equal(found[place], ((positions + place) % 2 == 0).to(torch.int8)) for place in range(2))


@pytest.mark.parametrize("graphs", [True, False], ids=["captured", "eager"])
def test_a_router_decides_from_hidden_states(graphs):
    """Captured and not; FP16 may take a row near the threshold the other way, and all that follows from it then differs."""
    model = compiled("llama", "router", graphs=graphs)
    model.engine.routes.record()
    reference = build("llama", torch.float16, "cuda", num_hidden_layers=3).float()
    skipper, alike = skipper_for(reference, "router"), 0
    for (key, (tokens, logits)), prompt in zip(served(model, tag="q").items(), PROMPTS, strict=True):
        answer = routed_answer(reference, "llama", skipper, prompt + tokens[:-1], len(prompt), key)
        found = model.engine.routes.depth_map(key)
        assert 0 < found.float().mean() < 1 and logits.isfinite().all()
        if torch.equal(found.cpu(), answer.actions[:, : found.shape[1]].cpu()):
            alike += 1
            assert distance(logits, answer.logits[len(prompt) - 1 :]) < 0.03, key
    assert alike >= len(PROMPTS) - 1


def test_nested_weights_in_both_precisions():
    model = compiled("llama", weights="nested")
    check("llama", model, "random_skip", tag="n")
    model.set_precision("fast")
    for tokens, logits in served(model, tag="f").values():
        assert len(tokens) == NEW and logits.isfinite().all()
    model.set_precision({1: "full"})
    assert all(logits.isfinite().all() for _, logits in served(model, tag="m").values())


def test_a_long_prompt_in_chunks():
    """Chunks of 128 rows and the rest of them: prefill of a cohort whose positions have gaps."""
    model = compiled("llama")
    prompt = prompts((230,), seed=5)[0]
    model.engine.add(prompt, SamplingParams(max_new_tokens=1, external=True), request_id="long")
    outputs = []
    while not outputs:
        outputs = [o for o in model.engine.step() if o.logits is not None]
    model.engine.push_token("long", 1)
    while model.engine.has_unfinished():
        model.engine.step()
    reference = build("llama", torch.float16, "cuda").float()
    expected = routed_answer(reference, "llama", skipper_for(reference, "random_skip"), prompt, len(prompt), "long").logits[-1]
    assert distance(outputs[0].logits, expected) < 0.03
