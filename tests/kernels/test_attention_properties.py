"""Attention kernels beyond their cases: split counts, reused counters, scratch, and the error texts."""

from __future__ import annotations

import pytest
import torch

from depthfx.lowering.kernel_spec import INTERPRETED, KERNELS, max_error
from depthfx.lowering.kernels import _scratch
from depthfx.lowering.kernels.decode_attention import MAX_SPLITS, DecodeConfig, decode_config, launch_decode

CPU = torch.device("cpu")


def _decode_inputs():
    """q, pool, layer, positions, table rows and block tables of the decode case that has sinks."""
    spec = KERNELS.get("paged_attention")
    case = next(c for c in spec.cases if c.label == "decode-8:1x80-splits-sinks")
    return spec, case.inputs(CPU, torch.float32, 3)


@pytest.mark.skipif(not INTERPRETED, reason="launches on CPU tensors")
@pytest.mark.parametrize("num_splits", [1, 2, 3, 7, 16])
def test_any_number_of_key_ranges_gives_one_result(num_splits):
    spec, args = _decode_inputs()
    q, pool, layer, positions, table_rows, tables, *_, num_rows, scale, window, softcap, sinks = args
    expected = spec.reference(*args)
    for _ in range(2):  # the second launch finds the counters that the first left behind
        out = torch.full_like(expected, float("nan"))
        launch_decode(
            q, pool, layer, positions, table_rows, tables, out, num_rows, scale, window, softcap, sinks,
            config=DecodeConfig(block_keys=32, num_warps=4, num_stages=1, num_splits=num_splits),
        )  # fmt: skip
        assert max_error(out, expected) < 2e-5  # fp32 sums in another order
    assert not _scratch.scratch_of(CPU, 1, 1).counters.any()


@pytest.mark.parametrize("num_rows", [1, 4, 32, 256])
@pytest.mark.parametrize("max_keys", [16, 512, 4096, 131072])
def test_decode_plan_fits_the_machine(num_rows, max_keys):
    config = decode_config(num_rows, 8, max_keys, 128, 132)
    assert 1 <= config.num_splits <= MAX_SPLITS
    assert (config.num_splits - 1) * config.block_keys < max_keys
    assert num_rows * 8 * config.num_splits <= max(8 * num_rows * 8, 4 * 132)


def test_reserved_scratch_serves_every_decode_plan():
    _scratch.reserve_scratch(CPU, 64, 32, 128)
    held = _scratch.scratch_of(CPU, 1, 1)
    for num_rows in range(1, 65):
        for max_keys in (64, 4096, 1 << 20):
            splits = decode_config(num_rows, 8, max_keys, 128, 132).num_splits
            assert _scratch.scratch_of(CPU, splits * num_rows * 32 * 130, num_rows * 8) is held


def test_growing_keeps_the_scratch_that_graphs_may_hold():
    before = _scratch.scratch_of(CPU, 1, 1)
    after = _scratch.scratch_of(CPU, before.values.numel() + 1, 1)
    assert after is not before
    assert any(kept is before for kept in _scratch._held)


def test_rows_of_the_wrong_width_are_named():
    args = list(KERNELS.get("rotary_append").cases[0].inputs(CPU, torch.float32, 0))
    args[0] = args[0][:, :-1]
    with pytest.raises(ValueError, match="it must be"):
        KERNELS.get("rotary_append").reference(*args)


@pytest.mark.parametrize(("heads", "kv_heads"), [(5, 2), (0, 0)])
def test_heads_that_the_pool_has_not_are_named(heads, kv_heads):
    args = list(KERNELS.get("rotary_append").cases[0].inputs(CPU, torch.float32, 0))
    args[0], args[11:13] = args[0][:, : (heads + 2 * kv_heads) * 64], [heads, kv_heads]
    with pytest.raises(ValueError, match=f"{heads} query heads and {kv_heads} KV heads do not fit a pool of 3"):
        KERNELS.get("rotary_append").reference(*args)


def test_unknown_activation_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match="'relu' is not known; allowed: silu"):
        KERNELS.get("gated_activation").reference(torch.zeros(1, 4), "relu")
