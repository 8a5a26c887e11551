"""Every registered policy and projector keeps the contract in every dtype, and is traced once for all numbers of rows."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from depthfx.contracts import Rows
from depthfx.errors import RegistryError
from depthfx.skippers import make_skipper, validate
from depthfx.skippers.plugins import POLICIES, PROJECTORS, register_policy, register_projector
from depthfx.skippers.validate import random_rows
from tests.skippers.toys import CPU, HIDDEN, LAYERS, model

POLICY_CASES = [(n, gate, i) for n, s in POLICIES.items() for gate in s.gates for i in range(len(s.cases))]
PROJECTOR_CASES = [(n, i) for n, s in PROJECTORS.items() for i in range(len(s.cases))]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def test_the_folders_hold_the_plug_ins():
    assert POLICIES.names() == [
        "confidence_exit", "dllm", "flexidepth", "force_project", "force_run", "random_skip", "static_depth", "unified",
    ]  # fmt: skip
    assert PROJECTORS.names() == ["adapter", "identity", "lora", "scalar"]
    for spec, register in ((POLICIES.get("dllm"), register_policy), (PROJECTORS.get("lora"), register_projector)):
        with pytest.raises(RegistryError, match="registered already"):
            register(spec)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "gate", "case"), POLICY_CASES)
def test_policy_keeps_the_contract(name, gate, case, dtype):
    skipper = make_skipper(model(dtype), name, gate=gate, **POLICIES.get(name).cases[case])
    assert skipper.gate == gate and skipper.name == f"{name}+identity"
    assert all(t.dtype is dtype for t in skipper.parameters())
    validate(skipper, HIDDEN, LAYERS, dtype, CPU)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "case"), PROJECTOR_CASES)
def test_projector_keeps_the_contract(name, case, dtype):
    skipper = make_skipper(model(dtype), "force_run", name, **PROJECTORS.get(name).cases[case])
    for tensor in skipper.parameters():
        torch.nn.init.normal_(tensor, std=0.2)  # LoRA starts as nothing
    validate(skipper, HIDDEN, LAYERS, dtype, CPU)
    hidden, mlp_input = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(0)).to(dtype)
    update = skipper.projectors[0](hidden, mlp_input)
    changes = PROJECTORS.get(name).cases[case] or name not in ("identity", "scalar")  # these two do nothing by default
    assert bool(changes) == (update is not None and bool(update.any()))


def compiled(function):
    torch._dynamo.reset()
    counter = CompileCounter()
    return torch.compile(function, backend=counter, fullgraph=True, dynamic=True), counter


@pytest.mark.parametrize(("name", "gate", "case"), POLICY_CASES)
def test_policy_is_traced_once(name, gate, case):
    skipper = make_skipper(model(), name, gate=gate, **POLICIES.get(name).cases[case])
    num_places = len(skipper.layers)

    def decide(*tensors):
        decisions = [skipper.policies[place](Rows(*tensors, place, num_places)) for place in (0, num_places - 1)]
        return [t + 0 for d in decisions for t in (d.actions, d.weight) if t is not None]

    function, counter = compiled(decide)
    with torch.no_grad():
        for count in (5, 9, 17):
            rows = random_rows(count, 1, num_places, HIDDEN, torch.float32, CPU)
            tensors = (rows.hidden, rows.normed, rows.request_ids, rows.positions, rows.is_prompt, rows.ran)
            for found, expected in zip(function(*tensors), decide(*tensors), strict=True):
                assert torch.equal(found, expected)
    assert counter.frame_count == 1


@pytest.mark.parametrize(("name", "case"), PROJECTOR_CASES)
def test_projector_is_traced_once(name, case):
    projector = make_skipper(model(), "force_run", name, **PROJECTORS.get(name).cases[case]).projectors[0]

    def project(hidden, mlp_input):
        update = projector(hidden, mlp_input)
        return hidden + update if update is not None else hidden + 0

    function, counter = compiled(project)
    with torch.no_grad():
        for count in (5, 9, 17):
            hidden, mlp_input = torch.randn(2, count, HIDDEN, generator=torch.Generator().manual_seed(count))
            assert torch.equal(function(hidden, mlp_input), project(hidden, mlp_input))
    assert counter.frame_count == 1


def test_padding_rows_do_no_harm():
    for name in POLICIES.names():
        skipper = make_skipper(model(), name)
        rows = random_rows(9, 0, len(skipper.layers), HIDDEN, torch.float32, CPU)
        padded = Rows(**{**vars(rows), "positions": torch.where(torch.arange(9) < 5, rows.positions, -1)})
        with torch.no_grad():
            found, expected = skipper.policies[0](padded).actions, skipper.policies[0](rows).actions
        assert torch.equal(found[:5], expected[:5])
