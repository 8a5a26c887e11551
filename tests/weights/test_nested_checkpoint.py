"""Nested checkpoints and ordinary folders: the model that comes out, what is in the files, and every fault that is refused."""

from __future__ import annotations

import json
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import depthfx
from depthfx.errors import CheckpointError
from depthfx.lowering import load_model, nested_checkpoint
from depthfx.lowering.load_model import convert, load_hf_nested, load_nested
from depthfx.lowering.nested_checkpoint import MANIFEST, seal
from depthfx.lowering.nested_linear import nested_linears
from tests.weights.exact import check_bits, check_states, exact_model, logits

UP = "model.layers.1.mlp.up_proj.weight"
CASES = [
    ("llama", torch.float16, {}),
    ("granite", torch.bfloat16, {}),
    ("llama", torch.float32, {"tie_word_embeddings": True}),
    ("llama_yarn", torch.bfloat16, {"tie_word_embeddings": True}),
    ("qwen2", torch.float16, {}),
    ("gemma2", torch.float32, {}),
]


def saved(folder: Path, family: str = "llama", dtype: torch.dtype = torch.float16, **changes) -> Path:
    exact_model(family, dtype, **changes).save_pretrained(folder, max_shard_size="60KB")
    return folder


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("llama")
    convert(saved(base / "plain"), base / "nested")
    return base


@pytest.fixture
def folder(converted, tmp_path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(converted / "nested", tmp_path / "nested"))


@pytest.mark.parametrize(("family", "dtype", "changes"), CASES, ids=str)
def test_both_ways_give_the_original(family, dtype, changes, tmp_path):
    plain = saved(tmp_path / "plain", family, dtype, **changes)
    assert len(list(plain.glob("*.safetensors"))) > 1
    original = AutoModelForCausalLM.from_pretrained(plain, dtype="auto").eval()
    convert(plain, tmp_path / "nested")
    for model in (load_hf_nested(plain), load_nested(tmp_path / "nested"), depthfx.load(tmp_path / "nested"), depthfx.load(plain)):
        assert type(model) is type(original) and not model.training and model.dtype is dtype
        formats = {m.format for m in nested_linears(model).values()}
        assert formats == {"nested_e4m3", "nested_e4m3_scaled"} and len(nested_linears(model)) == 7 * 3
        check_bits(logits(model), logits(original))
        check_states(model.state_dict(), original.state_dict())
        for (a, x), (b, y) in zip(model.named_buffers(), original.named_buffers()):
            assert "proj" in a or (a == b and torch.equal(x, y))
        assert model.generation_config.to_dict() == original.generation_config.to_dict()


def test_another_dtype_reads_the_same_weights(converted):
    for dtype in (torch.float32, torch.bfloat16):
        original = logits(AutoModelForCausalLM.from_pretrained(converted / "plain", dtype=dtype))
        for model in (load_nested(converted / "nested", dtype=dtype), load_hf_nested(converted / "plain", dtype=dtype)):
            assert model.dtype is dtype
            check_bits(logits(model), original)


def test_files_hold_persistent_and_residual_bytes_apart(converted):
    nested = converted / "nested"
    persistent, residual = (load_file(nested / f"{kind}-00001.safetensors") for kind in ("persistent", "residual"))
    assert set(residual) == {f"{path}.weight.lower" for path in nested_linears(load_nested(nested))}
    assert all(t.dtype is torch.uint8 for t in residual.values()) and f"{UP}.upper" in persistent
    assert "model.embed_tokens.weight" in persistent and "lm_head.weight" in persistent and UP not in persistent
    names = {p.name for p in nested.iterdir()}
    assert {"config.json", "generation_config.json", MANIFEST} <= names and not any(n.startswith("model") for n in names)
    assert sum(p.stat().st_size for p in nested.glob("*.safetensors")) < 1.1 * sum(
        p.stat().st_size for p in (converted / "plain").glob("*.safetensors")
    )


def test_many_files(converted, tmp_path, monkeypatch):
    monkeypatch.setattr(nested_checkpoint, "_FILE_BYTES", 10_000)
    convert(converted / "plain", tmp_path / "nested")
    assert len(list((tmp_path / "nested").glob("persistent-*"))) > 3 and len(list((tmp_path / "nested").glob("residual-*"))) > 3
    check_states(load_nested(tmp_path / "nested").state_dict(), load_nested(converted / "nested").state_dict())


def test_one_16_bit_weight_at_a_time(converted, monkeypatch):
    seen: list[weakref.ref] = []
    whole = load_model.nest

    def watched(weight):
        assert all(old() is None for old in seen)
        seen.append(weakref.ref(weight))
        return whole(weight)

    monkeypatch.setattr(load_model, "nest", watched)
    load_hf_nested(converted / "plain")
    assert len(seen) == 21


