"""Tensors of a folder of safetensors files, read one at a time through a memory map."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from depthfx.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class TensorFiles:
    """Name to tensor, for ``places``: tensor name to file name in ``folder``. Files are opened when first needed.

    Raises :class:`CheckpointError` naming the file that is missing or cut off, or the tensor that a file lacks.
    """

    def __init__(self, folder: Path, places: dict[str, str]) -> None:
        self.folder = folder
        self.places = places
        self._open: dict[str, Any] = {}

    def get(self, name: str) -> torch.Tensor:
        """The tensor on the CPU: mapped from the file, private to this process, not read before it is used."""
        file = self.places[name]
        try:
            tensor: torch.Tensor = self._file(file).get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self.folder / file} has no tensor {name!r}: the file was altered; make the folder anew") from error
        return tensor

    def _file(self, file: str) -> Any:
        if file not in self._open:
            self._open[file] = open_file(self.folder / file)
        return self._open[file]


def open_file(path: Path) -> Any:
    """A safetensors file, open for reading on the CPU; raises :class:`CheckpointError` for a missing, cut or foreign one."""
    try:
        return safe_open(path, "pt", device="cpu")
    except OSError as error:
        raise CheckpointError(f"{path} is missing or cannot be read ({error}); copy or make the folder anew") from error
    except SafetensorError as error:
        raise CheckpointError(f"{path} is cut off or is no safetensors file ({error}); copy or make the folder anew") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; raises :class:`CheckpointError` for anything else."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); copy or make the folder anew") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a JSON {type(found).__name__}, not an object; copy or make the folder anew")
    return found


def hf_files(folder: Path) -> TensorFiles:
    """The weights of a folder in Hugging Face's layout, sharded or not, in the order of the files.

    Raises :class:`CheckpointError` where there are no safetensors files.
    """
    if (folder / INDEX).is_file():
        places = read_json(folder / INDEX).get("weight_map")
        if not isinstance(places, dict):
            raise CheckpointError(f"{folder / INDEX} has no weight_map; copy the folder anew")
        return TensorFiles(folder, dict(sorted(places.items(), key=lambda item: item[1])))
    if (folder / SINGLE).is_file():
        return TensorFiles(folder, dict.fromkeys(open_file(folder / SINGLE).keys(), SINGLE))
    raise CheckpointError(
        f"{folder} holds neither {SINGLE} nor {INDEX}; name a folder in Hugging Face's layout with safetensors files "
        "(save_pretrained writes one)"
    )
