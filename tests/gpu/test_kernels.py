"""The kernel cases on a CUDA device: eager, and replayed from a graph with dependent launch."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from depthfx.lowering.kernel_spec import KERNELS, enable_pdl, max_error
from depthfx.lowering.kernels.paged_attention import step_inputs
from depthfx.lowering.kernels.prefill_attention import launch_prefill, prefill_config, uses_hopper_kernel
from tests.kernels.checks import CASES, check_case, outputs
from tests.kernels.fp8_checks import check_every_byte_is_read, check_every_number_is_stored

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


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_kv_holds_every_number_and_gives_every_byte(dtype):
    check_every_number_is_stored(torch.ops.depthfx.kv_append, "cuda", dtype)
    check_every_byte_is_read(torch.ops.depthfx.paged_attention, "cuda", dtype)


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
    added = torch.ops.depthfx.linear_add(x, weight, residual)
    assert max_error(added, exact + residual.double()) < 8e-3  # two roundings
    assert torch.equal(added, residual + torch.ops.depthfx.linear(x, weight, None)), "as the two ops apart"
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


CHUNKS = [
    [(0, 17)],
    [(100, 140), (0, 1)],
    [(0, 64), (7, 65), (1000, 300)],
    [(129, 1), (255, 2), (256, 127), (0, 777), (63, 64)],
    [(4000, 500), (0, 2048)],
]


# (chunks, how much of each is there): neighbours of a tile may lie many tiles of keys apart
GAPPED = [
    ([(0, 300)], (0.05,)),
    ([(0, 4096)], (0.25,)),
    ([(0, 4096)], (0.6,)),
    ([(5, 3000), (100, 2000)], (0.1, 0.5)),
    ([(2000, 1500), (0, 777), (63, 64)], (0.02, 0.9, 0)),
]
HOPPER = pytest.mark.skipif(torch.cuda.get_device_capability()[0] != 9, reason="the kernel is for compute capability 9")
SHAPES = [((8, 2), 128, 16), ((4, 4), 64, 32), ((3, 1), 128, 64)]


@HOPPER
@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
@pytest.mark.parametrize(("heads", "dim", "block"), SHAPES)
def test_both_prefill_kernels_agree(chunks, heads, dim, block):
    """Odd chunks from odd positions."""
    check_prefill(chunks, None, heads, dim, block)


@HOPPER
@pytest.mark.parametrize(("chunks", "shares"), GAPPED, ids=str)
@pytest.mark.parametrize(("heads", "dim", "block"), SHAPES)
def test_both_prefill_kernels_agree_where_rows_are_missing(chunks, shares, heads, dim, block):
    g = torch.Generator().manual_seed(1)
    drawn = zip(shares, chunks, strict=True)
    check_prefill(chunks, [torch.randperm(n, generator=g)[: round(s * n)].sort().values.tolist() for s, (_, n) in drawn], heads, dim, block)


@HOPPER
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_a_program_takes_many_tiles_one_after_another(share):
    """Some fifteen for each multiprocessor, so that one group of warps may run ahead of the other from tile to tile; ten times alike."""
    chunks = [(0, 2048)] * 4
    g = torch.Generator().manual_seed(2)
    kept = [torch.randperm(n, generator=g)[: round(share * n)].sort().values.tolist() for _, n in chunks]
    check_prefill(chunks, kept, (32, 8), 128, 16, repeats=10)


def check_prefill(chunks, kept, heads, dim, block, repeats=2):
    """Both kernels on the same step; slots and blocks that no row may read hold NaN."""
    g = torch.Generator().manual_seed(0)
    lengths = [first + rows for first, rows in chunks]
    width = -(-max(lengths) // block) + 1
    count = width * len(chunks)
    pool = torch.randn(count + 1, 2, 2, heads[1], block, dim, generator=g).to(HALF)
    pool[count] = float("nan")
    tables = torch.randperm(count, generator=g).view(len(chunks), width).to(torch.int32)
    for row, length in enumerate(lengths):
        pool[tables[row, length // block], :, :, :, length % block :] = float("nan")
        tables[row, -(-length // block) :] = count
    step = step_inputs([], chunks, padding_rows=3, kept=kept)
    q = torch.randn(step[0].numel(), heads[0], dim, generator=g).to(HALF).cuda()
    pool, tables, *step = (t.cuda() for t in (pool, tables, *step))
    assert uses_hopper_kernel(q, pool, 0, 0.0, None) and not uses_hopper_kernel(q, pool, 5, 0.0, None)
    assert not uses_hopper_kernel(q, pool.to(torch.float8_e4m3fn), 0, 0.0, None)
    results = []
    for config in (prefill_config(dim, 2), *[None] * repeats):
        out = torch.full_like(q, float("nan"))
        launch_prefill(q, pool, 1, *step[:2], tables, *step[2:], out, 0, dim**-0.5, 0, 0.0, None, config=config)
        results.append(out)
    assert max_error(results[1], results[0]) < 2e-3  # both round their weights to fp16
    assert all(torch.equal(results[1], other) for other in results[2:])
