"""Compile the launches of all kernels for sm_90 on a machine without a GPU and print facts about the code as JSON."""

from __future__ import annotations

import json
import re
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from depthfx.lowering.kernel_spec import KERNELS, enable_pdl
from depthfx.lowering.kernels import prefill_attention
from depthfx.lowering.kernels._cases import counted
from depthfx.lowering.kernels._hopper_prefill import launch_hopper
from depthfx.lowering.kernels._hopper_stream import launch_stream


class _Hopper:
    """Stands in for the CUDA driver: it names the target, and nothing is ever launched."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _facts(op: str, case: str, kernel: Any, name: str, pdl: bool, uses_dot: bool) -> dict[str, Any]:
    ptx = kernel.asm["ptx"]
    return {
        "op": op,
        "case": case,
        "kernel": name,
        "pdl": pdl,
        "uses_dot": uses_dot,
        "wgmma": len(re.findall(r"wgmma\.mma_async", ptx)),
        "register_operands": len(re.findall(r"wgmma\.mma_async\S* \{[^}]*\}, \{", ptx)),
        "cp_async": len(re.findall(r"cp\.async\.c[ag]", ptx)),
        "fp8_reads": len(re.findall(r"cvt\S*\.e4m3x2 ", ptx)),
        "fp8_writes": len(re.findall(r"cvt\.rn\.satfinite\.e4m3x2\.", ptx)),
        "tensor_copies": len(re.findall(r"cp\.async\.bulk\.tensor", ptx)),
        "spills": len(re.findall(r"\.local\b", ptx)),
        "wide_loads": len(re.findall(r"ld\.global\S*\.v4", ptx)),
        "gdc": len(re.findall(r"griddepcontrol", ptx)),
        "shared_bytes": kernel.metadata.shared,
        "asks_before_waiting": bool(re.search(r"(ld|cp\S*)\.global", ptx.partition("griddepcontrol.wait")[0])),
    }


# Cases beyond the first of an op: they take another kernel or another form of it.
_LABELS = {
    "paged_attention": (
        "decode-9:3x64-padding",
        "prefill-two-tiles-from-the-middle",
        "fp8-mixed-4:2x128-softcap",  # both kernels
    ),
    "partition_rows": ("5rows-run0.5-forced0.2-padding0.2-bool", "1025rows-run0.5-forced0.1-padding0.1-bool"),
    "kv_append": ("17x3x64-block16-packed1", "7x3x80-block16-packed1-fp8"),
    "rotary_append": (
        "3rows-9:3x64-rotary64-norms0",
        "17rows-0:1x128-rotary128-norms1",
        "18rows-4:0x128-rotary128-norms1",
        "3rows-4:2x96-rotary96-norms1-fp8",
    ),
    "linear": ("1x72x576-bias1", "3x128x1024-bias0", "1x72x576-bias0-bound1", "3x128x1024-bias1-bound2"),
    "gated_linear": ("1x96x576-silu", "3x64x1024-gelu_tanh", "1x96x576-gelu-bound1", "3x64x1024-silu-bound3"),
    "dual_linear": (
        "1x66x576-nested_e4m3-full-hint-1-bias1",
        "3x128x1024-nested_e4m3_scaled-full-hint-1-bias0",
        "65x48x64-nested_e4m3_scaled-full-hint1-bias1",
        "1x66x576-nested_e4m3-fast-hint-1-bias0-bound1",
        "3x128x1024-nested_e4m3_scaled-full-hint-1-bias1-bound2",
    ),
    "dual_gated_linear": (
        "1x33x576-nested_e4m3-full-hint-1-silu",
        "3x64x1024-nested_e5m2-fast-hint-1-gelu_tanh",
        "1x33x576-nested_e4m3-full-hint-1-silu-bound1",
        "3x64x1024-nested_e5m2-fast-hint-1-gelu-bound3",
    ),
}


def main() -> None:
    facts: list[dict[str, Any]] = []
    current: dict[str, Any] = {}
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        uses_dot = bool(kwargs.get("USE_DOT", False))
        facts.append(_facts(current["op"], current["case"], kernel, self.__name__, current["pdl"], uses_dot))
        return kernel

    JITFunction.run = compile_only
    triton.runtime.driver.set_active(_Hopper())
    for name, spec in KERNELS.items():
        labels = _LABELS.get(name, (spec.cases[0].label,))
        for index, case in enumerate(c for c in spec.cases if c.label in labels):
            current.update(op=name, case=case.label, pdl=index == 0 or "bound" in case.label)
            enable_pdl(current["pdl"])
            spec.launch(*case.inputs(torch.device("cpu"), torch.float16 if index else torch.bfloat16, 0))
    case = next(c for c in KERNELS.get("paged_attention").cases if c.label == "prefill-two-tiles-from-the-middle")
    q, pool, layer, *step = case.inputs(torch.device("cpu"), torch.bfloat16, 0)[:9]
    for tile in ((128, 2), (64, 4)):
        current.update(op="paged_attention", case="", pdl=False)
        launch_hopper(q, pool, layer, *step, torch.empty_like(q), 0, 0.125, 132, tile=tile)
    for rows, op, gated, coding, pdl, bound in (
        (3, "dual_linear", False, 1, True, None),
        (40, "dual_gated_linear", True, 2, True, None),
        (100, "dual_linear", False, 1, False, None),
        (3, "dual_linear", False, 1, True, counted(1)),
        (40, "dual_gated_linear", True, 2, True, counted(1)),
    ):
        current.update(op=op, case="" if bound is None else "bound1", pdl=pdl)
        enable_pdl(pdl)
        x, flags = torch.empty(rows, 4096, dtype=torch.float16), torch.ones(1, dtype=torch.int32)
        upper, lower, shift = torch.empty(512, 4096, dtype=torch.uint8), torch.empty(512, 4096, dtype=torch.uint8), None
        launch_stream(x, upper, lower, shift, None, int(gated), flags, 0, coding, bound=bound)
    enable_pdl(False)
    print(json.dumps(facts))
    assert prefill_attention.INTERPRETED is False


if __name__ == "__main__":
    main()
