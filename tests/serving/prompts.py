"""Fifty varied prompts: chat, code, prose, lists, numbers, other scripts, one token, two thousand tokens."""

from __future__ import annotations

from typing import Any

_CHAT = (
    "What is the capital of France?",
    "Explain gravity to a child in two sentences.",
    "Write a haiku about the sea.",
    "Give me three uses for an old newspaper.",
    "Who wrote Romeo and Juliet, and when?",
    "Translate 'good morning' into Spanish.",
    "What is 17 times 23?",
    "List the planets of the solar system in order.",
    "How do I boil an egg?",
    "What is the difference between a list and a tuple in Python?",
    "Summarise the plot of a story about a lost dog.",
    "Why is the sky blue?",
    "Name five animals that live in the desert.",
    "What should I pack for a trip to the mountains?",
    "Write a short email asking for a day off.",
    "Is 91 a prime number? Explain.",
)
_TEXT = (
    "Gravity is",
    "Once upon a time, in a village by the river,",
    "The three laws of thermodynamics state that",
    "def fibonacci(n):\n    ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "SELECT name, COUNT(*) FROM orders WHERE",
    "#include <stdio.h>\n\nint main(void) {\n",
    "for (let i = 0; i < 10; i++) {\n  console.log(",
    '{"name": "Ada", "born": 1815, "fields": [',
    "1, 1, 2, 3, 5, 8, 13,",
    "3.14159265358979",
    "The price rose from $1,250.75 to $1,999.99, an increase of",
    "Q: What is the boiling point of water?\nA:",
    "To be, or not to be, that is the question:",
    "Ingredients:\n- 2 eggs\n- 100 g flour\n- 1 cup milk\n\nMethod:\n1.",
    "Dear Sir or Madam,\n\nI am writing to",
    "The quick brown fox jumps over the lazy dog. " * 3,
    "In 1969, humans first landed on the",
    "https://example.com/path?query=1&other=",
    "|a|b|c|\n|-|-|-|\n|1|2|3|\n|4|",
    "Le chat est assis sur le tapis et",
    "Der schnelle braune Fuchs springt über den",
    "¿Dónde está la biblioteca? ¡Está en la calle",
    "Привет, как дела? Сегодня",
    "日本の首都は",
    "안녕하세요, 저는",
    "مرحبا، كيف حالك؟",
    "🙂🚀🌍 emoji test: 👩‍👩‍👧‍👦",
    "naïve café façade — “quotes” … ½ ≤ ¾",
    "a\tb\tc\n\n\n    indented\r\nwindows line",
    "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
    "!",
)


def fifty_prompts(tokenizer: Any) -> list[list[int]]:
    """Token ids of fifty prompts, among them one of a single token and one of two thousand."""
    chat = [tokenizer.apply_chat_template([{"role": "user", "content": c}], add_generation_prompt=True, return_dict=False) for c in _CHAT]
    plain = [tokenizer(t)["input_ids"] for t in _TEXT]
    page = "The history of computing hardware covers many steps, from simple tools to machines that store programs. "
    long = tokenizer(page * 140)["input_ids"][:2000]
    return [list(p) for p in [*chat, *plain, [tokenizer.eos_token_id], long]]
