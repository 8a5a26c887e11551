"""The tile tuner with a clock of its own, the file it keeps, and who has the last word on a config."""

import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import depthfx
from depthfx import cli
from depthfx.errors import InternalError, SettingError, UnsupportedModelError
from depthfx.lowering import ops, tile_store, tune_model
from depthfx.lowering.kernels import _stream_config
from depthfx.lowering.kernels._stream_config import TUNED, StreamConfig, config_fault, default_config, stream_config, use_tiles
from depthfx.lowering.linear_shapes import linear_products
from depthfx.lowering.tile_store import DeviceKind, load_tiles, save_tiles, tile_file, use_stored_tiles
from depthfx.lowering.tuner import candidates, merged, table_line, tune, tune_product
from depthfx.report import CACHES, CompileReport
from tests.families.configs import build

SMS = 132
KIND = DeviceKind("NVIDIA H200", SMS)
PRODUCT = (16, 4096, 14336, False)
PRODUCTS = [PRODUCT, (64, 6144, 4096, False), (256, 28672, 4096, True), (128, 576, 576, False), (32, 3072, 576, True)]


class FakeBench:
    """A clock that gives 10 us in each precision, but for the configs and measurements that are told otherwise."""

    def __init__(self, times=None, faults=None):
        self.times, self.faults, self.calls = times or {}, faults or {}, []

    def fault(self, config):
        return self.faults.get(config)

    def time_us(self, config, full):
        self.calls.append((config, full))
        turn = self.calls.count((config, full)) - 1
        series = self.times.get(config, 10.0)
        return series[min(turn, len(series) - 1)] if isinstance(series, list) else series

    def cublas_us(self):
        return 12.0


@pytest.fixture(autouse=True)
def nothing_stored(monkeypatch):
    monkeypatch.setattr(_stream_config, "_stored", {})
    monkeypatch.setattr(tile_store, "_in_use", {})


@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_candidates_fit_and_the_built_in_config_leads(product):
    found = candidates(product, SMS)
    assert found[0] == default_config(*product, SMS)
    assert len(found) == len(set(found)) > 4
    assert all(config_fault(product, c) is None for c in found)
    tiles = {c: -(-product[1] // c.rows) for c in found[1:]}
    assert all(c.splits == 1 or tiles[c] * c.rows * c.splits * product[0] <= 8 << 20 for c in found[1:])  # reserved scratch


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (StreamConfig(96, 128, 3, 1), "64, 128 or 256 weight rows"),
        (StreamConfig(64, 128, 1, 1), "at least 2 places"),
        (StreamConfig(128, 128, 8, 1), "bytes of shared memory"),
        (StreamConfig(64, 128, 3, 113), "113 ranges of K"),
        (StreamConfig(64, 128, 3, 0), "0 ranges of K"),
    ],
)
def test_impossible_configs_are_named(config, text):
    assert text in config_fault(PRODUCT, config)


def test_a_faster_tile_is_kept_and_the_slow_one_timed_in_both_precisions():
    before, *_, other = candidates(PRODUCT, SMS)
    bench = FakeBench({other: 9.0})
    outcome = tune_product(PRODUCT, bench, SMS)
    assert outcome.kept and outcome.after == other and outcome.before == before
    assert (outcome.before_us, outcome.after_us, outcome.cublas_us) == (20.0, 18.0, 12.0)
    assert set(bench.calls) == {(c, full) for c in candidates(PRODUCT, SMS) for full in (True, False)}
    assert "11.1%" in table_line(outcome) and "24.0" in table_line(outcome)


@pytest.mark.parametrize(
    ("time", "kept"),
    [
        (9.71, False),  # 2.9 %
        (9.69, True),  # 3.1 %
        ([9.0, 10.0], False),  # a lucky first measurement
        ([9.0, 9.6], True),
    ],
)
def test_three_percent_twice(time, kept):
    other = candidates(PRODUCT, SMS)[3]
    outcome = tune_product(PRODUCT, FakeBench({other: time}), SMS)
    assert outcome.kept is kept
    assert outcome.after == (other if kept else outcome.before)
    assert kept or ("the same" in table_line(outcome) and outcome.after_us == outcome.before_us)


def test_the_sum_of_both_precisions_decides():
    class Uneven(FakeBench):
        def time_us(self, config, full):
            return {True: 8.0, False: 13.0}[full] if config == other else super().time_us(config, full)

    other = candidates(PRODUCT, SMS)[2]
    assert not tune_product(PRODUCT, Uneven(), SMS).kept


