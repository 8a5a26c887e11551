"""The folder of a nested checkpoint: what `depthfx convert` writes and `depthfx.load` reads.

::

    depthfx.json                         version, dtype of the model, and for each tensor its format, shape, order and parts
    persistent-00001.safetensors, ...    FP8 bytes (NAME.upper), shifts (NAME.shift), and whole tensors (NAME)
    residual-00001.safetensors, ...      residual bytes (NAME.lower)
    config.json, tokenizer files, ...    as in the folder that was converted

Every part has its SHA-256 in depthfx.json, and depthfx.json has one of its own text.
"""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from depthfx.errors import CheckpointError
from depthfx.lowering.fragment_order import is_fragment_order
from depthfx.lowering.nested_format import FORMATS, NestedWeight
from depthfx.lowering.tensor_files import TensorFiles, read_json

MANIFEST = "depthfx.json"
KIND, VERSION = "depthfx nested checkpoint", 1
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_FILE_BYTES = 256 << 20  # tensors held back before a file is written
_AGAIN = "copy the folder anew, or convert the model again"


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of the model: nested (``format`` is a name) or whole (None)."""

    format: str | None
    shape: tuple[int, ...]
    order: str  # of the columns: "fragment" or "plain"
    changed_by_cast: int  # elements that the cast to float16 changed
    fast_error: float  # relative error of fast mode
    parts: dict[str, tuple[str, str]]  # "upper", "lower", "shift" or "whole" -> file, SHA-256


@dataclass(frozen=True)
class Manifest:
    """What ``depthfx.json`` says."""

    dtype: torch.dtype  # of the model that was converted
    tensors: dict[str, TensorEntry]


def is_nested_checkpoint(folder: Path) -> bool:
    """Whether ``folder`` says that it is one."""
    return (folder / MANIFEST).is_file()


class NestedWriter:
    """Writes the tensors it is given into ``folder``, a file whenever 256 MiB have gathered; :meth:`close` writes the manifest."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.folder = folder
        self.dtype = str(dtype).removeprefix("torch.")
        self.tensors: dict[str, Any] = {}
        self._held: dict[str, dict[str, torch.Tensor]] = {"persistent": {}, "residual": {}}
        self._count = {"persistent": 1, "residual": 1}

    def add_nested(self, name: str, nested: NestedWeight, changed: int, error: float) -> None:
        """One nested weight in stored order, on any device."""
        order = "fragment" if nested.lower is not None and is_fragment_order(nested.upper.shape[1]) else "plain"
        parts = {"upper": ("persistent", nested.upper), "shift": ("persistent", nested.shift), "lower": ("residual", nested.lower)}
        held = {part: self._hold(kind, f"{name}.{part}", tensor) for part, (kind, tensor) in parts.items() if tensor is not None}
        self._enter(name, nested.format, nested.upper.shape, order, changed, error, held)

    def add_whole(self, name: str, tensor: torch.Tensor) -> None:
        """One tensor that is not nested."""
        self._enter(name, None, tensor.shape, "plain", 0, 0.0, {"whole": self._hold("persistent", name, tensor)})

    def close(self) -> None:
        """Write what is held back and then the manifest."""
        for kind in self._held:
            self._flush(kind)
        body = {"kind": KIND, "version": VERSION, "dtype": self.dtype, "tensors": self.tensors}
        (self.folder / MANIFEST).write_text(json.dumps({**body, "sha256": seal(body)}, indent=1))

    def _enter(self, name: str, form: str | None, shape: Any, order: str, changed: int, error: float, parts: dict[str, Any]) -> None:
        self.tensors[name] = {
            "format": form, "shape": list(shape), "order": order, "changed_by_cast": changed, "fast_error": error, "parts": parts,
        }  # fmt: skip

    def _hold(self, kind: str, name: str, tensor: torch.Tensor) -> dict[str, str]:
        held = self._held[kind]
        if sum(t.nbytes for t in held.values()) >= _FILE_BYTES:
            self._flush(kind)
            held = self._held[kind]
        held[name] = tensor.detach().cpu().contiguous()
        return {"file": self._file(kind), "sha256": digest(held[name])}

    def _file(self, kind: str) -> str:
        return f"{kind}-{self._count[kind]:05}.safetensors"

    def _flush(self, kind: str) -> None:
        if self._held[kind]:
            save_file(self._held[kind], self.folder / self._file(kind), metadata={"format": "pt"})
            self._held[kind] = {}
            self._count[kind] += 1


