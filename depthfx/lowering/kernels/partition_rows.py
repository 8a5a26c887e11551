"""The rows of a routed layer by what was decided for them: packed order, counts, and what the RUN cohort sees.

``choice[t]`` is -1 where ``positions[t] < 0`` (padding), else 1 (RUN) where ``actions[t]`` or ``forced[t]`` is not 0, else 0 (PROJECT).
``order`` [T] holds the RUN rows, then the PROJECT rows, then padding, each in rising order; ``counts`` [2] the numbers of the first
two; ``run_positions[t]`` is ``positions[t]`` of a RUN row and -1 of any other, so attention reads no key for it. Row ``place`` of
``tape`` [places, capacity >= T] int8 gets ``choice``, and of a forced row 3 where its action is not 0, else 2: what would have been
decided is seen there without any effect. Its columns from T on stay. All others are int32; T < 32768.
Decisions of several layers, ``actions`` [P, T], give [P, T] and [P, 2], and fill the tape from row ``place`` on.
Example: actions = [0, 1, 0, 1], forced = [0, 0, 1, 0], positions = [7, 3, 9, -1]: order = [1, 2, 0, 3], counts = [2, 1],
run_positions = [-1, 3, 9, -1], choice = [0, 1, 1, -1] and on the tape [0, 1, 2, -1].
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from depthfx.lowering.kernel_spec import Case, KernelSpec, inner_contiguous, is_collecting, pdl_options, register_kernel
from depthfx.lowering.kernels._cases import COPY_REASON, COPY_TOLERANCE
from depthfx.lowering.kernels._device import pdl_release, pdl_wait

MAX_ROWS = 32767  # two counts share an int32 of the prefix sum
MAX_BLOCK = 1024


@triton.jit
def _choose(actions_ptr, forced_ptr, positions_ptr, rows, num_rows):
    """``(choice, position, note for the tape)`` of ``rows``; rows from T on are -1."""
    inside = rows < num_rows
    action = tl.load(actions_ptr + rows, mask=inside, other=0)
    forced = tl.load(forced_ptr + rows, mask=inside, other=0)
    position = tl.load(positions_ptr + rows, mask=inside, other=-1)
    runs = (action != 0) | (forced != 0)
    noted = (action != 0).to(tl.int32) + tl.where(forced != 0, 2, 0)
    return tl.where(position < 0, -1, runs.to(tl.int32)), position, tl.where(position < 0, -1, noted)


@triton.jit
def _packed_counts(choice):
    """1 for a RUN row, 2^16 for a PROJECT row, 0 for padding: one sum counts both."""
    return tl.where(choice == 1, 1, tl.where(choice == 0, 1 << 16, 0))


@triton.jit(do_not_specialize=["num_rows", "place"])
def _partition_rows_kernel(
    actions_ptr, forced_ptr, positions_ptr, tape_ptr, order_ptr, counts_ptr, run_positions_ptr, choice_ptr,
    num_rows, place, stride_tape, BLOCK: tl.constexpr, ONE_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for all rows of a layer, BLOCK at a time: first the counts, which say where a cohort begins, then each row's place in its own."""
    at = tl.arange(0, BLOCK)
    layer = tl.program_id(0)
    tape_row = tape_ptr + (place + layer).to(tl.int64) * stride_tape
    actions_ptr += layer * num_rows
    order_ptr += layer * num_rows
    counts_ptr += 2 * layer
    run_positions_ptr += layer * num_rows
    choice_ptr += layer * num_rows
    pdl_release(PDL)
    pdl_wait(PDL)
    choice, position, noted = _choose(actions_ptr, forced_ptr, positions_ptr, at, num_rows)
    packed = _packed_counts(choice)
    if not ONE_BLOCK:
        for start in range(BLOCK, num_rows, BLOCK):
            more, _position, _noted = _choose(actions_ptr, forced_ptr, positions_ptr, start + at, num_rows)
            packed += _packed_counts(more)
    counted = tl.sum(packed, axis=0)
    num_run, num_project = counted & 0xFFFF, counted >> 16
    tl.store(counts_ptr, num_run)
    tl.store(counts_ptr + 1, num_project)

    before = num_run * 0
    for start in range(0, BLOCK if ONE_BLOCK else num_rows, BLOCK):
        rows = start + at
        inside = rows < num_rows
        if not ONE_BLOCK:
            choice, position, noted = _choose(actions_ptr, forced_ptr, positions_ptr, rows, num_rows)
        packed = _packed_counts(choice)
        earlier = before + tl.cumsum(packed, axis=0) - packed  # RUN and PROJECT rows before this one
        before += tl.sum(packed, axis=0)
        run, project = earlier & 0xFFFF, earlier >> 16
        target = tl.where(choice == 1, run, tl.where(choice == 0, num_run + project, num_run + num_project + rows - run - project))
        tl.store(order_ptr + target, rows, mask=inside)
        tl.store(run_positions_ptr + rows, tl.where(choice == 1, position, -1), mask=inside)
        tl.store(choice_ptr + rows, choice, mask=inside)
        tl.store(tape_row + rows, noted.to(tl.int8), mask=inside)


