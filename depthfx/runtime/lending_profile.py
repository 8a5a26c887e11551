"""Which layer gives its residual first, by how much each one suffers from fast precision."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthfx.errors import SettingError
from depthfx.whole_file import write_whole


@dataclass(frozen=True)
class Sensitivity:
    """Mean KL divergence in nats a token from full precision, with one layer fast, for each layer."""

    layers: tuple[float, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """Layers, the least sensitive first; equal ones as they run."""
        return tuple(sorted(range(len(self.layers)), key=lambda layer: (self.layers[layer], layer)))

    def save(self, path: str | Path) -> None:
        """Writes the profile as JSON, for ``ElasticMemory(profile=path)``."""
        write_whole(Path(path), json.dumps({"kl_nats_per_token": list(self.layers)}, indent=1))

    @classmethod
    def load(cls, path: str | Path) -> Sensitivity:
        """Reads a profile; raises :class:`SettingError` for a file that is missing or holds something else."""
        try:
            found: Any = json.loads(Path(path).read_text())["kl_nats_per_token"]
            layers = tuple(float(x) for x in found)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SettingError(
                f"memory profile={str(path)!r} cannot be read ({error}); write it with depthfx.measure_sensitivity(...).save"
            ) from error
        if not layers or not all(math.isfinite(x) for x in layers):
            raise SettingError(f"memory profile={str(path)!r} holds {found!r}; it must hold a finite number for each layer")
        return cls(layers)
