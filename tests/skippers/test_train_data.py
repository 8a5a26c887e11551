"""Texts, chats, ids and files as sequences, and what is wrong with them."""

from __future__ import annotations

import json

import pytest
import torch

from depthfx.errors import SettingError, SkipperError
from depthfx.skippers.train import Sequences, documents, find_files, make_sequences, read_files, split_files
from tests.skippers.train_toys import model

CPU = torch.device("cpu")


class Letters:
    """A tokenizer: one token for each letter, 1 for "a"; chats are ``[role initial] text end`` for each message."""

    eos_token_id = 100
    chat_template = "yes"

    def __call__(self, text):
        return {"input_ids": [ord(c) - 96 for c in text]}

    def apply_chat_template(self, messages, tokenize, return_dict, add_generation_prompt=False):
        """As transformers' tokenizers."""
        assert tokenize and not return_dict
        ids = [i for m in messages for i in [110 + (m["role"] == "assistant"), *self(m["content"])["input_ids"], 100]]
        return ids + [111] * add_generation_prompt


CHAT = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "de"}]


@pytest.fixture(scope="module")
def of():
    return model()


def test_packing(of):
    found = make_sequences(["abc", [9, 9], {"text": "de"}, torch.tensor([7, 8])], 5, of, Letters())
    assert found.ids.tolist() == [[1, 2, 3, 100, 9], [9, 100, 4, 5, 100]], "the incomplete end is left out"
    ids, labels, real = found.take([1], CPU)
    assert torch.equal(ids, labels) and real.all() and len(found) == 2
    assert make_sequences([[1, 2, 3], [4, 5]], 5, of).ids.tolist() == [[1, 2, 3, 4, 5]], "no tokenizer, no separator"
    assert make_sequences([[1, 2], [4]], 5, of, separator=0).ids.tolist() == [[1, 2, 0, 4, 0]]


def test_padding(of):
    found = make_sequences(["abc", "a", "abcdef"], 4, of, Letters(), pack=False, too_long="cut")
    ids, labels, real = found.take([0, 1], CPU)
    assert ids.tolist() == [[1, 2, 3, 0], [1, 2, 3, 4]] and labels.tolist() == [[1, 2, 3, -100], [1, 2, 3, 4]]
    assert real.tolist() == [[True, True, True, False], [True] * 4]
    assert len(make_sequences(["abc", "abcdef"], 4, of, Letters(), pack=False, too_long="drop")) == 1
    with pytest.raises(SkipperError, match=r"document 1 has 6 tokens, more than length=4; give a larger length, pack=True"):
        make_sequences(["abc", "abcdef"], 4, of, Letters(), pack=False)


def test_chats(of):
    for chat in (CHAT, {"messages": CHAT}):
        (found,) = documents([chat], Letters())
        assert (found.ids, found.prompt) == ([110, 1, 2, 3, 100, 111, 4, 5, 100], 0)
    found = make_sequences([CHAT], 12, of, Letters(), pack=False, answers_only=True)
    assert found.take([0], CPU)[1].tolist() == [[-100] * 6 + [4, 5, 100] + [-100] * 3]
    packed = make_sequences([CHAT, "a"], 11, of, Letters(), answers_only=True)
    assert packed.take([0], CPU)[1].tolist() == [[-100] * 6 + [4, 5, 100, 100, 1]]
    with pytest.raises(SkipperError, match="item 0: answers_only needs a chat whose last message is the assistant's"):
        list(documents([CHAT[:1]], Letters(), answers_only=True))
    bare = Letters()
    bare.chat_template = None
    with pytest.raises(SkipperError, match="item 0 is a chat, but the tokenizer has no chat template"):
        list(documents([CHAT], bare))


