"""The product of nested weights and many rows on Hopper: odd sizes, both formats and precisions, ranges of K, repeated bits, replays."""

from __future__ import annotations

import threading

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from depthfx.lowering.kernel_spec import max_error
from depthfx.lowering.kernels import gated_activation
from depthfx.lowering.kernels._cluster_linear import MIN_ROWS, _is_supported, launch_cluster, uses_cluster
from depthfx.lowering.kernels._dual_weight import plain_weight
from depthfx.lowering.nest import nest
from tests.kernels.checks import poisoned_empty

pytestmark = pytest.mark.skipif(not _is_supported(0), reason="needs compute capability 9 and NVRTC")
# fp32 sums of another order, then one rounding (two where gated) of numbers up to 8
TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 8e-2}


def make(rows, outputs, inputs, name, dtype, full, seed=0):
    """``(x, upper, lower, shift, flags, weight as it counts)``; rows of ``nested_e4m3_scaled`` need shifts."""
    g = torch.Generator("cuda").manual_seed(seed)
    weight = (torch.randn(outputs, inputs, generator=g, device="cuda") * inputs**-0.5).half()
    if name == "nested_e4m3_scaled":
        weight[::3] *= 64
    nested = nest(weight, name)
    assert nested.format == name
    x = torch.randn(rows, inputs, generator=g, device="cuda").to(dtype)
    flags = torch.tensor([7, full], dtype=torch.int32, device="cuda")
    counts = plain_weight(nested.upper, nested.lower, nested.shift, name, bool(full))
    return x, nested.upper, nested.lower, nested.shift, flags, counts


def expected(x, weight, bias, activation):
    """In fp32 of the weights in the dtype of x."""
    y = x.double() @ weight.to(x.dtype).double().t()
    if bias is not None:
        y = y + bias.double()
    return y if activation is None else gated_activation.reference(y.to(x.dtype), activation).double()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("full", [1, 0])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "name", "activation", "splits"),
    [
        (129, 264, 64, "nested_e4m3", None, None), (256, 256, 256, "nested_e5m2", None, 1), (300, 136, 4096, "nested_e4m3_scaled", None, None),
        (513, 8, 512, "nested_e4m3", None, 2), (700, 400, 1088, "nested_e5m2", "silu", None), (130, 528, 576, "nested_e4m3_scaled", "gelu", 3),
        (2049, 272, 320, "nested_e4m3", "gelu_tanh", None), (1100, 2056, 704, "nested_e4m3", None, None),
    ],
)  # fmt: skip
def test_against_plain_products(rows, outputs, inputs, name, activation, splits, full, dtype):
    x, upper, lower, shift, flags, weight = make(rows, outputs, inputs, name, dtype, full)
    assert uses_cluster(x, upper, activation is not None)
    bias = torch.randn(outputs, device="cuda").to(dtype) if activation is None and rows % 2 else None
    if not full:
        lower = torch.full_like(lower, 0xFF)  # is not read
    code = gated_activation.activation_code(activation) if activation else 0
    want = expected(x, weight, bias, activation)
    with poisoned_empty():
        found = launch_cluster(x, upper, lower, shift, flags, 1, name, bias, code, splits)
        again = launch_cluster(x, upper, lower, shift, flags, 1, name, bias, code, splits)
    assert max_error(found, want) < TOLERANCE[dtype] * max(1.0, float(want.abs().max()) / 8)
    assert torch.equal(found, again)


@pytest.mark.parametrize(("name", "limit"), [("nested_e4m3", 1.875), ("nested_e5m2", 30000.0)])
def test_every_code_comes_through(name, limit):
    """Ones on the diagonal of x give the weights back. Larger codes of E5M2 are infinite in fast precision, and times 0 would spoil a sum."""
    codes = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    codes = codes[codes.abs() < limit]
    codes = codes[torch.randperm(len(codes), generator=torch.Generator().manual_seed(0))]
    codes = torch.cat((codes, torch.ones(-len(codes) % 2048, dtype=torch.float16))).view(-1, 256).cuda()
    nested = nest(codes, name)
    assert nested.format == name
    x = torch.eye(256, dtype=torch.float16, device="cuda")
    for full in (1, 0):
        flags = torch.tensor([full], dtype=torch.int32, device="cuda")
        found = launch_cluster(x, nested.upper, nested.lower, nested.shift, flags, 0, name)
        assert torch.equal(found.t().float(), plain_weight(nested.upper, nested.lower, nested.shift, name, bool(full)).float())
        assert not full or torch.equal(found.t().float(), codes.float())


