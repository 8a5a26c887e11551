"""The forward of training against Hugging Face's own layers chosen from row by row, and the layers it refuses."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from torch import nn

from depthfx.errors import SettingError, SkipperError
from depthfx.skippers import make_skipper
from depthfx.skippers.train.parts import find_parts
from depthfx.skippers.train.routing import routed_training
from tests.families.configs import FAMILIES, SIZES, build, randomised
from tests.families.routed_cases import make, reference
from tests.families.routed_reference import routed_answer

IDS = [5, 9, 30, 77, 2, 61, 8, 100, 44, 3, 17, 90] * 2


@pytest.mark.parametrize("gate", ["hard", "mlp"])
@pytest.mark.parametrize("name", FAMILIES)
def test_training_computes_what_is_served(name, gate):
    """Bit for bit, with gradients and recomputation on."""
    model, ids = build(name), torch.tensor([IDS])
    skipper = make(gate, model.config.num_hidden_layers, "" if gate == "hard" else "monotone")
    with routed_training(model, skipper, "straight_through", recompute=gate == "mlp") as routing:
        logits = model(input_ids=ids, use_cache=False).logits[0]
        actions = torch.stack([a[0] for a in routing.actions]).to(torch.int8)
        logits.sum().backward()
        with routing.off():
            plain = model(input_ids=ids, use_cache=False).logits
    expected = routed_answer(reference(name), name, skipper, IDS, len(IDS))
    assert torch.equal(logits.detach(), expected.logits) and torch.equal(actions, expected.actions)
    assert 0 < float(actions.float().mean()) < 1
    assert all(p.grad is None for p in model.parameters()) and any(p.grad is not None for p in skipper.parameters())
    assert torch.equal(plain, reference(name)(input_ids=ids, use_cache=False).logits)
    assert torch.equal(plain, model(input_ids=ids, use_cache=False).logits), "nothing is left behind"
    assert all(p.requires_grad for p in model.parameters())


def gradients(gate, decision, recompute=False):
    model = build("llama")
    skipper = make_skipper(model, "flexidepth", "adapter", gate=gate, reduction=4, proj_reduction=4)
    with routed_training(model, skipper, decision, recompute) as routing:
        logits = model(input_ids=torch.tensor([IDS]), use_cache=False).logits
        logits.square().mean().backward()
        return logits.detach(), routing.actions, {n: p.grad for n, p in skipper.named_parameters()}


def test_decisions_differ_in_gradient_or_value():
    hard, actions, through = gradients("mlp", "hard")
    straight, same_actions, estimated = gradients("mlp", "straight_through")
    soft, _, _ = gradients("mlp", "soft")
    router = next(n for n in through if "router_head" in n)
    adapter = [n for n in through if "up_proj" in n][-1]  # in earlier layers, later routers count
    assert torch.equal(hard, straight) and all(map(torch.equal, actions, same_actions))
    assert through[router].abs().sum() > 0 and not torch.allclose(through[router], estimated[router])
    torch.testing.assert_close(through[adapter], estimated[adapter])
    assert not torch.allclose(soft, hard)
    for mine, again in zip(through.values(), gradients("mlp", "hard", recompute=True)[2].values(), strict=True):
        assert torch.equal(mine, again)


def test_wide_parameters_are_rounded_to_the_model():
    model = build("llama", torch.bfloat16)
    skipper = make_skipper(model, "flexidepth", "adapter", gate="mlp")
    wide = make_skipper(model, "flexidepth", "adapter", gate="mlp").float()
    with torch.no_grad():
        for p in wide.parameters():
            p.mul_(1 + 1e-4)  # below what the model's dtype can tell
    logits = []
    for s in (skipper, wide):
        with routed_training(model, s) as routing:
            logits.append(model(input_ids=torch.tensor([IDS]), use_cache=False).logits)
            assert routing.weights[0].dtype is torch.bfloat16
    assert torch.equal(*logits)


def test_decisions_that_do_not_train_are_refused():
    model = build("llama")
    skipper = make_skipper(model, "flexidepth", "adapter")
    with (
        pytest.raises(SettingError, match="gives the router no gradient of the loss; use 'straight_through'"),
        routed_training(model, skipper),
    ):
        pass
    with pytest.raises(SettingError, match="decision='firm' is not known; allowed: hard"), routed_training(model, skipper, "firm"):
        pass
    static = make_skipper(model, "static_depth", "identity")
    with routed_training(model, static, "soft"), pytest.raises(SkipperError, match="policy StaticDepth gives no weight"):
        model(input_ids=torch.tensor([IDS]), use_cache=False)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_named(bad):
    """Not taken for a layer that mixes tokens."""
    model = build("llama", torch.float16)
    skipper = make_skipper(model, "flexidepth", "adapter", gate="mlp")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] = bad
    with (
        pytest.raises(
            SkipperError, match=rf"the model's model.layers.1.mlp.down_proj.weight holds numbers from .* to {bad}; training needs finite"
        ),
        routed_training(model, skipper),
    ):
        pass
    assert all(p.requires_grad for p in model.parameters()), "nothing is left behind"


class Changed(nn.Module):
    """A child of a layer whose output is changed."""

    def __init__(self, inner, change):
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, *args, **kwargs):
        out = self.inner(*args, **kwargs)
        return (self.change(out[0]), *out[1:]) if isinstance(out, tuple) else self.change(out)


class Mixer(nn.Module):
    """An MLP that reads the rows before as well."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return self.linear(x.cumsum(1))


