"""What a run may start from and aim at: routers that run everything, targets that rise, one loss alone, chats of the model's own."""

from __future__ import annotations

import pytest
import torch

from depthfx.errors import SettingError, SkipperError
from depthfx.skippers import load_skipper, make_skipper
from depthfx.skippers.train import Stage, TrainSettings, evaluate_skipper, make_own_chats, make_own_documents, routed_training
from depthfx.skippers.train import loss as loss_module
from depthfx.skippers.train.sequences import IGNORED
from depthfx.skippers.train.settings import offset_of, target_share
from tests.skippers.train_toys import data, model, settings, skipper, train


def test_a_router_can_start_with_all_rows_running_and_an_adapter_with_nothing():
    of = model()
    made = make_skipper(of, "flexidepth", "adapter", reduction=4, proj_reduction=4, head_bias=3.0, zero=True)
    ids = data(of, 4).ids.long()
    with routed_training(of, made, "straight_through") as routing, torch.no_grad():
        routed = of(input_ids=ids, use_cache=False).logits
        assert all(bool(a.all()) for a in routing.actions)
        with routing.off():
            assert torch.equal(routed, of(input_ids=ids, use_cache=False).logits)
    assert all(p(torch.ones(2, 64), torch.ones(2, 64)).abs().max() == 0 for p in made.projectors)
    spread = make_skipper(of, "flexidepth", "adapter", reduction=4, proj_reduction=4, head_bias=3.0, head_std=0.1, seed=1)
    assert 0.05 < float(spread.policies[0].router_head.weight.std()) < 0.15 and float(spread.policies[0].router_head.bias) == 3.0
    for wrong in ({"head_std": 0.1}, {"head_std": -1.0, "head_bias": 1.0}):
        with pytest.raises(SkipperError, match="give 0 or more, and above 0 only with head_bias"):
            make_skipper(of, "flexidepth", "adapter", **wrong)
    with pytest.raises(SkipperError, match="head_bias='much' is not allowed; give a finite number"):
        make_skipper(of, "flexidepth", "adapter", head_bias="much")


def test_thresholds_run_more_rows_or_fewer():
    of = model()
    made = make_skipper(of, "flexidepth", "adapter", reduction=4, proj_reduction=4)
    shares = []
    for threshold in (0.0, 0.5, 1.0):
        for policy in made.policies:
            policy.threshold = threshold
        shares.append(evaluate_skipper(of, made, data(of, 8)).skipped_share)
    assert shares[0] == 0.0 < shares[1] < shares[2] == 1.0


