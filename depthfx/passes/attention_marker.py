"""The op that stands for attention in a captured graph, and the Hugging Face functions that emit it.

``depthfx::attention(q, k, v, layer, scale, window, softcap, sinks)`` with q ``[1, Hq, T, D]``, k and v
``[1, Hkv, T, D]`` yields ``[1, T, Hq, D]``. Run as it stands it is plain causal attention over T rows of one
sequence; the pass `use_paged_attention` replaces it.
"""

from __future__ import annotations

from typing import Any

import torch

from depthfx.errors import UnsupportedModelError

NAME = "depthfx"
_LIBRARY = torch.library.Library("depthfx", "FRAGMENT")
_LIBRARY.define("attention(Tensor q, Tensor k, Tensor v, int layer, float scale, int window, float softcap, Tensor? sinks) -> Tensor")


def _causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, scale: float, window: int, softcap: float, sinks: torch.Tensor | None
) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    scores = q.float() @ k.float().repeat_interleave(group, 1).transpose(2, 3) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(q.shape[2], device=q.device)[:, None] - torch.arange(q.shape[2], device=q.device)[None]
    hidden = (distance < 0) | (distance >= window) if window > 0 else distance < 0
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : q.shape[2]]
    return (weights @ v.float().repeat_interleave(group, 1)).transpose(1, 2).to(q.dtype).contiguous()


def _fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, scale: float, window: int, softcap: float, sinks: Any
) -> torch.Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


_LIBRARY.impl("attention", _causal, "CPU")
_LIBRARY.impl("attention", _causal, "CUDA")
_LIBRARY.impl("attention", _fake, "Meta")
OP = torch.ops.depthfx.attention.default


def hf_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Hugging Face ``AttentionInterface`` function: emits the marker; no mask reaches it, padding is never packed."""
    if attention_mask is not None:
        raise UnsupportedModelError("the model passes its own attention mask to attention; depthfx supports causal and windowed masks only")
    if not kwargs.get("is_causal", getattr(module, "is_causal", True)):
        raise UnsupportedModelError(
            f"{type(module).__name__} attends to later tokens too (is_causal=False); depthfx supports causal decoders only"
        )
    if kwargs.get("position_bias") is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} adds a position bias to its scores; depthfx supports scale, window, softcap and sinks"
        )
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    if kinds and kinds[module.layer_idx] == "sliding_attention" and not sliding_window:
        raise UnsupportedModelError(
            f"{type(module).__name__} gives its window to the mask alone; depthfx needs it as the argument sliding_window"
        )
    scale = float(scaling) if scaling is not None else query.shape[-1] ** -0.5
    out = torch.ops.depthfx.attention(query, key, value, module.layer_idx, scale, sliding_window or 0, softcap or 0.0, s_aux)
    return out, None
