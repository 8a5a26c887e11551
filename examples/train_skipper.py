"""Train a small skipper for SmolLM2 on the Python documentation, then serve it.

Without arguments a few short steps on the language reference that every Python carries (`pydoc_data`), which shows how it is done and
trains nothing worth having. For more, name a folder of text, say the sources of the whole documentation (Debian's package python3.11-doc,
below html/_sources), and several hundred steps:

    python examples/train_skipper.py --texts FOLDER --pattern "*.rst.txt" --steps 500 --rate 1e-3 --length 512 --batch 16 --out RUN

Started again with the same arguments, it goes on where it was stopped; `accelerate launch` (on CPUs: `torchrun`) in place of `python` uses
several processes.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import depthfx
from depthfx.skippers import load_skipper, make_skipper
from depthfx.skippers.train import Stage, TrainSettings, find_files, make_sequences, plot_metrics, read_files, split_files, train_skipper
from depthfx.smollm2 import load_smollm2


def main(arguments: tuple[str, ...] = ()) -> float:
    """Train, and generate with the result; returns the share of rows that skip in held-out text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", help="a folder; without it, the language reference of this Python")
    parser.add_argument("--pattern", default="*.txt", help="files of that folder")
    parser.add_argument("--out", help="a folder for state, metrics, plot and result; without it, a temporary one")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=48)
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate")
    parser.add_argument("--skip", type=float, default=0.4, help="share of routed rows that are to skip")
    asked = parser.parse_args(arguments)

    model, tokenizer = load_smollm2(device=asked.device)
    if asked.texts:
        files, held_out_files = split_files(find_files(asked.texts, asked.pattern), held_out=0.02)
        texts, held_out = read_files(files), read_files(held_out_files)
    else:
        names = sorted(topics)
        texts, held_out = (topics[n] for n in names[4:8]), (topics[n] for n in names[:1])
    data = make_sequences(texts, asked.length, model, tokenizer)
    checked = make_sequences(held_out, asked.length, model, tokenizer)
    checked = checked.first(64 if asked.texts else 4)

    skipper = make_skipper(model, "flexidepth", "adapter", layers=range(22, 30), gate="mlp")
    settings = TrainSettings(
        stages=(Stage(steps=asked.steps, learning_rate=asked.rate, penalty=0.0),), batch_size=asked.batch, micro_batch=min(4, asked.batch),
        decision="straight_through", distill=1.0, target_skip=asked.skip, log_every=1,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(asked.out or temporary)
        result = train_skipper(model, skipper, data, folder, settings, checked)
        plot_metrics(folder / "metrics.jsonl", folder / "metrics.png", skipper.layers)
        found = result.evaluation
        print(f"held out: {found.loss:.3f} nats a token, {found.base_loss:.3f} without skipping; {found.skipped_share:.0%} of rows skip")
        model = depthfx.compile(model, skipper=load_skipper(result.folder, model), inductor=False)  # compiles nothing for a short look
    output = model.generate(**tokenizer("The capital of France is", return_tensors="pt"), max_new_tokens=12, do_sample=False)
    print(tokenizer.decode(output[0]))
    return found.skipped_share


if __name__ == "__main__":
    main(tuple(sys.argv[1:]))
