"""One request: what was asked, what has been produced, where it stands; and the checks on what users hand in."""

from __future__ import annotations

import operator
import time
import zlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal, get_args

from depthfx.errors import InvalidRequestError, NonFiniteLogitsError, RequestTooLargeError, RestoreError, SettingError
from depthfx.records import Depth, MinPrecision, SamplingParams

if TYPE_CHECKING:
    import torch

FinishReason = Literal["eos", "length", "stop", "abort", "error"]

# Looks at the ids generated so far, in a list of its own, and says whether the request ends.
StopCheck = Callable[[list[int]], bool]


class Status(Enum):
    """Where a request stands. PARKED: its logits were delivered and the caller has not chosen the token yet."""

    WAITING = "waiting"
    RUNNING = "running"
    PARKED = "parked"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """News of one request: tokens that are final, and how it ended, if it did."""

    request_id: str
    new_token_ids: tuple[int, ...]
    finished: bool = False
    finish_reason: FinishReason | None = None
    error: BaseException | None = None
    logits: torch.Tensor | None = None  # [V] float32, for a request that picks its tokens itself


class Request:
    """State of one request; the scheduler alone changes it.

    Positions: KV of [0, ``num_computed``) is present, KV of [0, ``num_planned``) will be once the outstanding steps are
    done. ``num_pending`` tokens have been planned but not committed, so the request is ``len(token_ids) + num_pending``
    tokens long; a decode is due when all but the last of these are planned.
    """

    __slots__ = (
        "added_s", "arrival", "auto", "error", "finish_reason", "fresh", "full", "holds_blocks", "keep_content", "last_step", "max_new_tokens",
        "may_route", "num_backed", "num_computed", "num_pending", "num_planned", "num_prompt", "num_uniform", "number", "output_ids", "prefilling",
        "promoted_at", "request_id", "routed", "salt", "sample_row", "sampling", "settled", "shown_ids", "state", "status", "stop_check", "table_row",
        "token_ids",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Iterable[int],
        sampling: SamplingParams,
        stop_check: StopCheck | None = None,
        salt: bytes = b"",
        depth: tuple[Depth, Depth] = ("dense", "dense"),
        added_s: float | None = None,
    ) -> None:
        """``added_s``: when, by ``time.monotonic``; None: now."""
        check_names(request_id, stop_check)
        self.request_id = request_id
        self.number = zlib.crc32(request_id.encode()) & 0x7FFFFFFF
        self.auto = depth[0] == "auto", depth[1] == "auto"  # whether the depth of prompt and answer is left open
        self.routed = depth[0] == "routed", depth[1] == "routed"  # whether prompt and answer ask the skipper
        self.settled = not self.auto[0]  # the prompt's depth is decided
        self.promoted_at = 0  # tokens before it were computed dense, though the answer is routed by now
        self.may_route = self.auto[1] or self.routed[1]  # the answer
        self.full = sampling.min_precision == "full"
        self.token_ids = list(prompt_token_ids)  # prompt and output
        self.output_ids: list[int] = []
        self.shown_ids: list[int] = []  # the copy for ``stop_check``, which may spoil it
        self.num_prompt = len(self.token_ids)
        self.sampling = sampling
        self.stop_check = stop_check
        self.salt = salt  # requests share KV only under equal salts
        self.max_new_tokens = sampling.max_new_tokens  # the scheduler lowers it to fit the context
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.error: BaseException | None = None
        self.arrival = -1
        self.added_s = time.monotonic() if added_s is None else added_s
        self.last_step = -1  # last step whose plan names the request
        self.keep_content = True  # its KV may be reused by others after it ends
        self.forget_place()

    def forget_place(self) -> None:
        """Back to having no table row, no blocks and no KV; the tokens stay."""
        self.table_row = -1
        self.holds_blocks = False
        self.num_backed = 0  # tokens that its blocks have room for
        self.num_computed = 0
        self.num_planned = 0
        self.num_pending = 0
        self.sample_row = -1  # row among the sampled rows of the last step that named it
        self.prefilling = True
        self.fresh = True  # nothing has been planned since admission
        self.state = b""  # precision and depth of its prompt at admission
        self.num_uniform = -1  # leading tokens that were planned under it; -1: all

    def settle(self, routed: bool) -> None:
        """The prompt's depth is decided; for good."""
        self.routed, self.settled = (routed, self.routed[1]), True

    def promote(self) -> None:
        """The answer is routed from the next token that is planned; for good."""
        self.routed, self.promoted_at = (self.routed[0], True), self.num_planned

    def plan_under(self, state: bytes, start: int) -> None:
        """Tokens from ``start`` on are planned under ``state``."""
        if self.num_uniform < 0 and state != self.state:
            self.num_uniform = start

    def num_alike(self, answers_differ: bool) -> int:
        """Leading tokens whose KV is of the prompt's depth: what an admission, also after a preemption, may find and reuse.

        ``answers_differ``: routed rows of an answer are not what the same ones of a prompt are.
        """
        prompt, answer = self.routed
        if not (prompt or answer) or (prompt and answer and not answers_differ and self.promoted_at <= self.num_prompt):
            return len(self.token_ids)
        return self.num_prompt if prompt else max(self.num_prompt, self.promoted_at)

    @property
    def num_sharable(self) -> int:
        """Leading tokens whose KV was computed under the state of the admission; what follows is nobody else's."""
        return self.num_computed if self.num_uniform < 0 else min(self.num_computed, self.num_uniform)

    def end_of_output(self) -> FinishReason | None:
        """Whether the last token ended the request, and how. An error raised by ``stop_check`` comes through."""
        if self.output_ids[-1] in self.sampling.eos_token_ids:
            return "eos"
        if self.stop_check is not None:
            self.shown_ids.append(self.output_ids[-1])
            if self.stop_check(self.shown_ids):
                return "stop"
        return "length" if len(self.output_ids) >= self.max_new_tokens else None


