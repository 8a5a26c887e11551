"""A registry that refuses a second use of a name and lists the known ones; plug-ins are files found by folder."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Generic, TypeVar

from depthfx.errors import RegistryError

T = TypeVar("T")


class Registry(Generic[T]):
    """Names to plug-ins of one kind, for example ``KERNELS``.

    ``package`` is the dotted folder whose modules register themselves; it is imported on the first look-up.
    A plug-in outside the package calls the same :meth:`add`.
    """

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self.package = package
        self._items: dict[str, T] = {}
        self._discovered = False

    def add(self, name: str, item: T) -> T:
        """Register ``item``; a second use of ``name`` raises :class:`RegistryError`."""
        if name in self._items:
            raise RegistryError(f"{self.kind} {name!r} is registered already; choose another name")
        self._items[name] = item
        return item

    def get(self, name: str) -> T:
        """The plug-in called ``name``; an unknown name raises :class:`RegistryError` listing the known ones."""
        self._discover()
        if name not in self._items:
            raise RegistryError(f"unknown {self.kind} {name!r}; known: {', '.join(sorted(self._items)) or 'none'}")
        return self._items[name]

    def items(self) -> Iterator[tuple[str, T]]:
        """All plug-ins, sorted by name."""
        self._discover()
        return iter(sorted(self._items.items()))

    def names(self) -> list[str]:
        return [name for name, _ in self.items()]

    def _discover(self) -> None:
        if self._discovered:
            return
        folder = importlib.import_module(self.package)
        for module in pkgutil.iter_modules(folder.__path__):
            importlib.import_module(f"{self.package}.{module.name}")
        self._discovered = True
