"""Tokens that skip layers of nested weights, in both precisions, against Hugging Face's own layers chosen from row by row."""

from __future__ import annotations

import pytest
import torch

import depthfx
from depthfx.lowering.kernel_spec import max_error
from depthfx.lowering.nested_linear import nested_linears
from tests.families.configs import FAMILIES
from tests.families.harness import prompts
from tests.families.routed_cases import COMMON, make
from tests.families.routed_reference import routed_answer
from tests.families.test_every_family import TOLERANCE
from tests.families.test_nested_families import exact, fast_values
from tests.families.test_routed_families import generated

RAGGED = prompts((33, 7))
NESTED = [name for name in FAMILIES if name != "gpt2"]  # its linears are Conv1D, which are refused


@pytest.mark.parametrize("name", NESTED)
def test_logits_in_both_precisions(name):
    """Prompts and answers of ragged batches; fast weights are what the format itself states."""
    model, plain = exact(name), exact(name)
    skipper = make("mlp", model.config.num_hidden_layers)
    model = depthfx.compile(model, skipper=skipper, weights="nested", **COMMON)
    skipped = torch.zeros(2)
    for precision in ("full", "fast"):
        if precision == "fast":
            with torch.no_grad():
                for path, module in nested_linears(model).items():
                    plain.get_submodule(path).weight.copy_(fast_values(module))
        model.set_precision(precision)
        for prompt, row, mine, request_id in _answers(model):
            answer = routed_answer(plain, name, skipper, prompt + row[:-1], len(prompt), request_id)
            assert max_error(mine, answer.logits[len(prompt) - 1 :]) < TOLERANCE, precision
            skipped += (answer.actions == 0).sum(1)
    assert (skipped > 0).all(), "the case skips in every layer"


def _answers(model):
    """``(prompt, tokens, logits, request id)`` of each prompt."""
    ids, tokens, logits = generated(model, RAGGED)
    return list(zip(RAGGED, tokens, logits, ids, strict=True))