def fit_request(request: Request, max_model_len: int, max_kv_tokens: int) -> None:
    """Lowers ``request.max_new_tokens`` to what fits a context of ``max_model_len`` tokens.

    Raises :class:`InvalidRequestError`, or :class:`RequestTooLargeError` for more than the ``max_kv_tokens`` of KV that one request can have.
    """
    name, num_prompt = request.request_id, request.num_prompt
    if num_prompt < 1:
        raise InvalidRequestError(f"request {name!r} has an empty prompt; it must have at least one token id: give a start token")
    if request.sampling.max_new_tokens < 1:
        raise InvalidRequestError(f"request {name!r} asks for max_new_tokens={request.sampling.max_new_tokens}; it must be at least 1")
    if num_prompt > max_model_len:
        raise InvalidRequestError(
            f"request {name!r} has a prompt of {num_prompt} tokens; at most max_model_len={max_model_len} are allowed: shorten it"
        )
    # A prompt that fills the context still yields one token: that token needs no KV.
    request.max_new_tokens = min(request.sampling.max_new_tokens, max(1, max_model_len - num_prompt))
    num_needed = num_prompt + request.max_new_tokens - 1  # the last token's KV is never needed
    if num_needed > max_kv_tokens:
        raise RequestTooLargeError(
            f"request {name!r} needs KV for {num_needed} tokens ({num_prompt} of prompt, {request.max_new_tokens} new); "
            f"one request can have {max_kv_tokens}: shorten it, lower max_new_tokens or give more KV memory"
        )


def check_limits(max_batch_size: int, max_batch_tokens: int, max_chunk_tokens: int, max_model_len: int, num_table_rows: int) -> None:
    """Raises :class:`SettingError` if sizes of the engine do not fit each other."""
    limits = {"max_batch_size": max_batch_size, "max_chunk_tokens": max_chunk_tokens, "max_model_len": max_model_len}
    for name, value in limits.items():
        if value < 1:
            raise SettingError(f"setting {name}={value} must be at least 1; give a larger value")
    if max_batch_tokens < max_batch_size:
        raise SettingError(
            f"setting max_batch_tokens={max_batch_tokens} must be at least max_batch_size={max_batch_size}, one row a decode: raise it"
        )
    if num_table_rows < max_batch_size:
        raise SettingError(
            f"setting max_batch_size={max_batch_size} must be at most the {num_table_rows} rows of the block table: lower it"
        )


