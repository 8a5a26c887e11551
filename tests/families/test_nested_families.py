"""Every family with nested weights: full precision is the dense path, fast precision is the model with its FP8 bytes as numbers."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import depthfx
from depthfx.errors import UnsupportedModelError
from depthfx.lowering.kernel_spec import max_error
from depthfx.lowering.kernels._dual_weight import plain_weight
from depthfx.lowering.nest import unnest
from depthfx.lowering.nested_linear import nested_linears
from tests.families.configs import build
from tests.families.harness import GREEDY, alone, engine_over, left_padded, prompts, run_staggered

# Fast precision against Hugging Face's kernels, whose fp32 sums differ in their last bits.
TOLERANCE = 2e-5
RAGGED = prompts((40, 33, 20, 7))
# One of each kind of weight: split, biased and fused projections, a joined gate, a plain MLP, tied embeddings, multipliers, parallel blocks.
families = pytest.mark.parametrize(
    "name", ["llama", "qwen2", "phi3", "gemma3_text", "granite", "glm4", "starcoder2", "gpt_neox", "cohere2"]
)
some_families = pytest.mark.parametrize("name", ["llama", "phi3", "gemma3_text", "gpt_neox", "cohere2"])


def exact(name, **changes):
    """The model of a family with weights that float16 holds."""
    model = build(name, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half())
    return model


def fast_values(module):
    """What fast precision multiplies with, as the format itself states it."""
    return plain_weight(module.upper, module.lower, module.shift, module.format, full=False)


@cache
def compiled(name, weights="nested"):
    return depthfx.compile(exact(name), inductor=False, check=True, kv_blocks=64, max_batch_size=8, weights=weights)


def logits_of(model):
    out = model.generate(**left_padded(RAGGED), **GREEDY, return_dict_in_generate=True, output_logits=True)
    return out.sequences, out.logits


@families
def test_full_precision_is_the_dense_path(name):
    model = compiled(name)
    model.set_precision("full")
    sequences, logits = logits_of(model)
    expected_sequences, expected = logits_of(compiled(name, "16bit"))
    assert torch.equal(sequences, expected_sequences)
    assert all(torch.equal(a, b) for a, b in zip(logits, expected, strict=True))  # equal weights, the same kernels
    assert "no value changed" in model.explain()
    assert run_staggered(engine_over(model), RAGGED) == run_staggered(engine_over(compiled(name, "16bit")), RAGGED)


@families
def test_fast_precision_is_the_model_of_the_fp8_bytes(name):
    model = compiled(name)
    reference = exact(name)
    with torch.no_grad():
        for path, module in nested_linears(model).items():
            reference.get_submodule(path).weight.copy_(fast_values(module))
    model.set_precision("fast")
    try:
        sequences, logits = logits_of(model)
        engine = engine_over(model)
        engine.set_precision("fast")
        tokens = run_staggered(engine, RAGGED)
    finally:
        model.set_precision("full")
    expected_sequences, expected = logits_of(reference)
    for a, b in zip(logits, expected, strict=True):
        assert max_error(a, b) < TOLERANCE
    assert torch.equal(sequences, expected_sequences)
    assert tokens == alone(reference, RAGGED)
    assert not all(torch.equal(a, b) for a, b in zip(logits, logits_of(model)[1], strict=True)), "fast differs from full"


@some_families
def test_layers_switch_one_by_one(name):
    model = compiled(name)
    reference = exact(name)
    path = model.explain().splitlines()[1].split(" at ")[1]
    with torch.no_grad():
        for module_path, module in nested_linears(model).items():
            if module_path.startswith(f"{path}.1."):
                reference.get_submodule(module_path).weight.copy_(fast_values(module))
    model.set_precision({1: "fast"})
    try:
        _, logits = logits_of(model)
        assert model.precision()[0] == "full" and model.precision()[1] == "fast"
    finally:
        model.set_precision("full")
    for a, b in zip(logits, logits_of(reference)[1], strict=True):
        assert max_error(a, b) < TOLERANCE


@some_families
def test_the_model_still_holds_its_weights(name):
    model, original = compiled(name), exact(name)
    state = model.state_dict()
    assert state.keys() == original.state_dict().keys()
    assert all(torch.equal(state[k], v) for k, v in original.state_dict().items())
    for path, module in nested_linears(model).items():
        assert torch.equal(unnest(module.nested, torch.float32), original.get_submodule(path).weight)
    ids = torch.tensor([RAGGED[0]])
    assert max_error(model(ids).logits, original(ids).logits) < TOLERANCE


@pytest.mark.parametrize("weights", ["nested", "fp8"])
def test_conv1d_is_refused(weights):
    with pytest.raises(UnsupportedModelError, match=rf"weights='{weights}'.*use weights='16bit'"):
        depthfx.compile(exact("gpt2"), inductor=False, weights=weights)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "phi3", "qwen2", "gpt_neox"])
def test_static_fp8(name):
    model, dense = compiled(name, "fp8"), compiled(name, "16bit")
    ids = torch.tensor([RAGGED[0]])
    options = {**GREEDY, "max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True}
    ours, exactly = (m.generate(ids, **options).logits[0] for m in (model, dense))
    error = float((ours - exactly).norm() / exactly.norm())
    assert 1e-3 < error < 0.3, "rounded to FP8, and still the same model"
    assert "static FP8" in model.explain()


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_without_fusions(name):
    plain = depthfx.compile(exact(name), inductor=False, fuse=False, kv_blocks=64, max_batch_size=8, weights="nested")
    assert alone(plain, RAGGED) == alone(compiled(name, "16bit"), RAGGED)