def test_a_wrong_candidate_never_wins_and_is_named():
    first, wrong, slower, *_ = candidates(PRODUCT, SMS)
    outcome = tune_product(PRODUCT, FakeBench({wrong: 1.0, slower: 9.0}, {wrong: "off by 2"}), SMS)
    assert outcome.after == slower
    assert outcome.faults == (f"{wrong}: off by 2",)
    with pytest.raises(InternalError, match="off by 3"):
        tune_product(PRODUCT, FakeBench(faults={first: "off by 3"}), SMS)


def test_a_second_run_replaces_what_the_first_kept():
    other = candidates(PRODUCT, SMS)[3]
    kept, *_ = tune([PRODUCT], lambda product: FakeBench({other: 5.0}), SMS)
    tiles = merged({PRODUCTS[2]: other}, [kept])
    assert tiles == {PRODUCTS[2]: other, PRODUCT: other}
    same = tune_product(PRODUCT, FakeBench(), SMS)
    assert merged(tiles, [same]) == {PRODUCTS[2]: other}


def test_the_file_gives_back_what_was_kept(tmp_path):
    tiles = {p: candidates(p, SMS)[-1] for p in PRODUCTS}
    path = save_tiles(tmp_path, KIND, tiles)
    assert path == tile_file(tmp_path, KIND) == tmp_path / "tiles" / "nvidia-h200-132.json"
    assert load_tiles(tmp_path, KIND) == (tiles, "tuned tiles: 5 products from nvidia-h200-132.json")
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # no temporary file stays
    assert load_tiles(tmp_path, DeviceKind("NVIDIA H200", 78))[0] == {}
    assert "none kept" in load_tiles(tmp_path, DeviceKind("NVIDIA H200", 78))[1]


def damaged(change):
    def damage(path):
        body = json.loads(path.read_text())
        change(body)
        path.write_text(json.dumps(body))

    return damage


