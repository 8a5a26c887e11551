"""Tiles that a tuner kept, one JSON file for each kind of device in the cache folder.

The kind is the name and the number of multiprocessors; the driver plays no part. A process reads the file once, before its first
launch, so captured graphs and later launches agree. A file that is broken, foreign or of another version is left alone and reported.
"""

from __future__ import annotations

import json
import re
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch

from depthfx.lowering.kernel_spec import device_sms
from depthfx.lowering.kernels._stream_config import Product, StreamConfig, config_fault, use_tiles
from depthfx.report import CACHES, CompileReport
from depthfx.whole_file import write_whole

VERSION = 1  # raise it when the file or the streaming kernel changes: what was timed before is then void

Tiles = dict[Product, StreamConfig]
_in_use: dict[int, str] = {}  # multiprocessors -> the line that said what was loaded


@dataclass(frozen=True)
class DeviceKind:
    """What tiles depend on."""

    name: str
    num_sms: int


def device_kind(device: torch.device) -> DeviceKind:
    """The kind of a CUDA device."""
    return DeviceKind(torch.cuda.get_device_name(device), device_sms(device))


def tile_file(folder: Path, kind: DeviceKind) -> Path:
    """Where the tiles of ``kind`` are kept."""
    slug = re.sub(r"[^a-z0-9]+", "-", kind.name.lower()).strip("-")
    return folder / "tiles" / f"{slug}-{kind.num_sms}.json"


def load_tiles(folder: Path, kind: DeviceKind) -> tuple[Tiles, str]:
    """The tiles of ``kind`` and a line that says what was found; none where the file is missing, broken or foreign."""
    path = tile_file(folder, kind)
    try:
        tiles = _read(json.loads(path.read_text()), kind)
    except FileNotFoundError:
        return {}, f"tuned tiles: none kept for {kind.name}; depthfx tune finds them"
    except (OSError, ValueError, TypeError, KeyError) as error:
        return {}, f"tuned tiles: {path} is ignored ({type(error).__name__}: {error}); depthfx tune writes it anew"
    return tiles, f"tuned tiles: {len(tiles)} products from {path.name}"


def save_tiles(folder: Path, kind: DeviceKind, tiles: Tiles) -> Path:
    """Write ``tiles`` in one step, so that a reader sees all of it or what was there before. Raises ``OSError`` where it cannot."""
    path = tile_file(folder, kind)
    rows = [[*product, *astuple(config)] for product, config in sorted(tiles.items())]
    body = {"version": VERSION, "device": kind.name, "multiprocessors": kind.num_sms, "tiles": rows}
    write_whole(path, json.dumps(body, indent=1))
    return path


def use_stored_tiles(folder: Path, kind: DeviceKind, report: CompileReport) -> None:
    """Let the streaming kernel use what ``folder`` keeps for ``kind``; later calls in the process change nothing and say so."""
    if kind.num_sms in _in_use:
        report.add(CACHES, f"{_in_use[kind.num_sms]} (read earlier in this process)")
        return
    tiles, line = load_tiles(folder, kind)
    use_tiles(kind.num_sms, tiles)
    _in_use[kind.num_sms] = line
    report.add(CACHES, line)


def _read(body: Any, kind: DeviceKind) -> Tiles:
    """The tiles of a parsed file; ``ValueError`` names what does not fit."""
    if not isinstance(body, dict) or body.get("version") != VERSION:
        found = body.get("version") if isinstance(body, dict) else type(body).__name__
        raise ValueError(f"version {found!r}, expected {VERSION}")
    if (body["device"], body["multiprocessors"]) != (kind.name, kind.num_sms):
        raise ValueError(
            f"made on {body['device']!r} with {body['multiprocessors']} multiprocessors, not {kind.name!r} with {kind.num_sms}"
        )
    tiles: Tiles = {}
    for row in body["tiles"]:
        block_t, num_outputs, num_inputs, gated, *cut = row
        if [type(v) for v in row] != [int, int, int, bool, int, int, int, int]:
            raise ValueError(f"entry {row} must be rows, N, K, gated and the four numbers of a config")
        product, config = (block_t, num_outputs, num_inputs, gated), StreamConfig(*cut)
        if (fault := config_fault(product, config)) is not None:
            raise ValueError(f"entry {row}: {fault}")
        tiles[product] = config
    return tiles
