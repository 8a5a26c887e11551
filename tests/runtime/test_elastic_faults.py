"""What may go wrong around shared memory: failing copies, failing builds, engines closed or forgotten, weights touched while lent."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

from depthfx.alloc.physical.memfd import Memfd
from depthfx.errors import InvalidRequestError, MemoryStateError, OutOfPhysicalMemoryError, SettingError
from depthfx.records import SamplingParams
from depthfx.runtime.runner import Runner
from tests.families.test_nested_families import exact
from tests.runtime.test_elastic import BURST, elastic, serve

IDS = torch.tensor([[5, 6, 7]])
GREEDY = {"max_new_tokens": 3, "do_sample": False}


def mappings() -> int:
    """Mappings of shared memory in this process."""
    return Path("/proc/self/maps").read_text().count("memfd:depthfx")


def under_load(model, steps: int = 8):
    """Steps until residuals are lent, requests unfinished."""
    for prompt in BURST:
        model.engine.add(prompt, SamplingParams(max_new_tokens=40))
    for _ in range(steps):
        model.engine.step()
    assert not any(model.engine.control.region.resident())
    return model


def end_all(engine) -> None:
    for request in engine._scheduler.unfinished():
        engine.abort(request)
    while engine.has_unfinished():
        engine.step()


@pytest.mark.parametrize("ends", [False, True])
def test_failing_copies(ends, monkeypatch):
    """Service goes on in fast precision, the copy is tried again after a while and not before, a dead worker is replaced."""
    monkeypatch.setattr("depthfx.runtime.elastic.RETRY_SECONDS", 0.05)
    model = elastic()
    engine = model.engine
    control, first = engine.control, engine.control.shared.worker
    first.copier.fail("before chunk", 1, count=12, ends=ends)
    with pytest.warns(UserWarning, match=r"stays in fast precision and is tried again.*injected"):
        serve(engine, lambda turn: time.sleep(0.002))
    assert 0 < control.num_failures < 100 and engine.stats().steps_by_precision["fast"] > 20
    monkeypatch.undo()
    first.copier.fail("before chunk", 0)
    engine.restore()
    assert control.shared.backup.verify(control._home) == len(control.shared.weights)
    assert (control.shared.worker is first) == (not ends)
    assert control.stats().num_restores > 0
    engine.close()


@pytest.mark.filterwarnings("ignore:a residual was not restored:UserWarning")
def test_a_copy_under_way_when_the_worker_ends_is_tried_again(monkeypatch):
    """The thread ends while a unit is under way, and tells of it only after another unit found no thread."""
    monkeypatch.setattr("depthfx.runtime.elastic.RETRY_SECONDS", 0.0)
    model = under_load(elastic())
    control, first = model.engine.control, model.engine.control.shared.worker
    first.wait_idle(5.0)
    first.copier.fail("after chunk", 1, ends=True)
    first.copier.hold("before done")
    later = threading.Timer(0.3, first.copier.go)
    later.start()
    end_all(model.engine)
    model.engine.restore(timeout=5.0)
    later.join()
    assert control.shared.worker is not first and all(control.region.resident())
    assert control.shared.backup.verify(control._home) == len(control.shared.weights)
    model.engine.close()


@pytest.mark.filterwarnings("ignore:a residual was not restored:UserWarning")
def test_restore_gives_up_on_a_copy_that_always_fails():
    model = elastic()
    under_load(model)
    control = model.engine.control
    control.shared.worker.copier.disturb(1, fail_share=1.0)
    end_all(model.engine)
    start = time.monotonic()
    with pytest.raises(MemoryStateError, match=r"residuals cannot be copied back; call .*injected"):
        model.engine.restore()
    assert time.monotonic() - start < 10
    control.shared.worker.copier.disturb(0)
    model.engine.restore()
    assert all(control.region.resident())
    model.engine.close()


def refuse_memory(monkeypatch) -> type[Exception]:
    def create(self, size: int) -> int:
        raise OutOfPhysicalMemoryError("injected")

    monkeypatch.setattr(Memfd, "_create", create)
    return OutOfPhysicalMemoryError


def fail_at_home(monkeypatch) -> type[Exception]:
    def copy_all(self, targets, sources):
        raise RuntimeError("injected")

    monkeypatch.setattr("depthfx.alloc.restore_worker.RestoreWorker.copy_all", copy_all)
    return RuntimeError


def fail_in_runner(monkeypatch) -> type[Exception]:
    made = Runner.__init__

    def init(self, *args, **kwargs) -> None:
        made(self, *args, **kwargs)
        raise RuntimeError("injected")

    monkeypatch.setattr(Runner, "__init__", init)
    return RuntimeError


def fail_in_scheduler(monkeypatch) -> type[Exception]:
    def init(self, *args) -> None:
        raise SettingError("injected")

    monkeypatch.setattr("depthfx.runtime.scheduler.Scheduler.__init__", init)
    return SettingError


@pytest.mark.parametrize("fail", [refuse_memory, fail_at_home, fail_in_runner, fail_in_scheduler], ids=lambda f: f.__name__)
def test_a_build_that_fails_leaves_the_model_whole(fail, monkeypatch):
    model, before = exact("llama"), mappings()
    expected = model(IDS).logits
    with monkeypatch.context() as patched:
        error = fail(patched)
        with pytest.raises(error, match="injected"):
            elastic(model)
    assert torch.equal(model(IDS).logits, expected) and mappings() == before
    elastic(model)
    assert torch.equal(model(IDS).logits, expected) and mappings() > before
    model.engine.close()
    assert torch.equal(model(IDS).logits, expected) and mappings() == before


def test_close_under_load_and_with_tensors_held():
    reference, model, before = exact("llama"), elastic(lookahead=True), mappings()
    other = elastic()  # two in one process
    under_load(model)
    pool = model.engine._runner.kv_pool
    with pytest.raises(MemoryStateError, match="still in use"):
        model.engine.close()
    with pytest.raises(MemoryStateError, match="on the host while the engine is being closed"):
        model(IDS)
    del pool
    model.engine.close()
    model.engine.close()
    assert torch.equal(model(IDS).logits, reference(IDS).logits) and mappings() <= before
    with pytest.raises(InvalidRequestError, match="this engine is closed"):
        model.generate(IDS, **GREEDY)
    model.load_state_dict(reference.state_dict())
    serve(other.engine)
    other.engine.restore()
    assert torch.equal(other(IDS).logits, reference(IDS).logits)
    other.engine.close()


def test_a_forgotten_model_gives_its_memory_back():
    gc.collect()
    before = mappings()
    model = under_load(elastic())
    engine = weakref.ref(model.engine)
    assert mappings() > before
    del model
    deadline = time.monotonic() + 20
    while mappings() > before and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    assert engine() is None and mappings() <= before


def test_weights_cannot_be_touched_while_lent(tmp_path):
    model = under_load(elastic())
    state, control = exact("llama").state_dict(), model.engine.control
    for touch in (model.state_dict, lambda: model.save_pretrained(tmp_path), lambda: model(IDS)):
        with pytest.raises(MemoryStateError, match="lent to the KV cache"):
            touch()
    for touch in (model.engine.restore, lambda: model.load_state_dict(state)):
        with pytest.raises(MemoryStateError, match="while requests hold KV blocks"):
            touch()
    lent = control._home[: control.region.num_open_units * control.shared.layout.unit_bytes]
    before = lent.clone()
    with pytest.raises(MemoryStateError, match="lent to the KV cache"):
        model.model.layers[0].mlp.load_state_dict({"up_proj.weight": state["model.layers.0.mlp.up_proj.weight"]}, strict=False)
    assert lent.numel() and torch.equal(lent, before)  # nothing was written into KV
    del lent
    end_all(model.engine)
    model.engine.restore()
    model.save_pretrained(tmp_path)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())
    model.engine.close()


def test_changed_weights_come_back_as_the_new_ones():
    model = elastic()
    serve(model.engine)
    state = {n: -v if ".layers." in n and v.dim() == 2 else v for n, v in exact("llama").state_dict().items()}
    model.load_state_dict(state)  # restores by itself
    serve(model.engine)
    model.engine.restore()
    assert model.engine.control.stats().num_restores > 2
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())
    under_load(model)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.25)  # no residual: allowed while others are lent
    model.generate(IDS, **GREEDY)
    model.model.layers[0].mlp.up_proj.lower.add_(1)  # by hand, into KV of others
    for _ in range(2):
        with pytest.raises(MemoryStateError, match="nested weights were changed while residuals are lent"):
            model.generate(IDS, **GREEDY)
    model.engine.close()


def test_hugging_faces_loop_gets_whole_weights():
    model, reference = elastic(on_unsupported="eager"), exact("llama")
    beams = {**GREEDY, "num_beams": 2}
    expected = reference.generate(IDS, **beams)
    under_load(model)
    with pytest.warns(UserWarning, match="in full precision"), pytest.raises(MemoryStateError, match="finish or abort them first"):
        model.generate(IDS, **beams)
    end_all(model.engine)
    assert torch.equal(model.generate(IDS, **beams), expected)
    model.engine.close()


def test_compiled_in_inference_mode():
    with torch.inference_mode():
        model = elastic()
    serve(model.engine)
    model.engine.restore()
    assert model.engine.control.stats().num_restores > 0
    model.engine.close()