def _check(actions: torch.Tensor, forced: torch.Tensor, positions: torch.Tensor, tape: torch.Tensor, place: int) -> None:
    num_rows, num_layers = actions.shape[-1] if actions.dim() else 0, actions.shape[0] if actions.dim() == 2 else 1
    if (
        actions.dim() not in (1, 2)
        or actions.is_floating_point()
        or forced.shape != actions.shape[-1:]
        or positions.shape != actions.shape[-1:]
    ):
        raise ValueError(
            f"actions are {actions.dtype} {list(actions.shape)}, forced {list(forced.shape)}, positions {list(positions.shape)}; all must be "
            "[T], actions [P, T] for several layers, bool or integer; compare a router's output with its threshold first"
        )
    if num_rows > MAX_ROWS:
        raise ValueError(f"{num_rows} rows are too many for one partition; at most {MAX_ROWS} are allowed; lower max_batch_tokens")
    if tape.dim() != 2 or tape.dtype is not torch.int8 or tape.shape[1] < num_rows or not 0 <= place <= tape.shape[0] - num_layers:
        raise ValueError(
            f"tape is {tape.dtype} {list(tape.shape)} for place {place}, {num_layers} layers, {num_rows} rows; it must be int8 [places, capacity] with "
            "a row for each routed layer and a column for each row of the largest step"
        )


Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def reference(actions: torch.Tensor, forced: torch.Tensor, positions: torch.Tensor, tape: torch.Tensor, place: int) -> Result:
    """Plain PyTorch."""
    _check(actions, forced, positions, tape, place)
    choice = torch.where(positions < 0, -1, ((actions != 0) | (forced != 0)).to(torch.int32)).to(torch.int32)
    order = torch.argsort(choice, dim=-1, descending=True, stable=True).to(torch.int32)
    counts = torch.stack(((choice == 1).sum(-1), (choice == 0).sum(-1)), dim=-1).to(torch.int32)
    noted = torch.where(positions < 0, -1, (actions != 0).to(torch.int32) + 2 * (forced != 0))
    tape[place : place + (len(actions) if actions.dim() == 2 else 1), : choice.shape[-1]] = noted.to(torch.int8)
    return order, counts, torch.where(choice == 1, positions, -1).to(torch.int32), choice


