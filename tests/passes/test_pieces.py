"""Splitting: equal pieces share one compiled body, and the KV pool never enters one."""

from __future__ import annotations

import re

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor import cpu_vec_isa
from torch._inductor.utils import run_and_get_code
from transformers import OPTConfig

import depthfx
from depthfx.passes import pipeline
from tests.families.configs import VOCABULARY, build, randomised
from tests.families.harness import alone, prompts

POOL_BLOCKS = 61  # a size that nothing else has


def pieces(compiled):
    program = compiled.engine._runner.program.module
    return program, [n for n in program.graph.nodes if n.op == "call_module" and str(n.target).startswith("piece")]


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_neox"])
def test_bodies_do_not_grow_with_the_number_of_layers(name):
    bodies, counts = [], []
    for layers in (4, 6):
        program, calls = pieces(depthfx.compile(build(name, num_hidden_layers=layers), inductor=False, kv_blocks=4))
        counts.append(len(calls))
        bodies.append(len({id(program.get_submodule(n.target).compiled.__self__) for n in calls}))
        for call in calls:
            assert not any(a.name == "kv_pool" for a in call.all_input_nodes)
    assert bodies[0] == bodies[1] < 6
    assert counts[1] > counts[0] or name == "llama"


def opt():
    """Its layers fold the rows with a ``torch.Size`` that they unfold them with."""
    sizes = {"hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "word_embed_proj_dim": 64}
    return randomised(OPTConfig(**sizes, vocab_size=VOCABULARY, max_position_embeddings=256))


@pytest.mark.parametrize("make", [lambda: build("gpt2"), lambda: build("gpt_neox"), opt], ids=["gpt2", "gpt_neox", "opt"])
def test_pieces_yield_tensors_alone(make, monkeypatch):
    """A product that is split into queries, keys and values ends a piece of GPT-2, which no compiler takes with a tuple for a result."""
    yields = []

    def look(piece, inputs):
        (results,) = (n.args[0] for n in piece.graph.nodes if n.op == "output")
        yields.extend(type(n.meta["example_value"]) for n in results)
        return piece.forward

    monkeypatch.setattr(pipeline, "run_eagerly", look)
    model = depthfx.compile(make(), inductor=False, kv_blocks=16, program_cache=False)
    rows = prompts((9, 21))
    assert alone(model, rows) == alone(make(), rows)
    assert yields and not {tuple, list, torch.Size} & set(yields)


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: build("gpt2"), opt], ids=["gpt2", "opt"])
def test_what_is_split_with_tuples_compiles(make):
    row = [[5, 6, 7, 8, 9]]
    assert alone(depthfx.compile(make(), kv_blocks=4), row) == alone(make(), row)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_inductor_code_holds_nothing_of_the_size_of_the_pool(kv_dtype):
    model = build("gemma2")
    cpu_vec_isa.pick_vec_isa()  # without caches it is found out by ten runs of the compiler, in every process
    with inductor_config.patch(force_disable_caches=True):
        compiled, code = run_and_get_code(lambda: depthfx.compile(model, kv_blocks=POOL_BLOCKS, max_batch_size=4, kv_dtype=kv_dtype))
    assert len(code) > 1
    pool = compiled.engine._runner.kv_pool
    assert pool.shape[0] == POOL_BLOCKS and (pool.dtype is torch.float8_e4m3fn) == (kv_dtype == "fp8")
    for text in code:
        sizes = [int(n) for shape in re.findall(r"empty_strided\w*\(\(([^)]*)\)", text) for n in re.findall(r"\b\d+\b", shape)]
        assert POOL_BLOCKS not in sizes and pool.numel() not in sizes
        assert "aten.clone" not in text and "kv_pool" not in text
    before = pool.data_ptr()
    alone(compiled, [[5, 6, 7]])
    assert compiled.engine._runner.kv_pool.data_ptr() == before and bool((pool.float() != 0).any())


def test_two_models_in_one_process():
    """Sizes and families of an earlier compilation leave no trace in a later one."""
    sizes = [("llama", {}), ("gemma2", {"num_hidden_layers": 2}), ("llama", {"hidden_size": 96, "num_hidden_layers": 4}), ("llama", {})]
    row = [[5, 6, 7, 8, 9]]
    models = [(name, changes, depthfx.compile(build(name, **changes), inductor=False, kv_blocks=8)) for name, changes in sizes]
    for name, changes, compiled in models:
        original = build(name, **changes)
        assert compiled.config._attn_implementation == original.config._attn_implementation == "eager"
        assert alone(compiled, row) == alone(original, row)
        with torch.no_grad():
            torch.testing.assert_close(compiled(torch.tensor(row)).logits, original(torch.tensor(row)).logits, atol=2e-5, rtol=2e-5)
