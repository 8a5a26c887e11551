"""Policies and projectors against formulas written out a second time, row by row or in another form."""

from __future__ import annotations

import math

import pytest
import torch

from depthfx.contracts import PROJECT_ONLY, RUN
from depthfx.errors import SkipperError
from depthfx.skippers import make_skipper
from depthfx.skippers.policies.random_skip import MODULUS, hash_of
from depthfx.skippers.policies.unified import skipped_layers
from tests.skippers.toys import HIDDEN, INTERMEDIATE, LAYERS, grid, model, rows


def randomised(module, seed=0, scale=0.3):
    g = torch.Generator().manual_seed(seed)
    for tensor in module.parameters():
        tensor.data.copy_(torch.randn(tensor.shape, generator=g) * scale)
    return module


# ---- RandomSkip


def plain_mix(x):
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) % 2**32
    return x ^ (x >> 16)


def test_hash_against_python_integers():
    g = torch.Generator().manual_seed(0)
    ids = torch.cat([torch.arange(50), torch.randint(-(2**62), 2**62, (50,), generator=g)])
    positions = torch.randint(0, 2**31, (100,), generator=g)
    for seed in (0, 1234):
        keys = [i ^ (p * 1_000_000_007) ^ seed for i, p in zip(ids.tolist(), positions.tolist())]
        expected = [plain_mix(plain_mix(k & (2**32 - 1)) ^ ((k >> 32) & (2**32 - 1))) % 1_000_003 for k in keys]
        assert hash_of(ids, positions, seed).tolist() == expected


@pytest.mark.parametrize("rate", [0.1, 0.25, 0.5, 0.75])
@pytest.mark.parametrize("seed", [0, 1234])
def test_shares_and_independence_of_neighbours(rate, seed):
    where = grid(400, 500)
    skipped = make_skipper(model(), "random_skip", rate=rate, seed=seed).policies[0](where).actions.logical_not().view(400, 500).double()
    spread = math.sqrt(rate * (1 - rate))
    assert abs(skipped.mean() - rate) < 4 * spread / math.sqrt(skipped.numel())
    assert (skipped.mean(1) - rate).abs().max() < 5 * spread / math.sqrt(500)  # of every request
    assert (skipped.mean(0) - rate).abs().max() < 5 * spread / math.sqrt(400)  # at every position
    centred = (skipped - rate) / spread
    for lag in (1, 2, 3, 8, 64):
        assert abs((centred[:, lag:] * centred[:, :-lag]).mean()) < 0.012, f"positions {lag} apart"
        assert abs((centred[lag:] * centred[:-lag]).mean()) < 0.012, f"requests {lag} apart"
        assert abs((centred[lag:, lag:] * centred[:-lag, :-lag]).mean()) < 0.012, f"both {lag} apart"


def test_hash_is_uniform():
    where = grid(400, 500)
    counts = torch.histc(hash_of(where.request_ids, where.positions, 1234).double(), bins=100, min=0, max=MODULUS)
    expected = 200_000 / 100
    assert float(((counts - expected) ** 2 / expected).sum()) < 160  # chi square of 99 degrees; 0.9999 quantile is 158


def test_seeds_differ():
    where = grid(40, 50)
    a, b = (make_skipper(model(), "random_skip", rate=0.5, seed=s).policies[0](where).actions for s in (1, 2))
    assert 0.4 < float((a != b).double().mean()) < 0.6


def test_depth_takes_the_last_layers_and_a_token_is_the_same_in_all():
    skipper = make_skipper(model(num_hidden_layers=32), "random_skip", rate=0.5, depth=0.25)
    assert skipper.layers == tuple(range(16, 32))
    actions = [skipper.policies[p](grid(20, 20, p, 16)).actions for p in range(16)]
    assert all(bool(a.all()) for a in actions[:12])
    assert all(torch.equal(a, actions[12]) for a in actions[12:])
    assert 0.4 < float(actions[12].double().mean()) < 0.6


def test_the_hash_is_compared_strictly():
    where = grid(3, 3)
    for row, h in enumerate(hash_of(where.request_ids, where.positions, 1234).tolist()):
        skips = [not make_skipper(model(), rate=(h + d) / MODULUS).policies[0](where).actions[row] for d in (-0.5, 0.5)]
        assert skips == [False, True]


def test_rates_zero_and_one():
    assert bool(make_skipper(model(), rate=0.0).policies[0](grid(30, 30)).actions.all())
    assert not bool(make_skipper(model(), rate=1.0).policies[0](grid(30, 30)).actions.any())


# ---- Static depth, unified, forced


