"""Sensitivity of layers: a profile that names the layer made coarse, and residuals lent in its order."""

from __future__ import annotations

import json

import pytest
import torch

import depthfx
from depthfx.errors import InvalidRequestError, SettingError, UnsupportedOptionError
from depthfx.records import SamplingParams
from depthfx.runtime.elastic_memory import plan_units
from depthfx.runtime.lending_profile import Sensitivity
from tests.families.harness import prompts
from tests.families.test_nested_families import exact

TEXTS = prompts((30, 17))
LENDING = {"kv_blocks": 12, "max_batch_tokens": 64, "max_chunk_tokens": 16, "max_model_len": 128, "block_tokens": 8, "prefix_reuse": False}


def nested(**options):
    """A llama of three layers whose layer 1 adds next to nothing and whose layer 0 adds most."""
    model = exact("llama", num_hidden_layers=3)
    with torch.no_grad():
        for layer, factor in ((0, 4.0), (1, 2.0**-9)):
            model.model.layers[layer].mlp.down_proj.weight.mul_(factor)
            model.model.layers[layer].self_attn.o_proj.weight.mul_(factor)
    return depthfx.compile(model, weights="nested", inductor=False, check=True, **options)


def test_the_profile_ranks_layers_and_changes_nothing(tmp_path):
    model = nested(kv_blocks=64, max_batch_size=8)
    model.set_precision({2: "fast"})
    found = depthfx.measure_sensitivity(model, TEXTS)
    assert found.order == (1, 2, 0) and found.layers[1] >= 0 and found.layers[0] > 2 * found.layers[2] > 4 * found.layers[1]
    assert model.precision() == {0: "full", 1: "full", 2: "fast"}
    found.save(tmp_path / "profile.json")
    assert Sensitivity.load(tmp_path / "profile.json") == found
    with pytest.raises(InvalidRequestError, match="no prompts to measure with"):
        depthfx.measure_sensitivity(model, [])
    with pytest.raises(InvalidRequestError, match=r"600 tokens do not fit one step; 1 to \d+ are allowed, for max_batch_tokens="):
        depthfx.measure_sensitivity(model, [[1] * 600])
    for wrong, why in (
        ([[5, 9999]], r"token 1 of the prompt is 9999; ids must be in \[0, 131\)"),
        (["abc"], "is 'a' of type str; ids must be"),
    ):
        with pytest.raises(InvalidRequestError, match=why):
            depthfx.measure_sensitivity(model, wrong)
    assert model.precision() == {0: "full", 1: "full", 2: "fast"}
    model.engine.add([1, 2, 3], SamplingParams(max_new_tokens=2), "busy")
    with pytest.raises(InvalidRequestError, match="computed by an idle engine"):
        depthfx.measure_sensitivity(model, TEXTS)
    model.engine.abort("busy")


def test_what_suffers_least_lends_first(tmp_path):
    path = str(tmp_path / "profile.json")
    Sensitivity((0.5, 0.1, 0.3)).save(path)
    memory = depthfx.ElasticMemory(unit_mib=0.01, profile=path)
    model = nested(memory=memory, **LENDING)
    runner = model.engine._runner
    _, placed = plan_units(runner.program.stored, runner.shape.kv, 3, 4, memory, 4096)
    assert list(dict.fromkeys(weight.entry for weight, _ in placed)) == [1, 2, 0]
    assert [first for _, first in placed] == sorted(first for _, first in placed)
    model.engine.close()


def test_blocks_of_lent_units_are_not_written():
    """A prompt that fits a step but not the blocks that are always KV would be written over residuals."""
    model = nested(memory=depthfx.ElasticMemory(unit_mib=0.01), **{**LENDING, "kv_blocks": 4})
    base = model.engine._scheduler.manager.max_full_tokens
    assert base < LENDING["max_batch_tokens"]
    depthfx.measure_sensitivity(model, [[1] * base])
    with pytest.raises(
        InvalidRequestError, match=rf"{base + 1} tokens do not fit one step; 1 to {base} are allowed, for .* and {base} tokens of KV"
    ):
        depthfx.measure_sensitivity(model, [[1] * (base + 1)])
    model.engine.close()


def test_weights_of_one_precision_have_no_profile():
    model = depthfx.compile(exact("llama", num_hidden_layers=3), inductor=False, kv_blocks=16)
    with pytest.raises(UnsupportedOptionError):
        depthfx.measure_sensitivity(model, TEXTS)


def test_a_layer_that_stays_fast_cannot_be_measured(monkeypatch):
    model = nested(kv_blocks=64, max_batch_size=8)
    monkeypatch.setattr(model.engine, "precision", lambda: {0: "full", 1: "fast", 2: "full"})
    with pytest.raises(InvalidRequestError, match="layer 1 stays fast, so full precision cannot be compared with"):
        depthfx.measure_sensitivity(model, TEXTS)


@pytest.mark.parametrize(("text", "message"), [
    (None, "cannot be read"), ("{}", "cannot be read"), ("[1, 2]", "cannot be read"), (json.dumps({"kl_nats_per_token": []}), "a finite number for each layer"),
    (json.dumps({"kl_nats_per_token": [float("nan")] * 3}), "a finite number for each layer"),
    (json.dumps({"kl_nats_per_token": [0.1, 0.2]}), "is of 2 layers; the model has 3"),
])  # fmt: skip
def test_profiles_that_do_not_fit(tmp_path, text, message):
    path = tmp_path / "profile.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SettingError, match=message):
        nested(memory=depthfx.ElasticMemory(unit_mib=0.01, profile=str(path)), **LENDING)


def test_an_order_and_a_profile_contradict_each_other():
    with pytest.raises(SettingError, match=r"order=\(1,\) and profile='p.json' both say"):
        depthfx.ElasticMemory(order=(1,), profile="p.json")
    with pytest.raises(SettingError, match="profile"):
        depthfx.ElasticMemory(profile=3)
