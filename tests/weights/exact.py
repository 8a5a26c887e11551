"""Tiny models whose weights float16 holds exactly, in any dtype, and a comparison by bits."""

from __future__ import annotations

from typing import Any

import torch

from tests.families.configs import build

IDS = torch.tensor([[5, 17, 3, 88, 41, 2, 9], [64, 1, 1, 7, 30, 99, 12]])


def exact_model(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A tiny model of ``family`` in ``dtype`` with matrices that survive a cast to float16; one weight needs the scaled format."""
    model = build(family, **{"num_hidden_layers": 3, **changes})
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.to(torch.bfloat16).float())
            p[p.abs() < 2.0**-17] = 0
        next(m for m in model.modules() if isinstance(m, torch.nn.Linear)).weight[1, 2] = 9.25
    return model.to(dtype)


def check_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    kind = torch.int16 if a.element_size() == 2 else torch.int32
    assert a.dtype is b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def check_states(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert list(a) == list(b)
    for name in a:
        check_bits(a[name].cpu(), b[name].cpu())


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(IDS.to(next(model.parameters()).device), use_cache=False).logits
