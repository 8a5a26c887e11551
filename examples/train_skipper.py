"""Train a small skipper for SmolLM2, then serve it.

Without arguments a few short steps on the language reference that every Python carries (`pydoc_data`), which shows how it is done and
trains nothing worth having. The one in the package comes from the preset `smollm2`: a GPU, some ten minutes, the sources of Python's
documentation (Debian's package python3.11-doc has them below html/_sources), and chats and documents that the model makes up itself:

    python examples/train_skipper.py --preset smollm2 --texts /usr/share/doc/python3.11/html/_sources --out RUN

RUN gets what the model made up, the state, metrics with a plot, the held-out text and the result, the folder `skipper`. Any option after the
preset replaces what it says. Started again with the same arguments, it goes on where it was stopped. In place of `python`, `torchrun
--nproc_per_node N` or `accelerate launch --multi_gpu --num_processes N` uses several processes, on GPUs or, where there is none, on the CPU
(`accelerate launch --cpu` starts only one there). They need `--out`, which is one folder for all of them; the first process writes.
"""

import argparse
import copy
import dataclasses
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

import depthfx
from depthfx.skippers import load_skipper, make_skipper
from depthfx.skippers.train import (
    Stage,
    TrainSettings,
    Workers,
    find_files,
    make_own_chats,
    make_own_documents,
    make_sequences,
    plot_metrics,
    read_files,
    split_files,
    train_skipper,
)
from depthfx.smollm2 import load_smollm2

PRESETS = {
    "look": {
        "steps": 3, "annealing": 0, "batch": 2, "micro_batch": 2, "length": 48, "log_every": 1, "settle": 2,
        "layers": list(range(22, 30)), "rate": 1e-4,
    },
    "smollm2": {
        "steps": 969, "annealing": 646, "batch": 24, "micro_batch": 24, "length": 512, "chats": 12_288, "documents": 6144, "log_every": 10,
        "dtype": "float16", "device": "cuda", "rise": 0.4, "pattern": "*.rst.txt", "skip": 0.262, "shift": 0.3, "lm": 0.3,
        "router_rate": 0.5, "head_std": 0.1, "balance": True, "noise": 1.0, "annealing_rate": 1e-3,
        # Without any one of the others the loss on this text rises by more than 0.32 nats a token.
        "layers": [3, 4, 5, 6, 7, 10, 12, 13, 14, 15, 16, 17, 18, 21, 22, 25, 26, 27],
    },
}  # fmt: skip

# Whom the user's messages are for: with nothing said, about half of them ask for stories and programs, and few for sums.
SUBJECTS = (
    None,
    "You are an expert in grade-school mathematics. The user asks word problems with numbers, and you solve them step by step.",
)
TEMPERATURES = (0.7, 1.0)
START = 0  # SmolLM2's <|endoftext|>, which stands before each document
PACE_STEPS = 30