def test_a_target_rises():
    how = settings(10, target_skip=0.5, target_rise=0.4)
    assert [target_share(how, 0, n, 10) for n in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert target_share(how, 1, 0, 10) == 1.0 == target_share(settings(10), 0, 0, 10)
    with pytest.raises(SettingError, match=r"target_rise=2 is not allowed"):
        TrainSettings(target_rise=2)


def test_the_share_follows_a_rising_target(tmp_path):
    of = model()
    made = make_skipper(of, "flexidepth", "adapter", gate="hard", reduction=4, proj_reduction=4, head_bias=1.0, zero=True)
    how = settings(
        60, penalty=0.0, decision="straight_through", target_skip=0.5, target_rise=0.7, max_penalty=0.05, controller_shift=0.5,
        router_rate=0.3,
    )  # fmt: skip
    _, records = train(tmp_path, how, of, trained=made)
    shares = torch.tensor([r["skipped_share"] for r in records])
    assert shares[0] == 0.0 and shares[10:20].mean() < 0.25 and abs(shares[-10:].mean() - 0.5) < 0.06 and shares[-10:].std() < 0.12
    assert made.policies[0].router_head.bias != made.policies[1].router_head.bias, "training has moved them apart"
    with pytest.raises(SkipperError, match=r"these have none; make them with head_bias=1\.0"):
        train(tmp_path / "other", how, of)


def test_offsets_are_quantiles():
    weights = [torch.tensor([[0.5, 0.9], [0.1, 0.2]]), torch.tensor([[0.7, 0.6], [0.3, 0.4]])]
    real = torch.tensor([[True, True], [True, False]])
    found = [float(torch.sigmoid(offset_of(weights, real, share))) for share in (0.0, 0.34, 0.5, 1.0)]
    assert found == pytest.approx([0.1, 0.3, 0.5, 0.9], abs=1e-6)
    logits = torch.logit(torch.stack(weights)[:, real])
    for noise in (0.5, 2.0):
        expected = torch.sigmoid((offset_of(weights, real, 0.3, noise) - logits) / noise).mean()
        assert float(expected) == pytest.approx(0.3, abs=1e-4)


def test_one_loss_alone_moves_only_what_it_is_about(tmp_path):
    """With the divergence alone and nothing skipped there is nothing to learn; the loss of the language model is not part of it."""
    of = model()
    made = make_skipper(of, "flexidepth", "adapter", gate="hard", reduction=4, proj_reduction=4, head_bias=3.0)
    _, (record,) = train(tmp_path, settings(1, penalty=0.0, lm=0.0, distill=1.0, decision="straight_through"), of, trained=made)
    assert record["lm"] > 1 and abs(record["distill"]) < 1e-5 and record["gradient_norm"] < 1e-5
    with pytest.raises(SettingError, match=r"lm=0.0 and distill=0.0 leave nothing to learn"):
        TrainSettings(lm=0.0)


def test_the_result_of_each_stage_is_kept(tmp_path):
    of = model()
    stages = tuple(Stage(name=n, steps=2, learning_rate=1e-2, penalty=0.0) for n in ("alignment", "annealing"))
    result, _ = train(tmp_path, settings(stages=stages), of)
    first, last = (load_skipper(tmp_path / name, of) for name in ("skipper-alignment", "skipper"))
    assert result.folder == tmp_path / "skipper"
    assert not torch.equal(first.policies[0].router_enc.weight, last.policies[0].router_enc.weight)
    alone, _ = train(tmp_path / "alone", settings(stages=stages[:1]), of)
    assert torch.equal(first.policies[0].router_enc.weight, load_skipper(alone.folder, of).policies[0].router_enc.weight)
    assert not (tmp_path / "alone" / "skipper-alignment").exists()


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_losses_by_chunks_have_the_gradients_of_the_plain_ones(monkeypatch, temperature):
    monkeypatch.setattr(loss_module, "_CHUNK", 4 * 50)
    torch.manual_seed(0)
    logits, base = torch.randn(3, 9, 50, requires_grad=True), torch.randn(3, 9, 50)
    labels, real = torch.randint(0, 50, (3, 9)), torch.ones(3, 9, dtype=torch.bool)
    labels[0, 5:] = IGNORED
    found = loss_module.sum_losses(logits, labels, real, [torch.ones(3, 9)], base, temperature)
    (0.3 * found.lm + 0.7 * found.distill).backward()
    ours, logits.grad = logits.grad, None
    kept = labels[:, 1:] != IGNORED
    lm = torch.nn.functional.cross_entropy(logits[:, :-1][kept], labels[:, 1:][kept], reduction="sum")
    wide, exact = (torch.log_softmax(x[:, :-1][kept] / temperature, -1) for x in (logits, base))
    distill = torch.nn.functional.kl_div(wide, exact, log_target=True, reduction="sum") * temperature**2
    (0.3 * lm + 0.7 * distill).backward()
    torch.testing.assert_close((found.lm, found.distill), (lm, distill))
    torch.testing.assert_close(ours, logits.grad)


@pytest.mark.parametrize("apart", [True, False])
def test_balanced_routers_are_not_pushed_all_one_way(apart):
    """The gradients of the heads' biases are the sums of those of their logits; those of all layers together are then zero."""
    of = model()
    made = make_skipper(of, "flexidepth", "adapter", gate="hard", reduction=4, proj_reduction=4, head_bias=0.2, head_std=0.3)
    ids = data(of, 4).ids.long()
    with routed_training(of, made, "straight_through") as routing:
        routing.apart = apart
        of(input_ids=ids, use_cache=False).logits.logsumexp(-1).sum().backward()
        if apart:
            assert all(p.router_enc.weight.grad is None for p in made.policies)
            routing.send_gradients(torch.ones_like(ids, dtype=torch.bool))
    pushes = torch.stack([p.router_head.bias.grad for p in made.policies])
    assert (abs(pushes.sum()) < 1e-4 * pushes.abs().sum()) == apart
    assert all(p.router_enc.weight.grad.abs().max() > 0 for p in made.policies)


def test_balance_needs_a_share_that_is_set():
    with pytest.raises(SettingError, match="balance=True needs a target_skip, a controller_shift above 0 and recompute=False"):
        TrainSettings(balance=True)
    with pytest.raises(SettingError, match="stage noise=-1 is not allowed"):
        Stage(noise=-1)


def test_noise_draws_decisions_in_training_alone():
    of, ids = model(), data(model(), 16).ids.long()
    made = make_skipper(of, "flexidepth", "adapter", gate="hard", reduction=4, proj_reduction=4, head_bias=1.0, head_std=0.5)
    torch.manual_seed(0)
    with routed_training(of, made, "straight_through") as routing, torch.no_grad():
        routing.noise = 1.0
        of(input_ids=ids, use_cache=False)
        weights, actions = torch.stack(routing.weights), torch.stack(routing.actions)
        assert abs(float(actions.float().mean() - weights.mean())) < 0.06 and not torch.equal(actions, weights > 0.5)
        with routing.served():
            of(input_ids=ids, use_cache=False)
            assert torch.equal(torch.stack(routing.actions), torch.stack(routing.weights) > 0.5)


def test_routers_stay_where_a_stage_says_so(tmp_path):
    of = model()
    made = make_skipper(of, "flexidepth", "adapter", gate="hard", reduction=4, proj_reduction=4, head_bias=1.0, head_std=0.1)
    before = [made.policies[0].router_enc.weight.clone(), made.projectors[0].gate_proj.weight.clone()]
    stages = (Stage(steps=2, learning_rate=1e-2, penalty=0.0, routers=0.0, noise=1.0),)
    how = settings(stages=stages, decision="straight_through", target_skip=0.5, controller_shift=0.3, balance=True, recompute=False)
    train(tmp_path, how, of, trained=made)
    after = [made.policies[0].router_enc.weight, made.projectors[0].gate_proj.weight]
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True, False]


