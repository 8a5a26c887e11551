"""The native CPU kernels against float64, at sizes that leave remainders everywhere, with poison where nothing may be read."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from depthfx.lowering import native, ops  # noqa: F401  (ops registers all kernels)
from depthfx.lowering.kernel_spec import Case, KernelSpec
from tests.kernels.checks import CASES, check_case, poisoned_empty

pytestmark = pytest.mark.skipif(not native.available()[0], reason=f"native kernels: {native.available()[1]}")


@pytest.fixture(autouse=True)
def _seeded_and_poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Results start as NaN: an element that no kernel wrote cannot pass."""
    torch.manual_seed(11)
    monkeypatch.setattr(native, "_empty_strided_cpu", lambda shape, stride, dtype: torch.full(shape, float("nan"), dtype=dtype))
    with poisoned_empty():
        yield


ROOT = Path(__file__).resolve().parents[2]
ROWS = (1, 2, 3, 7, 8, 13, 16, 32)


def error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    assert actual.dtype == torch.float32
    assert actual.shape == exact.shape
    return float((actual.double() - exact).abs().max())


def assert_as_good(actual: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor, scale: float | None = None) -> None:
    """No further from float64 than twice torch's own fp32 result, plus two roundings of ``scale`` (the largest value)."""
    scale = float(exact.abs().max()) if scale is None else scale
    allowed = 2 * error(plain, exact) + 1.2e-7 * scale
    assert error(actual, exact) <= allowed, f"error {error(actual, exact):.2e}, torch's own {error(plain, exact):.2e}"