def test_static_depth():
    skipper = make_skipper(model(), "static_depth", layers=(2, 4, 6), skip=(2, 6))
    where = [rows(place=p, num_places=3) for p in range(3)]
    assert [skipper.policies[p](where[p]).actions.tolist() for p in range(3)] == [[False] * 17, [True] * 17, [False] * 17]
    assert skipper.policies[0].scope == "static"
    decode = make_skipper(model(), "static_depth", phases="decode")
    assert torch.equal(decode.policies[0](where[0]).actions, where[0].is_prompt) and decode.policies[0].scope == "phase"
    with pytest.raises(SkipperError, match=r"skip=\[3\].*not routed.*\[2, 4\]"):
        make_skipper(model(), "static_depth", layers=(2, 4), skip=(3,))
    with pytest.raises(SkipperError, match="phases='prefill' is not known"):
        make_skipper(model(), "static_depth", phases="prefill")


@pytest.mark.parametrize(("count", "share", "kept"), [(8, 0.5, [0, 2, 5, 7]), (12, 0.25, [0, 1, 3, 4, 6, 7, 8, 10, 11]), (5, 1.0, [0, 4])])
def test_unified_examples(count, share, kept):
    assert [i for i in range(count) if i not in skipped_layers(count, share)] == kept


@pytest.mark.parametrize("count", [6, 16, 30, 32, 61])
@pytest.mark.parametrize("share", [0.2, 0.25, 0.5, 0.7])
def test_unified_spacing(count, share):
    kept = [i for i in range(count) if i not in skipped_layers(count, share)]
    assert (kept[0], kept[-1], len(kept)) == (0, count - 1, round(count * (1 - share)))
    gaps = [b - a for a, b in zip(kept, kept[1:])]
    assert max(gaps) - min(gaps) <= 1


def test_unified_leaves_prompts_alone():
    skipper = make_skipper(model(), "unified", share=0.5)
    assert skipper.layers == (1, 3, 4, 6)
    for place in range(4):
        where = rows(place=place)
        assert torch.equal(skipper.policies[place](where).actions, where.is_prompt)
    with pytest.raises(SkipperError, match=r"\[1, 3\] are not routed"):
        make_skipper(model(), "unified", layers=(4, 5, 6, 7), share=0.5)
    with pytest.raises(SkipperError, match="leaves out none of 8 layers"):
        make_skipper(model(), "unified", share=0.01)


@pytest.mark.parametrize(("name", "action"), [("force_run", RUN), ("force_project", PROJECT_ONLY)])
def test_forced(name, action):
    decision = make_skipper(model(torch.float16), name, gate="mlp").policies[0](rows(dtype=torch.float16))
    assert (decision.actions.int() == action).all() and (decision.weight == action).all() and decision.weight.dtype is torch.float16


# ---- Routers


@pytest.mark.parametrize("decay", [None, 4.0])
def test_confidence_exit(decay):
    where = rows(61, num_places=2)
    policy = randomised(make_skipper(model(), "confidence_exit", threshold=0.6, decay=decay, horizon=64, layers=(6, 7))).policies[1]
    assert policy.monotone
    actions = policy(where).actions.tolist()
    weight, bias = policy.head.weight.detach().double(), policy.head.bias.detach().double()
    for t in range(61):
        logit = float(where.hidden[t].double() @ weight[0] + bias)
        limit = 0.6 if decay is None else min(1.0, max(0.0, 0.9 * 0.6 + 0.1 * math.exp(-decay * int(where.positions[t]) / 64)))
        assert actions[t] == (bool(where.ran[t]) and 1 / (1 + math.exp(-logit)) < limit)
    assert 0 < sum(actions) < sum(where.ran.tolist())


def test_the_exit_limit_falls_with_the_position():
    policy = make_skipper(model(), "confidence_exit", threshold=0.8, decay=4.0, horizon=64).policies[0]
    found = policy.limit(torch.tensor([0, 16, 100_000]))
    assert torch.allclose(found, torch.tensor([0.82, 0.72 + 0.1 * math.exp(-1), 0.72]), atol=1e-6)


def test_dllm():
    where = rows(61, positions=torch.arange(61) % 5)
    policy = randomised(make_skipper(model(), "dllm", width=48)).policies[0]
    actions = policy(where).actions
    w1, b1, w2, b2, norm = (t.double() for t in (policy.linear_1.weight, policy.linear_1.bias, policy.linear_2.weight, policy.linear_2.bias,
                                                 policy.norm.weight))  # fmt: skip
    for t in range(61):
        x = w1 @ where.hidden[t].double() + b1
        x = x / (x.square().mean() + 1e-5).sqrt() * norm
        skip, run = (w2 @ (x / (1 + torch.exp(-x))) + b2).softmax(0)
        assert bool(actions[t]) == (t % 5 < 2 or bool(run >= 0.5)), f"row {t}: {skip} {run}"
    assert 0 < int(actions[where.positions >= 2].sum()) < 36


