"""Several processes as one, through `accelerate`: each takes its share of a step's sequences, gradients and sums are added up."""

from __future__ import annotations

import atexit
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from depthfx.errors import SkipperError


class Workers:
    """The processes of this run: one, or those that ``torchrun`` or ``accelerate launch`` started.

    On CPUs ``torchrun --nproc_per_node N`` starts several; of ``accelerate launch`` without MPI, ``--cpu --num_processes N`` starts one alone.
    """

    def __init__(self) -> None:
        """Raises :class:`SkipperError` where accelerate is not installed."""
        try:
            from accelerate import PartialState
            from accelerate.utils import parse_flag_from_env
        except ImportError as error:
            raise SkipperError("training needs the package accelerate; install depthfx[train]") from error
        first = not torch.distributed.is_initialized()
        self._state: Any = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available())
        self.rank, self.count = int(self._state.process_index), int(self._state.num_processes)
        self.is_main = self.rank == 0
        if self.count > 1 and first:  # else gloo's threads end the process with a signal, now and then
            atexit.register(self._state.destroy_process_group)

    def place(self, model: nn.Module) -> torch.device:
        """Where ``model`` is; with several processes it is moved to this one's device first."""
        if self.count > 1:
            model.to(self._state.device)
        return next(model.parameters()).device

    def share(self, indices: list[int]) -> list[int]:
        """This process's part of a list that all processes have."""
        return indices[self.rank :: self.count]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of ``values`` over all processes, in each of them."""
        if self.count == 1:
            return values
        from accelerate.utils import reduce

        total: torch.Tensor = reduce(values, "sum")
        return total

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Every parameter's gradient becomes the sum over all processes; a missing one counts as zero."""
        own = list(parameters)
        for p in own:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        if self.count == 1:
            return
        gradients = [p.grad for p in own if p.grad is not None]
        total = self.sum(torch.cat([g.flatten() for g in gradients]))
        for gradient, part in zip(gradients, total.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def wait(self) -> None:
        """Until all processes are here."""
        self._state.wait_for_everyone()
