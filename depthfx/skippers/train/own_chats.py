"""Chats that a model makes up itself, to train on what it is used for where no chat data are at hand.

An instruction-tuned model that is given its chat template up to where the user speaks writes a user's message; asked that message, it
writes the answer. Both are sampled.
"""

from __future__ import annotations

from typing import Any

import torch

from depthfx.errors import SkipperError
from depthfx.skippers.options import check_count

_MARK = "\u2042"  # where the user's message is in the template


def make_own_chats(
    model: Any, tokenizer: Any, count: int, *, question_tokens: int = 64, answer_tokens: int = 256, temperature: float = 1.0,
    batch_size: int = 1024, seed: int = 42,
) -> list[dict[str, Any]]:  # fmt: skip
    """Up to ``count`` chats ``{"messages": [user, assistant]}`` of the Hugging Face model, sampled from ``seed``; no message is given twice.

    Messages that are empty or do not end within their number of tokens are left out, of answers only the empty ones. Raises
    :class:`SkipperError` for a tokenizer without a chat template, and where no chat comes out.
    """
    check_count("count", count), check_count("batch_size", batch_size)
    if getattr(tokenizer, "chat_template", None) is None or tokenizer.eos_token_id is None:
        raise SkipperError("the tokenizer has no chat template or no end token, so no chat can be made up; give texts, or set both")
    opening = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False).partition(_MARK)[0]
    start = list(tokenizer(opening, add_special_tokens=False)["input_ids"])
    chats: dict[str, dict[str, Any]] = {}
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        for first in range(0, count, batch_size):
            asked = _sample(model, tokenizer, [start] * min(batch_size, count - first), question_tokens, temperature)
            whole = [tokenizer.decode(ids[:-1], skip_special_tokens=True).strip() for ids in asked if ids[-1] == tokenizer.eos_token_id]
            questions = list(dict.fromkeys(q for q in whole if q and q not in chats))
            if not questions:
                continue
            turns = [[{"role": "user", "content": q}] for q in questions]
            prompts = [list(tokenizer.apply_chat_template(t, add_generation_prompt=True, return_dict=True)["input_ids"]) for t in turns]
            for turn, ids in zip(turns, _sample(model, tokenizer, prompts, answer_tokens, temperature), strict=True):
                answer = tokenizer.decode(ids, skip_special_tokens=True).strip()
                if answer:
                    chats[turn[0]["content"]] = {"messages": [*turn, {"role": "assistant", "content": answer}]}
    if not chats:
        raise SkipperError(f"{type(model).__name__} wrote no message that ends within {question_tokens} tokens; give texts, or more tokens")
    return list(chats.values())


@torch.no_grad()
def _sample(model: Any, tokenizer: Any, prompts: list[list[int]], new_tokens: int, temperature: float) -> list[list[int]]:
    """New tokens of each prompt, up to the end token and with it."""
    end, longest = tokenizer.eos_token_id, max(map(len, prompts))
    ids = torch.tensor([[end] * (longest - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    rows = model.generate(
        input_ids=ids, attention_mask=mask, do_sample=True, temperature=temperature, top_k=0, top_p=0.95, max_new_tokens=new_tokens,
        eos_token_id=end, pad_token_id=end,
    )[:, longest:].tolist()  # fmt: skip
    return [row[: row.index(end) + 1] if end in row else row for row in rows]
