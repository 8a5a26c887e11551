"""Folders to models with nested weights, tensor by tensor, and ordinary folders to nested checkpoints.

A model is made without memory for its weights first; then each tensor goes straight to its place on the device. Besides the model
in its nested form, one 16-bit weight at a time is in memory.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from depthfx.errors import FOREIGN_FAULTS, CheckpointError, FormatError, SettingError
from depthfx.lowering.nest import DTYPES, fast_error_of, nest, nest_counted
from depthfx.lowering.nested_checkpoint import NestedReader, NestedWriter, TensorEntry, is_nested_checkpoint
from depthfx.lowering.nested_format import NestedWeight
from depthfx.lowering.nested_linear import NestedLinear, linears_to_nest, place_linear
from depthfx.lowering.tensor_files import TensorFiles, hf_files, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Not copied into a nested checkpoint: weights of the original, and the checksums of its files.
_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|h5|msgpack|onnx|index\.json)$|depthfx-seal\.json$")
# Tensors of old files that Hugging Face computes instead.
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$|(^|\.)position_ids$")


def load(path: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None, verify: bool = True) -> PreTrainedModel:
    """A model with nested weights from a nested checkpoint or from an ordinary Hugging Face folder with safetensors files.

    ``dtype`` is what the weights read as: float16, bfloat16 or float32; None takes the folder's. See :func:`load_nested` and
    :func:`load_hf_nested`, whose errors it raises.
    """
    if is_nested_checkpoint(_path(path)):
        return load_nested(path, device, dtype, verify)
    return load_hf_nested(path, device, dtype)


def load_nested(
    path: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None, verify: bool = True
) -> PreTrainedModel:
    """The model of a nested checkpoint on ``device``, in evaluation mode; nothing is transcoded.

    On a CPU the nested weights stay in the files' memory maps. ``verify`` reads everything once to compare its SHA-256 (about
    1.3 GB/s for each core, all cores at once); False trusts the files. Raises :class:`CheckpointError` for a folder that is missing, altered, of another
    version, or does not fit its config, and :class:`SettingError` for a device that there is not, as all functions here do.
    """
    folder, device = _path(path), _usable_device(device)
    reader = NestedReader(folder)
    dtype = dtype or reader.manifest.dtype
    model = empty_model(folder, dtype)
    entries = reader.manifest.tensors
    names = names_to_read(model, entries, folder)
    for tied, source in model.all_tied_weights_keys.items():
        if tied in entries and source in entries and _digests(entries[tied]) != _digests(entries[source]):
            raise _untied(tied, source, folder)
    if verify:
        reader.verify()
    for name in names:
        entry = entries[name]
        _check_shape(model, name, entry.shape, folder)
        if entry.format is None:
            _set_tensor(model, names[name], _own(reader.whole(name), device, dtype))
        else:
            _set_nested(model, names[name], _moved(reader.nested(name), device), dtype, folder)
    return _finish(model, device, folder)


def load_hf_nested(path: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The model of an ordinary folder on ``device``, in evaluation mode, each linear weight nested there as it is read.

    Weights are cast to ``dtype`` as Hugging Face would, and then to float16 for nesting. Raises :class:`CheckpointError` for a
    folder without config or safetensors files, or whose tensors are not those of the model.
    """
    folder, device = _path(path), _usable_device(device)
    files, model, names, nestable = open_folder(folder, dtype)
    for name, target in names.items():
        tensor = checked_tensor(model, files, name, folder)
        if target in nestable:
            with _naming(name, folder):
                nested = nest(tensor.to(device).to(model.dtype))
            _set_nested(model, target, nested, model.dtype, folder)
        else:
            _set_tensor(model, target, _own(tensor, device, model.dtype))
    return _finish(model, device, folder)


