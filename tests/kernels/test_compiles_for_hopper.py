"""Every kernel compiles for compute capability 9.0 without a GPU, and the matrix kernels use wgmma there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from depthfx.lowering.kernel_spec import KERNELS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def compiled() -> list[dict]:
    """Facts about the code of each launch; compiled in a process of its own, where the interpreter is off."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    script = Path(__file__).with_name("compile_for_hopper.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_every_op_compiles_its_kernel(compiled):
    own = {name for name, spec in KERNELS.items() if spec.launch.__module__.startswith("depthfx.")}  # an example may have added one
    assert {c["op"] for c in compiled} == own
    assert {c["pdl"] for c in compiled} == {True, False}


def test_dependent_launch_appears_only_when_asked_for(compiled):
    assert all((c["gdc"] > 0) == c["pdl"] for c in compiled)


def test_matrix_kernels_use_the_hopper_tensor_cores(compiled):
    assert any(c["kernel"] == "_prefill_attention_kernel" for c in compiled)
    for c in compiled:
        if c["kernel"] == "_prefill_attention_kernel" or c["uses_dot"]:
            assert c["wgmma"] > 0, c


def test_weights_are_copied_asynchronously_or_in_16_byte_loads(compiled):
    for c in compiled:
        if c["kernel"] == "_small_linear_kernel":
            assert (c["cp_async"] if c["uses_dot"] else c["wide_loads"]) > 0, c


def test_dual_weights_go_from_wide_loads_through_registers_to_the_tensor_cores(compiled):
    found = [c for c in compiled if c["kernel"] == "_dual_linear_kernel"]
    assert {(c["op"], c["uses_dot"]) for c in found} == {(op, dot) for op in ("dual_linear", "dual_gated_linear") for dot in (True, False)}
    for c in found:
        assert c["spills"] == 0, c
        if c["uses_dot"]:
            assert c["cp_async"] > 0 and c["register_operands"] == c["wgmma"] > 0, c
        else:
            assert c["wide_loads"] > 0, c


def test_a_product_with_a_bound_asks_for_nothing_before_it_knows_the_bound(compiled):
    """Without one, weights are asked for while the kernel before still runs."""
    streaming = ("_small_linear_kernel", "_dual_linear_kernel", "_hopper_stream_kernel")
    found = [c for c in compiled if c["kernel"] in streaming and c["pdl"]]
    bounded = [c for c in found if "bound" in c["case"]]
    assert {c["kernel"] for c in bounded} == set(streaming) and len(bounded) == 10
    for c in found:
        assert c["asks_before_waiting"] == (c not in bounded), c
        assert c["spills"] == 0, c


def test_the_prefill_kernel_for_hopper_loads_by_the_copy_engine_and_keeps_its_sums_in_registers(compiled):
    found = [c for c in compiled if c["kernel"] == "_hopper_prefill_kernel"]
    assert len(found) == 2
    for c in found:
        assert c["wgmma"] > 0 and c["tensor_copies"] > 0 and c["spills"] == 0, c
        assert c["shared_bytes"] <= 227 << 10


def test_fp8_kv_is_rounded_and_widened_by_instruction(compiled):
    found = [c for c in compiled if "fp8" in c["case"]]
    kernels = [c["kernel"] for c in found]
    assert sorted(set(kernels)) == ["_decode_attention_kernel", "_kv_append_kernel", "_prefill_attention_kernel", "_rotary_append_kernel"]
    for c in found:
        attention = "attention" in c["kernel"]
        assert (c["fp8_reads"] > 0, c["fp8_writes"] > 0, c["spills"]) == (attention, not attention, 0), c
        assert c["cp_async"] > 0 or not attention, c


def test_the_streaming_kernel_copies_by_the_engine_and_multiplies_from_registers(compiled):
    found = [c for c in compiled if c["kernel"] == "_hopper_stream_kernel"]
    assert len(found) == 5
    for c in found:
        assert c["tensor_copies"] > 0 and c["register_operands"] == c["wgmma"] > 0 and c["spills"] == 0, c
        assert c["shared_bytes"] <= 227 << 10