def plain_router(x, w):
    """The published arithmetic, one step after another."""
    x = torch.matmul(x, w["router_enc.weight"].T)
    variance = (x.to(torch.float32) ** 2).mean(dim=-1, keepdim=True)
    x = w["router_norm.weight"] * (x.to(torch.float32) * torch.rsqrt(variance + 1e-5)).to(x.dtype)
    x = torch.matmul(torch.tanh(x), w["router_dec.weight"].T)
    return torch.sigmoid(torch.matmul(x, w["router_head.weight"].T))[:, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gate", ["mlp", "hard"])
def test_flexidepth_bit_for_bit(dtype, gate):
    skipper = randomised(make_skipper(model(dtype), "flexidepth", "adapter", gate=gate), scale=0.5)
    where = rows(301, dtype=dtype)
    with torch.no_grad():
        for place in range(4):
            decision = skipper.policies[place](where)
            expected = plain_router(where.normed, skipper.policies[place].state_dict())
            assert decision.weight.dtype is dtype and torch.equal(decision.weight, expected)
            assert decision.actions.tolist() == [float(w) > 0.5 for w in expected]
            assert 0.1 < float(decision.actions.double().mean()) < 0.9


def test_flexidepth_a_half_does_not_run():
    skipper = make_skipper(model(), "flexidepth", gate="mlp")
    torch.nn.init.zeros_(skipper.policies[0].router_head.weight)
    decision = skipper.policies[0](rows())
    assert (decision.weight == 0.5).all() and not bool(decision.actions.any())


def test_flexidepth_sizes():
    router = make_skipper(model(), "flexidepth", "adapter", gate="mlp")
    shapes = {name: tuple(t.shape) for name, t in [*router.policies[0].named_parameters(), *router.projectors[0].named_parameters()]}
    assert shapes == {
        "router_enc.weight": (HIDDEN // 16, HIDDEN), "router_norm.weight": (HIDDEN // 16,), "router_dec.weight": (HIDDEN, HIDDEN // 16),
        "router_head.weight": (1, HIDDEN), "gate_proj.weight": (INTERMEDIATE // 16, HIDDEN), "down_proj.weight": (INTERMEDIATE // 16, HIDDEN),
        "up_proj.weight": (HIDDEN, INTERMEDIATE // 16),
    }  # fmt: skip


# ---- Projectors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_adapter_bit_for_bit(dtype):
    adapter = randomised(make_skipper(model(dtype), "force_run", "adapter")).projectors[2]
    where = rows(dtype=dtype)
    w = adapter.state_dict()
    gate, factor = where.normed @ w["gate_proj.weight"].T, where.normed @ w["down_proj.weight"].T
    expected = (torch.nn.functional.silu(gate) * factor) @ w["up_proj.weight"].T
    with torch.no_grad():
        assert torch.equal(adapter(where.hidden, where.normed), expected)


def test_other_projectors():
    where = rows()
    args = (where.hidden, where.normed)
    assert make_skipper(model(), projector="identity").projectors[0](*args) is None
    scalars = make_skipper(model(), projector="scalar", scale=(1.0, 0.5, 2.0, 1.25)).projectors
    for module, s in zip(scalars, (1.0, 0.5, 2.0, 1.25), strict=True):
        assert torch.equal(where.hidden + module(*args), where.hidden * s)
    assert "scale" in dict(scalars[0].named_buffers())
    with pytest.raises(SkipperError, match="scale has 2 numbers for 4 routed layers"):
        make_skipper(model(), projector="scalar", scale=(1.0, 2.0))
    lora = make_skipper(model(), projector="lora", rank=5).projectors[0]
    assert not bool(lora(*args).any())
    randomised(lora)
    assert torch.allclose(lora(*args), where.hidden @ (lora.b.weight @ lora.a.weight).T, atol=1e-5)


def test_untrained_weights_depend_on_the_seed_alone():
    before = torch.random.get_rng_state()
    a, b, c = (make_skipper(model(), "flexidepth", "adapter", seed=s) for s in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(a.policies[0].router_enc.weight, b.policies[0].router_enc.weight)
    assert not torch.equal(a.policies[0].router_enc.weight, c.policies[0].router_enc.weight)
    assert not torch.equal(a.policies[0].router_enc.weight, a.policies[1].router_enc.weight)
    assert len(a.layers) == LAYERS // 2