class Letters:
    """A tokenizer of single letters with a chat template of its own; 1 is the end."""

    eos_token_id, chat_template = 1, "own"

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [ord(c) % 60 + 2 for c in text]}

    def decode(self, ids, skip_special_tokens=False):
        return " ".join(str(i) for i in ids if i != 1)

    def apply_chat_template(self, turns, tokenize=True, add_generation_prompt=False, return_dict=False):
        text = "".join(f"<{t['content']}>" for t in turns) + ("=" if add_generation_prompt else "")
        return text if not tokenize else {"input_ids": self(text)["input_ids"]}


def test_a_model_makes_up_chats():
    of = model()
    with torch.no_grad():
        of.lm_head.weight.mul_(0.05)  # nearly even, so that the end comes now and then
    before = torch.get_rng_state()
    made = make_own_chats(of, Letters(), 24, question_tokens=40, answer_tokens=6, batch_size=16, seed=3)
    assert torch.equal(before, torch.get_rng_state())
    assert made == make_own_chats(of, Letters(), 24, question_tokens=40, answer_tokens=6, batch_size=16, seed=3)
    assert 0 < len(made) <= 24 and [m["role"] for m in made[0]["messages"]] == ["user", "assistant"]
    questions = [c["messages"][0]["content"] for c in made]
    assert all(questions) and len(set(questions)) == len(questions)
    with pytest.raises(SkipperError, match="wrote no message that ends within 1 tokens"):
        make_own_chats(of, Letters(), 2, question_tokens=1)
    about = make_own_chats(of, Letters(), 24, question_tokens=40, answer_tokens=6, system="sums", seed=3)
    assert {m["role"] for c in about for m in c["messages"]} == {"user", "assistant"} and about != made
    written = make_own_documents(of, Letters(), 24, tokens=40, batch_size=16, start=7, seed=3)
    words = [d["text"].split() for d in written]
    assert written == make_own_documents(of, Letters(), 24, tokens=40, batch_size=16, start=7, seed=3) and max(map(len, words)) == 40
    assert any(w[-1] == "7" for w in words) and not any("7" in w[:-1] for w in words), "the token before a document ends it as well"
    plain = Letters()
    plain.chat_template = None
    with pytest.raises(SkipperError, match="no chat template"):
        make_own_chats(of, plain, 2)


def test_skipper_toys_have_no_bias():
    """Checkpoints of the published form: the head's bias is there only where it is asked for."""
    assert skipper(model()).policies[0].router_head.bias is None
