"""Joined linears: which are joined, and that the model keeps its parameters without a second copy."""

from __future__ import annotations

import pytest
import torch

import depthfx
from tests.families.configs import build
from tests.families.harness import alone

ROWS = [[5, 6, 7, 8, 9, 10], [3]]


def compiled(model):
    return depthfx.compile(model, inductor=False, kv_blocks=16)


def storages(tensors):
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def weights_of(model):
    return dict(model.engine._runner.program.module.weights.named_buffers())


@pytest.mark.parametrize("biased", [False, True])
def test_parameters_are_views_of_the_joined_weight(biased):
    changes = {"attention_bias": biased, "mlp_bias": biased}
    original, model = build("llama", **changes), build("llama", **changes)
    identities = {name: id(p) for name, p in model.named_parameters()}
    bytes_before = sum(storages(model.parameters()).values())
    compiled(model)
    assert {name: id(p) for name, p in model.named_parameters()} == identities
    assert sum(storages(model.parameters()).values()) == bytes_before
    layer = model.model.layers[1]
    for group in ([layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj], [layer.mlp.gate_proj, layer.mlp.up_proj]):
        assert len(storages(linear.weight for linear in group)) == 1
        if biased:
            assert len(storages(linear.bias for linear in group)) == 1
    extra = set(storages(weights_of(model).values())) - set(storages([*model.parameters(), *model.buffers()]))
    assert all(w.shape[-2] == 256 for w in weights_of(model).values() if w.untyped_storage().data_ptr() in extra), (
        "tables of positions alone"
    )
    assert model.state_dict().keys() == original.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), original.state_dict().values(), strict=True))
    assert alone(model, ROWS) == alone(original, ROWS)


def tie(model):
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight = layer.self_attn.q_proj.weight
    return model


def test_tied_weights_are_left_alone():
    heads = {"num_key_value_heads": 4}
    original, model = tie(build("llama", **heads)), tie(build("llama", **heads))
    compiled(model)
    attention = model.model.layers[0].self_attn
    assert attention.k_proj.weight is attention.q_proj.weight
    names = [name for name in weights_of(model) if "layers_0_self_attn" in name]
    assert names and not any("joined" in name for name in names)
    assert alone(model, ROWS) == alone(original, ROWS)
    with torch.no_grad():
        attention.q_proj.weight.mul_(-1)
        original.model.layers[0].self_attn.q_proj.weight.mul_(-1)
        for layer in (model.model.layers[0], original.model.layers[0]):
            layer.mlp.up_proj.weight.mul_(2)  # a view of the joined weight: the program sees it
    assert alone(model, [[9, 8, 7]]) == alone(original, [[9, 8, 7]])


def test_a_tied_head():
    original, model = build("llama", tie_word_embeddings=True), build("llama", tie_word_embeddings=True)
    compiled(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert alone(model, ROWS) == alone(original, ROWS)
