"""No memory at all: the calls are logged, the rules are checked, tensors are on the meta device.

For plans, tests and machines without room. ``log`` holds the raw calls in their order, as a driver would have seen them.
"""

from __future__ import annotations

import torch

from depthfx.alloc.mapping_ledger import Access
from depthfx.alloc.physical_backend import PHYSICAL, PhysicalBackend


class Dry(PhysicalBackend):
    """See the module's text."""

    name = "dry"
    holds_bytes = False

    @classmethod
    def unavailable(cls) -> str | None:
        return None

    def __init__(self, granularity: int | None = None, capacity: int | None = None) -> None:
        self.log: list[tuple[str, tuple[int | str, ...]]] = []
        self._next_address = 1 << 40
        self._next_handle = 1
        super().__init__(granularity, capacity)

    def _device_granularity(self) -> int:
        return 4096

    def _reserve(self, size: int) -> int:
        step = self._granularity
        address = -(-self._next_address // step) * step
        self._next_address = address + size + step  # a gap behind each range: running over its end hits nothing else
        self.log.append(("reserve", (address, size)))
        return address

    def _free(self, address: int, size: int) -> None:
        self.log.append(("free", (address, size)))

    def _create(self, size: int) -> int:
        raw = self._next_handle
        self._next_handle += 1
        self.log.append(("create", (raw, size)))
        return raw

    def _release(self, raw: int, size: int) -> None:
        self.log.append(("release", (raw, size)))

    def _map(self, address: int, size: int, raw: int, handle_offset: int) -> None:
        self.log.append(("map", (address, size, raw, handle_offset)))

    def _set_access(self, address: int, size: int, access: Access) -> None:
        self.log.append(("set_access", (address, size, access)))

    def _unmap(self, address: int, size: int) -> None:
        self.log.append(("unmap", (address, size)))

    def _tensor(self, address: int, shape: tuple[int, ...], dtype: torch.dtype, nbytes: int) -> tuple[torch.Tensor, object]:
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        return tensor, tensor.untyped_storage()

    def _close(self) -> None:
        self.log.append(("close", ()))


PHYSICAL.add(Dry.name, Dry)
