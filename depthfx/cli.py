"""The command line: ``demo``, ``explain``, ``generate``, ``inspect``, ``convert``, ``skipper``, ``tune``, ``bench`` and ``version``."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from depthfx.errors import FOREIGN_FAULTS, DepthfxError

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit code is 1 for a mistake that depthfx explains, 130 after Ctrl-C, 141 where nobody reads the output any more."""
    try:
        options = build_parser().parse_args(argv)
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except DepthfxError as error:
        print(f"depthfx: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        return 141


def build_parser() -> argparse.ArgumentParser:
    """The argument parser with all commands."""
    parser = argparse.ArgumentParser(prog="depthfx", description="A PyTorch compile backend for Hugging Face decoder models.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="SmolLM2 answers eight questions at once, compared with Hugging Face, then a burst of requests")
    demo.add_argument("--max-new-tokens", type=_positive, default=64, metavar="N", help="tokens of one answer at most (default 64)")
    demo.add_argument(
        "--picture", type=Path, default=None, metavar="PNG", help="of the burst (default: demo-burst.png in the cache folder)"
    )
    _add_device(demo)
    demo.set_defaults(run=_demo)

    explain = commands.add_parser("explain", help="what depthfx recognises, rewrites and refuses in a model")
    explain.add_argument("model", metavar="PATH_OR_smollm2", help="folder in Hugging Face's layout, or smollm2")
    _add_device(explain)
    explain.set_defaults(run=_explain)

    generate = commands.add_parser("generate", help="continue a prompt, text as it comes")
    generate.add_argument("model", metavar="PATH_OR_smollm2", help="folder in Hugging Face's layout, or smollm2")
    generate.add_argument("--prompt", required=True, metavar="TEXT", help="the text to continue, or with --chat to answer")
    generate.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    generate.add_argument("--max-new-tokens", type=_positive, default=128, metavar="N", help="tokens at most (default 128)")
    generate.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    generate.add_argument("--seed", type=int, default=0, metavar="N", help="where the temperature is above 0 (default 0)")
    _add_device(generate)
    generate.set_defaults(run=_generate)

    inspect = commands.add_parser("inspect", help="how each linear weight splits into an FP8 byte and a residual byte")
    inspect.add_argument("model", metavar="PATH_OR_smollm2", help="folder in Hugging Face's layout, nested checkpoint, or smollm2")
    inspect.set_defaults(run=_inspect)

    convert = commands.add_parser("convert", help="write a model as a nested checkpoint, FP8 bytes and residual bytes in files apart")
    convert.add_argument("model", metavar="PATH_OR_smollm2", help="folder in Hugging Face's layout, or smollm2")
    convert.add_argument("out", metavar="OUT", help="new folder")
    _add_device(convert, "default: as it is stored")
    convert.set_defaults(run=_convert)

    _add_skipper(commands)

    tune = commands.add_parser("tune", help="time tiles of nested products on this GPU and keep the ones that beat the built-in choice")
    tune.add_argument("model", metavar="PATH_OR_smollm2", help="folder with a config.json (no weight is read), or smollm2")
    tune.add_argument(
        "--rows", type=_positive, nargs="+", default=None, metavar="M", help="rows of x, up to 256 (default 16 32 64 128 256)"
    )
    tune.add_argument("--device", type=_device, default="cuda", help="cuda (default) or cuda:N")
    tune.set_defaults(run=_tune)

    bench = commands.add_parser("bench", help="run a script of benchmarks/ (in a checkout); without a name: list them")
    bench.add_argument("name", nargs="?", help="one of the listed names")
    bench.add_argument("arguments", nargs=argparse.REMAINDER, help="handed to the script; NAME --help lists them")
    bench.set_defaults(run=_bench)

    commands.add_parser("version", help="versions of depthfx and of what it stands on").set_defaults(run=_version)
    return parser


def _add_skipper(commands: Any) -> None:
    skipper = commands.add_parser("skipper", help="look after a skipper's checkpoint")
    known = skipper.add_subparsers(title="commands", required=True, metavar="COMMAND")
    check = known.add_parser("check", help="whether it is served as it was trained: forced actions, keys and values, every decision")
    check.add_argument("path", metavar="PATH", help="folder or .safetensors file of the skipper")
    check.add_argument("model", metavar="PATH_OR_smollm2", help="its base: folder in Hugging Face's layout, or smollm2")
    check.add_argument("--text", nargs="+", default=None, metavar="FILE", help="text or .jsonl files (default: Python's own help texts)")
    check.add_argument(
        "--tokens", type=_positive, default=2048, metavar="N", help="of the text (default 2048), in sequences of 256 at most"
    )
    check.add_argument("--json", type=Path, default=None, metavar="FILE", help="write what was found there too, as one JSON object")
    _add_device(check)
    check.set_defaults(run=_skipper_check)
    settle = known.add_parser("settle", help="write a skipper anew with another share of skipped rows, without training")
    settle.add_argument("path", metavar="PATH", help="folder or .safetensors file of the skipper")
    settle.add_argument("model", metavar="PATH_OR_smollm2", help="its base: folder in Hugging Face's layout, or smollm2")
    settle.add_argument("--share", type=float, required=True, metavar="S", help="of routed rows that are to skip, between 0 and 1")
    settle.add_argument("--text", nargs="+", required=True, metavar="FILE", help="text or .jsonl files, of those it was trained on")
    settle.add_argument("--out", required=True, metavar="OUT", help="new folder")
    settle.add_argument("--tokens", type=_positive, default=32768, metavar="N", help="of the text, from all of it (default 32768)")
    settle.add_argument("--held-out", nargs="+", default=None, metavar="FILE", help="text to measure the result on (as many tokens)")
    _add_device(settle)
    settle.set_defaults(run=_skipper_settle)


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return value


def _device(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} must be cpu, cuda or cuda:N")
    return text


def _add_device(parser: argparse.ArgumentParser, default_dtype: str = "default: float16 on cuda, float32 on a CPU") -> None:
    parser.add_argument("--device", type=_device, default=None, help="cpu, cuda or cuda:N (default: cuda where there is one)")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default=None, help=default_dtype)


def place(options: argparse.Namespace) -> tuple[str, Any]:
    """Device and dtype of a command, with the defaults filled in."""
    import torch

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    name = options.dtype or ("float16" if device.startswith("cuda") else "float32")
    return device, getattr(torch, name)


def require_device(device: str) -> None:
    """Raise :class:`DepthfxError` where torch does not see ``device``."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.startswith("cuda") and int(device.partition(":")[2] or 0) >= count:
        raise DepthfxError(f"--device {device}: torch {torch.__version__} sees {count or 'no'} CUDA device(s) here; try --device cpu")


def load(model: str, device: str, dtype: Any) -> tuple[Any, Any]:
    """Model and tokenizer of a local folder or of ``smollm2``; nothing is fetched. ``dtype`` "auto": as it is stored."""
    require_device(device)
    if model == "smollm2":
        from depthfx.smollm2 import load_smollm2

        return load_smollm2(*(() if dtype == "auto" else (dtype, device)))
    if not (Path(model) / "config.json").is_file():
        raise DepthfxError(f"{model!r} is neither smollm2 nor a folder with a config.json; give one of the two")
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from depthfx.lowering.load_model import load_nested
    from depthfx.lowering.nested_checkpoint import is_nested_checkpoint

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        if is_nested_checkpoint(Path(model)):
            return load_nested(model, device, None if dtype == "auto" else dtype), tokenizer
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, local_files_only=True)
    except DepthfxError:
        raise
    except (*FOREIGN_FAULTS, StrictDataclassError) as error:
        raise DepthfxError(f"{model!r} cannot be loaded; it needs config, weights and tokenizer. Hugging Face says: {error}") from error
    return loaded.to(device).eval(), tokenizer


def compiled(model: Any) -> Any:
    """The loaded model compiled; a nested checkpoint with its weights as they are."""
    import depthfx
    from depthfx.lowering.nested_linear import nested_linears

    return depthfx.compile(model, weights="nested") if nested_linears(model) else depthfx.compile(model)


def chat_ids(tokenizer: Any, question: str) -> list[int]:
    """Token ids of one user message in the chat template, ready to be answered."""
    turn = [{"role": "user", "content": question}]
    return list(tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)["input_ids"])


def pieces(tokenizer: Any, ids: Iterable[int]) -> Iterator[str]:
    """Text of a token stream as it comes; a character that is still incomplete waits for its last token."""
    seen: list[int] = []
    shown = ""
    for token in ids:
        seen.append(token)
        text = tokenizer.decode(seen, skip_special_tokens=True)
        if not text.endswith("\ufffd") and len(text) > len(shown):
            yield text[len(shown) :]
            shown = text
    rest = tokenizer.decode(seen, skip_special_tokens=True)[len(shown) :]
    if rest:
        yield rest


def eos_ids(model: Any) -> tuple[int, ...]:
    """Ids that end an answer, from the model's generation config."""
    ids = model.generation_config.eos_token_id
    return () if ids is None else tuple(ids) if isinstance(ids, (list, tuple)) else (ids,)


def _folder(model: str) -> Path:
    """The folder of a model on the command line."""
    if model == "smollm2":
        from depthfx.smollm2 import converted_folder

        return converted_folder()
    return Path(model)


def _inspect(options: argparse.Namespace) -> int:
    from depthfx.lowering.weight_report import folder_rows, weight_table

    print(weight_table(folder_rows(_folder(options.model))))
    return 0


def _convert(options: argparse.Namespace) -> int:
    import torch

    from depthfx.lowering.load_model import convert
    from depthfx.lowering.weight_report import folder_rows, sum_lines

    device, _ = place(options)
    require_device(device)
    start = time.perf_counter()
    convert(_folder(options.model), options.out, device, getattr(torch, options.dtype) if options.dtype else None)
    rows = folder_rows(Path(options.out))
    changed = sum(r.changed_by_cast for r in rows)
    print("\n".join(sum_lines(rows)))
    print(f"{changed:,} weights of the model were changed by the cast to float16" if changed else "full precision is exact")
    print(f"{options.out} written in {time.perf_counter() - start:.1f} s; load it with depthfx.load")
    return 0


def _skipper_check(options: argparse.Namespace) -> int:
    import depthfx
    from depthfx.skippers.check import check_skipper
    from depthfx.skippers.train import make_sequences, read_files

    model, tokenizer = load(options.model, *place(options))
    if options.text is None:
        from pydoc_data.topics import topics

        texts: Iterable[Any] = (topics[name] for name in sorted(topics))
    else:
        texts = read_files(options.text)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 8192
    length = max(16, min(256, options.tokens, context - 16) // 16 * 16)
    sequences = make_sequences(texts, length, model, tokenizer).first(-(-options.tokens // length))
    found = check_skipper(Path(options.path), model, sequences, depthfx.compile)
    print("\n".join(found.lines()))
    if options.json:
        found.write(options.json, model, skipper=options.path, base=options.model, text=options.text, digest=sequences.digest())
        print(f"{options.json} written")
    return 0 if found.passed else 1


def _skipper_settle(options: argparse.Namespace) -> int:
    from depthfx.skippers.train import make_sequences, read_files, settle_checkpoint

    model, tokenizer = load(options.model, *place(options))
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 8192
    length = max(2, min(512, options.tokens, context))
    given, held_out = (
        files and make_sequences(read_files(files), length, model, tokenizer).spread(-(-options.tokens // length))
        for files in (options.text, options.held_out)
    )
    found, evaluation = settle_checkpoint(options.path, options.out, model, given, options.share, held_out)
    print(f"{found.share:.1%} of routed rows skip, {found.began:.1%} before, over {found.tokens:,} tokens in {found.rounds} rounds")
    if evaluation:
        loss = f"{evaluation.loss:.4f} nats a token, {evaluation.base_loss:.4f} without skipping"
        print(f"held out: {loss}; {evaluation.skipped_share:.1%} of routed rows skip, {evaluation.agreement:.1%} of likeliest tokens agree")
    print(f"{options.out} written")
    return 0


def _tune(options: argparse.Namespace) -> int:
    from depthfx.lowering.tune_model import row_classes, tunable, tune_products, why_nothing
    from depthfx.settings import Settings, cache_dir

    classes = row_classes(options.rows)
    products, skipped = tunable(_shapes(options.model), classes)
    print("\n".join(skipped), end="\n" if skipped else "")
    reason = why_nothing(options.device) or ("" if products else f"{options.model} has no product that the streaming kernel serves")
    if reason:
        print(f"nothing to tune: {reason}")
        return 0
    tune_products(products, options.device, cache_dir(Settings.build()), print)
    return 0


def _shapes(model: str) -> list[tuple[int, int, bool]]:
    """``(N, K, gated)`` of the nested products of a model, from its config alone."""
    folder = _folder(model)
    if not (folder / "config.json").is_file():
        raise DepthfxError(f"{model!r} is neither smollm2 nor a folder with a config.json; give one of the two")
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM

    from depthfx.lowering.linear_shapes import linear_products

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(config)
    except (*FOREIGN_FAULTS, StrictDataclassError) as error:
        raise DepthfxError(f"the config of {model!r} describes no decoder that Hugging Face knows: {error}") from error
    return linear_products(built)


def _demo(options: argparse.Namespace) -> int:
    from depthfx.demo import run_demo
    from depthfx.settings import cache_dir

    device, dtype = place(options)
    require_device(device)
    return run_demo(device, dtype, options.max_new_tokens, options.picture or cache_dir() / "demo-burst.png")


def _explain(options: argparse.Namespace) -> int:
    model, _ = load(options.model, *place(options))
    print(compiled(model).explain())
    return 0


def _generate(options: argparse.Namespace) -> int:
    import depthfx

    model, tokenizer = load(options.model, *place(options))
    model = compiled(model)
    prompt = chat_ids(tokenizer, options.prompt) if options.chat else tokenizer(options.prompt)["input_ids"]
    sampling = depthfx.SamplingParams(
        max_new_tokens=options.max_new_tokens, temperature=options.temperature, seed=options.seed, eos_token_ids=eos_ids(model)
    )
    start, count = time.perf_counter(), 0

    def counted() -> Iterator[int]:
        nonlocal count
        for token in model.engine.stream(prompt, sampling):
            count += 1
            yield int(token)

    for piece in pieces(tokenizer, counted()):
        print(piece, end="", flush=True)
    print()
    seconds = time.perf_counter() - start
    print(f"{count} tokens in {seconds:.1f} s, warm-up included", file=sys.stderr)
    return 0


def _bench(options: argparse.Namespace) -> int:
    scripts = {p.stem: p for p in sorted(BENCHMARKS.glob("*.py")) if "__main__" in p.read_text()}
    if not scripts:
        raise DepthfxError(f"no benchmarks beside the package ({BENCHMARKS.name}/ holds no script); run this command in a checkout")
    if options.name is None:
        print("\n".join(scripts))
        return 0
    if options.name not in scripts:
        raise DepthfxError(f"unknown benchmark {options.name!r}; known: {', '.join(scripts)}")
    command = [sys.executable, str(scripts[options.name]), *options.arguments]
    return subprocess.run(command, cwd=BENCHMARKS.parent, check=False).returncode


def _version(options: argparse.Namespace) -> int:
    from importlib.metadata import PackageNotFoundError, version

    import depthfx

    print(f"depthfx {depthfx.__version__}")
    for name in ("torch", "transformers", "triton"):
        try:
            print(f"{name} {version(name)}")
        except PackageNotFoundError:
            print(f"{name} not installed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
