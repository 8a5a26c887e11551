"""A linear module whose weight is stored nested: to Hugging Face's code and files it looks like the one it took the place of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from depthfx.errors import FormatError, UnsupportedModelError, UnsupportedOptionError
from depthfx.lowering.nest import nest, unnest
from depthfx.lowering.nested_format import NestedWeight, to_float16


class NestedLinear(nn.Linear):
    """``F.linear`` with a nested weight ``[out_features, in_features]`` that reads as a weight of dtype ``weight_dtype``.

    The bytes are buffers ``upper``, ``lower`` and ``shift`` outside the ``state_dict``, where the original weight stands under its own
    name, on the CPU. There is no parameter ``weight``: reading it joins the bytes into a new tensor each time.
    """

    upper: torch.Tensor
    lower: torch.Tensor | None
    shift: torch.Tensor | None
    guard: Callable[[], None] | None = None  # raises while the residual bytes are lent, so that nobody reads them as weights

    def __init__(self, nested: NestedWeight, bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would make a weight
        self.out_features, self.in_features = nested.upper.shape
        self.weight_dtype = dtype
        self.register_parameter("bias", bias)
        self.assign(nested)

    @property
    def nested(self) -> NestedWeight:
        """The stored bytes themselves, not a copy. Raises what ``guard`` raises."""
        if self.guard is not None:
            self.guard()
        return NestedWeight(self.format, self.upper, self.lower, self.shift)

    def assign(self, nested: NestedWeight) -> None:
        """Take ``nested`` of the same shape as the stored bytes, without copying; it may be a view of a larger weight."""
        if tuple(nested.upper.shape) != (self.out_features, self.in_features):
            raise UnsupportedModelError(
                f"a NestedLinear of {self.out_features} x {self.in_features} cannot take a weight of {' x '.join(map(str, nested.upper.shape))}"
            )
        self.format = nested.format
        for name in ("upper", "lower", "shift"):
            self.register_buffer(name, getattr(nested, name), persistent=False)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The joined weight ``[out_features, in_features]`` in ``weight_dtype``: a new tensor, and torch refuses to write into it."""
        with torch.inference_mode():
            return unnest(self.nested, self.weight_dtype)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise UnsupportedOptionError("the weight of a NestedLinear cannot be replaced; change it with load_state_dict, or call assign")
        super().__setattr__(name, value)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, unnest(self.nested, self.weight_dtype), self.bias)

    def reset_parameters(self) -> None:
        """Raises: random weights would have to be nested first."""
        raise UnsupportedOptionError(
            "the weight of a NestedLinear cannot be initialised in place; nest an initialised linear with swap_linear"
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, format={self.format}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.weight_dtype = fn(torch.empty(0, dtype=self.weight_dtype, device=self.upper.device)).dtype
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = unnest(self.nested, self.weight_dtype).cpu()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        name = prefix + "weight"
        found = state_dict.get(name)
        if found is None:
            missing_keys.append(name)
        elif found.shape != self.upper.shape:
            error_msgs.append(f"size mismatch for {name}: {list(found.shape)} in the state dict, {list(self.upper.shape)} in the model")
        else:
            fault = self._load(found.detach(), bool(local_metadata.get("assign_to_params_buffers")))
            error_msgs.extend([f"{name} {fault}"] if fault else [])
        own = {k: v for k, v in state_dict.items() if k.startswith(prefix) and k != name}
        super()._load_from_state_dict(own, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)

    @torch.no_grad()
    def _load(self, weight: torch.Tensor, assign: bool) -> str:
        """Take ``weight``, in place unless ``assign``; returns what is wrong with it, or an empty text. Raises what ``guard`` raises."""
        if self.guard is not None:
            self.guard()
        try:  # in place: the present format where it can be kept, for joined neighbours may have asked for it
            nested = nest(weight.to(self.upper.device, self.weight_dtype), None if assign else self.format)
        except FormatError as error:
            return f"cannot be nested: {error}"
        if assign:
            self.assign(nested)
        elif not self._copy(nested):
            return (
                f"needs the format {_kind(nested)}, and the memory of the model is laid out for {_kind(self.nested)}: "
                "load with assign=True before depthfx.compile, or load the model anew"
            )
        return ""

    def _copy(self, nested: NestedWeight) -> bool:
        """Write ``nested`` over the bytes in place, where the formats allow it."""
        if (nested.format, self.format) == ("nested_e4m3", "nested_e4m3_scaled"):
            nested = NestedWeight(self.format, nested.upper, nested.lower, nested.upper.new_zeros(self.out_features, dtype=torch.int8))
        if nested.format != self.format:
            return False
        if nested.upper.dtype != self.upper.dtype:  # plain16: float16 over bfloat16 or the other way round
            if to_float16(nested.upper)[1] or self.upper.dtype is not torch.float16:
                return False
        for name in ("upper", "lower", "shift"):
            if (target := getattr(self, name)) is not None:
                target.copy_(getattr(nested, name))
        return True


def _kind(nested: NestedWeight) -> str:
    return nested.format if nested.lower is not None else f"{nested.format} in {nested.upper.dtype}"


def nested_linears(model: nn.Module) -> dict[str, NestedLinear]:
    """Path to module for every :class:`NestedLinear` of ``model``; a module used twice appears once."""
    return {name: m for name, m in model.named_modules() if isinstance(m, NestedLinear)}


def linears_to_nest(model: Any, head: bool = False) -> list[str]:
    """Paths of the linears of a Hugging Face model that nest: all but the LM head, which does with ``head`` where no embedding shares it."""
    output = model.get_output_embeddings()
    tied = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return [
        name
        for name, m in model.named_modules()
        if type(m) is nn.Linear and (m is not output or head) and id(m.weight) not in tied
    ]  # fmt: skip


def swap_linear(model: nn.Module, path: str) -> NestedLinear:
    """Put a :class:`NestedLinear` in the place of the linear at ``path``, nesting its weight now, and return it.

    Linears that share the weight are replaced too and share its bytes. The 16-bit weight is freed where nothing else holds it.
    Raises :class:`UnsupportedModelError` for a module that is not a plain ``nn.Linear``, that carries hooks, or whose weight another
    kind of module uses.
    """
    found = model.get_submodule(path)
    if isinstance(found, NestedLinear):
        return found
    users = _users(model, found, path)
    assert isinstance(found, nn.Linear)
    nested, dtype = nest(found.weight.detach()), found.weight.dtype
    made: dict[int, NestedLinear] = {}
    for user_path, user in users:
        if id(user) not in made:
            made[id(user)] = NestedLinear(nested, user.bias, dtype).train(user.training)
        place_linear(model, user_path, made[id(user)])
    return made[id(found)]


def place_linear(model: nn.Module, path: str, module: nn.Linear) -> None:
    """Set the module at ``path``."""
    parent, _, last = path.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def _users(model: nn.Module, found: nn.Module, path: str) -> list[tuple[str, nn.Linear]]:
    """All paths and modules whose weight is that of ``found``; raises where one cannot be replaced."""
    weight = getattr(found, "weight", None)
    modules = list(model.named_modules(remove_duplicate=False))
    users = [(name, m) for name, m in modules if m is found or (weight is not None and m._parameters.get("weight") is weight)]
    for name, m in users:
        if type(m) is not nn.Linear:
            kind = f"{type(m).__module__}.{type(m).__name__}"
            shared = "" if name == path else f", which shares the weight of {path!r}"
            raise UnsupportedModelError(f"{name!r} is a {kind}{shared}; only the weight of plain torch.nn.Linear modules can be nested")
        if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks:
            raise UnsupportedModelError(f"{name!r} carries hooks, which nesting its weight would drop; remove them first")
    return users  # type: ignore[return-value]


@contextmanager
def plain_linears(model: nn.Module) -> Iterator[None]:
    """For tracing: plain linears in the place of the nested ones, with parameters of the right shape, dtype and device but no content.

    All of them are views of one buffer as large as the largest weight.
    """
    found = nested_linears(model)
    paths = [(name, m) for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, NestedLinear)]
    sizes = {(m.weight_dtype, m.upper.device): 0 for m in found.values()}
    for m in found.values():
        key = (m.weight_dtype, m.upper.device)
        sizes[key] = max(sizes[key], m.upper.numel())
    buffers = {key: torch.zeros(size, dtype=key[0], device=key[1]) for key, size in sizes.items()}
    stand_ins: dict[int, nn.Linear] = {}
    try:
        for name, m in paths:
            if id(m) not in stand_ins:
                with torch.device("meta"):
                    plain = nn.Linear(m.in_features, m.out_features, bias=False)
                content = buffers[m.weight_dtype, m.upper.device][: m.upper.numel()].view(m.out_features, m.in_features)
                plain.weight = nn.Parameter(content, requires_grad=False)
                plain.register_parameter("bias", m.bias)
                stand_ins[id(m)] = plain.train(m.training)
            place_linear(model, name, stand_ins[id(m)])
        yield
    finally:
        for name, m in paths:
            place_linear(model, name, m)