def latent_attention(layer):
    layer.self_attn.k_proj = nn.Sequential(nn.Linear(64, 16), nn.Linear(16, 32))


def no_mlp(layer):
    layer.mlp = nn.Identity()


@pytest.mark.parametrize(("change", "reason"), [
    (lambda layer: setattr(layer, "self_attn", Changed(layer.self_attn, lambda x: x)), None),
    (lambda layer: setattr(layer, "mlp", Mixer()), r"layer 1 \(LlamaDecoderLayer\) has 2 children that mix tokens"),
    (latent_attention, "3 tensors are projected inside its attention"),
    (no_mlp, r"layer 1 \(LlamaDecoderLayer\) has no MLP"),
])  # fmt: skip
def test_unknown_layers_are_refused(change, reason):
    model = build("llama")
    change(model.model.layers[1])
    if reason is None:
        assert find_parts(model, [1])[0].attention is model.model.layers[1].self_attn
        return
    with pytest.raises(SkipperError, match=reason):
        find_parts(model, [1])


def test_residual_streams_that_are_not_only_added_to_are_refused():
    model = build("llama")
    layer = model.model.layers[1]
    own = layer.forward
    layer.forward = lambda *args, **kwargs: own(*args, **kwargs) * 0.5
    with pytest.raises(SkipperError, match="does not return its input where attention and MLP give nothing"):
        find_parts(model, [1])
    layer.forward = lambda hidden, *args, **kwargs: (own(hidden, *args, **kwargs) - hidden).mul(1.5).square() + hidden
    with pytest.raises(SkipperError, match=r"layer 1 \(LlamaDecoderLayer\): what mlp gives is not simply added to the hidden state"):
        find_parts(model, [1])
    model = build("olmo2")
    model.model.layers[1].post_attention_layernorm = nn.LayerNorm(64)
    nn.init.ones_(model.model.layers[1].post_attention_layernorm.bias)
    with pytest.raises(SkipperError, match="a norm with a bias after a branch"):
        find_parts(model, [1])
    with pytest.raises(SkipperError, match=r"routed layers \[7\] are none of the model's 3 layers"):
        find_parts(build("llama"), [7])


OTHERS = {
    "falcon": (hf.FalconConfig, {}, None),  # adds to its MLP's output in place
    "phi": (hf.PhiConfig, {}, None),
    "mixtral": (hf.MixtralConfig, {}, "has no MLP whose first projection reads rows"),
    "bloom": (hf.BloomConfig, {"n_layer": 3, "n_head": 4}, "or a part that adds its input itself"),
    "openai": (hf.OpenAIGPTConfig, {}, "has 0 children that mix tokens"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_families_train_or_are_refused(name):
    config, options, reason = OTHERS[name]
    model = randomised(config(**{**SIZES, "num_hidden_layers": 3, **options}))
    if reason is not None:
        with pytest.raises(SkipperError, match=reason):
            find_parts(model, [2])
        return
    skipper = make_skipper(model, "flexidepth", "adapter", layers=[1, 2], gate="mlp")
    with routed_training(model, skipper) as routing:
        model(input_ids=torch.tensor([IDS]), use_cache=False).logits.square().mean().backward()
    assert 0 < float(torch.stack(routing.actions).float().mean()) < 1
    assert all(p.grad is not None and p.grad.isfinite().all() for p in skipper.parameters())