@pytest.mark.parametrize(("items", "reason"), [
    ([], "the data give no sequence of 5 tokens: they are empty or too short"),
    ([[1, 2]], "they are empty or too short"),
    ([[1, 2, 3], [4, 131, 5]], "document 1 holds the token id 131, outside the model's vocabulary of 131; use the model's own tokenizer"),
    ([[1, -1]], "document 0 holds the token id -1, outside"),
    (["abc"], "item 0 is text, which needs a tokenizer; give one, or token ids"),
    ([[1], 7], "item 1 is a int; give texts, chats"),
    ([[1.5, 2.0]], "item 0 is a list; give texts, chats"),
    (None, r"items is a NoneType; give a list, or another iterable, of texts, chats or lists of token ids"),
    ("abc", "items is a str; give a list"),
    ({"text": "abc"}, "items is a dict; give a list"),
    ([{"content": "a"}], r"item 0 has the keys \['content'\]; exactly one of text, messages and input_ids is needed"),
])  # fmt: skip
def test_items_are_refused(of, items, reason):
    with pytest.raises(SkipperError, match=reason):
        make_sequences(items, 5, of)
    if items:
        with pytest.raises(SkipperError, match="too short" if items == [[1, 2]] else reason):
            make_sequences(items, 5, of, pack=items == [[1, 2]])


def test_separators_outside_the_vocabulary_are_refused(of):
    for wrong in (131, -1, "end"):
        with pytest.raises(SkipperError, match=f"separator='?{wrong}'? is not allowed; give one of the model's 131 token ids, or None"):
            make_sequences([[1] * 9], 5, of, separator=wrong)


def test_sequences_of_wrong_tensors_are_refused():
    ids, lengths = torch.zeros(2, 4, dtype=torch.int32), torch.tensor([4, 4])
    assert Sequences(ids, ids == 0, lengths).num_targets() == 6 and Sequences(ids, ids == 1, lengths).num_targets() == 0
    assert Sequences(ids, ids == 0, torch.tensor([1, 3])).num_targets() == 2, "of the second one, two have a token before them"
    for wrong, reason in (
        (([[1, 2]], ids == 0, lengths), r"the ids of Sequences are of list; give a tensor of torch.int32, or texts to make_sequences"),
        ((ids, ids, lengths), "the targets of Sequences are of torch.int32; give a tensor of torch.bool"),
        ((ids, ids == 0, torch.tensor([4])), r"Sequences of ids \[2, 4\], targets \[2, 4\], lengths \[1\] do not fit together"),
    ):
        with pytest.raises(SkipperError, match=reason):
            Sequences(*wrong)


def test_lengths_are_refused(of):
    with pytest.raises(SettingError, match="length=257 is more than the 256 positions of the model; give at most 256"):
        make_sequences([[1] * 300], 257, of)
    with pytest.raises(SkipperError, match="length=1 is not allowed; give an integer of at least 2"):
        make_sequences([[1] * 300], 1, of)
    with pytest.raises(SkipperError, match="too_long='keep' is not known; allowed: raise, drop, cut"):
        make_sequences([[1] * 300], 8, of, too_long="keep")


def test_files(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one.txt").write_text("abc")
    (tmp_path / "two.jsonl").write_text('{"text": "x\u2028y"}\n\n' + json.dumps({"messages": CHAT}) + "\n")
    (tmp_path / "three.md").write_text("no")
    files = find_files(tmp_path)
    assert [f.name for f in files] == ["one.txt", "two.jsonl"]
    assert list(read_files(files)) == ["abc", {"text": "x\u2028y"}, {"messages": CHAT}]
    assert [f.name for f in find_files(tmp_path, "*.md")] == ["three.md"]
    with pytest.raises(SkipperError, match=r"holds no file like \*.rst; name a folder with text, or another pattern"):
        find_files(tmp_path, "*.rst")
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n{"text"\n')
    with pytest.raises(SkipperError, match=r"bad.jsonl, line 2, is no JSON"):
        list(read_files([tmp_path / "bad.jsonl"]))
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\x00")
    for name in ("bad.txt", "none.txt"):
        with pytest.raises(SkipperError, match=rf"{name} cannot be read as text in UTF-8"):
            list(read_files([tmp_path / name]))


def test_split(tmp_path):
    files = [tmp_path / f"{i}.txt" for i in range(50)]
    train, held_out = split_files(files, 0.1)
    assert len(held_out) == 5 and sorted(train + held_out) == sorted(files)
    assert split_files(files[::-1], 0.1) == (train, held_out) and split_files(files, 0.1, seed=1)[1] != held_out
    assert [len(part) for part in split_files(files[:2], 0.0)] == [1, 1]
    with pytest.raises(SkipperError, match="1 files cannot be split"):
        split_files(files[:1])
    with pytest.raises(SkipperError, match="held_out=2 is not allowed"):
        split_files(files, 2)