def test_weights_can_be_changed_and_files_stay(folder):
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    model = load_nested(folder)
    state = {name: t.flip(0) for name, t in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    check_states(model.state_dict(), state)
    model = load_nested(folder)
    with torch.no_grad():
        model.get_submodule("model.layers.1.mlp.up_proj").lower.fill_(7)
        model.model.norm.weight.fill_(3.0)
    assert before == {p.name: p.read_bytes() for p in folder.iterdir()}


def spoil_manifest(folder: Path, change, sealed: bool = True) -> None:
    body = json.loads((folder / MANIFEST).read_text())
    change(body)
    if sealed:
        body.pop("sha256")
        body["sha256"] = seal(body)
    (folder / MANIFEST).write_text(json.dumps(body))


def spoil_tensors(folder: Path, kind: str, change) -> None:
    path = folder / f"{kind}-00001.safetensors"
    tensors = load_file(path)
    path.unlink()
    change(tensors)
    save_file(tensors, path)


def narrow(config: Path) -> None:
    config.write_text(config.read_text().replace('"intermediate_size": 96', '"intermediate_size": 80'))


def tie(config: Path) -> None:
    config.write_text(config.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))


def heads(config: Path) -> None:
    config.write_text(config.read_text().replace('"num_attention_heads": 4', '"num_attention_heads": 3'))


def flip_bit(tensors):
    tensors[f"{UP}.lower"][3, 4] ^= 1


