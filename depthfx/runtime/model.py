"""DepthModel: the Hugging Face model itself, with generation served by the engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from depthfx.errors import InvalidRequestError, UnsupportedOptionError
from depthfx.lowering.fp8_weight import Fp8Linear
from depthfx.report import CompileReport
from depthfx.runtime import generation
from depthfx.runtime.engine import Engine
from depthfx.runtime.memory_report import memory_text
from depthfx.runtime.precision import Modes
from depthfx.settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NOT_COMPILED = "every call: the model is not compiled"

# Models of which Hugging Face's own code runs a call in this thread.
_bypassed: ContextVar[tuple[DepthModel, ...]] = ContextVar("depthfx_bypassed", default=())


@dataclass(frozen=True)
class Compiled:
    """What :func:`depthfx.compile` attached to a model."""

    engine: Engine | None  # None: not compiled, Hugging Face's own code generates
    report: CompileReport
    settings: Settings
    kv_block_bytes: int = 0


class DepthModel:
    """Mixed into the class of a compiled model; see :func:`as_depth_model`.

    The object keeps its identity, name, config and weights, so everything that takes a Hugging Face model takes it.
    ``forward`` is still Hugging Face's own.
    """

    _depthfx: Compiled

    @property
    def engine(self) -> Engine:
        """The continuous-batching engine: ``add``, ``step``, ``stream``, ``abort``, ``stats``."""
        if self._depthfx.engine is None:
            raise UnsupportedOptionError(
                "this model was not compiled and has no engine; explain() gives the reason, generate() still works"
            )
        return self._depthfx.engine

    def explain(self) -> str:
        """What was recognised, rewritten and compiled, and why anything was not."""
        return self._depthfx.report.text()

    def memory(self) -> str:
        """Who owns each byte now: weights, residuals lent and restored, KV by state, the host's copy; and what has moved so far.

        Works with and without ``memory`` settings, on any device, also while requests run (on a step's boundary). Takes time for each
        KV block and unit: to look at, not to poll. ``engine.timeline()`` is the course of the same numbers.
        """
        return memory_text(self, self._depthfx.engine, self._depthfx.kv_block_bytes)  # type: ignore[arg-type]

    def set_precision(self, modes: Modes) -> None:
        """``"full"`` (every bit of the FP16 weights) or ``"fast"`` (their FP8 bytes) for all layers, or ``{layer: mode}`` for some.

        Takes effect at the next step that is planned, for all requests. KV computed in one state is not shared with another. Only the
        engine switches: ``forward`` and calls that Hugging Face's own loop runs (``on_unsupported="eager"``) are always full. Raises
        :class:`~depthfx.errors.UnsupportedOptionError` unless compiled with ``weights="nested"``.
        """
        self.engine.set_precision(modes)

    def precision(self) -> dict[int | str, str]:
        """The present mode of each layer, and of the ``"head"`` where it is nested; empty for weights of one precision."""
        return self.engine.precision()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Hugging Face's ``generate``, with the decoding loop run by the engine.

        Raises :class:`~depthfx.errors.UnsupportedOptionError` naming the option for what the engine does not do, or
        runs Hugging Face's own loop there if the model was compiled with ``on_unsupported="eager"``. ``generator`` (a
        ``torch.Generator``) may be given to seed sampling. In a batch without an end-of-sequence id, a row that
        ``stop_strings`` ended is padded; Hugging Face lets it go on until all rows have ended.
        """
        if self._bypasses():
            return super().generate(*args, **kwargs)  # type: ignore[misc]
        given = kwargs.get("inputs", args[0] if args else None)
        if given is not None and not isinstance(given, torch.Tensor):
            raise InvalidRequestError(
                f"generate got {type(given).__name__} as inputs; it takes token ids as a tensor [rows, tokens]: "
                "model.generate(**tokenizer(text, return_tensors='pt'))"
            )
        with generation.seeded_by(kwargs.pop("generator", None)):
            reason = NOT_COMPILED if self._depthfx.engine is None else generation.unsupported_argument(kwargs)
            if reason is not None:
                return self._without_engine(reason, "generate", *args, **kwargs)
            return super().generate(*args, **kwargs)  # type: ignore[misc]

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        if self._bypasses():
            return super()._sample(*args, **kwargs)  # type: ignore[misc]
        reason = generation.unsupported_call(self, *args, **kwargs)
        if reason is not None:
            return self._without_engine(reason, "_sample", *args, **kwargs)
        return generation.decode(self, *args, **kwargs)

    def _beam_search(self, *args: Any, **kwargs: Any) -> Any:
        return self._without_engine("num_beams > 1 (beam search)", "_beam_search", *args, **kwargs)

    def _assisted_decoding(self, *args: Any, **kwargs: Any) -> Any:
        return self._without_engine(
            "assistant_model or prompt_lookup_num_tokens (assisted decoding)", "_assisted_decoding", *args, **kwargs
        )

    def _bypasses(self) -> bool:
        """Whether this call was made, in this thread, by Hugging Face's own code while it runs a call of this model without the engine."""
        return any(model is self for model in _bypassed.get())

    def _without_engine(self, option: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Hugging Face's own ``method``, because of ``option``, where the settings allow it."""
        if not self._bypasses():
            self._allow_hugging_face(option)
        token = _bypassed.set((*_bypassed.get(), self))
        try:
            return getattr(super(), method)(*args, **kwargs)
        finally:
            _bypassed.reset(token)

    def _allow_hugging_face(self, option: str) -> None:
        if self._depthfx.settings.on_unsupported == "raise":
            raise UnsupportedOptionError(
                f"generate: {option} is not supported by the depthfx engine; leave it out, or compile with on_unsupported='eager' "
                "to run Hugging Face's own loop for such calls"
            )
        if generation.given_generator() is not None:
            raise UnsupportedOptionError(
                f"generate: generator is not supported with {option}, which Hugging Face's loop runs; use torch.manual_seed"
            )
        self._note_hugging_face(option)

    def _note_hugging_face(self, option: str) -> None:
        """Say that Hugging Face's code runs because of ``option``, and that it reads whole weights, where the engine would not; restore them."""
        engine = self._depthfx.engine
        if option not in self._depthfx.report.sections.get("run by Hugging Face", []):
            self._depthfx.report.add("run by Hugging Face", option)
        if engine is not None and "fast" in engine.precision().values():
            line = f"{option}: in full precision, set_precision switches the engine alone"
            if line not in self._depthfx.report.sections["run by Hugging Face"]:
                self._depthfx.report.add("run by Hugging Face", line)
            warnings.warn(f"generate: {line}", stacklevel=5)
        if engine is not None:
            engine.restore()

    def generate_batch(self, inputs: list[list[int]], generation_config: Any = None, **kwargs: Any) -> dict[str, Any]:
        """Hugging Face's ``generate_batch``: many prompts of token ids at once, by continuous batching.

        Returns request id (``req_0``, ...) to ``GenerationOutput``; a request that fails carries its error there.
        """
        if self._bypasses() or self._depthfx.engine is None:
            return self._without_engine(NOT_COMPILED, "generate_batch", inputs, generation_config, **kwargs)
        return generation.generate_batch(self, inputs, generation_config, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Copies weights into the model; the engine computes with them from its next step on.

        Residual bytes that are lent are restored first, see :meth:`Engine.restore`.
        """
        if assign and self._depthfx.engine is not None:
            raise UnsupportedOptionError(
                "load_state_dict: assign=True would replace the weights that the engine reads; leave it out to copy into them"
            )
        if any(isinstance(m, Fp8Linear) for m in self.modules()):  # type: ignore[attr-defined]
            raise UnsupportedOptionError(
                "load_state_dict: weights='fp8' rounded the weights of this model, and nothing can be loaded into them; nothing was changed: "
                "load the model again, or compile with weights='nested'"
            )
        engine = self._depthfx.engine
        with engine.writing_weights() if engine is not None else nullcontext():
            try:
                return super().load_state_dict(state_dict, strict=strict)  # type: ignore[misc]
            finally:  # what does not fit raises after the rest was copied
                if engine is not None:
                    engine.follow_weights()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedOptionError(
            f"a compiled {type(self).__name__} cannot be copied or pickled (it holds an engine); use save_pretrained or state_dict, "
            "and compile the copy"
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        probe = next(self.parameters())  # type: ignore[attr-defined]
        with torch.no_grad():
            moved = fn(probe[:0])
        if moved.device == probe.device and moved.dtype == probe.dtype:
            return self
        raise UnsupportedOptionError(
            f"a compiled model stays on {probe.device} in {probe.dtype}; it cannot go to {moved.device} in {moved.dtype}: "
            "move or cast the model before depthfx.compile"
        )


def as_depth_model(model: PreTrainedModel, compiled: Compiled) -> Any:
    """Turn ``model`` into a :class:`DepthModel` in place: a subclass of its own class, of the same name and module."""
    cls = type(model)
    model.__class__ = type(cls.__name__, (DepthModel, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})
    model._depthfx = compiled  # type: ignore[attr-defined]
    return model
