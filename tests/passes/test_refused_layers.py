"""Layers that mix rows, or that are not one run of ops around one attention, are refused by op and module."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from depthfx.errors import UnsupportedModelError
from depthfx.passes.check_rows import check_rows
from depthfx.report import CompileReport
from tests.passes.toys import Call, captured, toy, with_layer_forward, with_mlp

F = torch.nn.functional
MIXING = {
    "mean": (lambda m, x: x - x.mean(1, keepdim=True), "mean .*"),
    "softmax": (lambda m, x: x.softmax(1), "softmax .* reduces over rows"),
    "cumsum": (lambda m, x: x.cumsum(1), "cumsum .* reduces over rows"),
    "norm": (lambda m, x: x / x.norm(), "norm .* drops the row dimension"),
    "flip": (lambda m, x: x.flip(1), "flip .* is not known to treat rows independently"),
    "roll": (lambda m, x: x.roll(1, 1), "roll .* is not known"),
    "sort": (lambda m, x: x.sort(1).values, "sort .* is not known"),
    "matmul": (lambda m, x: (x @ x.transpose(1, 2)) @ x, "matmul .*"),
    "first row": (lambda m, x: x + x[:, :1], "getitem .* selects rows"),
    "one row": (lambda m, x: x + x[:, 0][:, None], "getitem .* selects rows"),
    "gather": (lambda m, x: x[:, torch.zeros(x.shape[1], dtype=torch.long)], "getitem .* selects rows"),
    "reshape": (lambda m, x: x.reshape(1, -1, 16).softmax(-1).reshape(x.shape), "reshape .* merges it with another"),
    "rotation": (lambda m, x: torch.cat(x.split([1, x.shape[1] - 1], 1)[::-1], 1), "cat .* concatenates along rows"),
    "shift": (lambda m, x: F.pad(x, (0, 0, 1, 0))[:, :-1], "pad .* is not known"),
    "convolution": (
        lambda m, x: F.conv1d(x.transpose(1, 2), m.weight.expand(32, 1, 32)[..., :3], padding=1, groups=32).transpose(1, 2),
        "conv1d",
    ),
    "attention": (lambda m, x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0], "scaled_dot_product_attention"),
    "place in the step": (lambda m, x: x + torch.arange(x.shape[1])[None, :, None], "arange .* numbers or draws rows by their place"),
    "noise": (lambda m, x: x + torch.rand_like(x), "rand_like .* is not known"),
    "number of rows": (lambda m, x: x / x.shape[1], "truediv .* uses the number of rows as a value"),
    "filled with it": (lambda m, x: x * torch.full((1, x.shape[1], 1), x.shape[1]), "full .* uses the number of rows as a value"),
}
ALONE = {
    "pointwise": lambda m, x: F.silu(x * m.weight).clamp(-3, 3),
    "norm": lambda m, x: x / x.norm(dim=-1, keepdim=True),
    "heads": lambda m, x: x.view(1, -1, 4, 8).softmax(-1).reshape(1, -1, 32),
    "halves": lambda m, x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "transposed": lambda m, x: x.transpose(1, 2).softmax(1).transpose(1, 2),
    "constant": lambda m, x: x + torch.zeros(1, x.shape[1], 1),
}


@pytest.fixture(scope="module")
def cases():
    """One capture for all cases: layer ``i + 1`` has the MLP of case ``i``, and layer 0 is a plain one."""
    functions = [*(function for function, _ in MIXING.values()), *ALONE.values()]
    model = toy(num_hidden_layers=1 + len(functions))
    for layer, function in zip(model.model.layers[1:], functions, strict=True):
        layer.mlp = Call(function)
    gm, ctx = captured(model)
    assert [layer.index for layer in ctx.layers] == list(range(len(functions) + 1))
    return gm, ctx


def alone(cases, index):
    """Graph and context in which layer 0, layer ``index`` and what stands outside all layers are checked."""
    gm, ctx = cases
    others = {n for layer in ctx.layers if layer.index not in (0, index) for n in layer.nodes}
    part = SimpleNamespace(graph=SimpleNamespace(nodes=[n for n in gm.graph.nodes if n not in others]))
    return part, replace(ctx, layers=[layer for layer in ctx.layers if layer.index in (0, index)], report=CompileReport())


@pytest.mark.parametrize("case", MIXING)
def test_mixed_rows_are_refused(case, cases):
    _, message = MIXING[case]
    index = 1 + list(MIXING).index(case)
    with pytest.raises(UnsupportedModelError, match=rf"{message}.*depthfx needs layers that treat each token alone") as error:
        check_rows(*alone(cases, index))
    assert f"in model.layers.{index}.mlp (Call)" in str(error.value)


@pytest.mark.parametrize("case", ALONE)
def test_separate_rows_pass(case, cases):
    gm, ctx = alone(cases, 1 + len(MIXING) + list(ALONE).index(case))
    check_rows(gm, ctx)
    assert any("independently" in line for line in ctx.report.sections["checked"])


def test_a_whole_graph_is_checked():
    """Graph, layers and message as a compilation has them, for one case of each kind."""
    gm, ctx = captured(with_mlp(MIXING["roll"][0]))
    with pytest.raises(UnsupportedModelError, match=r"roll .* in model.layers.1.mlp \(Call\) is not known"):
        check_rows(gm, ctx)
    gm, ctx = captured(with_mlp(ALONE["norm"]))
    check_rows(gm, ctx)
    assert any("independently" in line for line in ctx.report.sections["checked"])


def attend(layer, x, **arguments):
    return layer.self_attn(hidden_states=layer.input_layernorm(x), **arguments)[0]


def twice(layer, x, **arguments):
    return x + attend(layer, attend(layer, x, **arguments), **arguments)


def not_causal(layer, x, **arguments):
    layer.self_attn.is_causal = False
    return x + attend(layer, x, **arguments)


def masked(layer, x, **arguments):
    return x + attend(layer, x, **{**arguments, "attention_mask": torch.zeros(1, 1, 1, 1)})


def branching(layer, x, **arguments):
    return x + attend(layer, x, **arguments) if x.sum() > 0 else x


LAYERS = {
    "two attentions": (twice, r"layer model.layers.1 \(LlamaDecoderLayer\) calls attention 2 times; expected once"),
    "no attention": (
        lambda layer, x, **arguments: x + layer.mlp(x),
        r"numbered \[0, 2\]; expected one list 0..1 with one attention call each",
    ),
    "not causal": (not_causal, "LlamaAttention attends to later tokens too"),
    "own mask": (masked, "passes its own attention mask"),
    "data-dependent": (branching, "is not one graph: Data-dependent branching.*on_unsupported='eager'"),
}


@pytest.mark.parametrize("case", LAYERS)
def test_layers_that_do_not_fit(case):
    function, message = LAYERS[case]
    model = with_layer_forward(function)
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match=message):
        captured(model)
    assert model.config._attn_implementation == before


def with_memory(write, read):
    """A toy in which layer 0 keeps something that layer 2 reads."""
    kept = {}
    model = with_layer_forward(lambda layer, x, **arguments: write(kept, layer, x, arguments), index=0)
    other = with_layer_forward(lambda layer, x, **arguments: read(kept, layer, x, arguments), index=2)
    model.model.layers[2] = other.model.layers[2]
    return model


def test_a_residual_that_skips_a_layer():
    def write(kept, layer, x, arguments):
        kept["hidden"] = x + attend(layer, x, **arguments)
        return kept["hidden"]

    def read(kept, layer, x, arguments):
        return x + kept["hidden"] + attend(layer, x, **arguments)

    with pytest.raises(
        UnsupportedModelError, match=r"layer model.layers.2 \(LlamaDecoderLayer\) reads 2 hidden states.*the layer before it alone"
    ):
        captured(with_memory(write, read))


def test_a_tensor_handed_around_the_layers():
    def write(kept, layer, x, arguments):
        kept["scale"] = x.mean(-1, keepdim=True)
        return x + attend(layer, x, **arguments)

    def read(kept, layer, x, arguments):
        return x * kept["scale"] + attend(layer, x, **arguments)

    with pytest.raises(UnsupportedModelError, match=r"layer model.layers.0 \(LlamaDecoderLayer\) hands on 2 tensors"):
        captured(with_memory(write, read))


def test_a_head_as_wide_as_the_model():
    """Rotary cosines then have the shape of the hidden state and must not be taken for one."""
    _, ctx = captured(toy(head_dim=32))
    assert [layer.index for layer in ctx.layers] == [0, 1, 2]
    assert all(before.hidden_out is after.hidden_in for before, after in zip(ctx.layers, ctx.layers[1:]))
    assert ctx.layers[0].path == "model.layers.0" and ctx.layers[0].class_name == "LlamaDecoderLayer"
