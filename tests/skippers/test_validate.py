"""Each way to break the contract is refused with its reason, and `make_skipper` refuses what does not fit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from depthfx.contracts import Decision, Policy, Projector, Skipper
from depthfx.errors import RegistryError, SkipperError
from depthfx.skippers import make_skipper, validate
from depthfx.skippers.projectors.identity import Identity
from depthfx.skippers.validate import check_traces, random_rows, take_rows
from tests.skippers.toys import CPU, HIDDEN, LAYERS, config, model


class Own(Policy):
    """A policy by a function of the rows."""

    def __init__(self, decide):
        super().__init__()
        self.decide = decide
        self.register_buffer("number", torch.zeros(()))
        self.loose = [torch.ones(())]

    def forward(self, rows):
        found = self.decide(self, rows)
        return Decision(found) if isinstance(found, torch.Tensor) else found


class Added(Projector):
    """A projector by a function of the hidden states and the MLP's input."""

    def __init__(self, project):
        super().__init__()
        self.project = project
        self.register_buffer("number", torch.zeros(()))

    def forward(self, hidden, mlp_input):
        return self.project(self, hidden, mlp_input)


def ran(self, rows):
    return torch.ones_like(rows.ran)


def check(decide=ran, project=None, gate="hard", layers=(1, 3), dtype=torch.float32):
    validate(Skipper(layers, Own(decide), Added(project) if project else Identity(), gate), HIDDEN, LAYERS, dtype, CPU)


def weighted(weight):
    return lambda self, rows: Decision(torch.ones_like(rows.ran), weight(rows))


def test_good_ones_pass():
    check()
    check(lambda self, rows: rows.positions % 2)
    check(lambda self, rows: (rows.hidden.sum(-1) > 0).to(torch.int8))
    check(weighted(lambda rows: torch.sigmoid(rows.hidden[:, 0])), gate="mlp", dtype=torch.bfloat16)
    check(project=lambda self, hidden, x: hidden + x)
    assert random_rows(3, 0, 2, HIDDEN, torch.float32, CPU).ran.all()


POLICY_FAULTS = {
    "shape of actions": (lambda s, r: torch.ones_like(r.hidden), r"actions has shape \[5, 64\] for 5 rows; expected \[5\]"),
    "one action": (lambda s, r: torch.ones((), dtype=torch.bool), r"actions has shape \[\]"),
    "float actions": (lambda s, r: r.hidden[:, 0], "actions are torch.float32; allowed: bool or an integer"),
    "no decision": (lambda s, r: [1], r"returns list; return a Decision\(actions, weight\)"),
    "list of actions": (lambda s, r: Decision([1] * 5), "actions is a list; a tensor"),
    "another action": (lambda s, r: r.positions * 0 + 2, r"actions \[2\] are not allowed; allowed: 0 \(PROJECT_ONLY\) and 1 \(RUN\)"),
    "a negative action": (lambda s, r: -r.is_prompt.long(), r"actions \[-1\] are not allowed"),
    "random": (lambda s, r: torch.rand_like(r.hidden[:, 0]) < 0.5, "two runs on the same rows differ"),
    "cumulative": (lambda s, r: r.positions.cumsum(0) % 2, "change with the order of the rows"),
    "place in the step": (lambda s, r: torch.arange(len(r.positions)) % 2, "change with the order of the rows"),
    "mean of the step": (lambda s, r: r.hidden[:, 0] > r.hidden[:3, 0].mean(), "change with the order of the rows"),
    "number of rows": (lambda s, r: torch.full_like(r.ran, r.hidden.shape[0] > 8), "change with the number of rows"),
    "item": (lambda s, r: r.ran if r.positions[0].item() else ~r.ran, "reads values of tensors on the host.*torch.where"),
    "bool": (lambda s, r: r.ran if r.ran.all() else ~r.ran, "reads values of tensors on the host"),
    "int": (lambda s, r: r.ran | (int(r.positions.max()) > 3), "reads values of tensors on the host"),
    "tolist": (lambda s, r: torch.tensor(r.ran.tolist()), "reads values of tensors on the host"),
    "own number": (lambda s, r: r.ran | (s.number.item() > 3), "reads values of tensors on the host"),
    "numpy": (lambda s, r: torch.from_numpy(r.ran.numpy()), "cannot be traced"),
    "shape by value": (lambda s, r: r.ran[r.ran.nonzero()[:, 0]], "reads values of tensors on the host"),
    "loose tensor": (lambda s, r: r.hidden[:, 0] > s.loose[0], "neither parameter nor buffer; register it"),
    "wrong attribute": (lambda s, r: r.tokens > 3, "cannot be traced: AttributeError.*tokens"),
    "wrong width": (lambda s, r: r.hidden @ torch.ones(3) > 0, "cannot be traced: RuntimeError"),
    "state": (lambda s, r: r.ran | (s.number.add_(1) > 0), "writes into a tensor in place"),
    "writes rows": (lambda s, r: r.ran.logical_not_(), "writes into a tensor in place"),
}  # fmt: skip
WEIGHT_FAULTS = {
    "missing": (lambda r: None, "gives no weight, which the gate mlp multiplies with"),
    "above one": (lambda r: 1.5 + 0 * r.hidden[:, 0], "weights from 1.5 to 1.5 are not allowed"),
    "below zero": (lambda r: r.hidden[:, 0], "are not allowed; allowed: 0 to 1"),
    "nan": (lambda r: 0 * r.hidden[:, 0] + float("nan"), "weights from nan to nan are not allowed"),
    "shape": (lambda r: torch.sigmoid(r.hidden[:, :1]), r"weight has shape \[5, 1\] for 5 rows"),
    "integer": (lambda r: r.positions * 0, "weight is torch.int64; a floating dtype"),
    "softmax over rows": (lambda r: r.hidden[:, 0].softmax(0), "the weights change with the number of rows"),
    "order": (lambda r: torch.arange(len(r.ran)) / 99, "the weights change with the order of rows"),
}
UPDATE_FAULTS = {
    "shape": (lambda s, h, x: h[:, :3], r"the update is \[5, 3\] torch.float32; expected \[5, 64\]"),
    "dtype": (lambda s, h, x: h.double(), "torch.float64; expected"),
    "type": (lambda s, h, x: 0, "returns int; return a tensor"),
    "infinite": (lambda s, h, x: h / 0, "holds NaN or infinity"),
    "random": (lambda s, h, x: torch.rand_like(h), "two runs on the same rows differ"),
    "order": (lambda s, h, x: h.cumsum(0), "the updates change with the order of rows"),
    "number": (lambda s, h, x: h * h.shape[0], "the updates change with the number of rows"),
    "read": (lambda s, h, x: h if h.sum() > 0 else x, "reads values of tensors on the host"),
    "state": (lambda s, h, x: h + s.number.add_(1), "writes into a tensor in place"),
}


