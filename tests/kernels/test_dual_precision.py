"""Dual-precision kernels beyond their cases: every code through the packed joins, chunks, splits, FP8 products, error texts."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from depthfx.errors import FormatError
from depthfx.lowering.fragment_order import to_fragment_order
from depthfx.lowering.kernel_spec import INTERPRETED, KERNELS, max_error
from depthfx.lowering.kernels import _join_bytes, _scratch, gated_activation
from depthfx.lowering.kernels._dual_linear import dual_config, launch_small_dual
from depthfx.lowering.kernels._dual_weight import CODINGS, coding_of, draw_inputs, is_full, joined_weight, plain_weight
from depthfx.lowering.kernels._fp8_linear import launch_fp8, row_scales, uses_fp8
from depthfx.lowering.kernels._join_weight import join_weight, launch_joined
from depthfx.lowering.kernels._small_linear import LinearConfig
from depthfx.lowering.nested_format import FORMATS, NestedWeight

CPU = torch.device("cpu")
ALL = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.float16)
LIMITS = {"nested_e4m3": 1.875, "nested_e5m2": float("inf")}  # E5M2 joins every finite code
interpreted = pytest.mark.skipif(not INTERPRETED, reason="launches on CPU tensors")
FLAGS = torch.tensor([0, 1, 0], dtype=torch.int32)  # layer 1 is full


def split_all(name: str, columns: int = 1) -> tuple[torch.Tensor, NestedWeight]:
    """All codes within the format's limit, shuffled, in rows of ``columns`` (the rest is filled with 1.0), and their bytes."""
    codes = ALL[ALL.abs() < LIMITS[name]]
    codes = codes[torch.randperm(len(codes), generator=torch.Generator().manual_seed(0))]
    codes = torch.cat((codes, torch.ones(-len(codes) % columns, dtype=torch.float16))).view(-1, columns)
    form = FORMATS.get(name)
    return codes, form.split_any(codes) if name == "nested_e5m2" else form.split(codes)


def run_ptx(text: str, *inputs: np.ndarray) -> list[np.ndarray]:
    """Execute a block of PTX on uint32 arrays; operands ``$0, $1`` are its results, then come the inputs."""
    registers = {f"${i + 2}": value.astype(np.uint32) for i, value in enumerate(inputs)}

    def prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
        source = np.stack([(x >> np.uint32(8 * i)) & np.uint32(0xFF) for x in np.broadcast_arrays(a, b) for i in range(4)])
        return sum(source[(int(selector) >> 4 * i) & 7] << np.uint32(8 * i) for i in range(4))

    def lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
        terms = [(a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) for i in range(8) if int(table) >> i & 1]
        return np.bitwise_or.reduce(np.broadcast_arrays(*terms))

    operations = {
        "shr.u32": lambda a, n: a >> n, "shl.b32": lambda a, n: a << n, "and.b32": lambda a, b: a & b, "or.b32": lambda a, b: a | b,
        "sub.u32": lambda a, b: a - b, "prmt.b32": prmt, "lop3.b32": lop3,
    }  # fmt: skip
    for name, operands in re.findall(r"^(\w+\.\w+)\s+(.*);$", text, re.MULTILINE):
        target, *sources = [o.strip() for o in operands.split(",")]
        registers[target] = operations[name](*(registers[s] if s in registers else np.uint32(int(s, 0)) for s in sources))
    return [registers["$0"], registers["$1"]]


def four_a_register(t: torch.Tensor) -> np.ndarray:
    return t.flatten().numpy().view(np.uint32)


@pytest.mark.parametrize("mode", ["JOIN", "WIDEN"])
@pytest.mark.parametrize("name", LIMITS)
def test_packed_registers_give_every_code_beside_any_other(name, mode):
    text = getattr(_join_bytes, f"{mode}_{name[-4:].upper()}").value
    codes, nested = split_all(name, columns=4)
    if mode == "JOIN":
        expected = codes
    else:
        finite = FORMATS.get(name).fast_values(nested)
        expected = finite.to(torch.float16)
        assert torch.equal(expected.float(), finite)
    for seed in range(3):  # other neighbours each time
        order = torch.randperm(codes.numel(), generator=torch.Generator().manual_seed(seed))
        upper, lower, want = (t.flatten()[order] for t in (nested.upper, nested.lower, expected))
        low, high = run_ptx(text, four_a_register(upper), *([four_a_register(lower)] if mode == "JOIN" else []))
        joined = torch.from_numpy(np.stack((low, high), axis=1).view(np.int16).copy()).flatten()
        assert torch.equal(joined, want.view(torch.int16))