def poisoned(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"))


def strided(x: torch.Tensor, extra: int = 5) -> torch.Tensor:
    """The same numbers with NaN behind each row."""
    wide = poisoned(x.shape[0], x.shape[1] + extra)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


# ------------------------------------------------------------------------------------------------------ linear


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("outputs,inner", [(96, 64), (37, 53), (1, 7), (200, 576), (49, 16), (130, 1537)])
def test_small_linear(rows: int, outputs: int, inner: int) -> None:
    x, weight = torch.randn(rows, inner), torch.randn(outputs, inner)
    bias, residual = torch.randn(outputs), torch.randn(rows, outputs)
    exact = x.double() @ weight.double().T
    terms = float((x.abs() @ weight.abs().T).max())  # torch's own error may be zero by luck where there is one output
    assert_as_good(native.small_linear(strided(x), weight), F.linear(x, weight), exact, terms)
    full = native.small_linear(x, weight, bias, strided(residual))
    assert_as_good(full, F.linear(x, weight, bias) + residual, exact + bias + residual, terms)


@pytest.mark.parametrize("activation", native.ACTIVATIONS)
@pytest.mark.parametrize("rows,features,inner", [(1, 48, 64), (3, 33, 100), (8, 1536, 576), (13, 65, 31)])
def test_gated_linear(activation: str, rows: int, features: int, inner: int) -> None:
    x, weight = torch.randn(rows, inner), torch.randn(2 * features, inner) / inner**0.5 * 2
    bias, residual = torch.randn(2 * features), torch.randn(rows, features)

    def gated(wide: torch.Tensor) -> torch.Tensor:
        gate, up = wide.chunk(2, dim=-1)
        if activation == "silu":
            return F.silu(gate) * up
        return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up

    exact = F.linear(x.double(), weight.double(), bias.double())
    plain = F.linear(x, weight, bias)
    assert_as_good(native.small_linear(x, weight, bias, residual, activation), gated(plain) + residual, gated(exact) + residual)
    # the op on joined projections
    assert_as_good(native.gated_activation(strided(plain), activation), gated(plain), gated(plain.double()))
    assert native.gated_activation(plain[None], activation).shape == (1, rows, features)


@pytest.mark.parametrize("activation", native.ACTIVATIONS)
def test_activations_at_the_ends_of_the_range(activation: str) -> None:
    gate = torch.cat((torch.linspace(-12, 12, 4001), torch.tensor([0.0, -0.0, 1e-20, -1e-20, 88.0, -88.0, 200.0, -200.0, 1e30, -1e30])))
    gate_up = torch.cat((gate, torch.ones_like(gate)))[None]
    wide = gate.double()
    plain = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    exact = F.silu(wide) if activation == "silu" else F.gelu(wide, approximate="tanh" if activation == "gelu_tanh" else "none")
    actual = native.gated_activation(gate_up, activation)[0]
    assert bool(actual.isfinite().all())
    scale = 1 + gate.double().abs()
    assert float(((actual - exact) / scale).abs().max()) <= 2 * float(((plain - exact) / scale).abs().max()) + 6e-8
    assert bool(native.gated_activation(torch.tensor([[float("nan"), 1.0]]), activation).isnan().all())


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    x, weight = torch.randn(32, 577), torch.randn(101, 577)
    alone = torch.cat([native.small_linear(x[i : i + 1], weight) for i in range(32)])
    for rows in ROWS:
        assert torch.equal(native.small_linear(x[:rows], weight), alone[:rows])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_results_are_fp32_whatever_the_default_dtype(dtype: torch.dtype) -> None:
    gate_up = torch.randn(5, 64)
    expected = native.gated_activation(gate_up, "silu")
    torch.set_default_dtype(dtype)
    try:
        result = native.gated_activation(gate_up, "silu")
    finally:
        torch.set_default_dtype(torch.float32)
    assert result.dtype is torch.float32 and torch.equal(result, expected)


def test_nan_reaches_only_its_row() -> None:
    x, weight = torch.randn(3, 40), torch.randn(20, 40)
    x[1, 39] = float("nan")
    y = native.small_linear(x, weight)
    assert bool(y[1].isnan().all())
    assert bool(y[[0, 2]].isfinite().all())


def test_tensors_it_cannot_read_are_refused() -> None:
    x, weight = torch.randn(2, 8), torch.randn(4, 8)
    for bad in (
        lambda: native.small_linear(torch.randn(33, 8), weight),
        lambda: native.small_linear(x, torch.randn(8, 4).T),
        lambda: native.small_linear(x, torch.randn(4, 9)),
        lambda: native.small_linear(x.double(), weight.double()),
        lambda: native.small_linear(torch.randn(8, 2).T, weight),
        lambda: native.small_linear(x, weight, bias=torch.randn(5)),
        lambda: native.small_linear(x, weight, residual=torch.randn(2, 5)),
        lambda: native.small_linear(x, weight, activation="relu"),
        lambda: native.rms_norm(x, torch.randn(7), 1e-5),
    ):
        with pytest.raises(ValueError):
            bad()
    assert not native.usable(x, weight.half())
    assert native.usable(x, None, weight)


# ------------------------------------------------------------------------------------------------------ norms


@pytest.mark.parametrize("shape", [(1, 576), (3, 64), (2, 5, 80), (17, 33), (4, 2049)])
def test_norms(shape: tuple[int, ...]) -> None:
    x, residual, weight = torch.randn(shape), torch.randn(shape), 1 + 0.1 * torch.randn(shape[-1])

    def exact(wide: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(wide.double(), (shape[-1],), factor.double(), 1e-6)

    assert_as_good(native.rms_norm(x, weight, 1e-6), F.rms_norm(x, (shape[-1],), weight, 1e-6), exact(x, weight))
    assert_as_good(native.rms_norm(x, weight, 1e-6, offset=1.0), F.rms_norm(x, (shape[-1],), weight + 1, 1e-6), exact(x, weight + 1))
    normed, total = native.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert_as_good(normed, F.rms_norm(total, (shape[-1],), weight, 1e-6), exact(total, weight))


# ------------------------------------------------------------------------------------------------------ paged KV


class Paged:
    """Requests of given lengths in a pool of NaN, blocks in random order, one padding row behind the live ones."""

    def __init__(self, lengths: list[int], kv_heads: int, head_dim: int, block_tokens: int = 16, layers: int = 3) -> None:
        self.lengths, self.layer, self.block_tokens = lengths, 1, block_tokens
        columns = max(lengths) // block_tokens + 2
        blocks = len(lengths) * columns + 2
        self.tables = torch.randperm(blocks)[: len(lengths) * columns].view(len(lengths), columns).to(torch.int32)
        self.pool = poisoned(blocks, layers, 2, kv_heads, block_tokens, head_dim)
        self.kv = [torch.randn(2, kv_heads, n, head_dim) for n in lengths]
        for request, data in enumerate(self.kv):
            for j in range(lengths[request]):
                self.slot(request, j)[:] = data[:, :, j]
        order = torch.randperm(len(lengths))
        self.table_rows = torch.cat((order, order[:1])).to(torch.int32)
        self.positions = torch.tensor([lengths[s] - 1 for s in order] + [-1], dtype=torch.int32)

    def slot(self, request: int, position: int) -> torch.Tensor:
        block = int(self.tables[request, position // self.block_tokens])
        return self.pool[block, self.layer, :, :, position % self.block_tokens]

    @property
    def step(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.positions, self.table_rows, self.tables


def attention(
    q: torch.Tensor, paged: Paged, scale: float, window: int, softcap: float, sinks: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    out = torch.zeros(q.shape, dtype=dtype)
    for t, (position, request) in enumerate(zip(paged.positions.tolist(), paged.table_rows.tolist())):
        if position < 0:
            continue
        first = max(0, position - window + 1) if window else 0
        k, v = paged.kv[request][:, :, first : position + 1].to(dtype).repeat_interleave(q.shape[1] // paged.pool.shape[3], dim=1)
        scores = torch.einsum("hd,hkd->hk", q[t].to(dtype), k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat((scores, sinks.to(dtype)[:, None]), dim=1)
        weights = scores.softmax(-1)[:, : k.shape[1]]
        out[t] = torch.einsum("hk,hkd->hd", weights, v)
    return out


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256, 36])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("window,softcap,with_sinks", [(0, 0.0, False), (37, 0.0, False), (0, 30.0, False), (300, 20.0, True)])
def test_paged_decode_attention(head_dim: int, group: int, window: int, softcap: float, with_sinks: bool) -> None:
    kv_heads = 2
    paged = Paged([1, 16, 17, 70, 533], kv_heads, head_dim, block_tokens=8 if head_dim == 80 else 16)
    wide = torch.randn(6, kv_heads * group + 2, head_dim + 3) * 1.5  # strides over rows and heads
    q = wide[:, 1:-1, :head_dim]
    sinks = torch.randn(kv_heads * group) if with_sinks else None
    options = (head_dim**-0.5, window, softcap, sinks)
    out = native.paged_decode_attention(q, paged.pool, paged.layer, *paged.step, *options)
    assert bool((out[-1] == 0).all())
    plain = attention(q, paged, *options, torch.float32)
    assert_as_good(out, plain, attention(q, paged, *options, torch.float64))
    again = native.paged_decode_attention(q, paged.pool, paged.layer, *paged.step, *options)
    assert torch.equal(out, again)


@pytest.mark.parametrize("block_tokens", [8, 32, 128])
def test_attention_bits_depend_on_the_row_alone(block_tokens: int) -> None:
    paged = Paged([700, 5, 256, 257], 2, 64, block_tokens)
    q = torch.randn(5, 6, 64)
    out = native.paged_decode_attention(q, paged.pool, 1, *paged.step, 0.125)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(out, native.paged_decode_attention(q, paged.pool, 1, *paged.step, 0.125))
    finally:
        torch.set_num_threads(threads)
    for t in range(5):
        one = native.paged_decode_attention(
            q[t : t + 1], paged.pool, 1, paged.positions[t : t + 1], paged.table_rows[t : t + 1], paged.tables, 0.125
        )
        assert torch.equal(one[0], out[t])


def test_attention_with_huge_scores() -> None:
    paged = Paged([40, 90], 1, 64)
    q = 300 * torch.randn(3, 2, 64)
    args = (1.0, 0, 0.0, None)
    out = native.paged_decode_attention(q, paged.pool, 1, *paged.step, *args)
    assert_as_good(out, attention(q, paged, *args, torch.float32), attention(q, paged, *args, torch.float64))


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("heads,kv_heads,head_dim,rotary_dim", [(9, 3, 64, 64), (4, 4, 80, 32), (8, 1, 128, 128), (3, 1, 96, 20)])
def test_rotary_append(norms: bool, heads: int, kv_heads: int, head_dim: int, rotary_dim: int) -> None:
    paged = Paged([3, 16, 40], kv_heads, head_dim)
    qkv = torch.randn(4, (heads + 2 * kv_heads) * head_dim)
    angles = torch.rand(4, rotary_dim) * 6
    cos, sin = angles.cos(), angles.sin()
    q_norm, k_norm = (1 + 0.1 * torch.randn(head_dim) for _ in range(2)) if norms else (None, None)

    def plain(dtype: torch.dtype) -> torch.Tensor:
        x = qkv.to(dtype).view(4, -1, head_dim).clone()
        if q_norm is not None and k_norm is not None:
            x[:, :heads] = F.rms_norm(x[:, :heads], (head_dim,), q_norm.to(dtype), 1e-6)
            x[:, heads : heads + kv_heads] = F.rms_norm(x[:, heads : heads + kv_heads], (head_dim,), k_norm.to(dtype), 1e-6)
        turned = x[:, : heads + kv_heads, :rotary_dim]
        low, high = turned.chunk(2, dim=-1)
        half = torch.cat((-high, low), dim=-1)
        x[:, : heads + kv_heads, :rotary_dim] = turned * cos.to(dtype)[:, None] + half * sin.to(dtype)[:, None]
        return x

    before = paged.pool.clone()
    q = native.rotary_append(
        strided(qkv), strided(cos), strided(sin), q_norm, k_norm, 1e-6, paged.pool, 1, *paged.step, heads, kv_heads, head_dim
    )
    fp32, exact = plain(torch.float32), plain(torch.float64)
    assert_as_good(q, fp32[:, :heads], exact[:, :heads])
    for t, (position, request) in enumerate(zip(paged.positions.tolist(), paged.table_rows.tolist())):
        if position >= 0:
            written = paged.slot(request, position)
            assert_as_good(written[0], fp32[t, heads : heads + kv_heads], exact[t, heads : heads + kv_heads])
            assert torch.equal(written[1], fp32[t, heads + kv_heads :])
            block = int(paged.tables[request, position // 16])
            before[block, 1, :, :, position % 16] = written
    assert torch.equal(before.nan_to_num(1e9), paged.pool.nan_to_num(1e9)), "a slot beside the rows' own was written"


def test_kv_append() -> None:
    paged = Paged([3, 33, 40], 3, 80)
    expected = paged.pool.clone()
    k, v = torch.randn(3, 4, 80).transpose(0, 1), torch.randn(4, 9, 80)[:, 6:]
    native.kv_append(k, v, paged.pool, 1, *paged.step)
    for t, (position, request) in enumerate(zip(paged.positions.tolist(), paged.table_rows.tolist())):
        if position >= 0:
            block = int(paged.tables[request, position // 16])
            expected[block, 1, 0, :, position % 16] = k[t]
            expected[block, 1, 1, :, position % 16] = v[t]
    assert torch.equal(expected.nan_to_num(1e9), paged.pool.nan_to_num(1e9))


# ------------------------------------------------------------------------------------------------------ building

BUILD = """
import torch
from depthfx.lowering import native
found, reason = native.available()
if found:
    x, w = torch.ones(2, 40), torch.ones(50, 40)
    assert bool((native.small_linear(x, w) == 40).all())
    runtimes = {line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line or "libiomp" in line or "libomp" in line}
    assert len(runtimes) == 1, runtimes
print(found, reason)
"""


def start(cache: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "DEPTHFX_CACHE": str(cache), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", BUILD], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_two_processes_build_at_once(tmp_path: Path) -> None:
    for text in [process.communicate(timeout=110)[0] for process in [start(tmp_path) for _ in range(2)]]:
        assert text.split() == ["True"], text
    assert [p.suffix for p in (tmp_path / "native").iterdir()] == [".so"]


@pytest.fixture
def not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder, and a process that has not asked for the library yet."""
    monkeypatch.setattr(native, "_library", None)
    monkeypatch.setattr(native, "_reason", None)
    monkeypatch.setenv("DEPTHFX_CACHE", str(tmp_path))
    return tmp_path


def test_without_a_compiler_the_reason_is_given(not_built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(not_built))
    found, reason = native.available()
    assert not found and reason.startswith("no g++ on PATH"), reason
    assert not native.usable(torch.ones(1))


def test_a_failing_compiler_is_quoted(not_built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = not_built / "g++"
    compiler.write_text("#!/bin/sh\necho 'fatal error: out of ink' >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{not_built}:{os.environ['PATH']}")
    found, reason = native.available()
    assert not found and "out of ink" in reason, reason


@pytest.mark.parametrize(("spec", "case"), [p for p in CASES if p.values[0].cpu is not None])
def test_without_the_library_the_plain_forms_serve(spec: KernelSpec, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "usable", lambda *tensors: False)
    check_case(spec, case, spec.cpu, "cpu", torch.float32, seed=2)
