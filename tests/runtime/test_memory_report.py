"""`model.memory()` and `engine.timeline()`: every byte has one owner, and the numbers are those of the books."""

import re
from dataclasses import asdict

import pytest
import torch

import depthfx
from depthfx.alloc.manager import MemoryManager
from depthfx.runtime.memory_report import in_bytes, ranges, residual_bytes, weight_bytes
from depthfx.runtime.timeline import Timeline
from tests.families.configs import build

OPTIONS = {"inductor": False, "kv_blocks": 12, "max_batch_size": 8, "max_model_len": 128, "block_tokens": 8}
ELASTIC = depthfx.ElasticMemory(unit_mib=0.01, dwell_s=0.0)


def compiled(memory=ELASTIC, weights="nested", **options):
    return depthfx.compile(build("llama"), weights=weights, memory=memory, **{**OPTIONS, **options})


def burst(engine, number=8, new=30):
    generator = torch.Generator().manual_seed(0)
    for _ in range(number):
        engine.add(torch.randint(3, 90, (20,), generator=generator).tolist(), depthfx.SamplingParams(max_new_tokens=new))


def drain(engine):
    while engine.has_unfinished():
        assert all(output.error is None for output in engine.step())


def one_owner(sample):
    """The sum over owners, each of which has the byte alone."""
    return sample.kv_held_bytes + sample.kv_cached_bytes + sample.kv_free_bytes + sample.restoring_bytes + sample.residual_bytes


@pytest.fixture(scope="module")
def served():
    """A model in the middle of a burst, all residuals lent."""
    model = compiled()
    model.engine._timeline.interval_s = 0.0
    burst(model.engine)
    while model.engine.control.region.num_open_units < model.engine.control.region.layout.num_units:
        model.engine.step()
    yield model
    model.engine.close()


def test_bytes():
    assert [in_bytes(n) for n in (0, 1023, 1024, 3 << 19, 5 << 30)] == ["0 bytes", "1023 bytes", "1.00 KiB", "1.50 MiB", "5.00 GiB"]


def test_ranges():
    modes = {**dict.fromkeys(range(8), "full"), 2: "fast", 5: "fast", 6: "fast", "head": "fast"}
    assert ranges(modes) == [("full", "layers 0-1, 3-4, 7"), ("fast", "layers 2, 5-6; head")]
    assert ranges({0: "full", 1: "fast"}) == [("full", "layer 0"), ("fast", "layer 1")]
    assert ranges({}) == []


def test_weights_count_each_byte_once():
    model = build("llama")
    whole = sum(p.nbytes for p in model.parameters())
    depthfx.compile(model, weights="nested", **OPTIONS)
    persistent, residual = weight_bytes(model)
    linears = [m for layer in model.model.layers for m in layer.modules() if isinstance(m, torch.nn.Linear)]
    assert residual == sum(m.out_features * m.in_features for m in linears)
    scales = sum(m.shift.numel() * m.shift.element_size() for m in linears if m.shift is not None)
    inv_freq = sum(b.nbytes for n, b in model.named_buffers() if n.endswith("inv_freq"))
    # FP32 weights of four bytes became two: one persistent, one residual
    assert persistent + residual - inv_freq - scales == whole - 2 * residual


def test_report_of_lent_memory(served):
    text, region = served.memory(), served.engine.control.region
    owners = residual_bytes(region)
    assert owners["lent"] == served.engine.control.shared.backup.num_bytes == sum(owners.values())
    assert "90.00 KiB lent" in text
    assert "fast: layers 0-2" in text
    usage = served.engine.stats().kv.bytes
    assert f"lent: {in_bytes(usage.lent)}; held {in_bytes(usage.lent_held)}" in text
    assert f"base: {in_bytes(12 * 6144)}; held {in_bytes(usage.base_held)}" in text
    assert f"{region.num_lends} lends, 0 restores, 0 cancels, 0 failures" in text
    assert "units: 8 of 12.00 KiB; 6.00 KiB (6.25%) of them hold no residual" in text
    assert "host copy 90.00 KiB, not pinned" in text
    running = served.engine.stats().num_running
    assert f"{running} running" in text


