"""Chats and documents that a model makes up itself, to train on what it is used for where no such data are at hand.

An instruction-tuned model that is given its chat template up to where the user speaks writes a user's message; asked that message, it
writes the answer. Given nothing but the end token, which stands before every document of its first training, it writes a document. All
are sampled. The model may be a plain one or one that :func:`depthfx.compile` made, which is much faster where there are many.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from depthfx.errors import SkipperError
from depthfx.skippers.options import check_count

_MARK = "\u2042"  # where the user's message is in the template


def make_own_chats(
    model: Any, tokenizer: Any, count: int, *, question_tokens: int = 64, answer_tokens: int = 256, temperature: float = 1.0,
    top_p: float = 0.95, system: str | None = None, batch_size: int = 1024, seed: int = 42,
) -> list[dict[str, Any]]:  # fmt: skip
    """Up to ``count`` chats ``{"messages": [user, assistant]}`` of the Hugging Face model, sampled from ``seed``; no message is given twice.

    ``system`` stands before the user's message while that is written, to say what it is about, and is no part of the chat. Messages that
    are empty or do not end within their number of tokens are left out, of answers only the empty ones. Raises :class:`SkipperError` for a
    tokenizer without a chat template, and where no chat comes out.
    """
    check_count("count", count), check_count("batch_size", batch_size)
    if getattr(tokenizer, "chat_template", None) is None or tokenizer.eos_token_id is None:
        raise SkipperError("the tokenizer has no chat template or no end token, so no chat can be made up; give texts, or set both")
    before = [] if system is None else [{"role": "system", "content": system}]
    opening = tokenizer.apply_chat_template([*before, {"role": "user", "content": _MARK}], tokenize=False).partition(_MARK)[0]
    start = list(tokenizer(opening, add_special_tokens=False)["input_ids"])
    chats: dict[str, dict[str, Any]] = {}
    with _seeded(model, seed):
        for first in range(0, count, batch_size):
            asked = _sample(model, tokenizer, [start] * min(batch_size, count - first), question_tokens, temperature, top_p)
            whole = [tokenizer.decode(ids[:-1], skip_special_tokens=True).strip() for ids in asked if ids[-1] == tokenizer.eos_token_id]
            questions = list(dict.fromkeys(q for q in whole if q and q not in chats))
            if not questions:
                continue
            turns = [[{"role": "user", "content": q}] for q in questions]
            prompts = [list(tokenizer.apply_chat_template(t, add_generation_prompt=True, return_dict=True)["input_ids"]) for t in turns]
            for turn, ids in zip(turns, _sample(model, tokenizer, prompts, answer_tokens, temperature, top_p), strict=True):
                answer = tokenizer.decode(ids, skip_special_tokens=True).strip()
                if answer:
                    chats[turn[0]["content"]] = {"messages": [*turn, {"role": "assistant", "content": answer}]}
    if not chats:
        raise SkipperError(f"{type(model).__name__} wrote no message that ends within {question_tokens} tokens; give texts, or more tokens")
    return list(chats.values())


def make_own_documents(
    model: Any, tokenizer: Any, count: int, *, tokens: int = 448, temperature: float = 1.0, top_p: float = 0.95, start: int | None = None,
    batch_size: int = 1024, seed: int = 42,
) -> list[dict[str, str]]:  # fmt: skip
    """Up to ``count`` documents ``{"text"}`` of up to ``tokens`` tokens, sampled from ``seed``; empty ones are left out.

    ``start``: the token that they follow, which ends them as well; None: the tokenizer's start token, or where it has none its end token.
    Raises :class:`SkipperError` for a tokenizer without an end token, and where nothing is written.
    """
    check_count("count", count), check_count("batch_size", batch_size)
    end = tokenizer.eos_token_id
    if end is None:
        raise SkipperError("the tokenizer has no end token, so no document can be made up; give texts, or set it")
    begun = next(t for t in (start, getattr(tokenizer, "bos_token_id", None), end) if t is not None)
    made: list[dict[str, str]] = []
    with _seeded(model, seed):
        for done in range(0, count, batch_size):
            rows = _sample(model, tokenizer, [[begun]] * min(batch_size, count - done), tokens, temperature, top_p, begun)
            texts = [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in rows]
            made += [{"text": text} for text in texts if text]
    if not made:
        raise SkipperError(f"{type(model).__name__} wrote nothing after token {begun}; give texts, or another start")
    return made


@contextmanager
def _seeded(model: Any, seed: int) -> Iterator[None]:
    """All draws inside follow from ``seed``, and those outside do not change."""
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@torch.no_grad()
def _sample(
    model: Any, tokenizer: Any, prompts: list[list[int]], new_tokens: int, temperature: float, top_p: float, other_end: int | None = None
) -> list[list[int]]:
    """New tokens of each prompt, up to the end token (or the other one) and with it."""
    end, longest = tokenizer.eos_token_id, max(map(len, prompts))
    ends = [end] if other_end is None else list({end, other_end})
    ids = torch.tensor([[end] * (longest - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    rows = model.generate(
        input_ids=ids, attention_mask=mask, do_sample=True, temperature=temperature, top_k=0, top_p=top_p, max_new_tokens=new_tokens,
        eos_token_id=ends, pad_token_id=end,
    )[:, longest:].tolist()  # fmt: skip
    return [row[: next((i for i, token in enumerate(row) if token in ends), len(row)) + 1] for row in rows]