def parse_arguments(arguments: tuple[str, ...]) -> argparse.Namespace:
    """The options, with those of the preset filled in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="look")
    parser.add_argument("--texts", help="a folder; without it, the language reference of this Python")
    parser.add_argument("--pattern", default="*.txt", help="files of that folder")
    parser.add_argument("--chats", type=int, default=0, help="so many chats more, made up by the model itself")
    parser.add_argument("--documents", type=int, default=0, help="so many documents more, likewise")
    parser.add_argument("--prepare", action="store_true", help="end when these are made; --seed decides what is made up")
    parser.add_argument("--own-tokens", type=int, default=448, help="of such a document at most, and of an answer up to 256")
    parser.add_argument("--together", type=int, help="so many are written at once; 512 on CUDA, 8 on a CPU")
    parser.add_argument("--out", help="a folder for state, metrics, plot and result; without it, a temporary one (of one process)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--layers", type=int, nargs="+", default=list(range(15, 30)), help="routed decoder layers")
    parser.add_argument("--gate", default="hard", choices=["hard", "mlp"])
    parser.add_argument("--router", type=int, default=32, help="the router's width is the hidden size divided by this")
    parser.add_argument("--adapter", type=int, default=32, help="the adapter's width is that of the MLP divided by this")
    parser.add_argument("--head-bias", type=float, default=1.0, help="where the router starts: above 0 most rows run")
    parser.add_argument("--head-std", type=float, default=0.0, help="how far its head's weights are from zero at the start")
    parser.add_argument("--skip", type=float, default=0.3, help="share of routed rows that are to skip")
    parser.add_argument("--rise", type=float, default=0.0, help="share of the first stage in which that share rises from 0")
    parser.add_argument("--max-penalty", type=float, default=0.05)
    parser.add_argument("--shift", type=float, default=0.7, help="how fast routers are moved to the target at once")
    parser.add_argument("--settle", type=int, default=64, help="sequences by which, after the last step, routers are moved to that share")
    parser.add_argument("--router-rate", type=float, default=0.3, help="the router's learning rate as a share of the adapter's")
    parser.add_argument(
        "--balance", action=argparse.BooleanOptionalAction, default=False, help="routers learn which rows skip, not how many"
    )
    parser.add_argument("--noise", type=float, default=0.0, help="of decisions in the first stage; in the second, routers then stay")
    parser.add_argument("--lm", type=float, default=1.0, help="weight of the loss of the language model")
    parser.add_argument("--distill", type=float, default=1.0, help="weight of the divergence from the frozen model")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--annealing-rate", type=float, default=5e-4, help="of the second stage")
    parser.add_argument("--minutes", type=float, default=0.0, help="that training may take, in place of all numbers of steps; see `paced`")
    for name in ("steps", "annealing", "batch", "micro-batch", "length", "log-every"):
        parser.add_argument(f"--{name}", type=int, help="steps of the second stage" if name == "annealing" else None)
    given = parser.parse_known_args(arguments)[0]
    if given.minutes and (given.steps or given.annealing):
        parser.error(f"--minutes {given.minutes:g} chooses the numbers of steps; leave out --steps and --annealing, or --minutes")
    parser.set_defaults(**PRESETS[given.preset])
    return parser.parse_args(arguments)


def find_texts(asked: argparse.Namespace, tokenizer: object, workers: Workers) -> tuple[list, list]:
    """What to train on and what to hold out, no file and no chat in both."""
    if asked.texts:
        files, held_out_files = split_files(find_files(asked.texts, asked.pattern), held_out=0.02, seed=asked.seed)
        texts, held_out = list(read_files(files)), list(read_files(held_out_files))
    else:
        from pydoc_data.topics import topics

        names = sorted(topics)
        texts, held_out = [topics[n] for n in names[4:8]], [topics[n] for n in names[:1]]
    if asked.chats or asked.documents:
        file = Path(asked.out) / "own.jsonl"
        if workers.is_main and not file.exists():  # else a run that was stopped goes on with the same ones
            write_lines(file, make_own_texts(asked, tokenizer, file.with_name("own.part")))
        workers.wait()
        own = list(read_files([file]))
        apart = max(1, len(own) // 50)
        texts, held_out = texts + own[apart:], held_out + own[:apart]
    return texts, held_out


def make_own_texts(asked: argparse.Namespace, tokenizer: object, part: Path) -> list:
    """Chats of each subject and documents, at each temperature; half of the sums without the marks of a chat. The compiled model writes them.

    ``part`` gets what there is so far.
    """
    at_once = asked.together or (512 if asked.device == "cuda" else 8)
    model, _ = load_smollm2(getattr(torch, asked.dtype), asked.device)
    writer = depthfx.compile(model, inductor=False, max_batch_size=at_once, max_model_len=512, kv_blocks=33 * at_once)
    made: list = []
    for number, temperature in enumerate(TEMPERATURES):
        drawn = {"temperature": temperature, "top_p": 1.0, "batch_size": 1 << 20}
        for place, subject in enumerate(SUBJECTS):
            if count := asked.chats // (len(TEMPERATURES) * len(SUBJECTS)):
                seed = 100 * asked.seed + 10 * number + place
                chats = make_own_chats(
                    writer,
                    tokenizer,
                    count,
                    question_tokens=128,
                    answer_tokens=min(256, asked.own_tokens),
                    system=subject,
                    seed=seed,
                    **drawn,
                )
                for chat in chats[::2] if subject else ():
                    chat["text"] = "\n".join(m["content"] for m in chat.pop("messages"))
                made += chats
                write_lines(part, made)
        if count := asked.documents // len(TEMPERATURES):
            seed = 100 * asked.seed + number
            made += make_own_documents(writer, tokenizer, count, tokens=asked.own_tokens, start=START, seed=seed, **drawn)
            write_lines(part, made)
    del writer, model
    if asked.device == "cuda":
        torch.cuda.empty_cache()
    return random.Random(asked.seed).sample(made, len(made))


def write_lines(file: Path, items: list) -> None:
    """One line of JSON for each."""
    file.write_text("".join(json.dumps(item) + "\n" for item in items))


def settings_of(asked: argparse.Namespace) -> TrainSettings:
    """One stage, or two."""
    stages = [Stage(steps=asked.steps, learning_rate=asked.rate, penalty=0.0, noise=asked.noise)]
    if asked.annealing:  # on the routes that are served
        routers = 0.0 if asked.noise else 1.0
        stages.append(Stage(name="annealing", steps=asked.annealing, learning_rate=asked.annealing_rate, routers=routers))
    gain, rate = (0.0, 0.0) if asked.balance else (0.2, 0.03)
    return TrainSettings(
        stages=tuple(stages), batch_size=asked.batch, micro_batch=asked.micro_batch, decision="straight_through", recompute=False,
        seed=asked.seed, lm=asked.lm, distill=asked.distill, target_skip=asked.skip, target_rise=asked.rise, max_penalty=asked.max_penalty,
        controller_gain=gain, controller_rate=rate, balance=asked.balance, controller_shift=0.0 if asked.head_bias is None else asked.shift,
        router_rate=asked.router_rate, settle_sequences=asked.settle, log_every=asked.log_every, evaluate_every=250,
        checkpoint_every=100,
    )  # fmt: skip


def paced(asked: argparse.Namespace, model: object, skipper: object, data: object, workers: Workers) -> None:
    """Numbers of steps that take ``asked.minutes``, by the pace of a few steps of a copy; kept beside the state, so that a run can go on."""
    file = Path(asked.out) / "steps.json"
    if not file.exists():
        ends: list[float] = []
        few = dataclasses.replace(
            settings_of(argparse.Namespace(**{**vars(asked), "steps": PACE_STEPS, "annealing": 0})), settle_sequences=0, target_rise=0.0
        )
        with tempfile.TemporaryDirectory() as folder:
            train_skipper(
                model, copy.deepcopy(skipper), data, folder, few, progress=False, on_step=lambda _: ends.append(time.perf_counter())
            )
        pace = statistics.fmean(b - a for a, b in zip(ends[9:], ends[10:], strict=False))
        steps = max(3, int(0.9 * 60 * asked.minutes / pace))  # the rest: evaluation, settling, writing
        if workers.is_main:
            file.write_text(json.dumps([steps - 2 * steps // 5, 2 * steps // 5]))
        workers.wait()
    asked.steps, asked.annealing = json.loads(file.read_text())
    if workers.is_main:
        print(f"{asked.steps} and {asked.annealing} steps", flush=True)


def main(arguments: tuple[str, ...] = ()) -> float:
    """Train, and generate with the result; returns the share of rows that skip in held-out text."""
    asked, workers = parse_arguments(arguments), Workers()
    if workers.count > 1 and not asked.out:
        raise SystemExit(f"{workers.count} processes share one folder, so a temporary one does not do; name it with --out FOLDER")
    with tempfile.TemporaryDirectory() as temporary:
        asked.out = asked.out or temporary
        Path(asked.out).mkdir(parents=True, exist_ok=True)
        return run(asked, workers)


def run(asked: argparse.Namespace, workers: Workers) -> float:
    """As :func:`main`, in a folder that is there."""
    model, tokenizer = load_smollm2(getattr(torch, asked.dtype), asked.device)
    texts, held_out = find_texts(asked, tokenizer, workers)
    if asked.prepare:
        print(f"{len(texts):,} texts to train on, {len(held_out):,} held out")
        return 0.0
    data = make_sequences(texts, asked.length, model, tokenizer)
    checked = make_sequences(held_out, asked.length, model, tokenizer).spread(64 if asked.texts else 4)
    skipper = make_skipper(
        model, "flexidepth", "adapter", layers=asked.layers, gate=asked.gate, reduction=asked.router, proj_reduction=asked.adapter,
        head_bias=asked.head_bias, head_std=asked.head_std, zero=True, seed=asked.seed,
    )  # fmt: skip
    if asked.minutes:
        paced(asked, model, skipper, data, workers)
    folder = Path(asked.out)
    if workers.is_main:
        print(f"{data.ids.numel():,} tokens to train on, {checked.ids.numel():,} held out")
        write_lines(folder / "held_out.jsonl", [t if isinstance(t, dict) else {"text": t} for t in held_out])
    result = train_skipper(model, skipper, data, folder, settings_of(asked), checked)
    found = result.evaluation
    if workers.is_main:
        plot_metrics(folder / "metrics.jsonl", folder / "metrics.png", skipper.layers)
        print(f"held out: {found.loss:.3f} nats a token, {found.base_loss:.3f} without skipping; {found.skipped_share:.0%} of rows skip")
        show(model, tokenizer, result.folder)
    return found.skipped_share


def show(model: object, tokenizer: object, folder: Path) -> None:
    """Some words of the compiled model with the skipper of ``folder``."""
    small = {"inductor": False, "cuda_graphs": False, "max_batch_size": 1, "max_model_len": 128, "kv_blocks": 8}  # for a short look
    model = depthfx.compile(model, skipper=load_skipper(folder, model), **small)
    prompt = tokenizer("The capital of France is", return_tensors="pt").to(model.device)
    print(tokenizer.decode(model.generate(**prompt, max_new_tokens=12, do_sample=False)[0]))


if __name__ == "__main__":
    main(tuple(sys.argv[1:]))