def test_report_after_restore_and_close():
    model = compiled()
    model.engine._timeline.interval_s = 0.0
    burst(model.engine)
    drain(model.engine)
    samples = model.engine.timeline()
    assert {one_owner(s) for s in samples} == {28 * 6144}
    assert all(any(getattr(s, f"{name}_bytes") for s in samples) for name in ("kv_held", "kv_cached", "kv_free", "residual"))
    assert any(s.num_preemptions for s in samples)
    model.engine.restore()
    text = model.memory()
    assert "90.00 KiB in place, 0 bytes coming back, 0 bytes lent" in text
    assert "full: layers 0-2" in text
    assert re.search(
        r"8 lends, 8 restores, .*\n.*restored 90.00 KiB in .* GB/s\); 0 bytes on their way\n.*in flight: up to 1, halved 0 times", text
    )
    model.engine.close()
    assert "the engine is closed" in model.memory()


@pytest.mark.parametrize("policy", ["nested_resident", "static_full", "static_fast"])
def test_report_of_every_policy(policy):
    model = compiled(depthfx.ElasticMemory(policy=policy, unit_mib=0.01))
    text = model.memory()
    assert {"nested_resident": "memory does not move", "static_full": "no elastic memory", "static_fast": "policy static_fast"}[
        policy
    ] in text
    assert ("90.00 KiB lent" if policy == "static_fast" else "90.00 KiB, in place") in text
    sample = model.engine.timeline()[-1]
    assert sample.num_full_entries == (0 if policy == "static_fast" else 3)
    assert sample.kv_free_bytes == (28 if policy == "static_fast" else 12) * 6144
    model.engine.close()


def test_report_without_elastic_memory_and_without_engine():
    model = compiled(None, "16bit")
    assert "none: this model has no elastic memory" in model.memory()
    assert "the weights have one precision" in model.memory()
    assert "precision of the next step" not in model.memory()
    assert model.engine.timeline() == []
    assert model.engine._timeline is None
    eager = build("llama", num_hidden_layers=2)
    eager.generation_config.eos_token_id = None
    eager.config.num_experts = 4
    eager.model.layers[0].mlp.experts = torch.nn.ModuleList()
    assert "not compiled" in depthfx.compile(eager, on_unsupported="eager", **OPTIONS).memory()


def test_timeline_gives_each_byte_one_owner(served):
    samples = served.engine.timeline()
    assert len(samples) > 3
    assert {one_owner(s) for s in samples} == {28 * 6144}
    usage = served.engine.stats().kv
    assert samples[-1].kv_held_bytes == usage.bytes.base_held + usage.bytes.lent_held
    assert samples[-1].residual_bytes == usage.bytes.backed == 0
    assert samples[0].num_lends < samples[-1].num_lends == 8
    for name in ("time_s", "num_lends", "num_restores", "num_preemptions"):
        values = [asdict(s)[name] for s in samples]
        assert values == sorted(values), name
    assert samples[-1].num_full_entries == 0 < max(s.num_full_entries for s in samples)


def test_timeline_is_bounded_and_spaced_and_never_counts_blocks(served, monkeypatch):
    monkeypatch.setattr(MemoryManager, "usage", None)
    now = [10.0]
    timeline = Timeline(6144, interval_s=5 / 1024, most=4, clock=lambda: now[0])
    scheduler = served.engine._scheduler
    for _ in range(100):
        timeline.record(scheduler, b"\1\0\1")
        now[0] += 1 / 1024  # exact in binary
    times = [s.time_s for s in timeline.samples(scheduler)]
    assert [1024 * t for t in times] == [80, 85, 90, 95, 100]
    assert timeline.samples(scheduler)[0].num_full_entries == 2