@pytest.mark.parametrize("fault", POLICY_FAULTS)
def test_policy_is_refused(fault):
    decide, reason = POLICY_FAULTS[fault]
    with pytest.raises(SkipperError, match=f"policy Own of layer 1.*{reason}"):
        check(decide)


@pytest.mark.parametrize("fault", WEIGHT_FAULTS)
def test_weight_is_refused(fault):
    weight, reason = WEIGHT_FAULTS[fault]
    with pytest.raises(SkipperError, match=f"policy Own of layer 1.*{reason}"):
        check(weighted(weight), gate="mlp")


@pytest.mark.parametrize("fault", UPDATE_FAULTS)
def test_projector_is_refused(fault):
    project, reason = UPDATE_FAULTS[fault]
    with pytest.raises(SkipperError, match=f"projector Added of layer 1.*{reason}"):
        check(project=project)


def test_a_weight_that_comes_and_goes_is_refused():
    with pytest.raises(SkipperError, match="the weights change with the number of rows"):
        check(weighted(lambda rows: torch.sigmoid(rows.hidden[:, 0]) if len(rows.ran) > 1 else None))


def test_only_the_faulty_layer_is_named():
    policies = [Own(ran), Own(lambda s, r: r.positions)]
    with pytest.raises(SkipperError, match="policy Own of layer 3 "):
        validate(Skipper((1, 3), policies, Identity()), HIDDEN, LAYERS, torch.float32, CPU)


def test_fault_at_one_place_alone_is_found():
    with pytest.raises(SkipperError, match=r"policy Own of layer 3 .*actions"):
        check(lambda s, r: r.ran.long() + 7 * (r.place == 1))


def test_layers_and_dtypes_are_refused():
    with pytest.raises(SkipperError, match=r"routed layers \[8, 9\] are none of the model's 8 layers; allowed: 0 to 7"):
        check(layers=(3, 8, 9))
    with pytest.raises(SkipperError, match=r"cannot run in torch.float64; allowed: torch.float32"):
        check(dtype=torch.float64)


def test_copies_to_the_host_are_refused():
    good = Skipper((1,), Own(lambda s, r: r.positions > 3), Identity())
    check_traces(good, HIDDEN, torch.float32, torch.device("cuda"))
    there_and_back = Skipper((1,), Own(lambda s, r: (r.positions.cpu() > 3).to(r.ran.device)), Identity())
    with pytest.raises(SkipperError, match="copies rows to another device"):
        check_traces(there_and_back, HIDDEN, torch.float32, torch.device("cuda"))
    new = Skipper((1,), Own(lambda s, r: torch.ones(5, dtype=torch.bool)), Identity())
    with pytest.raises(SkipperError, match="actions is on cpu, the rows are on cuda"):
        check_traces(new, HIDDEN, torch.float32, torch.device("cuda"))


