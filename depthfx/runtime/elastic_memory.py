"""Semi-unified memory of one engine: residuals and KV blocks over the same units, the host's copy, and the worker that restores.

Built once, between the measurement of activations and the capture of graphs: residual bytes go to the host (their only way there),
units are made in the memory that this frees, and the bytes come back to their home addresses, which program and model read from then on.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from depthfx.alloc.backup import HostBackup
from depthfx.alloc.physical_backend import PHYSICAL, PhysicalBackend
from depthfx.alloc.restore_worker import RestoreWorker
from depthfx.alloc.unified_memory import ALIGNMENT, UnifiedMemory
from depthfx.alloc.units import UnitLayout
from depthfx.errors import MemoryStateError, SettingError
from depthfx.lowering.stored_weight import StoredWeight
from depthfx.records import KvShape
from depthfx.report import CompileReport
from depthfx.runtime.lending_profile import Sensitivity
from depthfx.runtime.reclaim import close_later
from depthfx.settings import ElasticMemory

MIB = 1 << 20


@dataclass
class Resources:
    """What has to be given back, and holds no tensor of the model: it outlives an engine that is forgotten."""

    worker: RestoreWorker
    memory: UnifiedMemory
    backup: HostBackup

    def close(self) -> None:
        """Gives all of it back. Raises :class:`MemoryStateError` while a tensor over the memory lives; may be called again."""
        self.worker.close()
        self.memory.close()
        self.backup.close()


@dataclass
class SharedMemory:
    """What :func:`share_memory` built; :meth:`dissolve` gives it back."""

    layout: UnitLayout
    resources: Resources
    weights: list[tuple[StoredWeight, int]]  # each residual tensor and its first byte in the home range
    followers: tuple[StoredWeight, ...] = ()  # of another program over the same modules

    @property
    def worker(self) -> RestoreWorker:
        """Copies units back."""
        return self.resources.worker

    @property
    def memory(self) -> UnifiedMemory:
        """The units."""
        return self.resources.memory

    @property
    def backup(self) -> HostBackup:
        """The host's copy of all residual bytes."""
        return self.resources.backup

    def lead(self, followers: Sequence[StoredWeight]) -> None:
        """Weights of another program over the same modules read the bytes where they are, now and wherever they move."""
        self.followers = tuple(followers)
        for weight in followers:
            weight.follow()

    def kv_pool(self, kv: KvShape, dtype: torch.dtype) -> torch.Tensor:
        """The KV pool ``[blocks, L, 2, Hkv, B, D]`` over base blocks and units; base blocks are zero, units hold residuals."""
        pool = self.memory.kv_tensor(kv.pool_shape(self.layout.num_blocks), dtype)
        pool[: self.layout.num_base_blocks].zero_()
        return pool

    def back_up(self) -> None:
        """Take the host's copy anew, after weights were changed in place; all units must hold their residuals."""
        for weight, first in self.weights:
            self.backup.put(first, weight.lower.reshape(-1))

    def dissolve(self) -> None:
        """Residuals back to ordinary memory, everything else given back. No step may be queued, and the KV pool must be gone.

        Raises :class:`MemoryStateError` while tensors over the units live; the weights cannot be read until another call succeeds.
        """
        self.worker.close()
        for weight, _ in self.weights:
            for module in weight.modules:
                module.guard = _refuse_while_closing
            weight.move(lower=_no_memory(weight.lower))
        for follower in self.followers:
            follower.move(lower=_no_memory(follower.lower))
        self.memory.close()
        self._whole_again()
        self.backup.close()
        self.weights.clear()
        self.followers = ()

    def abandon(self, error: BaseException) -> None:
        """As :meth:`dissolve`, where ``error`` ended the building of an engine whose tensors its traceback may keep alive.

        The weights are whole afterwards in any case; memory that is still seen is given back when it is not any more.
        """
        _forget_locals(None, error, None)
        try:
            self.dissolve()
        except MemoryStateError:
            self._whole_again()
            close_later(self.resources)

    def _whole_again(self) -> None:
        _move_back(self.weights, self.backup)
        for weight, _ in self.weights:
            for module in weight.modules:
                module.guard = None
        for follower in self.followers:
            follower.follow()


def _refuse_while_closing() -> None:
    raise MemoryStateError("the residual bytes of this weight are on the host while the engine is being closed; call engine.close() again")


