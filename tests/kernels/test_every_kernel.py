"""Every registered kernel: interpreted launch and CPU form against the reference, and the op's own contract."""

from __future__ import annotations

import pytest
import torch

from depthfx.errors import RegistryError
from depthfx.lowering.kernel_spec import INTERPRETED, KERNELS, register_kernel
from tests.kernels.checks import CASES, check_case

WIDTHS = (torch.float32, torch.float16, torch.bfloat16)
DTYPES = [pytest.param(dtype, id=str(dtype)[6:]) for dtype in WIDTHS]
# The interpreter is slow: the first case of a kernel in every dtype, each other case in the next one.
INTERPRETED_CASES = [
    pytest.param(spec, case, dtype, id=f"{name}-{case.label}-{str(dtype)[6:]}")
    for name, spec in KERNELS.items()
    for place, case in enumerate(spec.cases)
    for dtype in (WIDTHS if place == 0 else WIDTHS[place % 3 :][:1])
]
SPECS = [pytest.param(spec, id=name) for name, spec in KERNELS.items()]

if not CASES:
    raise RuntimeError("no kernel was found in depthfx.lowering.kernels; the folder's files must call register_kernel")


@pytest.fixture(autouse=True)
def one_thread():
    """The tensors are tiny: waking threads for each of thousands of calls would take most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.skipif(not INTERPRETED, reason="tests/gpu runs the same cases on the device")
@pytest.mark.parametrize(("spec", "case", "dtype"), INTERPRETED_CASES)
def test_interpreted_launch_equals_reference(spec, case, dtype):
    check_case(spec, case, spec.launch, "cpu", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("spec", "case"), CASES)
def test_op_on_a_cpu_equals_reference(spec, case, dtype):
    check_case(spec, case, getattr(torch.ops.depthfx, spec.name), "cpu", dtype, seed=1)


@pytest.mark.parametrize("spec", SPECS)
def test_op_keeps_its_contract(spec):
    """Schema (what is written, no aliases), fake result and tracing with dynamic shapes."""
    args = tuple(
        torch.nan_to_num(a) if isinstance(a, torch.Tensor) and a.is_floating_point() else a  # opcheck compares with ==
        for a in spec.cases[0].inputs(torch.device("cpu"), torch.float32, 0)
    )
    torch.library.opcheck(getattr(torch.ops.depthfx, spec.name).default, args)


@pytest.mark.parametrize("spec", SPECS)
def test_cases_state_a_tolerance_for_each_dtype(spec):
    assert len({case.label for case in spec.cases}) == len(spec.cases) > 0
    for case in spec.cases:
        assert set(case.tolerance) - {torch.float8_e4m3fn} == {torch.float32, torch.float16, torch.bfloat16}
        assert case.reason


def test_a_second_registration_of_a_name_is_refused():
    with pytest.raises(RegistryError, match="rms_norm"):
        register_kernel(KERNELS.get("rms_norm"))
