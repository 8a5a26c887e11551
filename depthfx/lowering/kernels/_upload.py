"""A step's own few kilobytes to the device by a kernel that reads pinned host memory, not by the copy engine.

The copy engine serves streams by time slices: behind a restore that always has chunks queued, a copy of any size waits for milliseconds
(benchmarks/results, semi-unified memory). A kernel's loads share the link with the restore, packet by packet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit(do_not_specialize=["num_words"])
def _upload_kernel(source_ptr, target_ptr, num_words, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target_ptr + i, tl.load(source_ptr + i, mask=i < num_words), mask=i < num_words)


def upload_words(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies ``source`` int32 ``[n]`` in pinned host memory to ``target`` int32 ``[n]`` on the device, in the order of the current stream.

    The caller keeps ``source`` as it is until the stream has come past: PyTorch's cache of pinned memory knows nothing of this read.
    ``ValueError`` for other types, shapes, or memory that is not pinned.
    """
    for name, tensor in (("target", target), ("source", source)):
        if tensor.dtype is not torch.int32 or tensor.dim() != 1 or not tensor.is_contiguous() or tensor.numel() != target.numel():
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; give contiguous int32 words, as many as the target has")
    if not target.numel():
        return
    if target.device.type == "cuda" and not source.is_pinned():
        raise ValueError(f"source is {source.device} memory that is not pinned; a kernel can read pinned host memory alone")
    _upload_kernel[(triton.cdiv(target.numel(), _BLOCK),)](source, target, target.numel(), BLOCK=_BLOCK, num_warps=4)
