"""The key of a stored program: everything that the captured and rewritten graph follows from, as one hash.

A key that is too fine costs a capture; a key that is too coarse would run another model's graph. So code counts by its
bytecode (a function patched in at run time changes the key), data by its value, tensors by layout and name alone.
"""

from __future__ import annotations

import argparse
import collections
import enum
import functools
import hashlib
import importlib.metadata
import platform
import sys
import types
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from depthfx.settings import Settings

# Settings that no pass reads; every other setting is part of the key.
_NOT_IN_THE_GRAPH = frozenset(
    "memory weight_offload_gib memory_budget_gib gpu_memory_utilization kv_blocks prefix_reuse max_batch_size max_batch_tokens max_chunk_tokens lookahead "
    "inductor kv_offload_gib cuda_graphs capture_prompts on_unsupported cache_dir program_cache parallel_warmup check depth depth_rule".split()
)
# Attributes of a module that are listed otherwise, or that concern loading or the generation loop alone.
_NOT_IN_THE_MODULE = frozenset({"_parameters", "_buffers", "_modules", "generation_config", "_is_hf_initialized"})
# Packages whose code counts by its version; depthfx itself counts by its text.
_BY_VERSION = frozenset(sys.stdlib_module_names) | {"torch", "triton", "numpy", "sympy", "depthfx", "builtins"}
# Plain holders of attributes, though of the standard library.
_RECORDS = frozenset({types.SimpleNamespace, argparse.Namespace})
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout, torch.memory_format)

# Globals of transformers' own functions that count; its version and the text of its files stand for the rest.
_FIXED = (*_PLAIN, types.FunctionType, types.BuiltinFunctionType, type, tuple)


def program_key(model: torch.nn.Module, settings: Settings, target: str, skipper: torch.nn.Module | None = None) -> str:
    """Hex digest for ``model`` on its device, compiled with ``settings`` for ``target``; with ``skipper``, of the routed program."""
    versions = {name: _version(name) for name in ("torch", "transformers", "triton")}
    device = next(model.parameters()).device
    parts = [
        _own_text(),
        repr((versions, platform.python_version(), target, str(device), torch.get_default_dtype(), torch.is_autocast_enabled(device.type))),
        repr([(f.name, getattr(settings, f.name)) for f in fields(settings) if f.name not in _NOT_IN_THE_GRAPH]),
        *_Description(model).lines(),
        *(["dense"] if skipper is None else _Description(skipper).lines()),
    ]
    return hashlib.sha256("\n".join(parts).encode("utf-8", "backslashreplace")).hexdigest()


def trace_key(model: torch.nn.Module, settings: Settings, target: str) -> str:
    """Hex digest for the trace of ``model``, which follows from one setting alone."""
    return program_key(model, Settings(max_model_len=settings.max_model_len), target)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # built in place, or under another name
        return str(getattr(sys.modules.get(package), "__version__", "unknown"))


@functools.cache
def _own_text() -> str:
    """Hash of the source of all files that shape the graph."""
    root = Path(__file__).resolve().parent.parent
    folders = ("passes/*.py", "lowering/**/*.py", "skippers/*.py", "skippers/policies/*.py", "skippers/projectors/*.py")
    files = [f for pattern in folders for f in sorted(root.glob(pattern))] + [
        root / f"{n}.py" for n in ("contracts", "records", "settings")
    ]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