def plan_units(weights: Sequence[StoredWeight], kv: KvShape, num_entries: int, num_base_blocks: int, settings: ElasticMemory,
               granularity: int) -> tuple[UnitLayout, list[tuple[StoredWeight, int]]]:  # fmt: skip
    """Where every residual tensor and unit lies: entries one after another in lending order, tensors at multiples of 256 bytes.

    Raises :class:`SettingError` for an ``order`` or a ``profile`` that does not fit the model, or if nothing can be lent.
    """
    order = _lending_order(settings, kv.num_layers, num_entries)
    block = kv.block_bytes
    spans, placed, at = [(0, 0)] * num_entries, [], 0
    for entry in order:
        first = at
        for weight in (w for w in weights if w.entry == entry):
            placed.append((weight, at))
            at += -(-weight.lower.numel() // ALIGNMENT) * ALIGNMENT
        spans[entry] = (first, at) if at > first else (0, 0)
    if not placed:
        raise SettingError("setting memory: no weight of this model has residual bytes to lend (see explain()); leave memory out")
    smallest = math.lcm(block, granularity)
    wanted = min(round(settings.unit_mib * MIB / smallest), -(-at // smallest))  # one unit may hold all, but not more than that
    unit = max(1, wanted) * smallest
    return UnitLayout(unit, unit // block, num_base_blocks, tuple(spans)), placed


def share_memory(
    weights: Sequence[StoredWeight], kv: KvShape, num_entries: int, num_base_blocks: int, settings: ElasticMemory, device: torch.device,
    report: CompileReport,
) -> SharedMemory:  # fmt: skip
    """Move the residuals of ``weights`` into units that KV can borrow. Call before graphs are captured, with no work queued.

    Raises :class:`HostMemoryError`, :class:`PhysicalMemoryError` or :class:`SettingError`; then the residuals are back in ordinary memory.
    """
    cuda = device.type == "cuda"
    moved: list[tuple[StoredWeight, int]] = []
    with ExitStack() as undo:
        backend = _backend(device)
        undo.callback(backend.close)
        layout, placed = plan_units(weights, kv, num_entries, num_base_blocks, settings, backend.granularity())
        used = max(end for _, end in layout.spans)
        backup = HostBackup(used, layout.unit_bytes, pin=cuda)
        undo.callback(backup.close)
        undo.callback(_move_back, moved, backup)
        for weight, first in placed:
            backup.put(first, weight.lower.reshape(-1))
            moved.append((weight, first))
            weight.move(lower=_no_memory(weight.lower))
        if cuda:
            for weight, _ in placed:  # a persistent half whose neighbour is gone moves beside another one, and whole segments become free
                weight.move(upper=weight.upper.clone())
            torch.cuda.empty_cache()
        memory = UnifiedMemory.build(backend, layout, num_base_blocks * kv.block_bytes)
        undo.callback(memory.close)
        worker = RestoreWorker(device)
        undo.callback(worker.close)
        undo.callback(_let_go, moved)
        undo.push(_forget_locals)
        _fill(memory, worker, backup)
        for weight, first in placed:
            weight.move(lower=memory.home_tensor(first, weight.lower.shape, torch.uint8))
        _describe(layout, used, kv, report)
        undo.pop_all()
    return SharedMemory(layout, Resources(worker, memory, backup), placed)


def _fill(memory: UnifiedMemory, worker: RestoreWorker, backup: HostBackup) -> None:
    """The residual bytes from the host to their home."""
    layout, home = memory.layout, memory.home_bytes_tensor()
    units = range(layout.num_units)
    worker.copy_all([home[slice(*layout.pieces_of(unit))] for unit in units], [backup.unit(unit) for unit in units])


def _forget_locals(_: object, error: BaseException | None, __: object) -> None:
    """What failed must not keep tensors over the units alive."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _let_go(moved: list[tuple[StoredWeight, int]]) -> None:
    for weight, _ in moved:
        weight.move(lower=_no_memory(weight.lower))


def _move_back(moved: list[tuple[StoredWeight, int]], backup: HostBackup) -> None:
    for weight, first in moved:
        content = backup.bytes(first, weight.lower.numel())
        weight.move(lower=content.to(weight.upper.device, copy=True).view(weight.lower.shape))


def _lending_order(settings: ElasticMemory, num_layers: int, num_entries: int) -> list[int]:
    order = settings.order
    if settings.profile is not None:
        found = Sensitivity.load(settings.profile)
        if len(found.layers) != num_layers:
            raise SettingError(
                f"memory profile={settings.profile!r} is of {len(found.layers)} layers; the model has {num_layers}: measure it"
            )
        order = found.order
    unknown = [layer for layer in order or () if not 0 <= layer < num_layers]
    if unknown:
        raise SettingError(f"memory order names layer {unknown[0]}; the model has layers 0 to {num_layers - 1}")
    first = list(order or ())
    return first + [entry for entry in range(num_entries) if entry not in first]


def _backend(device: torch.device) -> PhysicalBackend:
    if device.type == "cuda":
        with torch.cuda.device(device):
            return PHYSICAL.get("cuda_vmm")()
    return PHYSICAL.get("memfd")()


def _no_memory(like: torch.Tensor) -> torch.Tensor:
    """A tensor of the shape of ``like`` over one byte."""
    return like.new_zeros(1).expand(like.shape)


def _describe(layout: UnitLayout, used: int, kv: KvShape, report: CompileReport) -> None:
    spare = layout.num_units * layout.unit_bytes - used
    report.add(
        "memory",
        f"shared with residuals: {layout.num_units} units of {layout.unit_bytes / MIB:.2f} MiB, {layout.blocks_per_unit} KV blocks each; "
        f"up to {layout.num_blocks} blocks in all, {layout.num_blocks / max(1, layout.num_base_blocks):.2f} times the base; "
        f"{spare / MIB:.2f} MiB ({spare / (layout.num_units * layout.unit_bytes):.1%}) of the units hold no residual",
    )
    report.add("memory", f"host copy of residuals: {used / MIB:,.2f} MiB")