def test_a_skipper_in_another_dtype_is_refused():
    skipper = make_skipper(model(), "flexidepth")
    with pytest.raises(SkipperError, match=r"policy FlexiDepthRouter of layer 4 fails on random rows: RuntimeError.*dtype"):
        validate(skipper, HIDDEN, LAYERS, torch.float16, CPU)
    with pytest.raises(SkipperError, match="policy FlexiDepthRouter of layer 4 cannot be traced"):
        validate(skipper, HIDDEN + 1, LAYERS, torch.float32, CPU)


def test_a_default_device_of_the_caller_does_not_matter():
    with torch.device("meta"):
        drawn = random_rows(3, 1, 2, HIDDEN, torch.float16, CPU)
        check()
    assert {t.device for t in vars(drawn).values() if isinstance(t, torch.Tensor)} == {CPU}


def test_rows_are_taken():
    rows = random_rows(5, 1, 2, HIDDEN, torch.float32, CPU)
    index = torch.tensor([3, 1])
    taken = take_rows(rows, index)
    for name in ("hidden", "normed", "request_ids", "positions", "is_prompt", "ran"):
        assert torch.equal(getattr(taken, name), getattr(rows, name)[index])
    assert (taken.place, taken.num_places) == (1, 2)


# ---- make_skipper


def test_defaults():
    skipper = make_skipper(config())
    assert (skipper.layers, skipper.gate, skipper.name) == ((4, 5, 6, 7), "hard", "random_skip+identity")
    assert make_skipper(config(num_hidden_layers=3)).layers == (1, 2)
    assert make_skipper(config(), "dllm").layers == tuple(range(2, 8))
    assert not skipper.training


def test_own_modules():
    skipper = make_skipper(model(torch.float16), Own(ran), Added(lambda s, h, x: h + s.number), layers=[0, 7])
    assert (skipper.layers, skipper.name) == ((0, 7), "Own+Added")
    assert skipper.projectors[0].number.dtype is torch.float16


def test_options_go_to_whom_they_belong():
    skipper = make_skipper(model(), "confidence_exit", "lora", threshold=0.3, rank=2, seed=3)
    assert skipper.policies[0].threshold == 0.3 and skipper.projectors[0].a.weight.shape[0] == 2
    with pytest.raises(SkipperError, match=r"options \['speed'\] are not known; allowed here: \['depth', 'rank', 'rate', 'seed'\]"):
        make_skipper(model(), projector="lora", speed=3)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"layers": (6, 8)}, r"routed layers \[8\] are none of the model's 8 layers"),
        ({"layers": (3, 2)}, "give indices of decoder layers, from 0, rising"),
        ({"layers": ()}, "routes no layer"),
        ({"gate": "mlp"}, "policy 'random_skip' cannot be used with gate='mlp'; allowed: hard"),
        ({"gate": "soft"}, "cannot be used with gate='soft'"),
        ({"rate": 1.5}, "rate=1.5 is not allowed; give a number from 0 to 1"),
        ({"depth": True}, "depth=True is not allowed"),
        ({"seed": -1}, "seed=-1 is not allowed; give an integer of at least 0"),
        ({"policy": "confidence_exit", "decay": -1.0}, "decay=-1.0 is not allowed"),
        ({"policy": "dllm", "width": 0}, "width=0 is not allowed"),
        ({"policy": Own(lambda s, r: r.ran if r.ran.all() else ~r.ran)}, "reads values of tensors on the host"),
    ],
)
def test_make_refuses(arguments, reason):
    with pytest.raises(SkipperError, match=reason):
        make_skipper(model(), **arguments)


def test_make_refuses_names_and_models():
    with pytest.raises(RegistryError, match="unknown policy 'dice'; known: confidence_exit"):
        make_skipper(model(), "dice")
    with pytest.raises(RegistryError, match="unknown projector 'zero'; known: adapter"):
        make_skipper(model(), projector="zero")
    with pytest.raises(SkipperError, match="Linear has no config with num_hidden_layers"):
        make_skipper(nn.Linear(2, 2))
    with pytest.raises(SkipperError, match="no intermediate_size, which the adapter divides; use lora"):
        make_skipper(model(intermediate_size=None), projector="adapter")


def test_a_real_config_and_model():
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

    skipper = make_skipper(Qwen3Config(num_hidden_layers=6, hidden_size=32, intermediate_size=64), "flexidepth", "adapter", gate="mlp")
    assert skipper.layers == (3, 4, 5) and skipper.policies[0].router_enc.weight.shape == (2, 32)
    assert skipper.policies[0].router_norm.eps == 1e-6
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 8}
    small = LlamaForCausalLM(LlamaConfig(**sizes)).half()
    skipper = make_skipper(small, "flexidepth", "adapter")
    assert skipper.layers == (1,) and {p.dtype for p in skipper.parameters()} == {torch.float16}
    validate(skipper, 32, 2, small.dtype, small.device)