def check_names(request_id: object, stop_check: object) -> None:
    """Raises :class:`InvalidRequestError` for a request id that is no text, or a stop_check that cannot be called."""
    if not isinstance(request_id, str) or any("\ud800" <= c <= "\udfff" for c in request_id):
        raise InvalidRequestError(f"request_id={request_id!r} must be text that UTF-8 can hold, or None for an id of the engine's own")
    if stop_check is not None and not callable(stop_check):
        raise InvalidRequestError(f"stop_check={stop_check!r} must be a function of the ids generated so far, or None: leave it out")


def check_prompt(prompt_token_ids: Iterable[int], vocab_size: int) -> list[int]:
    """The prompt as a list of ints in [0, vocab_size); anything else raises :class:`InvalidRequestError`."""
    try:
        if isinstance(prompt_token_ids, (bytes, bytearray)):
            raise TypeError
        token_ids = list(prompt_token_ids)
    except TypeError:
        kind = type(prompt_token_ids).__name__
        raise InvalidRequestError(f"the prompt is of type {kind}; it must be a list of token ids: tokenize the text first") from None
    if token_ids and all(type(token) is int for token in token_ids) and min(token_ids) >= 0 and max(token_ids) < vocab_size:
        return token_ids
    token_ids = [check_token(token, vocab_size, place) for place, token in enumerate(token_ids)]
    if not token_ids:
        raise InvalidRequestError("the prompt is empty; it must have at least one token id: give a start token")
    return token_ids


def check_token(token: object, vocab_size: int, place: int | None = None) -> int:
    """``token`` as an int in [0, vocab_size); anything else raises :class:`InvalidRequestError`."""
    where = "token" if place is None else f"token {place} of the prompt"
    value = _whole(token)
    if value is None:
        raise InvalidRequestError(
            f"{where} is {token!r} of type {type(token).__name__}; ids must be integers, in one flat list for each request: tokenize the text first"
        )
    if not 0 <= value < vocab_size:
        raise InvalidRequestError(f"{where} is {value}; ids must be in [0, {vocab_size}), the vocabulary: use the model's tokenizer")
    return value


def check_sampling(sampling: SamplingParams) -> None:
    """Raises :class:`InvalidRequestError` if a value of ``sampling`` has another type or is out of its range."""
    if not isinstance(sampling, SamplingParams):
        raise InvalidRequestError(f"sampling is a {type(sampling).__name__}; give depthfx.SamplingParams(...)")
    s = sampling
    whole = (("max_new_tokens", s.max_new_tokens), ("min_new_tokens", s.min_new_tokens), ("top_k", s.top_k), ("seed", s.seed))
    reals = (("temperature", s.temperature), ("top_p", s.top_p), ("min_p", s.min_p), ("repetition_penalty", s.repetition_penalty))
    name: str
    value: object
    for name, value in whole:
        if type(value) is not int and _whole(value) is None:
            raise _refused(name, value, "a whole number")
    for name, value in reals:
        if type(value) is not float and type(value) is not int and not _is_real(value):
            raise _refused(name, value, "a number")
    for name, value, fits, allowed in (
        ("max_new_tokens", s.max_new_tokens, s.max_new_tokens >= 1, "at least 1"),
        ("min_new_tokens", s.min_new_tokens, s.min_new_tokens >= 0, "at least 0"),
        ("temperature", s.temperature, 0.0 <= s.temperature < float("inf"), "at least 0 (0 is greedy) and finite"),
        ("top_k", s.top_k, s.top_k >= 0, "at least 0 (0 is off)"),
        ("top_p", s.top_p, 0.0 < s.top_p <= 1.0, "above 0 and at most 1 (1 is off)"),
        ("min_p", s.min_p, 0.0 <= s.min_p <= 1.0, "between 0 (off) and 1"),
        ("repetition_penalty", s.repetition_penalty, 0.0 < s.repetition_penalty < float("inf"), "above 0 (1 is off) and finite"),
        ("seed", s.seed, -(1 << 63) <= int(s.seed) < 1 << 63, "a 64-bit signed integer"),
        ("eos_token_ids", s.eos_token_ids, _are_ids(s.eos_token_ids), "a tuple of token ids; () for none"),
        ("depth", s.depth, _is_depth(s.depth), "'auto', 'dense', 'routed', or a pair of these for prompt and answer"),
        ("min_precision", s.min_precision, s.min_precision in get_args(MinPrecision), "'fast' (whatever the load allows) or 'full'"),
        ("external", s.external, isinstance(s.external, bool), "True or False"),
    ):
        if not fits:
            raise _refused(name, value, allowed)