def convert(source: str | Path, out: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> None:
    """Write the ordinary folder ``source`` as a nested checkpoint to ``out``, tensor by tensor, transcoding on ``device``.

    ``dtype`` is that of the model that ``out`` will load as; None takes the source's. ``out`` appears at the end, whole, and must not
    exist before (or be empty). Raises :class:`CheckpointError` as :func:`load_hf_nested` does.
    """
    folder, target, device = _path(source), _path(out), _usable_device(device)
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise CheckpointError(f"{target} exists already and is not empty; name a new folder")
    if is_nested_checkpoint(folder):
        raise CheckpointError(f"{folder} is a nested checkpoint already; copy it")
    files, model, names, nestable = open_folder(folder, dtype)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    except OSError as error:
        raise CheckpointError(f"no folder can be made in {target.parent} ({error}); name another place for {target.name}") from error
    try:
        writer = NestedWriter(work, model.dtype)
        for name, model_name in names.items():
            tensor = checked_tensor(model, files, name, folder)
            if model_name in nestable:
                with _naming(name, folder):
                    nested, changed = nest_counted(tensor.to(device).to(model.dtype))
                writer.add_nested(model_name, nested, changed, fast_error_of(nested))
            else:
                writer.add_whole(model_name, tensor.to(model.dtype) if tensor.is_floating_point() else tensor)
        writer.close()
        for file in folder.iterdir():
            if file.is_file() and not _WEIGHTS.match(file.name):
                shutil.copy2(file, work / file.name)
        os.chmod(work, 0o755)  # mkdtemp makes it private
        os.replace(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def empty_model(folder: Path, dtype: torch.dtype | None) -> Any:
    """The model of ``folder``'s config with all parameters on the meta device and its computed buffers on the CPU.

    ``dtype`` None: the config's, or else that of the first tensor. Raises :class:`CheckpointError` for a config that cannot be used.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} is no folder with a config.json; name one in Hugging Face's layout")
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            read_json(folder / name)  # Hugging Face explains nothing of what is no JSON object
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        if getattr(config, "quantization_config", None) is not None:
            raise CheckpointError(f"{folder} holds quantised weights; nest the original 16-bit or 32-bit ones")
        dtype = dtype or config.dtype or next(iter_dtypes(folder))
        if dtype not in DTYPES:
            raise CheckpointError(f"dtype {dtype} of {folder}: weights read as one of {', '.join(map(str, DTYPES))}; give dtype=")
        with torch.device("cpu"), init_empty_weights(include_buffers=False):  # not where the caller has tensors made
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except CheckpointError:
        raise
    except (*FOREIGN_FAULTS, StrictDataclassError) as error:
        raise CheckpointError(f"no model can be made from {folder}; Hugging Face says: {error}") from error
    model.config._name_or_path = str(folder)
    return model.eval()


def iter_dtypes(folder: Path) -> Iterator[torch.dtype]:
    """The dtypes of floating-point tensors in ``folder``, in the order of its files."""
    files = hf_files(folder)
    return (t.dtype for t in map(files.get, files.places) if t.is_floating_point())


def names_to_read(model: Any, given: Iterable[str], folder: Path) -> dict[str, str]:
    """Name in the files to name in ``model``, for what has to be read; tied copies and computed tensors are left out.

    Raises :class:`CheckpointError` for tensors that the model lacks or that the files lack.
    """
    tied: dict[str, str] = dict(model.all_tied_weights_keys)  # target -> source
    expected = set(model.state_dict())
    ignored = [re.compile(p) for p in model._keys_to_ignore_on_load_unexpected or ()]
    names = {n: n for n in given if n in expected}
    unknown = [n for n in given if n not in expected and not _COMPUTED.search(n) and not any(p.search(n) for p in ignored)]
    if unknown:
        raise CheckpointError(
            f"{folder} has {len(unknown)} tensors that {type(model).__name__} lacks ({', '.join(unknown[:3])}); files that Hugging Face "
            "renames while loading have to go through from_pretrained and depthfx.compile"
        )
    for target, source in tied.items():
        if target in names and source in names:
            del names[target]
        elif target in names:
            names[target] = source
    missing = expected - set(names.values()) - {t for t, s in tied.items() if s in names.values()}
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} tensors of {type(model).__name__} ({', '.join(sorted(missing)[:3])}); copy it anew"
        )
    return names


def open_folder(folder: Path, dtype: torch.dtype | None) -> tuple[TensorFiles, Any, dict[str, str], set[str]]:
    """Files, empty model, names to read (in the files to in the model), and the model's names of what nests.

    Raises :class:`CheckpointError` for a folder that cannot be loaded or in which nothing nests.
    """
    model = empty_model(folder, dtype)
    files = hf_files(folder)
    names = names_to_read(model, files.places, folder)
    nestable = {f"{path}.weight" for path in linears_to_nest(model)}
    if not nestable:
        raise CheckpointError(f"{type(model).__name__} has no torch.nn.Linear besides its head, so nothing of {folder} can be nested")
    for target, source in model.all_tied_weights_keys.items():
        if target in files.places and source in files.places and not torch.equal(files.get(target), files.get(source)):
            raise _untied(target, source, folder)
    return files, model, names, nestable


def checked_tensor(model: Any, files: TensorFiles, name: str, folder: Path) -> torch.Tensor:
    """The tensor ``name`` of ``files``; raises :class:`CheckpointError` where its shape is not that of the model."""
    tensor = files.get(name)
    _check_shape(model, name, tuple(tensor.shape), folder)
    return tensor


def _untied(target: str, source: str, folder: Path) -> CheckpointError:
    return CheckpointError(f"{folder} ties {target} to {source}, but holds different values; set tie_word_embeddings=false in config.json")


def _digests(entry: TensorEntry) -> dict[str, str]:
    return {part: digest for part, (_, digest) in entry.parts.items()}


def _path(path: object) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise CheckpointError(f"{path!r} of type {type(path).__name__} is no path; name a folder in Hugging Face's layout")
    return Path(path)


def _check_shape(model: Any, name: str, shape: tuple[int, ...], folder: Path) -> None:
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    place = module._parameters.get(last, module._buffers.get(last))
    if place is not None and tuple(place.shape) != shape:
        raise CheckpointError(f"{name} in {folder} is {list(shape)}, and the config asks for {list(place.shape)}; copy the folder anew")


@contextmanager
def _naming(name: str, folder: Path) -> Iterator[None]:
    """Errors of a format become those of the tensor ``name``."""
    try:
        yield
    except FormatError as error:
        raise CheckpointError(f"{name} of {folder} cannot be nested: {error}") from error


def _usable_device(device: str | torch.device) -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    allowed = "'cpu'" if not count else "'cpu', 'cuda'" if count == 1 else f"'cpu', 'cuda' or 'cuda:0' to 'cuda:{count - 1}'"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise SettingError(f"device={device!r} is no device that PyTorch knows; allowed here: {allowed}") from error
    if found.type not in ("cpu", "cuda") or (found.type == "cuda" and (found.index or 0) >= count):
        raise SettingError(f"device={device!r} is not there or cannot be used; allowed here: {allowed}")
    return found


def _own(tensor: torch.Tensor, device: Any, dtype: torch.dtype) -> torch.Tensor:
    """``tensor`` on ``device``, floating-point ones in ``dtype``, in memory of its own."""
    moved = tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)
    return moved.clone() if moved is tensor else moved


def _moved(nested: NestedWeight, device: Any) -> NestedWeight:
    parts = [None if t is None else t.to(device) for t in (nested.upper, nested.lower, nested.shift)]
    return NestedWeight(nested.format, *parts)  # type: ignore[arg-type]


def _set_tensor(model: Any, name: str, tensor: torch.Tensor) -> None:
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    if last in module._parameters:
        module._parameters[last] = nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
    else:
        module._buffers[last] = tensor


def _set_nested(model: Any, name: str, nested: NestedWeight, dtype: torch.dtype, folder: Path) -> None:
    path = name.removesuffix(".weight")
    old = model.get_submodule(path)
    if type(old) is not nn.Linear:
        raise CheckpointError(f"{folder} has a nested {name}, and {path} is a {type(old).__name__}; convert the model again")
    place_linear(model, path, NestedLinear(nested, old.bias, dtype).train(old.training))


def _finish(model: Any, device: torch.device, folder: Path) -> Any:
    """Tie what the config ties and move the computed buffers; every tensor must have a value by now."""
    model.tie_weights()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)
    empty = [n for n, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
    if empty:
        raise CheckpointError(f"{folder} gives no value to {', '.join(empty[:3])}; load it with from_pretrained")
    return model
