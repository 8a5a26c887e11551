"""depthfx: a PyTorch compile backend for Hugging Face decoder models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from depthfx.records import SamplingParams
from depthfx.settings import ElasticMemory, Settings

if TYPE_CHECKING:
    from depthfx.alloc.pool.memory_pool import MemoryPool
    from depthfx.api import compile, measure_sensitivity
    from depthfx.lowering.load_model import load

__version__ = "0.1.0"
__all__ = ["ElasticMemory", "MemoryPool", "SamplingParams", "Settings", "__version__", "compile", "load", "measure_sensitivity"]


def __getattr__(name: str) -> Any:
    # these need torch, transformers and triton; `import depthfx` alone stays light and touches no device
    if name == "compile":
        from depthfx.api import compile

        return compile
    if name == "load":
        from depthfx.lowering.load_model import load

        return load
    if name == "MemoryPool":
        from depthfx.alloc.pool.memory_pool import MemoryPool

        return MemoryPool
    if name == "measure_sensitivity":
        from depthfx.api import measure_sensitivity

        return measure_sensitivity
    raise AttributeError(f"module 'depthfx' has no attribute {name!r}")