def check_streamable(sampling: SamplingParams | None) -> None:
    """Raises :class:`InvalidRequestError` for a request whose tokens are picked outside."""
    if sampling is not None and sampling.external:
        raise InvalidRequestError("external=True: a stream cannot wait for tokens from outside; use add(), step() and push_token()")


def check_full(sampling: SamplingParams, never: str, wanted: bytes) -> None:
    """Raises :class:`InvalidRequestError` if ``min_precision="full"`` cannot be had: ``never`` says why no layer ever is full, ``wanted`` has
    the entries that the user allows to be full."""
    if sampling.min_precision == "full" and (never or not all(wanted)):
        why = never or 'set_precision made layers fast; call set_precision("full") first'
        raise InvalidRequestError(f"min_precision='full' cannot be had: {why}; or leave it out, and the request runs in fast precision")


def check_still_full(wanted: bytes, num_full: int) -> None:
    """Raises :class:`InvalidRequestError` if layers would be fast while ``num_full`` requests ask for full precision."""
    if num_full and not all(wanted):
        raise InvalidRequestError(
            f"set_precision: {num_full} unfinished requests ask for min_precision='full', so no layer may be fast; let them end first"
        )


def not_finite(request: Request) -> NonFiniteLogitsError:
    """Why a request ends whose logits are not numbers."""
    return NonFiniteLogitsError(
        f"request {request.request_id!r} got NaN logits for token {len(request.output_ids)} of its output; logits must be numbers: "
        "check the weights, the dtype and the prompt"
    )


def never_full(request: Request, why: str) -> RestoreError:
    """Why a request ends that waited for full precision."""
    return RestoreError(
        f"request {request.request_id!r} asks for min_precision='full', but {why}; ask again later, or without min_precision: "
        "such requests are served in fast precision meanwhile"
    )


def _refused(name: str, value: object, allowed: str) -> InvalidRequestError:
    return InvalidRequestError(f"sampling parameter {name}={value!r} must be {allowed}; change it in the request's SamplingParams")


def _whole(value: object) -> int | None:
    """``value`` as an int, also NumPy's and one in a tensor; None for anything else, and for truth values."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):
        return None


def _is_real(value: object) -> bool:
    """Whether ``value`` is one number, also NumPy's and one in a tensor; text and truth values are none."""
    if isinstance(value, (bool, str, bytes)) or "bool" in str(getattr(value, "dtype", "")):
        return False
    try:
        float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


def _are_ids(ids: object) -> bool:
    try:
        return not isinstance(ids, (str, bytes)) and isinstance(ids, Collection) and all(_whole(token) is not None for token in ids)
    except TypeError:  # a tensor that holds one number
        return False


def _is_depth(depth: object) -> bool:
    parts = depth if isinstance(depth, tuple) else (depth, depth)
    return depth is None or (len(parts) == 2 and all(p in get_args(Depth) for p in parts))
