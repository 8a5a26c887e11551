"""Weights left in pinned host memory, which kernels read over the link: a baseline that semi-unified memory is compared with.

Nothing is copied ahead: a product reads its weight at the link's speed (about 50 GB/s, a hundredth of the device's own memory) each time it
runs, in captured graphs too. As many bytes as are left on the host are free for KV.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from depthfx.alloc.backup import HostBackup
from depthfx.errors import InternalError, SettingError
from depthfx.report import CompileReport

GIB = 1 << 30


def offload_weights(model: torch.nn.Module, program: Any, gib: float, device: torch.device, report: CompileReport) -> None:
    """Move the last weights of ``program``, ``gib`` GiB or a little less, to the host; program and model read them there from now on.

    Embeddings and the LM head stay. Raises :class:`SettingError` if no weight is that small, and :class:`HostMemoryError`
    where the host cannot give or pin the memory.
    """
    room, count, moved = int(gib * GIB), 0, 0
    readers = [p.module.weights for p in (program, program.routed) if p is not None]
    for tensor in _matrices(program.module.weights, program.vocab_size):
        if tensor.nbytes > room - moved:
            continue
        host = HostBackup(tensor.nbytes, tensor.nbytes, pin=True)
        host.put(0, tensor.reshape(-1).view(torch.uint8))
        alias = seen_from_device(host, device).view(tensor.dtype).view(tensor.shape)
        _replace(model, readers, tensor, alias)
        count += 1
        moved += tensor.nbytes
    if not count:
        raise SettingError(f"setting weight_offload_gib={gib} is smaller than every weight of this model; give more, or leave it out")
    torch.cuda.empty_cache()
    report.add("memory", f"weights read from pinned host memory: {moved / GIB:.2f} GiB in {count} tensors")


def seen_from_device(host: HostBackup, device: torch.device) -> torch.Tensor:
    """A CUDA tensor uint8 ``[bytes]`` over the pinned bytes of ``host``, which the device reads over the link; ``host`` ends with it."""
    view = torch.as_tensor(_PinnedBytes(host), device=device)
    if view.data_ptr() != host.bytes(0, host.num_bytes).data_ptr():
        raise InternalError("PyTorch copied pinned host memory instead of viewing it from the device; report its version")
    return view


class _PinnedBytes:
    """Registered host memory, which has one address on host and device; PyTorch keeps this object as long as the storage."""

    def __init__(self, host: HostBackup) -> None:
        self._host = host
        address = host.bytes(0, host.num_bytes).data_ptr()
        self.__cuda_array_interface__ = {
            "shape": (host.num_bytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3,
        }  # fmt: skip

    def __del__(self) -> None:
        self._host.close()


def _matrices(weights: torch.nn.Module, vocab_size: int) -> Iterator[torch.Tensor]:
    """Matrices of linears that are contiguous and have a storage of their own, the program's last first."""
    for tensor in reversed(list(weights.buffers())):
        alone = tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()
        if tensor.dim() == 2 and alone and vocab_size not in tensor.shape and min(tensor.shape) >= 64:
            yield tensor


def _replace(model: torch.nn.Module, readers: list[torch.nn.Module], old: torch.Tensor, new: torch.Tensor) -> None:
    """``new`` in the place of ``old`` in ``readers`` and ``model``, and of everything there that views it."""
    storage = old.untyped_storage().data_ptr()

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return new.view(-1).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    for parameter in model.parameters():
        if parameter.untyped_storage().data_ptr() == storage:
            parameter.data = moved(parameter.data)
    for module in [*model.modules(), *readers]:
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.untyped_storage().data_ptr() == storage:
                module._buffers[key] = new if buffer.shape == new.shape else moved(buffer)
