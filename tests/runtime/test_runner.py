"""The runner's staging: what a plan becomes as tensors, padding of buckets, block-table writes, several steps in rotation."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from depthfx.records import Chunk, KvShape, SamplingParams, StepInputs, StepPlan
from depthfx.runtime.graphs import decode_buckets, greedy
from depthfx.runtime.runner import Program, Runner, RunnerShape
from depthfx.runtime.staging import Staging, prefill_tiles
from depthfx.runtime.step_form import decode_form

CPU = torch.device("cpu")
GREEDY = SamplingParams()


def decode(name: str, row: int, start: int, token: int | None, source: int = -1) -> Chunk:
    return Chunk(name, row, start, () if token is None else (token,), source, True, 1, GREEDY)


def prefill(name: str, row: int, start: int, tokens: list[int], samples: bool = True) -> Chunk:
    return Chunk(name, row, start, tuple(tokens), -1, samples, 0, GREEDY)


def staging() -> Staging:
    return Staging(max_tokens=512, max_rows=8, blocks_per_row=10, device=CPU)


def test_a_mixed_step_is_packed_in_order():
    plan = StepPlan(
        0, (decode("a", 3, 7, 50), decode("b", 1, 9, None, source=2)), (prefill("c", 2, 4, [60, 61, 62]), prefill("d", 0, 0, [70, 71], False)),
        ((3, 0, 5), (2, 1, 6)),
    )  # fmt: skip
    up = staging().upload(plan)
    assert up.token_ids.tolist() == [50, 0, 60, 61, 62, 70, 71]
    assert up.source.tolist() == [-1, 2, -1, -1, -1, -1, -1]
    assert up.positions.tolist() == [7, 9, 4, 5, 6, 0, 1]
    assert up.table_rows.tolist() == [3, 1, 2, 2, 2, 0, 0]
    assert up.logit_rows.tolist() == [0, 1, 4]  # d's chunk does not sample
    assert (up.write_places.tolist(), up.write_blocks.tolist()) == ([30, 21], [5, 6])
    assert (up.chunk_starts.tolist(), up.num_decode_rows) == ([2, 5, 7], 2)


def test_a_bucket_is_padded_with_idle_rows():
    up = staging().upload(StepPlan(0, (decode("a", 3, 7, 50),), (), ((3, 1, 5),)), decode_form(4))
    assert up.positions.tolist() == [7, -1, -1, -1]
    assert up.source.tolist() == [-1, -1, -1, -1]
    assert up.logit_rows.tolist() == [0, 1, 2, 3]
    assert up.write_places.tolist() == [31, 80, 80, 80]  # 8 rows of 10: place 80 lies past the tables
    assert up.num_decode_rows == 4 and up.chunk_starts.numel() == 0


def test_fields_of_a_bucket_stay_in_place():
    stage = staging()
    first = stage.upload(StepPlan(0, (decode("a", 3, 7, 50),), (), ()), decode_form(8))
    places = [t.storage_offset() for t in (first.token_ids, first.positions, first.logit_rows)]
    again = stage.upload(StepPlan(1, tuple(decode(c, 1, 2, 3) for c in "abcdefgh"), (), ()), decode_form(8))
    assert places == [t.storage_offset() for t in (again.token_ids, again.positions, again.logit_rows)]
    assert all(p % 16 == 0 for p in places)


def test_uploads_in_rotation_do_not_overwrite_each_other():
    stage = staging()
    first = stage.upload(StepPlan(0, (decode("a", 3, 7, 50),), (), ()))
    stage.upload(StepPlan(1, (decode("a", 3, 8, 51),), (), ()))
    assert first.token_ids.tolist() == [50]
    held = [stage.upload(StepPlan(n, (decode("a", 3, 7, n),), (), ())).token_ids for n in range(6)]
    assert [t.tolist() for t in held] == [[n] for n in range(6)], "three steps of two halves each"
    assert len({stage.token_buffer().data_ptr() for _ in range(3)}) == 3


def test_tiles_cover_every_row_once_longest_first():
    chunks = (prefill("a", 0, 0, list(range(300))), prefill("b", 1, 1000, list(range(129))))
    numbers, starts = prefill_tiles(chunks)
    assert sorted(zip(numbers.tolist(), starts.tolist(), strict=True)) == [(0, 0), (0, 128), (0, 256), (1, 0), (1, 128)]
    assert numbers.tolist()[:2] == [1, 1]  # rows that read more keys come first


def test_greedy_marks_rows_with_nan():
    logits = torch.tensor([[0.0, 2.0, 2.0], [float("nan"), 1.0, 5.0], [3.0, float("-inf"), 1.0]])
    assert greedy(logits).tolist() == [1, -1, 0]


def test_buckets_reach_the_largest_batch():
    for largest in (1, 3, 8, 100, 256, 300):
        buckets = decode_buckets(largest)
        assert buckets[-1] == largest and list(buckets) == sorted(set(buckets)) and min(buckets) == 1


class Echo:
    """Stands for a program: logits whose argmax is the row's token plus one; records what it was given."""

    def __init__(self) -> None:
        self.seen: list[StepInputs] = []

    def __call__(self, inputs: StepInputs) -> torch.Tensor:
        self.seen.append(inputs)
        return torch.nn.functional.one_hot((inputs.token_ids + 1) % 100, 100).float()[inputs.logit_rows]


def runner(program: Program) -> Runner:
    shape = RunnerShape(KvShape(1, 1, 4, 16, 4), 1, torch.float32, 4, 8, 10, 512, 100)
    return Runner(program, shape, CPU, ())


def test_a_decode_reads_the_token_of_the_step_before_on_the_device():
    program = Echo()
    run = runner(program)
    assert run.wait(run.launch(StepPlan(0, (), (prefill("a", 0, 0, [5, 6]), prefill("b", 1, 0, [30])), ()))).token_ids == (7, 31)
    result = run.wait(run.launch(StepPlan(1, (decode("b", 1, 1, None, source=1), decode("a", 0, 2, None, source=0)), (), ())))
    assert program.seen[1].token_ids.tolist() == [31, 7]
    assert result.token_ids == (32, 8)


def test_table_writes_beyond_one_upload_are_applied_in_parts():
    program = Echo()
    run = runner(program)
    run.staging.max_writes = 7
    writes = tuple((row, column, 10 * row + column) for row in range(8) for column in range(10))
    run.launch(StepPlan(0, (decode("a", 0, 0, 5),), (), writes))
    assert run.block_tables.flatten().tolist() == list(range(80))


def test_what_a_failed_step_has_queued_is_waited_for(monkeypatch):
    """It may still read a host buffer that the third step from here writes."""

    class Stream:
        num_waits = 0

        def synchronize(self):
            self.num_waits += 1
            raise RuntimeError("the device is gone as well")

    def broken(inputs: StepInputs) -> torch.Tensor:
        raise ValueError("no kernel")

    run, stream = runner(broken), Stream()
    monkeypatch.setattr(run, "_stream", stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    with pytest.raises(ValueError, match="no kernel"):
        run.launch(StepPlan(0, (decode("a", 0, 0, 5),), (), ()))
    assert stream.num_waits == 1
    monkeypatch.setattr(run, "program", Echo())
    assert run.wait(run.launch(StepPlan(1, (decode("a", 0, 0, 5),), (), ()))).token_ids == (6,)
    assert stream.num_waits == 1