@functools.cache
def _file_hash(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return "no file"  # a notebook or a string; the bytecode counts in any case


def _followed(module: str | None) -> bool:
    return (module or "").split(".")[0] not in _BY_VERSION


class _Description:
    """Lines that name all modules of a model, and the functions and classes that its forward may reach."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._paths = {id(m): path for path, m in model.named_modules()}
        self._home = {type(m).__module__ for m in model.modules()}  # where the model's own classes live
        self._numbers: dict[int, int] = {}  # functions and classes in the order in which they were met
        self._objects: set[int] = set()
        self._pending: list[Any] = []
        self._alive: list[Any] = []  # ids stay unique while what they name is alive

    def lines(self) -> list[str]:
        """The description, the same in every process for equal models."""
        lines = []
        names: dict[int, str] = {}
        for path, module in self._model.named_modules():
            tensors = [(n, t) for group in (module._parameters, module._buffers) for n, t in group.items() if t is not None]
            layouts = [(n, names.setdefault(id(t), f"{path}.{n}"), tuple(t.shape), t.stride(), str(t.dtype)) for n, t in tensors]
            rest = {k: v for k, v in vars(module).items() if k not in _NOT_IN_THE_MODULE}
            lines.append(f"{path}: {self._of(type(module))} {layouts} {self._of(rest)}")
        outside = dict.fromkeys(type(m) for m in self._model.modules() if not _followed(type(m).__module__))
        lines += [f"{c.__qualname__}.forward {self._of(getattr(c.forward, '__code__', None))}" for c in outside]  # perhaps patched in place
        while self._pending:
            item = self._pending.pop()
            lines.append(self._class(item) if isinstance(item, type) else self._function(item))
        return lines

    def _of(self, value: Any) -> str:
        """Text of any value, without addresses."""
        if isinstance(value, enum.Enum):
            return f"{type(value).__qualname__}.{value.name}"
        if isinstance(value, _PLAIN):
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, torch.Tensor):
            return f"tensor {tuple(value.shape)} {value.dtype} {value.device}"
        if isinstance(value, torch.nn.Module):
            return f"module {self._paths[id(value)]}" if id(value) in self._paths else self._contents(value)
        if isinstance(value, (list, tuple, collections.deque)):
            return f"{type(value).__name__}({', '.join(map(self._of, value))})"
        if isinstance(value, (set, frozenset)):
            return f"{type(value).__name__}({', '.join(sorted(map(self._of, value)))})"
        if isinstance(value, (dict, types.MappingProxyType)):
            return f"dict({', '.join(f'{self._of(k)}: {self._of(v)}' for k, v in value.items())})"
        if isinstance(value, types.CodeType):
            consts = [self._of(c) for c in value.co_consts]
            return f"code {value.co_code.hex()} {consts} {value.co_names} {value.co_varnames} {value.co_freevars} {value.co_flags}"
        if isinstance(value, (types.FunctionType, type)):
            return self._number(value)
        return self._object(value)

    def _object(self, value: Any) -> str:
        if isinstance(value, types.MethodType):
            return f"method {self._of(value.__func__)} of {self._of(value.__self__)}"
        if isinstance(value, functools.partial):
            return f"partial {self._of(value.func)} {self._of(value.args)} {self._of(value.keywords)}"
        if isinstance(value, (staticmethod, classmethod)):
            return f"{type(value).__name__} {self._of(value.__func__)}"
        if isinstance(value, property):
            return f"property {self._of(value.fget)}"
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        if isinstance(value, (types.BuiltinFunctionType, types.ModuleType)):
            return f"{name} {getattr(value, '__module__', '')} {value.__name__}"
        if isinstance(value, (range, slice)):
            return repr(value)
        if isinstance(value, (np.generic, np.ndarray)):
            return f"{name} {value.dtype} {value.shape} {value.tobytes().hex()}"
        return self._contents(value) if _followed(type(value).__module__) or type(value) in _RECORDS else name

    def _contents(self, value: Any) -> str:
        """Type and attributes of an object, at its first appearance."""
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        if id(value) in self._objects:
            return name
        self._objects.add(id(value))
        self._alive.append(value)
        slots = [n for cls in type(value).__mro__ for n in cls.__dict__.get("__slots__", ()) if n not in ("__dict__", "__weakref__")]
        held = {n: getattr(value, n) for n in slots if hasattr(value, n)} | getattr(value, "__dict__", {})
        return f"{name} {self._of(type(value))} {self._of(held)}"

    def _number(self, value: Any) -> str:
        """Name and number of a function or class; what it holds gets a line of its own."""
        name = f"{value.__module__}.{value.__qualname__}"
        if not _followed(value.__module__):
            return name
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._numbers)
            self._alive.append(value)
            self._pending.append(value)
        return f"{name}#{self._numbers[id(value)]}"

    def _class(self, cls: type) -> str:
        file = getattr(sys.modules.get(cls.__module__), "__file__", None)
        bases = [self._of(base) for base in cls.__mro__[1:]]
        text = f"{self._of(cls)} {bases} {_file_hash(file) if file else 'no file'}"
        if cls.__module__ not in self._home:
            return text
        held = {k: v for k, v in vars(cls).items() if not k.startswith("__") or isinstance(v, types.FunctionType)}
        return f"{text} {self._of(held)}"

    def _function(self, function: types.FunctionType) -> str:
        cells = []
        for cell in function.__closure__ or ():
            try:
                cells.append(self._of(cell.cell_contents))
            except ValueError:
                cells.append("empty")
        names = sorted(_names(function.__code__))
        near = {n: function.__globals__[n] for n in names if n in function.__globals__}
        if function.__module__.split(".")[0] == "transformers":  # its registries grow with every model that the process has met
            near = {n: v for n, v in near.items() if isinstance(v, _FIXED)}
        near = {n: self._global(v, names) for n, v in near.items()}
        held = [function.__defaults__, function.__kwdefaults__]
        return f"{self._of(function)} {self._of(function.__code__)} {self._of(held)} {cells} {near}"

    def _global(self, value: Any, names: list[str]) -> str:
        """A global that a function names; of a module all that it may read, since the code says ``module.name``."""
        if not isinstance(value, types.ModuleType) or not _followed(value.__name__) or id(value) in self._objects:
            return self._of(value)
        return f"{value.__name__} {self._of({n: vars(value)[n] for n in names if n in vars(value)})}"


def _names(code: types.CodeType) -> set[str]:
    inner = [_names(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*inner)
