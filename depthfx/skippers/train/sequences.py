"""Texts, chats and token ids to sequences of one length."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from depthfx.errors import SettingError, SkipperError
from depthfx.skippers.options import check_choice, check_count

IGNORED = -100  # label of a token that is no target
TOO_LONG = ("raise", "drop", "cut")


@dataclass(frozen=True)
class Sequences:
    """N sequences of S tokens: ``ids`` [N, S] int32, ``targets`` [N, S] bool (the token is to be predicted), ``lengths`` [N] int64.

    What stands behind a sequence's length is padding. Raises :class:`SkipperError` for tensors of other shapes or kinds.
    """

    ids: torch.Tensor
    targets: torch.Tensor
    lengths: torch.Tensor

    def __post_init__(self) -> None:
        ids, targets, lengths = self.ids, self.targets, self.lengths
        kinds = ("ids", ids, torch.int32), ("targets", targets, torch.bool), ("lengths", lengths, torch.int64)
        for name, tensor, dtype in kinds:
            if not isinstance(tensor, torch.Tensor) or tensor.dtype is not dtype:
                found = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                raise SkipperError(f"the {name} of Sequences are of {found}; give a tensor of {dtype}, or texts to make_sequences")
        if ids.dim() != 2 or targets.shape != ids.shape or lengths.shape != ids.shape[:1]:
            shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor, _ in kinds)
            raise SkipperError(f"Sequences of {shapes} do not fit together; give ids and targets [N, S] and lengths [N]")

    def __len__(self) -> int:
        return self.ids.shape[0]

    def first(self, count: int) -> Sequences:
        """The first ``count`` of them, or all where there are fewer."""
        return Sequences(self.ids[:count], self.targets[:count], self.lengths[:count])

    def spread(self, count: int) -> Sequences:
        """``count`` of them at even distances, or all where there are fewer."""
        chosen = torch.linspace(0, len(self) - 1, min(count, len(self)), dtype=torch.float64).long()
        return Sequences(self.ids[chosen], self.targets[chosen], self.lengths[chosen])

    def take(self, indices: list[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ids and labels (int64) and which tokens are real (bool) of some sequences, ``[n, S]`` on ``device``."""
        ids = self.ids[indices].long()
        real = torch.arange(ids.shape[1])[None] < self.lengths[indices][:, None]
        labels = torch.where(self.targets[indices] & real, ids, IGNORED)
        return ids.to(device), labels.to(device), real.to(device)

    def num_targets(self) -> int:
        """How many tokens are to be predicted: targets that another token of their sequence stands before."""
        places = torch.arange(1, self.ids.shape[1])
        return int((self.targets[:, 1:] & (places < self.lengths[:, None])).sum())

    def digest(self) -> str:
        """A hash of all of it."""
        found = hashlib.sha256(repr(tuple(self.ids.shape)).encode())
        for tensor in (self.ids, self.targets, self.lengths):
            found.update(tensor.contiguous().numpy().tobytes())
        return found.hexdigest()


def check_sequences(name: str, given: Any, model: Any, targets: bool = True) -> Sequences:
    """``given`` as it is, where it is :class:`Sequences` that ``model`` can read and, with ``targets``, learn from; else :class:`SkipperError`."""
    if not isinstance(given, Sequences):
        raise SkipperError(f"{name}: expected Sequences, found {type(given).__name__}; make_sequences makes them of texts or token ids")
    if not len(given):
        raise SkipperError(f"{name}: no sequence is given; give at least one")
    if int(given.lengths.min()) < 1 or int(given.lengths.max()) > given.ids.shape[1]:
        raise SkipperError(
            f"{name}: lengths from {int(given.lengths.min())} to {int(given.lengths.max())}; allowed: 1 to {given.ids.shape[1]}"
        )
    vocabulary = model.config.get_text_config().vocab_size
    outside = given.ids[(given.ids < 0) | (given.ids >= vocabulary)]
    if len(outside):
        raise SkipperError(_outside(name, int(outside[0]), vocabulary))
    if targets and not given.num_targets():
        raise SkipperError(
            f"{name}: none of its {int(given.lengths.sum())} tokens is to be predicted (no targets, or sequences of one token); "
            "give longer sequences, or answers where answers_only is set"
        )
    return given


@dataclass(frozen=True)
class Document:
    """Token ids of one text; the first ``prompt`` of them are context only."""

    ids: list[int]
    prompt: int = 0


def documents(items: Iterable[Any], tokenizer: Any = None, answers_only: bool = False) -> Iterator[Document]:
    """Token ids of each item: a text, a chat (a list of messages ``{"role", "content"}``), token ids, or a mapping that holds one of them.

    In a mapping (a line of JSON, a row of a data set) they are found under ``text``, ``messages`` or ``input_ids``. Chats go through the
    tokenizer's template; ``answers_only`` makes their last message the only target. Raises :class:`SkipperError` naming the item.
    """
    if isinstance(items, (str, bytes, Mapping)) or not isinstance(items, Iterable):
        raise SkipperError(f"items is a {type(items).__name__}; give a list, or another iterable, of texts, chats or lists of token ids")
    for number, item in enumerate(items):
        if isinstance(item, Mapping):
            known = [k for k in ("text", "messages", "input_ids") if item.get(k) is not None]
            if len(known) != 1:
                raise SkipperError(
                    f"item {number} has the keys {sorted(map(str, item))}; exactly one of text, messages and input_ids is needed"
                )
            item = item[known[0]]
        if isinstance(item, torch.Tensor):
            item = item.tolist()
        if isinstance(item, str):
            yield Document(list(_needed(tokenizer, number)(item)["input_ids"]))
        elif isinstance(item, (list, tuple)) and item and all(isinstance(m, Mapping) for m in item):
            yield _chat(list(item), _needed(tokenizer, number), answers_only, number)
        elif isinstance(item, (list, tuple)) and all(type(i) is int for i in item):
            yield Document(list(item))
        else:
            raise SkipperError(f"item {number} is a {type(item).__name__}; give texts, chats (lists of messages) or lists of token ids")