@interpreted
@pytest.mark.parametrize("columns", [640, 200])
@pytest.mark.parametrize("name", LIMITS)
def test_joined_matrix_holds_every_code(name, columns):
    codes, nested = split_all(name, columns)
    upper, lower = (to_fragment_order(t).contiguous() for t in (nested.upper, nested.lower))
    full = join_weight(upper, lower, None, FLAGS, 1, name, torch.full_like(codes, float("nan")))
    assert torch.equal(full.view(torch.int16), codes.view(torch.int16))
    fast = join_weight(upper, torch.full_like(lower, 255), None, FLAGS, 2, name, torch.full_like(codes, float("nan")))
    assert torch.equal(fast.float(), FORMATS.get(name).fast_values(nested))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", LIMITS)
def test_plain_form_gives_every_code(name, dtype):
    codes, nested = split_all(name)
    upper, lower = to_fragment_order(nested.upper), to_fragment_order(nested.lower)
    full = joined_weight(upper, lower, None, name, True, dtype)
    fast = joined_weight(upper, lower, None, name, False, dtype)
    assert full.dtype is fast.dtype is dtype
    assert torch.equal(full.half().view(torch.int16), codes.view(torch.int16))
    assert torch.equal(fast.float(), FORMATS.get(name).fast_values(nested))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rows_of_a_joined_matrix_keep_their_power_of_two(dtype):
    _x, upper, lower, shift, *_ = draw_inputs((1, 70, 192, "nested_e4m3_scaled", 1, 1))(torch.Generator().manual_seed(0), torch.float16)
    assert len(shift.unique()) > 3
    for layer, full in ((1, True), (0, False)):
        expected = plain_weight(upper, lower, shift, "nested_e4m3_scaled", full)
        out = join_weight(upper, lower, shift, FLAGS, layer, "nested_e4m3_scaled", torch.empty(50, 192, dtype=dtype), first_row=13)
        assert torch.equal(out.float(), expected[13:63].float())


@interpreted
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_by_chunks_equal_one_product(with_bias):
    x, upper, lower, shift, *_ = draw_inputs((70, 50, 192, "nested_e4m3_scaled", 1, 1))(torch.Generator().manual_seed(0), torch.float32)
    bias = torch.randn(50) if with_bias else None
    args = (x, upper, lower, shift, FLAGS, 1, "nested_e4m3_scaled", bias)
    whole = launch_joined(*args)
    assert (
        max_error(whole, torch.nn.functional.linear(x, plain_weight(upper, lower, shift, "nested_e4m3_scaled", True).float(), bias)) < 2e-5
    )
    for rows in (1, 16, 17, 49):
        assert max_error(launch_joined(*args, chunk_bytes=rows * 192 * 4), whole) < 2e-5


@interpreted
@pytest.mark.parametrize("activation", ["", "silu"])
@pytest.mark.parametrize("full", [True, False])
def test_any_split_gives_one_result(activation, full):
    x, upper, lower, shift, *_ = draw_inputs((3, 96, 640, "nested_e4m3_scaled", 1, 1))(torch.Generator().manual_seed(0), torch.float16)
    code = gated_activation.activation_code(activation) if activation else 0
    product = x.float() @ plain_weight(upper, lower, shift, "nested_e4m3_scaled", full).float().t()
    expected = gated_activation.reference(product.half(), "silu") if activation else product
    for split in (1, 2, 3, 5, 16):
        config = LinearConfig(block_n=32, block_k=128, split_k=split, num_warps=4, num_stages=1, use_dot=True)
        for c in (config, replace(config, use_dot=False) if split == 1 else config):
            rows = 2 if not c.use_dot else 3
            out = launch_small_dual(x[:rows], upper, lower, shift, FLAGS, 1 if full else 2, "nested_e4m3_scaled", activation=code, config=c)
            assert max_error(out, expected[:rows]) < 4e-3
    assert not _scratch.scratch_of(CPU, 1, 1).counters.any()


