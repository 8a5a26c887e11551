"""The kernel cases on a CUDA device: eager, and replayed from a graph with dependent launch."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from depthfx.lowering.kernel_spec import KERNELS, enable_pdl, max_error
from tests.kernels.checks import CASES, check_case, outputs

DTYPES = [pytest.param(dtype, id=str(dtype)[6:]) for dtype in (torch.float16, torch.bfloat16)]
HALF = torch.float16


@pytest.fixture
def dependent_launch():
    enable_pdl(True)
    yield
    enable_pdl(False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("spec", "case"), CASES)
def test_launch_equals_reference(spec, case, dtype):
    check_case(spec, case, getattr(torch.ops.depthfx, spec.name), "cuda", dtype)


@pytest.mark.usefixtures("dependent_launch")
@pytest.mark.parametrize(("spec", "case"), CASES)
def test_a_graph_with_dependent_launch_gives_the_same_bits_in_every_replay(spec, case):
    op = getattr(torch.ops.depthfx, spec.name)
    args = case.inputs(torch.device("cuda"), HALF, 0)
    enable_pdl(False)
    expected = [t.clone() for t in outputs(op, args)]  # eager, without dependent launch
    enable_pdl(True)
    outputs(op, args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = outputs(op, args)
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert all(max_error(a, b) == 0.0 for a, b in zip(results, expected, strict=True))


LINEAR_SHAPES = [(6144, 4096), (4096, 14336), (960, 576), (576, 1536), (49152, 576)]


@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 16, 17, 32, 33, 64, 65])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), LINEAR_SHAPES)
def test_linear_on_model_shapes(num_rows, num_outputs, num_inputs):
    g = torch.Generator("cuda").manual_seed(num_rows)
    x = torch.randn(num_rows, num_inputs, generator=g, device="cuda").to(HALF)
    weight = (torch.randn(num_outputs, num_inputs, generator=g, device="cuda") * num_inputs**-0.5).to(HALF)
    residual = torch.randn(num_rows, num_outputs, generator=g, device="cuda").to(HALF)
    exact = x.double() @ weight.double().t()
    # 4e-3: one rounding of fp16 at magnitude 4, after fp32 sums
    assert max_error(torch.ops.depthfx.linear(x, weight, None), exact) < 4e-3
    assert max_error(torch.ops.depthfx.linear_add(x, weight, residual), exact + residual.double()) < 4e-3
    gated = KERNELS.get("gated_linear").reference(x.float(), weight.float(), "silu")
    assert max_error(torch.ops.depthfx.gated_linear(x, weight, "silu"), gated) < 8e-3  # three roundings


def test_attention_in_a_pool_beyond_32_bit_offsets():
    """Blocks behind element 2^31 of the pool are addressed in 64 bits."""
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.fail("needs 8 GiB of free device memory")
    block = 32 * 2 * 8 * 16 * 128
    pool = torch.zeros((1 << 31) // block + 8, 32, 2, 8, 16, 128, dtype=HALF, device="cuda")
    last = pool.shape[0] - 1
    tables = torch.tensor([[last, last - 1]], dtype=torch.int32, device="cuda")
    positions = torch.arange(20, dtype=torch.int32, device="cuda")
    rows = torch.zeros(20, dtype=torch.int32, device="cuda")
    g = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(20, h, 128, generator=g, device="cuda").to(HALF) for h in (32, 8, 8))
    torch.ops.depthfx.kv_append(k, v, pool, 31, positions, rows, tables)
    assert torch.equal(pool[last, 31, 0].transpose(0, 1), k[:16])
    starts = torch.tensor([0, 20], dtype=torch.int32, device="cuda")
    tile = torch.zeros(1, dtype=torch.int32, device="cuda")
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], is_causal=True, enable_gqa=True
    )[0].transpose(0, 1)
    out = torch.ops.depthfx.paged_attention(q, pool, 31, positions, rows, tables, starts, tile, tile, 0, 128**-0.5, 0, 0.0, None)
    assert max_error(out, expected) < 4e-3  # both round their weights to fp16
    decoded = torch.ops.depthfx.paged_attention(
        q[19:], pool, 31, positions[19:], rows[19:], tables, starts, tile, tile, 1, 128**-0.5, 0, 0.0, None
    )
    assert max_error(decoded, expected[19:]) < 4e-3