DAMAGE = {
    "cut": (lambda path: path.write_text(path.read_text()[:40]), "JSONDecodeError"),
    "not text": (lambda path: path.write_bytes(b"\xff\xfe\x80"), "UnicodeDecodeError"),
    "a list": (lambda path: path.write_text("[1]"), "version 'list', expected 1"),
    "other version": (damaged(lambda b: b.update(version=2)), "version 2, expected 1"),
    "other device": (damaged(lambda b: b.update(device="NVIDIA H100")), "made on 'NVIDIA H100'"),
    "no tiles": (damaged(lambda b: b.pop("tiles")), "KeyError"),
    "short entry": (damaged(lambda b: b["tiles"][0].pop()), "must be rows, N, K, gated"),
    "a text": (damaged(lambda b: b["tiles"][0].__setitem__(4, "64")), "must be rows, N, K, gated"),
    "impossible": (damaged(lambda b: b["tiles"][0].__setitem__(6, 99)), "bytes of shared memory"),
    "no such rows": (damaged(lambda b: b["tiles"][0].__setitem__(0, 17)), "17 rows"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_broken_or_foreign_file_is_ignored_and_reported(tmp_path, name):
    damage, text = DAMAGE[name]
    path = save_tiles(tmp_path, KIND, {PRODUCT: candidates(PRODUCT, SMS)[-1]})
    damage(path)
    tiles, line = load_tiles(tmp_path, KIND)
    assert tiles == {}
    assert text in line and str(path) in line and "ignored" in line


def test_stored_tiles_come_before_the_table_and_the_rule(tmp_path):
    tabled, ruled = next(iter(TUNED)), PRODUCT
    assert stream_config(16, *tabled[1:], SMS) == TUNED[tabled]
    stored = {p: StreamConfig(128, 64, 2, 2) for p in (tabled, ruled)}
    use_tiles(SMS, stored)
    for rows in (1, 16):
        assert stream_config(rows, *tabled[1:], SMS) == stored[tabled]
    assert stream_config(3, *ruled[1:], SMS) == stored[ruled]
    assert stream_config(17, *ruled[1:], SMS) == default_config(17, *ruled[1:], SMS)
    assert stream_config(3, *ruled[1:], 78) == default_config(3, *ruled[1:], 78)
    assert default_config(16, *tabled[1:], SMS) == TUNED[tabled]


def test_a_process_reads_the_file_once(tmp_path):
    config, report = candidates(PRODUCT, SMS)[-1], CompileReport()
    save_tiles(tmp_path, KIND, {PRODUCT: config})
    use_stored_tiles(tmp_path, KIND, report)
    assert stream_config(*PRODUCT, SMS) == config != default_config(*PRODUCT, SMS)
    save_tiles(tmp_path, KIND, {})
    use_stored_tiles(tmp_path, KIND, report)
    assert stream_config(*PRODUCT, SMS) == config
    first, second = report.sections[CACHES]
    assert first == "tuned tiles: 1 products from nvidia-h200-132.json"
    assert second == f"{first} (read earlier in this process)"


@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3", "starcoder2", "cohere2"])
def test_shapes_are_those_of_the_compiled_products(name):
    config = build(name).config
    with torch.device("meta"):
        products = linear_products(AutoModelForCausalLM.from_config(config))
    model = depthfx.compile(build(name), weights="nested", inductor=False, kv_blocks=16)
    found = set()
    with Recorder(found):
        model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False)
    assert found == set(products)


class Recorder(TorchDispatchMode):
    """Notes ``(N, K, gated)`` of each dual op that runs."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (ops.DUAL_LINEAR, ops.DUAL_GATED_LINEAR):
            self.found.add((*args[1].shape, func is ops.DUAL_GATED_LINEAR))
        return func(*args, **(kwargs or {}))


def test_a_model_that_does_not_run_on_ids_is_refused():
    config = build("llama").config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.model.layers[0].mlp.act_fn = torch.nn.Linear(3, 3, device="meta")
    with pytest.raises(UnsupportedModelError, match="cannot be read on the meta device"):
        linear_products(model)


def test_rows_become_classes_and_unserved_shapes_are_named():
    assert tune_model.row_classes(None) == (16, 32, 64, 128, 256)
    assert tune_model.row_classes([1, 8, 48]) == (16, 64)
    with pytest.raises(SettingError, match="--rows 300"):
        tune_model.row_classes([4, 300])
    products, skipped = tune_model.tunable([(96, 64, False), (96, 96, False), (72, 64, True)], (16, 32))
    assert products == [(16, 96, 64, False), (32, 96, 64, False)]
    assert [line.split(":")[0] for line in skipped] == ["96x96", "72x64 gated"]


def test_the_run_prints_a_table_and_keeps_what_won(tmp_path, monkeypatch):
    other = candidates(PRODUCT, SMS)[3]
    compiled, lines = [], []
    monkeypatch.setattr(tune_model, "device_kind", lambda device: KIND)
    monkeypatch.setattr(tune_model, "StreamBench", lambda product, device: FakeBench({other: 9.0}))
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.device("cpu"))

    def compile_configs(work, device, report):
        compiled.extend(work)
        report.add(CACHES, "kernels: none")

    monkeypatch.setattr(tune_model, "compile_configs", compile_configs)
    save_tiles(tmp_path, KIND, {PRODUCTS[2]: StreamConfig(64, 64, 2, 1)})
    tune_model.tune_products([PRODUCT, PRODUCTS[1]], "cuda", tmp_path, lines.append)
    assert compiled == [(p, candidates(p, SMS)) for p in (PRODUCT, PRODUCTS[1])]
    assert lines[0] == "kernels: none" and "before" in lines[1] and "4096x14336" in lines[2] and "6144x4096" in lines[3]
    assert lines[-1].startswith("1 of 2 products got another tile")
    assert load_tiles(tmp_path, KIND)[0] == {PRODUCTS[2]: StreamConfig(64, 64, 2, 1), PRODUCT: other}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about a machine without a GPU")
def test_the_command_says_that_there_is_nothing_to_tune(tmp_path, capsys):
    build("llama").config.save_pretrained(tmp_path)
    assert cli.main(["tune", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "nothing to tune" in out and "sees no CUDA device" in out
    assert "64x96: not served" in out
    assert cli.main(["tune", str(tmp_path), "--device", "cpu"]) == 0
    assert "runs no Triton kernel" in capsys.readouterr().out
    assert cli.main(["tune", str(tmp_path), "--rows", "257"]) == 1
    assert "--rows 257" in capsys.readouterr().err
    assert cli.main(["tune", str(tmp_path / "none")]) == 1
    assert "config.json" in capsys.readouterr().err