class NestedReader:
    """A nested checkpoint, checked against its manifest; tensors stay in the files until they are used.

    Raises :class:`CheckpointError` naming what is missing, altered, of another version or no nested checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        places = {part_name(n, p): file for n, e in self.manifest.tensors.items() for p, (file, _) in e.parts.items()}
        self._files = TensorFiles(folder, places)

    def verify(self) -> None:
        """Compare the SHA-256 of every part, several at a time (about 1.3 GB/s for each core); raises where one differs."""
        parts = [(n, p, digest_) for n, e in self.manifest.tensors.items() for p, (_, digest_) in e.parts.items()]
        with ThreadPoolExecutor(max_workers=max(1, torch.get_num_threads())) as pool:
            found = pool.map(digest, (self._part(n, p) for n, p, _ in parts))
            for (name, part, expected), actual in zip(parts, found, strict=True):
                if actual != expected:
                    raise CheckpointError(
                        f"{part_name(name, part)} in {self.folder} has SHA-256 {actual}, expected {expected}: altered; {_AGAIN}"
                    )

    def nested(self, name: str) -> NestedWeight:
        """The stored bytes of a nested tensor, on the CPU."""
        entry = self.manifest.tensors[name]
        assert entry.format is not None
        lower, shift = (self._part(name, p) if p in entry.parts else None for p in ("lower", "shift"))
        return NestedWeight(entry.format, self._part(name, "upper"), lower, shift)

    def whole(self, name: str) -> torch.Tensor:
        """A tensor that is not nested, on the CPU."""
        return self._part(name, "whole")

    def _part(self, name: str, part: str) -> torch.Tensor:
        entry = self.manifest.tensors[name]
        tensor = self._files.get(part_name(name, part))
        shape = entry.shape[:1] if part == "shift" else entry.shape
        allowed = {"shift": (torch.int8,), "lower": (torch.uint8,)}.get(part, tuple(_DTYPES.values()))
        if part == "upper" and "lower" in entry.parts:
            allowed = (torch.uint8,)
        if tuple(tensor.shape) != shape or tensor.dtype not in allowed:
            raise CheckpointError(
                f"{part_name(name, part)} in {self.folder} is {list(tensor.shape)} {tensor.dtype}, expected {list(shape)} "
                f"{' or '.join(map(str, allowed))}: altered; {_AGAIN}"
            )
        return tensor


def part_name(name: str, part: str) -> str:
    """The name of a part in its file."""
    return name if part == "whole" else f"{name}.{part}"


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of the bytes of a contiguous CPU tensor, as hexadecimal digits."""
    content: Any = tensor.flatten().view(torch.uint8).numpy()
    return hashlib.sha256(content).hexdigest()


def seal(body: dict[str, Any]) -> str:
    """SHA-256 of what the manifest says."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """``depthfx.json`` of ``folder``; raises :class:`CheckpointError` where it cannot be trusted."""
    if not is_nested_checkpoint(folder):
        raise CheckpointError(f"{folder} holds no {MANIFEST} and is no nested checkpoint; `depthfx convert` writes one")
    path = folder / MANIFEST
    body = read_json(path)
    if body.get("kind") != KIND:
        raise CheckpointError(f"{path} is of kind {body.get('kind')!r}, not {KIND!r}; name a folder that `depthfx convert` wrote")
    if body.get("version") != VERSION:
        raise CheckpointError(f"{path} has version {body.get('version')!r}; this depthfx reads version {VERSION}: convert the model again")
    if body.pop("sha256", None) != seal(body):
        raise CheckpointError(f"{path} was altered: its SHA-256 is not that of its content; {_AGAIN}")
    if body["dtype"] not in _DTYPES:
        raise CheckpointError(f"{path} has dtype {body['dtype']!r}; allowed: {', '.join(_DTYPES)}: {_AGAIN}")
    return Manifest(_DTYPES[body["dtype"]], {name: _entry(path, name, said) for name, said in body["tensors"].items()})


def _entry(path: Path, name: str, said: dict[str, Any]) -> TensorEntry:
    parts = {part: (place["file"], place["sha256"]) for part, place in said["parts"].items()}
    form, shape, order = said["format"], tuple(said["shape"]), said["order"]
    if form is None:
        allowed = {"whole"}
    elif form not in FORMATS.names():
        raise CheckpointError(f"{path} stores {name} as {form!r}; this depthfx knows {', '.join(FORMATS.names())}: convert the model again")
    else:
        allowed = {"upper", "lower", "shift"} if "shift" in parts else {"upper", "lower"} if "lower" in parts else {"upper"}
    if set(parts) != allowed:
        raise CheckpointError(f"{path} lists the parts {sorted(parts)} of {name}, expected {sorted(allowed)}: {_AGAIN}")
    expected = "fragment" if "lower" in parts and is_fragment_order(shape[1]) else "plain"
    if order != expected:
        raise CheckpointError(f"{path} stores {name} in {order!r} order; this depthfx reads {expected!r}: convert the model again")
    return TensorEntry(form, shape, order, said["changed_by_cast"], said["fast_error"], parts)
