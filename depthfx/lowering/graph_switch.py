"""Cohorts of chosen size in a captured graph: a conditional node whose bodies are the sizes, picked on the device at each replay.

A captured step cannot ask the host how many rows run. `GraphSwitch` captures, for one cohort, a body for each of a few numbers of rows and puts
them into a SWITCH node of CUDA's conditional graph nodes (12.8 and later, one node: about 7 us beside its body on an H200); a small
kernel reads the counts in front of it and sets the number of the body. What the bodies read and write lies
outside of them; their own memory comes from a pool of this file, which all bodies of all graphs share, since they follow one another.

PyTorch 2.11 has no interface for conditional nodes, so they are made by `cuda.bindings`, and the setter is compiled by NVRTC.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from depthfx.errors import BackendUnavailableError, DriverError
from depthfx.lowering.kernel_spec import is_collecting
from depthfx.lowering.nvrtc import has_nvrtc, machine_code

_SETTER = r"""
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned int value);
struct Choice { unsigned long long handle; const int* counts; int cohort, step, whole, unused; };
struct Choices { Choice at[64]; };
extern "C" __global__ void pick(Choices choices) {
  Choice c = choices.at[threadIdx.x];
  int mine = c.counts[c.cohort], other = c.counts[1 - c.cohort];
  cudaGraphSetConditional(c.handle, mine > 0 && other == 0 && c.whole > 0 ? c.whole : (mine + c.step - 1) / c.step);
}
"""
_MOST = 64  # choices of one launch: they are the kernel's argument
MIN_DRIVER = 12080  # SWITCH nodes

Body = Callable[[], None]


@dataclass(frozen=True)
class Choice:
    """Which of several bodies runs: with n = ``counts[cohort]``, number ``whole`` where n > 0 and the other cohort is empty, else
    number ``ceil(n / step)``."""

    counts: torch.Tensor  # [2] int32 on the device
    cohort: int
    step: int
    whole: int = 0  # 0: there is no such body
    handle: Any = None  # of the conditional node, in a capture

    def now(self) -> int:
        """The number, read by the host; the setter's arithmetic, in Python."""
        mine, other = int(self.counts[self.cohort]), int(self.counts[1 - self.cohort])
        return self.whole if mine > 0 and other == 0 and self.whole else -(-mine // self.step)


class _Entry(ctypes.Structure):
    """`Choice` of the setter."""

    _fields_ = (
        ("handle", ctypes.c_ulonglong), ("counts", ctypes.c_void_p), ("cohort", ctypes.c_int), ("step", ctypes.c_int), ("whole", ctypes.c_int),
        ("unused", ctypes.c_int),
    )  # fmt: skip


class Switch(Protocol):
    """How one of several bodies comes to run."""

    def choose(self, choices: Sequence[Choice]) -> list[Choice]:
        """``choices``, to be made when the step gets here; each is handed to :meth:`run` once."""

    def run(self, choice: Choice, bodies: Sequence[Body | None]) -> None:
        """Run the chosen body; None does nothing."""


class HostSwitch:
    """The host reads the count: for devices without graphs."""

    def choose(self, choices: Sequence[Choice]) -> list[Choice]:
        """They are made in :meth:`run`."""
        return list(choices)

    def run(self, choice: Choice, bodies: Sequence[Body | None]) -> None:
        """As :class:`Switch` says."""
        body = bodies[choice.now()]
        if body is not None:
            body()


class GraphSwitch:
    """See the module's text. Outside of a capture every body runs, so that what it needs is compiled and reserved."""

    def __init__(self, device: torch.device) -> None:
        """Raises :class:`BackendUnavailableError` where :func:`unavailable` names a reason."""
        if (why := unavailable()) is not None:
            raise BackendUnavailableError(f"cohorts of chosen size in captured graphs: {why}")
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._driver = importlib.import_module("cuda.bindings.driver")
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # PyTorch's context is there
            (self._context,) = self._call("cuCtxGetCurrent")
            major, minor = torch.cuda.get_device_capability(device)
            (self._module,) = self._call("cuModuleLoadData", machine_code(_SETTER, f"sm_{major}{minor}", ("-rdc=false",)))
            (self._setter,) = self._call("cuModuleGetFunction", self._module, b"pick")
            self._stream = torch.cuda.Stream(device)
            self._pool = torch.cuda.MemPool()

    def choose(self, choices: Sequence[Choice]) -> list[Choice]:
        """One small kernel for all of them, at each replay."""
        if is_collecting() or not torch.cuda.is_current_stream_capturing():
            return list(choices)
        stream = self._driver.CUstream(torch.cuda.current_stream(self.device).cuda_stream)
        graph = self._capture_info(stream)[2]
        made = [replace(c, handle=self._call("cuGraphConditionalHandleCreate", graph, self._context, 0, 0)[0]) for c in choices]
        for first in range(0, len(made), _MOST):
            some = made[first : first + _MOST]
            entries = (_Entry * _MOST)(*(_Entry(int(c.handle), c.counts.data_ptr(), c.cohort, c.step, c.whole) for c in some))
            arguments = (ctypes.c_void_p * 1)(ctypes.addressof(entries))
            self._call("cuLaunchKernel", self._setter, 1, 1, 1, len(some), 1, 1, 0, stream, ctypes.addressof(arguments), 0)
        return made

    def run(self, choice: Choice, bodies: Sequence[Body | None]) -> None:
        """As :class:`Switch` says, at each replay of the graph that is being captured."""
        if is_collecting():
            _run_all(bodies)
        elif torch.cuda.is_current_stream_capturing():
            self._capture(choice.handle, bodies)
        else:
            outer = torch.cuda.current_stream(self.device)
            self._stream.wait_stream(outer)
            with torch.cuda.stream(self._stream):
                _run_all(bodies)
            outer.wait_stream(self._stream)

    def _capture(self, handle: Any, bodies: Sequence[Body | None]) -> None:
        cu, stream = self._driver, self._driver.CUstream(torch.cuda.current_stream(self.device).cuda_stream)
        node = cu.CUgraphNodeParams()
        node.type = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        node.conditional.handle, node.conditional.ctx = handle, self._context
        node.conditional.type = cu.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_SWITCH
        node.conditional.size = len(bodies)
        info = self._capture_info(stream)
        (added,) = self._call("cuGraphAddNode", info[2], info[3], None, info[-1], node)
        replace = cu.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES
        self._call("cuStreamUpdateCaptureDependencies", stream, [added], None, 1, replace)
        for body, child in zip(bodies, node.conditional.phGraph_out, strict=True):
            if body is not None:
                self._capture_body(body, child)

    def _capture_body(self, body: Body, graph: Any) -> None:
        cu, stream = self._driver, self._driver.CUstream(self._stream.cuda_stream)
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        with torch.cuda.stream(self._stream), torch.cuda.use_mem_pool(self._pool, self.device):
            self._call("cuStreamBeginCaptureToGraph", stream, graph, None, None, 0, mode)
            try:
                body()
            finally:
                self._call("cuStreamEndCapture", stream)

    def _capture_info(self, stream: Any) -> tuple[Any, ...]:
        """(status, id, graph, dependencies, ..., number of dependencies) of the capture on ``stream``."""
        return self._call("cuStreamGetCaptureInfo", stream)

    def _call(self, name: str, *args: Any) -> tuple[Any, ...]:
        code, *results = getattr(self._driver, name)(*args)
        if int(code) != 0:
            raise DriverError(name, code.name, "a conditional node could not be put into a captured step")
        return tuple(results)


def _run_all(bodies: Sequence[Body | None]) -> None:
    for body in bodies:
        if body is not None:
            body()


def unavailable() -> str | None:
    """Why conditional nodes cannot be made here; None if they can."""
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    if not has_nvrtc():
        return "the package cuda-bindings or its NVRTC is missing (install depthfx[cuda]), or NVRTC is of a later CUDA than the driver"
    code, version = importlib.import_module("cuda.bindings.driver").cuDriverGetVersion()
    if int(code) != 0 or version < MIN_DRIVER:
        return f"the driver is of CUDA {version // 1000}.{version % 1000 // 10}; SWITCH nodes need 12.8"
    return None


class _Active(threading.local):
    switch: Switch | None = None


_active = _Active()


def active_switch() -> Switch | None:
    """The switch of captured steps that this thread makes now; None: cohorts stay in place."""
    return _active.switch


@contextmanager
def switching(switch: Switch | None) -> Iterator[None]:
    """Captured steps that this thread runs inside have their cohorts of many rows picked by ``switch``."""
    before, _active.switch = _active.switch, switch
    try:
        yield
    finally:
        _active.switch = before
