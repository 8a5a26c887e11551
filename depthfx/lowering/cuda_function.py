"""A function of compiled machine code, launched through the driver, and tensor maps for the tensor copy engine."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch

from depthfx.errors import DriverError

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_TYPES = {torch.uint8: 0, torch.float16: 6, torch.bfloat16: 9}  # CUtensorMapDataType
_L2_128_BYTES = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B
SWIZZLE_NONE, SWIZZLE_128 = 0, 3  # CUtensorMapSwizzle


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *args: Any) -> None:
    code = getattr(_driver(), name)(*args)
    if code != 0:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(text))
        raise DriverError(
            name, (text.value or b"an unknown error").decode(), "a kernel of compiled CUDA C++ could not be loaded or launched"
        )


def _enter_context() -> None:
    """Make PyTorch's context current in a thread that has not used the device yet; the runtime does so by itself, the driver does not."""
    context, device = ctypes.c_void_p(), ctypes.c_int()
    _call("cuCtxGetCurrent", ctypes.byref(context))
    if not context:
        _call("cuDeviceGet", ctypes.byref(device), torch.cuda.current_device())
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        _call("cuCtxSetCurrent", context)


class TensorMap:
    """128 bytes that describe a tensor and the box of it that one copy takes; handed to a kernel by value."""

    def __init__(
        self, address: int, dtype: torch.dtype, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int
    ) -> None:  # fmt: skip
        """``sizes`` and ``box`` count elements, innermost first; ``strides`` bytes of all dims but the innermost. What lies outside reads as 0."""
        self._bytes = ctypes.create_string_buffer(192)
        self.at = (ctypes.addressof(self._bytes) + 63) & ~63
        n = len(sizes)
        _call(
            "cuTensorMapEncodeTiled", ctypes.c_void_p(self.at), _TYPES[dtype], n, ctypes.c_void_p(address), (ctypes.c_uint64 * n)(*sizes),
            (ctypes.c_uint64 * (n - 1))(*strides), (ctypes.c_uint32 * n)(*box), (ctypes.c_uint32 * n)(*[1] * n), 0, swizzle, _L2_128_BYTES, 0,
        )  # fmt: skip


@lru_cache(maxsize=1 << 14)
def tensor_map(
    address: int, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle: int
) -> TensorMap:
    """The :class:`TensorMap` of these numbers: it follows from them alone, so it may be kept."""
    return TensorMap(address, dtype, sizes, strides, box, swizzle)


class CudaFunction:
    """One function of ``code`` on the current device."""

    def __init__(self, code: bytes, name: str, threads: int, shared_bytes: int) -> None:
        """Raises :class:`DriverError` where the driver refuses the code."""
        _enter_context()
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _call("cuModuleLoadData", ctypes.byref(module), code)
        _call("cuModuleGetFunction", ctypes.byref(self._function), module, name.encode())
        _call("cuFuncSetAttribute", self._function, _MAX_DYNAMIC_SHARED, shared_bytes)
        self._threads, self._shared_bytes = threads, shared_bytes

    def launch(self, programs: int, *args: TensorMap | torch.Tensor | int | None) -> None:
        """Queue it on the current stream; tensors are handed over as addresses (None: 0), numbers as 32-bit integers."""
        _enter_context()
        held = [a.at if isinstance(a, TensorMap) else _argument(a) for a in args]
        pointers = (ctypes.c_void_p * len(held))(*(a if isinstance(a, int) else ctypes.addressof(a) for a in held))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        _call("cuLaunchKernel", self._function, programs, 1, 1, self._threads, 1, 1, self._shared_bytes, stream, pointers, None)


def _argument(value: torch.Tensor | int | None) -> ctypes.c_void_p | ctypes.c_int:
    if isinstance(value, int):
        return ctypes.c_int(value)
    return ctypes.c_void_p(0 if value is None else value.data_ptr())