def launch(actions: torch.Tensor, forced: torch.Tensor, positions: torch.Tensor, tape: torch.Tensor, place: int) -> Result:
    _check(actions, forced, positions, tape, place)
    actions, forced, positions = actions.contiguous(), inner_contiguous(forced), inner_contiguous(positions)
    if tape.stride(1) != 1:
        raise ValueError(f"tape has strides {tape.stride()}; the rows of a layer must be contiguous; make it with torch.zeros")
    *layers, num_rows = actions.shape
    order, run_positions, choice = (torch.empty(actions.shape, dtype=torch.int32, device=actions.device) for _ in range(3))
    counts = torch.empty((*layers, 2), dtype=torch.int32, device=actions.device)
    block = min(MAX_BLOCK, max(32, triton.next_power_of_2(num_rows)))
    _partition_rows_kernel[(math.prod(layers),)](
        actions, forced, positions, tape, order, counts, run_positions, choice, num_rows, place, tape.stride(0),
        BLOCK=block, ONE_BLOCK=num_rows <= block, num_warps=max(1, block // 128), **pdl_options(),
    )  # fmt: skip
    if is_collecting():  # nothing may have run, and rows, keys and sizes are looked up by these: any that are there will do
        order.copy_(torch.arange(num_rows, dtype=torch.int32, device=actions.device))
        run_positions.copy_(positions)
        counts.zero_()
        choice.zero_()
    return order, counts, run_positions, choice


def fake(actions: torch.Tensor, forced: torch.Tensor, positions: torch.Tensor, tape: torch.Tensor, place: int) -> Result:
    order, run_positions, choice = (actions.new_empty(actions.shape, dtype=torch.int32) for _ in range(3))
    return order, actions.new_empty((*actions.shape[:-1], 2), dtype=torch.int32), run_positions, choice


def _case(
    rows: int, run: float, forced: float = 0.0, padding: float = 0.0, extra: int = 0, dtype: torch.dtype = torch.bool,
    layers: tuple[int, ...] = (),
) -> Case:  # fmt: skip
    """``run``, ``forced`` and ``padding`` are shares of the rows, drawn one by one; ``extra``: columns of the tape behind T."""

    def make(g: torch.Generator, _dtype: torch.dtype) -> tuple:
        actions = (torch.rand(*layers, rows, generator=g) < run).to(dtype)
        if dtype is not torch.bool:
            actions *= torch.randint(1, 1000, (*layers, rows), generator=g).to(dtype)
        positions = torch.randint(0, 100_000, (rows,), generator=g, dtype=torch.int32)
        positions[torch.rand(rows, generator=g) < padding] = -1
        tape = torch.randint(-1, 2, (3, rows + extra), generator=g).to(torch.int8)
        return actions, (torch.rand(rows, generator=g) < forced).to(torch.int32), positions, tape, 1

    label = f"{'x'.join(map(str, (*layers, rows)))}rows-run{run:g}-forced{forced:g}-padding{padding:g}-{str(dtype)[6:]}"
    return Case(label, make, COPY_TOLERANCE, COPY_REASON)


register_kernel(
    KernelSpec(
        name="partition_rows",
        schema="(Tensor actions, Tensor forced, Tensor positions, Tensor(a!) tape, int place) "
        "-> (Tensor order, Tensor counts, Tensor run_positions, Tensor choice)",
        reference=reference,
        launch=launch,
        fake=fake,
        cases=(
            _case(5, 0.5, forced=0.2, padding=0.2, extra=3),
            _case(0, 1.0, extra=2),
            _case(1, 1.0),
            _case(1, 0.0, extra=15),
            _case(1, 1.0, padding=1.0),
            _case(33, 1.0, dtype=torch.int32),
            _case(64, 0.0, padding=0.3, dtype=torch.int32),
            _case(77, 0.7, padding=1.0),
            _case(257, 0.4, forced=0.1, padding=0.1, extra=7, dtype=torch.int32),
            _case(1024, 0.6, padding=0.05),
            _case(1025, 0.5, forced=0.1, padding=0.1, extra=1),
            _case(8192, 0.7, forced=0.01, padding=0.02, dtype=torch.int32),
            _case(70, 0.6, forced=0.1, padding=0.1, extra=2, layers=(2,)),
            _case(1030, 0.3, padding=0.02, extra=1, dtype=torch.int32, layers=(2,)),
        ),
    )
)