@pytest.mark.parametrize("num_rows", [1, 2, 3, 16, 64])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(28672, 4096), (4096, 14336), (6144, 4096), (576, 576), (33, 40)])
def test_configs_fit_the_fragments_and_the_machine(num_rows, num_outputs, num_inputs):
    config = dual_config(num_rows, num_outputs, num_inputs, 132)
    assert config.block_k % 64 == 0 and config.block_n % 2 == 0
    assert config.split_k == 1 or config.use_dot
    block_t = max(16, 1 << (num_rows - 1).bit_length())
    shared = config.num_stages * config.block_k * 2 * (config.block_n + block_t)
    assert not config.use_dot or (config.block_n >= 64 and shared <= 227 << 10)


@interpreted
@pytest.mark.parametrize("name", CODINGS)
def test_fp8_products_agree_with_their_formula(name):
    """On a CPU the scaled product is PyTorch's own; order, scales and shifts are the same."""
    x, upper, lower, shift, *_ = draw_inputs((5, 48, 192, name, 0, 0))(torch.Generator().manual_seed(0), torch.float32)
    weight = plain_weight(upper, lower, shift, name, False)
    quantized, scale = KERNELS.get("quantize_rows").reference(x)
    rounded = torch.empty(5, 192)
    rounded[:, to_fragment_order(torch.arange(192)[None])[0]] = quantized.float() * scale[:, None]
    scales = row_scales(48, shift, coding_of(name, shift), CPU)
    stored = upper.view(FORMATS.get(name).fp8).float()
    assert max_error((quantized.float() @ stored.t()) * scale[:, None] * scales, rounded @ weight.t()) < 1e-5
    bias = torch.randn(48, generator=torch.Generator().manual_seed(1))
    out = launch_fp8(x.half(), upper, shift, name, bias.half())
    halves = KERNELS.get("quantize_rows").reference(x.half())
    exact = (halves[0].float() @ stored.t()) * halves[1][:, None] * scales + bias
    assert out.dtype is torch.float16 and max_error(out, exact) < 4e-3  # two roundings to fp16
    assert max_error(rounded, x) < 0.04  # half a step of three bits, relative to 1 + |x|


@interpreted
def test_numbers_that_are_none_stay_none_in_fp8():
    x = torch.tensor([[1.0, float("nan"), 3.0], [1.0, 2.0, -4.0]])
    quantized, scale = KERNELS.get("quantize_rows").launch(x)
    assert quantized.float().isnan().tolist() == [[False, True, False], [False] * 3]
    assert quantized[1].float().tolist() == [112.0, 224.0, -448.0] and scale[1] == torch.tensor(4.0) / 448


def test_fp8_products_are_for_known_fast_steps_on_hopper():
    x, upper = torch.zeros(512, 64, dtype=torch.float16), torch.zeros(64, 64, dtype=torch.uint8)
    assert not uses_fp8(x, upper, 0)  # a CPU
    with pytest.raises(FormatError, match="plain16"):
        launch_fp8(x, upper, None, "plain16")


def test_what_does_not_belong_together_is_named():
    upper = torch.zeros(4, 8, dtype=torch.uint8)
    with pytest.raises(FormatError, match=r"'plain16' has no dual-precision product; allowed: nested_e4m3, .*16-bit"):
        coding_of("plain16", None)
    with pytest.raises(FormatError, match="'nested_e4m3_scaled' came with no shift"):
        coding_of("nested_e4m3_scaled", None)
    with pytest.raises(FormatError, match=r"'nested_e5m2' came with a shift of shape \(4,\)"):
        coding_of("nested_e5m2", torch.zeros(4, dtype=torch.int8))
    with pytest.raises(ValueError, match="precision 2 is not known"):
        is_full(FLAGS, 0, 2)
    for wrong in (upper.t().contiguous(), upper.float(), torch.zeros(8, 4, dtype=torch.uint8).t()):
        with pytest.raises(ValueError, match=r"the lower bytes are .*both planes"):
            join_weight(upper, wrong, None, FLAGS, 0, "nested_e4m3", torch.empty(4, 8))
