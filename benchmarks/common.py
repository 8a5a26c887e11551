"""Shared by the benchmarks: model shapes with random weights, the bandwidth floor, and how results are written."""

from __future__ import annotations

import datetime
import gc
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

SHAPES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama3-8b": (
        transformers.LlamaConfig,
        {
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
        },
    ),
    "qwen3-8b": (
        transformers.Qwen3Config,
        {
            "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
            "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 8192, "rope_theta": 1000000.0,
        },
    ),
    "small": (  # whose KV blocks of 16 tokens have 1 MiB: units of lending may be as small as a GPU maps
        transformers.LlamaConfig,
        {
            "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 4,
            "head_dim": 64, "vocab_size": 49152, "max_position_embeddings": 8192, "rope_theta": 100000.0,
        },
    ),
    "smollm2": (
        transformers.LlamaConfig,
        {
            "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
            "vocab_size": 49152, "max_position_embeddings": 8192, "rope_theta": 100000.0, "tie_word_embeddings": True,
        },
    ),
}  # fmt: skip


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_model(shape: str, device: torch.device, dtype: torch.dtype, layers: int | None = None, values: str = "normal") -> Any:
    """A model of ``shape`` with random weights, never zeros: of standard deviation 0.02 and norms of 1, or those of :func:`add_value_option`."""
    config_class, values = SHAPES[shape]
    config = config_class(**{**values, **({"num_hidden_layers": layers} if layers else {})})
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    for name, p in model.named_parameters():
        if values == "tiny":
            p.data.uniform_(-1e-3, 1e-3, generator=generator)
        elif p.dim() == 1:
            p.data.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            p.data.normal_(0, 0.02, generator=generator)
    for module in model.modules():
        if hasattr(module, "compute_default_rope_parameters"):  # computed buffers, which to_empty left without content
            inv_freq, module.attention_scaling = type(module).compute_default_rope_parameters(config, device)
            module.register_buffer("inv_freq", inv_freq, persistent=False)
            module.original_inv_freq = inv_freq
    model.tie_weights()
    return model.eval()


# Arms of depthfx beside the plain one, which `--weights` and `--precision` define: settings.weights and the precision to set.
_ARMS = {"depthfx-full": ("nested", "full"), "depthfx-fast": ("nested", "fast"), "depthfx-fp8": ("fp8", None)}


def add_value_option(parser: Any) -> None:
    """``--values``, of all weights."""
    parser.add_argument(
        "--values", choices=["normal", "tiny"], default="normal",
        help="tiny: uniform between -0.001 and 0.001 in every tensor, norms too, as engines fill a model whose weights are not loaded; "
        "activations then nearly vanish, and products draw less power",
    )  # fmt: skip


def suffix(args: Any) -> str:
    """Of a result's name: runs with other values than the usual ones are not mixed up with those."""
    return "" if args.values == "normal" else f"-{args.values}"


def add_weight_options(parser: Any) -> None:
    """``--weights`` and ``--precision`` of the arm ``depthfx``."""
    parser.add_argument("--weights", choices=["16bit", "nested", "fp8"], default="16bit", help="of the arm depthfx")
    parser.add_argument("--precision", choices=["full", "fast"], default="full", help="of the arm depthfx with nested weights")


def depthfx_groups(args: Any) -> dict[str, list[tuple[str, str | None]]]:
    """The depthfx arms asked for by the weights that they compile with: ``{weights: [(label, precision to set)]}``."""
    groups: dict[str, list[tuple[str, str | None]]] = {}
    for arm in args.arms:
        if arm in _ARMS:
            weights, precision = _ARMS[arm]
        elif arm == "depthfx":
            weights, precision = args.weights, args.precision if args.weights == "nested" else None
        else:
            continue
        label = {"16bit": "depthfx", "fp8": "depthfx-fp8", "nested": f"depthfx-{precision}"}[weights]
        if (label, precision) not in groups.setdefault(weights, []):
            groups[weights].append((label, precision))
    return groups


def release() -> None:
    """Give back the memory of models that nobody holds any more."""
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def settle() -> None:
    """What exists now is not searched for garbage any more until :func:`release`, as in a server that has started: compiling leaves so many
    objects that one search would be a gap between tokens."""
    gc.collect()
    gc.freeze()


def weight_bytes_per_step(model: Any) -> int:
    """Bytes of weights that one decode step reads: all but the embedding table (unless it is also the LM head)."""
    table = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight.data_ptr() == table.data_ptr()
    return sum(p.numel() * p.element_size() for p in model.parameters()) - (0 if tied else table.numel() * table.element_size())


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second of a large copy, read plus write, median of ten."""
    size = (2 << 30) if device.type == "cuda" else (128 << 20)
    a = torch.empty(size, dtype=torch.uint8, device=device).random_(0, 255)
    b = torch.empty_like(a)
    times = []
    for _ in range(10):
        synchronize(device)
        start = time.perf_counter()
        b.copy_(a)
        synchronize(device)
        times.append(time.perf_counter() - start)
    return 2 * size / statistics.median(times)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def spread(values: list[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile."""
    ordered = sorted(values)
    pick = lambda q: ordered[min(len(ordered) - 1, int(q * len(ordered)))]  # noqa: E731
    return {"median": statistics.median(ordered), "p10": pick(0.1), "p90": pick(0.9), "n": len(ordered)}


def environment(device: torch.device) -> dict[str, str]:
    import triton

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    versions = {"torch": torch.__version__, "triton": triton.__version__, "transformers": transformers.__version__}
    return {"device": name, "python": platform.python_version(), **versions, "command": " ".join(["python3", *sys.argv])}


def write_results(name: str, rows: list[dict[str, Any]], device: torch.device) -> Path:
    """JSON beside the dated notes, or under ``$OUT`` where that is set; returns the path without its ending, for a picture."""
    folder = Path(os.environ.get("OUT") or Path(__file__).parent / "results")
    folder.mkdir(parents=True, exist_ok=True)
    stamp = datetime.date.today().isoformat()
    path = folder / f"{stamp}-{name}.json"
    path.write_text(json.dumps({"environment": environment(device), "rows": rows}, indent=1))
    return path.with_suffix("")


def print_table(rows: list[dict[str, Any]], columns: list[str]) -> None:
    widths = [max(len(c), *(len(_cell(r.get(c))) for r in rows)) for c in columns]
    print("  ".join(c.ljust(w) for c, w in zip(columns, widths, strict=True)))
    for row in rows:
        print("  ".join(_cell(row.get(c)).ljust(w) for c, w in zip(columns, widths, strict=True)))


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else "" if value is None else str(value)
