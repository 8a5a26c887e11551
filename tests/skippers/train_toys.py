"""A tiny random llama, sequences that can be learned, and short runs."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from pathlib import Path

import torch
from torch.multiprocessing import start_processes

from depthfx.skippers import make_skipper
from depthfx.skippers.train import Stage, TrainSettings, make_sequences, train_skipper
from tests.families.configs import VOCABULARY, build

LENGTH = 24


def model(dtype=torch.float32, **changes):
    return build("llama", dtype, num_hidden_layers=4, **changes)


def skipper(of, gate="mlp", seed=0):
    return make_skipper(of, "flexidepth", "adapter", gate=gate, reduction=4, proj_reduction=4, seed=seed)


def texts(count, seed=1):
    """Token ids: five of twenty words of six tokens each."""
    words = torch.randint(1, VOCABULARY, (20, 6), generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(seed)
    return [words[torch.randint(0, 20, (5,), generator=draw)].flatten().tolist() for _ in range(count)]


def data(of, count=64, seed=1, **options):
    return make_sequences(texts(count, seed), LENGTH, of, **options)


def ragged(of, count=16):
    """Sequences of different lengths, padded, some tokens of each context only."""
    found = data(of, count, pack=False, too_long="cut")
    found.lengths[:] = torch.arange(count) * 5 % (LENGTH - 4) + 4
    found.targets[:, :3] = False
    return found


def settings(steps=6, **changes):
    stage = {k: changes.pop(k) for k in ("penalty", "learning_rate", "final_share", "epochs") if k in changes}
    stages = (Stage(**{"steps": steps, "learning_rate": 3e-3, "penalty": 0.01, **stage}),)
    return TrainSettings(**{"stages": stages, "batch_size": 8, "micro_batch": 8, "recompute": False, "log_every": 1, **changes})


def train(folder, how, of=None, given=None, trained=None, **options):
    """Result, records of all steps, and the skipper, of a short run."""
    of = model() if of is None else of
    trained = skipper(of) if trained is None else trained
    records = []

    def keep(record):
        records.append(record)
        if then is not None:
            then(record)

    then = options.pop("on_step", None)
    given = data(of) if given is None else given
    result = train_skipper(of, trained, given, folder, how, progress=False, on_step=keep, **options)
    return result, records


def in_process(function, *arguments):
    """``function(0, *arguments)`` in another process. Where torch has no threads for a GPU, a fork of this one: it has imported everything."""
    start_processes(function, arguments, 1, start_method="spawn" if torch.cuda.is_available() else "fork")


def run_of_several(folder):
    """What the test of several processes runs in each of them, and by itself."""
    torch.set_num_threads(1)
    of = model()
    result, records = train(folder, settings(4, micro_batch=2), of, ragged(of), held_out=data(of, 5, seed=2))
    return records, result.evaluation.loss


def killed_at(rank, folder, how, step):
    """A run that dies at once after ``step``."""
    torch.set_num_threads(1)
    train(folder, how, on_step=lambda record: os.kill(os.getpid(), signal.SIGKILL) if record["step"] == step else None)


if __name__ == "__main__":  # as a launcher starts it
    # Runs after what others register: who has not left the group by then may be ended by a signal, so the launcher is told.
    atexit.register(lambda: os._exit(int(torch.distributed.is_initialized())))
    place = Path(sys.argv[1])
    torch.save(run_of_several(place / "run"), place / f"records{os.environ['RANK']}.pt")