def test_rows_apart_and_columns_of_a_wider_tensor():
    """x may be part of a wider matrix; rows behind the last one are neither read nor written."""
    x, upper, lower, shift, flags, weight = make(200, 256, 512, "nested_e4m3", torch.float16, 1)
    wide = torch.full((200, 1024), float("nan"), device="cuda", dtype=torch.float16)
    wide[:, 64:576] = x
    found = launch_cluster(wide[:, 64:576], upper, lower, shift, flags, 1, "nested_e4m3")
    assert max_error(found, expected(x, weight, None, None)) < TOLERANCE[torch.float16]


def test_a_captured_product_follows_the_flag():
    x, upper, lower, shift, flags, weight = make(384, 512, 2048, "nested_e4m3", torch.float16, 1)
    fast = plain_weight(upper, lower, shift, "nested_e4m3", False)
    launch_cluster(x, upper, lower, shift, flags, 1, "nested_e4m3")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch_cluster(x, upper, lower, shift, flags, 1, "nested_e4m3")
    for full in (1, 0, 1):
        flags[1] = full
        out.fill_(float("nan"))
        graph.replay()
        assert max_error(out, expected(x, weight if full else fast, None, None)) < TOLERANCE[torch.float16]


def test_in_a_thread_that_has_used_no_device():
    """Memory comes from PyTorch's cache, so the product may be the first that such a thread asks of the driver."""
    x, upper, lower, shift, flags, _ = make(200, 512, 1024, "nested_e4m3", torch.float16, 1)
    here = launch_cluster(x, upper, lower, shift, flags, 1, "nested_e4m3")
    launch_cluster(x, upper, lower, shift, flags, 1, "nested_e4m3")  # leaves its memory to the thread
    torch.cuda.synchronize()
    there = []
    thread = threading.Thread(target=lambda: there.append(launch_cluster(x, upper, lower, shift, flags, 1, "nested_e4m3")))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert len(there) == 1 and torch.equal(there[0], here)


@pytest.mark.parametrize(
    ("rows", "inputs", "activation", "times"),
    [(130, 16384, None, 16385), (130, 16384, "silu", 8193), (16400, 64, None, 16385)],
    ids=["weights", "gated weights", "results"],
)
def test_numbers_beyond_31_bits(rows, inputs, activation, times):
    """More than 2^31 weights, or results: 8 columns, many times over. Up to 10 GiB."""
    gated = activation is not None
    x, upper, lower, shift, flags, weight = make(rows, 16 if gated else 8, inputs, "nested_e4m3", torch.float16, 1)
    want = expected(x, weight, None, activation)
    upper, lower = (torch.cat([half.repeat(times, 1) for half in plane.chunk(2 if gated else 1)]) for plane in (upper, lower))
    assert max(upper.numel(), rows * times * 8) > 1 << 31
    code = gated_activation.activation_code(activation) if gated else 0
    found = launch_cluster(x, upper, lower, shift, flags, 1, "nested_e4m3", None, code)
    assert found.shape == (rows, 8 * times)
    for some, those in zip(found.split(256), want.split(256), strict=True):
        assert max_error(some.reshape(-1, times, 8), those[:, None].expand(-1, times, -1)) < TOLERANCE[torch.float16]


def test_what_it_does_not_serve():
    x, upper, *_ = make(MIN_ROWS, 64, 128, "nested_e4m3", torch.float16, 1)
    assert uses_cluster(x, upper, False) and uses_cluster(x, upper, True)
    assert not uses_cluster(x[:-1], upper, False)  # a row less
    assert not uses_cluster(x, upper[:60], False) and not uses_cluster(x, upper[:56], True)  # results in groups of 8
    assert not uses_cluster(x.float(), upper, False) and not uses_cluster(x[:, 1:], upper, False)
    assert not uses_cluster(x.cpu(), upper, False)