# What is done to the folder, and what the error says.
FAULTS = {
    "no manifest": (lambda f: (f / MANIFEST).unlink(), r"holds no depthfx.json and is no nested checkpoint; `depthfx convert`"),
    "manifest cut": (lambda f: (f / MANIFEST).write_text((f / MANIFEST).read_text()[:-9]), r"depthfx.json cannot be read as JSON"),
    "manifest a list": (lambda f: (f / MANIFEST).write_text("[]"), r"holds a JSON list, not an object"),
    "foreign manifest": (lambda f: (f / MANIFEST).write_text("{}"), r"is of kind None, not 'depthfx nested checkpoint'"),
    "version": (lambda f: spoil_manifest(f, lambda b: b.update(version=2)), r"has version 2; this depthfx reads version 1"),
    "edited": (lambda f: spoil_manifest(f, lambda b: b.update(dtype="float32"), sealed=False), r"depthfx.json was altered"),
    "dtype": (lambda f: spoil_manifest(f, lambda b: b.update(dtype="int4")), r"dtype 'int4'; allowed: float16"),
    "format": (lambda f: spoil_manifest(f, lambda b: b["tensors"][UP].update(format="nf4")), r"as 'nf4'; this depthfx knows nested_e4m3,"),
    "order": (lambda f: spoil_manifest(f, lambda b: b["tensors"][UP].update(order="plain")), r"in 'plain' order; .* reads 'fragment'"),
    "parts": (lambda f: spoil_manifest(f, lambda b: b["tensors"][UP]["parts"].pop("upper")), r"parts \['lower'\] of .*up_proj"),
    "less": (lambda f: spoil_manifest(f, lambda b: b["tensors"].pop(UP)), r"lacks 1 tensors of LlamaForCausalLM \(.*up_proj"),
    "more": (lambda f: spoil_manifest(f, lambda b: b["tensors"].update(x=b["tensors"][UP])), r"1 tensors that LlamaForCausalLM lacks \(x\)"),
    "no file": (lambda f: (f / "residual-00001.safetensors").unlink(), r"residual-00001.safetensors is missing"),
    "file cut": (lambda f: (f / "residual-00001.safetensors").write_bytes((f / "residual-00001.safetensors").read_bytes()[:-1]), r"is cut off"),
    "foreign file": (lambda f: (f / "residual-00001.safetensors").write_text("hello, this is no such file"), r"no safetensors file"),
    "no tensor": (lambda f: spoil_tensors(f, "residual", lambda t: t.pop(f"{UP}.lower")), r"has no tensor '.*up_proj.weight.lower'"),
    "shape": (lambda f: spoil_tensors(f, "persistent", lambda t: t.update({f"{UP}.upper": t[f"{UP}.upper"][:-1]})), r"\[95, 64\] torch.uint8, expected"),
    "bytes": (lambda f: spoil_tensors(f, "residual", lambda t: t.update({f"{UP}.lower": t[f"{UP}.lower"].half()})), r"torch.float16, expected .* torch.uint8"),
    "one bit": (lambda f: spoil_tensors(f, "residual", flip_bit), r"up_proj.weight.lower in .* has SHA-256 .*, expected .*: altered"),
    "config": (lambda f: narrow(f / "config.json"), r"is \[96, 64\], and the config asks for \[80, 64\]"),
    "tied later": (lambda f: tie(f / "config.json"), r"ties lm_head.weight to model.embed_tokens.weight, but holds different values"),
    "config a list": (lambda f: (f / "config.json").write_text("[]"), r"config.json holds a JSON list, not an object"),
    "generation a list": (lambda f: (f / "generation_config.json").write_text("[]"), r"generation_config.json holds a JSON list"),
    "odd heads": (lambda f: heads(f / "config.json"), r"no model can be made from .* Hugging Face says"),
    "no config": (lambda f: (f / "config.json").unlink(), r"no folder with a config.json"),
    "model type": (lambda f: (f / "config.json").write_text('{"model_type": "no_such"}'), r"no model can be made from .* Hugging Face says"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_spoilt_folders_are_refused(folder, fault):
    spoil, message = FAULTS[fault]
    spoil(folder)
    with pytest.raises(CheckpointError, match=message):
        load_nested(folder)


@pytest.mark.parametrize("path", [None, 5, b"folder"])
def test_a_path_is_a_path(path, tmp_path):
    for call in (depthfx.load, load_nested, load_hf_nested, lambda p: convert(p, tmp_path / "new"), lambda p: convert(tmp_path, p)):
        with pytest.raises(CheckpointError, match="is no path; name a folder"):
            call(path)


def test_without_verify_a_changed_bit_is_not_noticed(folder):
    spoil_tensors(folder, "residual", flip_bit)
    assert load_nested(folder, verify=False) is not None
    with pytest.raises(CheckpointError, match="altered"):
        load_nested(folder)


def test_ordinary_folders_that_do_not_fit(converted, tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere is no folder with a config.json"):
        depthfx.load(tmp_path / "nowhere")
    plain = Path(shutil.copytree(converted / "plain", tmp_path / "plain"))
    index = plain / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    file = said["weight_map"].pop(UP)
    index.write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors of LlamaForCausalLM \(model.layers.1.mlp.up_proj.weight\)"):
        load_hf_nested(plain)
    said["weight_map"][UP] = "no-such.safetensors"
    index.write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match=r"no-such.safetensors is missing"):
        load_hf_nested(plain)
    said["weight_map"].update({UP: file, "model.extra.weight": file})
    index.write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match=r"1 tensors that LlamaForCausalLM lacks \(model.extra.weight\)"):
        load_hf_nested(plain)
    index.unlink()
    with pytest.raises(CheckpointError, match=r"holds neither model.safetensors nor model.safetensors.index.json"):
        load_hf_nested(plain)
    saved(tmp_path / "gpt2", "gpt2")
    with pytest.raises(CheckpointError, match=r"GPT2LMHeadModel has no torch.nn.Linear"):
        load_hf_nested(tmp_path / "gpt2")


def test_tied_copies_in_the_files(tmp_path):
    plain = tmp_path / "plain"
    exact_model("llama", torch.float16, tie_word_embeddings=True).save_pretrained(plain)
    tensors = load_file(plain / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    for given in ({"lm_head.weight": table.clone()}, {"lm_head.weight": table.clone(), "model.embed_tokens.weight": None}):
        save_file({n: t for n, t in {**tensors, **given}.items() if t is not None}, plain / "model.safetensors", metadata={"format": "pt"})
        model = load_hf_nested(plain)
        assert model.lm_head.weight is model.model.embed_tokens.weight and torch.equal(model.lm_head.weight, table)
    save_file({**tensors, "lm_head.weight": table + 1}, plain / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"ties lm_head.weight to model.embed_tokens.weight, but holds different values"):
        load_hf_nested(plain)


def test_convert_refuses_and_leaves_nothing(converted, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(CheckpointError, match="exists already and is not empty"):
        convert(converted / "plain", tmp_path / "full")
    with pytest.raises(CheckpointError, match="is a nested checkpoint already"):
        convert(converted / "nested", tmp_path / "new")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="link exists already"):
        convert(converted / "plain", tmp_path / "link")
    (tmp_path / "link").unlink()
    with pytest.raises(CheckpointError, match=r"no folder can be made in .*full/file .*name another place for new"):
        convert(converted / "plain", tmp_path / "full" / "file" / "new")
    plain = Path(shutil.copytree(converted / "plain", tmp_path / "plain"))
    shard = sorted(plain.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="cut off"):
        convert(plain, tmp_path / "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full", "plain"]


def test_float32_beyond_float16_names_the_weight(tmp_path):
    model = exact_model("llama", torch.float32)
    with torch.no_grad():
        model.get_parameter(UP)[0, 0] = 1e6
    model.save_pretrained(tmp_path / "plain")
    with pytest.raises(CheckpointError, match=rf"{UP} of .*plain cannot be nested: a float32 weight of 1e\+06 is beyond FP16"):
        depthfx.load(tmp_path / "plain")
    with pytest.raises(CheckpointError, match=rf"{UP} of .*plain cannot be nested"):
        convert(tmp_path / "plain", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert float(depthfx.load(tmp_path / "plain", dtype=torch.bfloat16).get_submodule(UP.removesuffix(".weight")).weight[0, 0]) == 999424.0
