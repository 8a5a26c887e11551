"""Every FP16 code of every format on a CUDA device: split and joined by the format, and through each kernel that reads stored bytes."""

from __future__ import annotations

import functools

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from depthfx.lowering.fragment_order import to_fragment_order
from depthfx.lowering.kernels._cluster_linear import launch_cluster
from depthfx.lowering.kernels._dual_linear import launch_small_dual
from depthfx.lowering.kernels._join_weight import join_weight
from depthfx.lowering.kernels._stream_config import launch_streamed
from depthfx.lowering.nested_format import FORMATS, NestedWeight

ALL = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.float16)
COLUMNS = 256
JOINED = {
    "nested_e4m3": 2 * 16256,
    "nested_e4m3_scaled": 16 * 2 * 16256,
    "nested_e5m2": 2 * 31744,
}  # codes, of each power of two where scaled
hopper = pytest.mark.skipif(torch.cuda.get_device_capability()[0] != 9, reason="a kernel for compute capability 9")


def in_rows(codes: torch.Tensor, fill: float) -> torch.Tensor:
    """``codes`` shuffled into rows of :data:`COLUMNS`, each with ``fill`` in its first column."""
    codes = codes[torch.randperm(len(codes), generator=torch.Generator().manual_seed(0))]
    first = torch.full((1,), fill, dtype=torch.float16)
    codes = torch.cat((codes, first.expand(-len(codes) % (COLUMNS - 1)))).view(-1, COLUMNS - 1)
    return torch.cat((first.expand(len(codes), 1), codes), dim=1)


def every_code(name: str) -> torch.Tensor:
    """``[N, COLUMNS]`` float16 with all finite codes of the format's range; where rows carry a power of two, all codes under each of the 16."""
    below = ALL[ALL.abs() < 1.875]
    if name == "nested_e5m2":  # from 61,440 on the upper byte rounds to infinity: rows of their own
        beyond = ALL.isfinite() & (ALL.abs() >= 61440)
        codes = torch.cat((in_rows(ALL[ALL.isfinite() & ~beyond], 1.0), in_rows(ALL[beyond], 1.0)))
        return torch.cat((codes, codes[: -len(codes) % 8]))  # results come in groups of 8
    if name == "nested_e4m3":
        return in_rows(below, 1.0)
    return torch.cat([in_rows(below * 2.0**k, 1.5 * 2.0**k) for k in range(16)])


@functools.cache
def stored(name: str) -> tuple[torch.Tensor, NestedWeight]:
    """All codes and their bytes in plain order, on the device."""
    codes, form = every_code(name).cuda(), FORMATS.get(name)
    return codes, form.split_any(codes) if name == "nested_e5m2" else form.split(codes)


def planes(name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Upper and lower bytes in stored order, and the shift."""
    nested = stored(name)[1]
    return to_fragment_order(nested.upper).contiguous(), to_fragment_order(nested.lower).contiguous(), nested.shift


@pytest.mark.parametrize("name", FORMATS.names())
def test_the_device_splits_and_joins_as_the_host(name):
    form = FORMATS.get(name)
    codes = ALL[:, None] if name == "plain16" else every_code(name)
    split = form.split_any if name == "nested_e5m2" else form.split
    here, there = split(codes), split(codes.cuda())
    assert there.upper.is_cuda
    for part in ("upper", "lower", "shift"):
        mine, other = getattr(here, part), getattr(there, part)
        assert (mine is None) == (other is None)
        assert mine is None or torch.equal(mine.view(torch.uint8), other.cpu().view(torch.uint8))
    assert torch.equal(form.join(there).cpu().view(torch.int16), codes.view(torch.int16))


@pytest.mark.parametrize("name", JOINED)
def test_the_rows_hold_every_code_under_every_power_of_two(name):
    codes, nested = stored(name)
    shifts = torch.zeros(len(codes), dtype=torch.int8, device="cuda") if nested.shift is None else nested.shift
    pairs = (shifts.long()[:, None] * 65536 + codes.view(torch.int16).long() + 32768).unique()
    assert len(pairs) == JOINED[name]


@pytest.mark.parametrize("name", JOINED)
def test_joining_into_scratch(name):
    codes, nested = stored(name)
    upper, lower, shift = planes(name)
    for full in (1, 0):
        flags = torch.tensor([1 - full, full], dtype=torch.int32, device="cuda")
        found = join_weight(upper, lower, shift, flags, 1, name, torch.full_like(codes, float("nan")))
        want = codes.float() if full else FORMATS.get(name).fast_values(nested).half().float()
        assert torch.equal(found.float(), want)


def small(x, upper, lower, shift, flags, name):
    return launch_small_dual(x, upper, lower, shift, flags, 0, name)


def streamed(x, upper, lower, shift, flags, name):
    return launch_streamed(x, upper, lower, shift, flags, 0, name)


def cluster(x, upper, lower, shift, flags, name):
    return launch_cluster(x, upper, lower, shift, flags, 0, name)


@pytest.mark.parametrize("full", [1, 0])
@pytest.mark.parametrize("name", JOINED)
@pytest.mark.parametrize(
    ("product", "rows"),
    [
        (small, 1), (small, 2), (small, 16), (small, 64),
        *(pytest.param(streamed, rows, marks=hopper) for rows in (1, 32, 64, 128, 256)),
        pytest.param(cluster, 256, marks=hopper),
    ],
)  # fmt: skip
def test_products_with_ones_on_the_diagonal_give_the_weights_back(product, rows, name, full):
    """Rows with a fast value that is infinite are left out in fast precision: infinity times 0 would spoil their sums."""
    codes, nested = stored(name)
    want = codes.float() if full else FORMATS.get(name).fast_values(nested).half().float()
    upper, lower, shift = planes(name)
    keep = want.isfinite().all(dim=1)
    assert len(keep) - int(keep.sum()) == (2 if name == "nested_e5m2" and not full else 0)
    flags = torch.tensor([full], dtype=torch.int32, device="cuda")
    diagonal = torch.eye(COLUMNS, dtype=torch.float16, device="cuda")
    if not full:
        lower = torch.full_like(lower, 0xFF)  # is not read
    for first in range(0, COLUMNS, rows):
        found = product(diagonal[first : first + rows], upper, lower, shift, flags, name)
        assert torch.equal(found.t().float()[keep], want[keep, first : first + rows])