def make_sequences(
    items: Iterable[Any], length: int, model: Any, tokenizer: Any = None, *, pack: bool = True,
    too_long: Literal["raise", "drop", "cut"] = "raise", answers_only: bool = False, separator: int | None = None,
) -> Sequences:  # fmt: skip
    """Sequences of ``length`` tokens for ``model``, of items as :func:`documents` takes them.

    ``pack``: documents are joined, each followed by ``separator`` (the tokenizer's end token where None; nothing where there is no
    tokenizer), and cut into full sequences; tokens see what stands before them, other documents too, and an incomplete end is left out.
    Otherwise each document is a sequence by itself, padded at its end; ``too_long`` says what happens to longer ones. Raises
    :class:`SkipperError` for no data, ids outside the vocabulary and documents that are too long, :class:`SettingError` for lengths the
    model cannot read.
    """
    check_count("length", length, least=2)
    check_choice("too_long", too_long, TOO_LONG)
    config = getattr(model, "config", model).get_text_config()
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise SettingError(f"length={length} is more than the {longest} positions of the model; give at most {longest}")
    if separator is None:
        separator = getattr(tokenizer, "eos_token_id", None)
    if separator is not None and not (type(separator) is int and 0 <= separator < config.vocab_size):
        raise SkipperError(f"separator={separator!r} is not allowed; give one of the model's {config.vocab_size} token ids, or None")
    found = _checked(documents(items, tokenizer, answers_only), config.vocab_size)
    made = _packed(found, length, separator) if pack else _padded(found, length, too_long)
    if not len(made):
        raise SkipperError(
            f"the data give no sequence of {length} tokens: they are empty or too short; give more text, a smaller length, or pack=False"
        )
    return made


def _packed(found: Iterable[Document], length: int, separator: int | None) -> Sequences:
    ids: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    for document in found:
        joined = document.ids if separator is None else [*document.ids, separator]
        ids.append(torch.tensor(joined, dtype=torch.int32))
        targets.append(torch.arange(len(joined)) >= document.prompt)
    count = sum(map(len, ids)) // length
    if not count:
        return Sequences(torch.empty(0, length, dtype=torch.int32), torch.empty(0, length, dtype=torch.bool), torch.empty(0).long())
    flat = torch.cat(ids)[: count * length].view(count, length)
    return Sequences(flat, torch.cat(targets)[: count * length].view(count, length), torch.full((count,), length))


def _padded(found: Iterable[Document], length: int, too_long: str) -> Sequences:
    rows, targets, lengths = [], [], []
    for number, document in enumerate(found):
        if len(document.ids) > length:
            if too_long == "raise":
                raise SkipperError(
                    f"document {number} has {len(document.ids)} tokens, more than length={length}; give a larger length, pack=True, "
                    "or too_long='drop' or 'cut'"
                )
            if too_long == "drop":
                continue
        ids = document.ids[:length]
        if len(ids) < 2 or document.prompt >= len(ids):
            continue  # nothing to predict
        rows.append(torch.tensor([*ids, *[0] * (length - len(ids))], dtype=torch.int32))
        targets.append(torch.arange(length) >= document.prompt)
        lengths.append(len(ids))
    if not rows:
        return _packed((), length, None)
    return Sequences(torch.stack(rows), torch.stack(targets), torch.tensor(lengths))


def _checked(found: Iterable[Document], vocabulary: int) -> Iterator[Document]:
    for number, document in enumerate(found):
        if document.ids and not 0 <= min(document.ids) <= max(document.ids) < vocabulary:
            wrong = next(i for i in document.ids if not 0 <= i < vocabulary)
            raise SkipperError(_outside(f"document {number}", wrong, vocabulary))
        yield document


def _outside(who: str, token: int, vocabulary: int) -> str:
    return f"{who} holds the token id {token}, outside the model's vocabulary of {vocabulary}; use the model's own tokenizer"


def _chat(messages: list[Any], tokenizer: Any, answers_only: bool, number: int) -> Document:
    if getattr(tokenizer, "chat_template", None) is None:
        raise SkipperError(f"item {number} is a chat, but the tokenizer has no chat template; set tokenizer.chat_template, or give texts")
    ids = list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))
    if not answers_only:
        return Document(ids)
    before = list(tokenizer.apply_chat_template(messages[:-1], tokenize=True, return_dict=False, add_generation_prompt=True))
    if messages[-1].get("role") != "assistant" or ids[: len(before)] != before:
        raise SkipperError(
            f"item {number}: answers_only needs a chat whose last message is the assistant's, and a template that writes it behind the rest"
        )
    return Document(ids, len(before))


def _needed(tokenizer: Any, number: int) -> Any:
    if tokenizer is None:
        raise SkipperError(f"item {number} is text, which needs a tokenizer; give one, or token ids")
    return tokenizer
