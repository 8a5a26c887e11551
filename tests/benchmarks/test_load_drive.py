"""The driver on an engine of one's own and a clock that only steps and sleeps move."""

from types import SimpleNamespace

import pytest
from load_drive import SAMPLE_S, Limits, difference, replay
from load_metrics import Slo, attainment
from load_workload import Ask, Job

COUNTS = ("num_steps", "num_prefill_tokens", "num_preemptions", "num_reused_tokens", "num_reloaded_blocks", "num_saved_blocks")


class Engine:
    """One token for each of the oldest ``slots`` requests in each step of ``step_s`` seconds; ``modes``: precision by step."""

    def __init__(self, step_s=0.125, slots=100, short_by=0, modes=b""):
        self.now, self.step_s, self.slots, self.short_by, self.modes = 0.0, step_s, slots, short_by, modes
        self.live, self.num_steps, self.slept, self.error = {}, 0, [], None
        manager = SimpleNamespace(held_blocks=0, open_blocks=1)
        self._scheduler = SimpleNamespace(precision=b"", manager=manager, num_running=0, num_waiting=0, num_preemptions=0)
        self.control = self.routes = None

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds

    def add(self, prompt, sampling):
        name = f"r{len(self.live)}-{self.now}"
        self.live[name] = sampling.max_new_tokens - self.short_by
        return name

    def has_unfinished(self):
        return bool(self.live)

    def step(self):
        self.now += self.step_s
        self.num_steps += 1
        if self.modes:
            self._scheduler.precision = bytes([self.modes[min(self.num_steps, len(self.modes)) - 1]] * 2)
        outputs = []
        for name in list(self.live)[: self.slots]:
            self.live[name] -= 1
            finished = self.live[name] == 0
            outputs.append(
                SimpleNamespace(request_id=name, new_token_ids=(1,), finished=finished, finish_reason="length", error=self.error)
            )
            if finished:
                del self.live[name]
        return outputs

    def abort(self, name):
        return self.live.pop(name, None) is not None

    def precision(self):
        return {}

    def stats(self):
        return SimpleNamespace(
            **{**dict.fromkeys(COUNTS, 0), "num_steps": self.num_steps}, steps_by_precision={"full": self.num_steps}, depth=None
        )


def jobs(*arrivals, tokens=3):
    return [Job(i, a, Ask((1, 2), tokens)) for i, a in enumerate(arrivals)]


def drive(engine, work, **options):
    return replay(engine, work, clock=engine.clock, sleep=engine.sleep, **options)


def test_it_sleeps_until_the_arrival_and_times_each_token():
    engine = Engine()
    run = drive(engine, jobs(1.0))
    (one,) = run.requests
    assert one.added_s == pytest.approx(1.0)
    assert one.token_s == pytest.approx([1.125, 1.25, 1.375])
    assert one.finished and run.stopped is None
    assert engine.num_steps == 3
    assert max(engine.slept) <= SAMPLE_S and sum(engine.slept) == pytest.approx(1.0)


def test_the_wait_for_the_step_under_way_is_in_the_latency():
    engine = Engine()
    first, second = drive(engine, jobs(0.0, 0.0625)).requests
    assert second.added_s == 0.125  # after the step
    assert second.ttft == 0.1875  # rest of that step, and its own
    assert first.token_s == [0.125, 0.25, 0.375]
    assert second.token_s == [0.25, 0.375, 0.5]


def test_matched_work_must_be_whole_and_natural_work_need_not():
    with pytest.raises(RuntimeError, match="request 0 produced 2 tokens, not 3"):
        drive(Engine(short_by=1), jobs(0.0))
    (one,) = drive(Engine(short_by=1), jobs(0.0), eos=(5,)).requests
    assert len(one.token_s) == 2 and one.finished


def test_a_request_that_fails_ends_the_run():
    engine = Engine()
    engine.error = ValueError("broken")
    with pytest.raises(RuntimeError, match="failed under load"):
        drive(engine, jobs(0.0))


@pytest.mark.parametrize("slots, ttft", [(1, 0.5), (2, 0.5), (4, 0.25), (8, 2.0), (1, 60.0)])
def test_a_run_is_given_up_only_where_it_would_have_failed(slots, ttft):
    slo = Slo(ttft, 0.25)
    work = jobs(*[0.1 * i for i in range(30)])
    whole = drive(Engine(slots=slots), work)
    fails = attainment(whole.requests, slo) < 0.9
    short = drive(Engine(slots=slots), work, limits=Limits(slo=slo, share=0.9))
    assert (short.stopped is not None) == fails
    assert (attainment(short.requests, slo) < 0.9) == fails
    if fails:
        assert "90%" in short.stopped


def test_the_wait_for_the_step_under_way_counts_against_the_slo():
    work = jobs(0.0, 0.0625)  # the second waits 0.1875 s, 0.125 s of them since it was added
    assert drive(Engine(), work, limits=Limits(slo=Slo(0.15, 10.0), share=1.0)).stopped is not None
    assert drive(Engine(), work, limits=Limits(slo=Slo(0.2, 10.0), share=1.0)).stopped is None


def test_the_lead_in_does_not_give_a_run_up():
    work, slo = jobs(*[0.0] * 8, 5.0, 6.0), Slo(0.2, 10.0)
    assert drive(Engine(slots=1), work, limits=Limits(slo=slo, share=0.9)).stopped is not None
    assert drive(Engine(slots=1), work, limits=Limits(slo=slo, share=0.9, lead_in_s=4.0)).stopped is None


def test_a_time_limit_leaves_requests_unfinished_and_the_engine_empty():
    engine = Engine(slots=1)
    run = drive(engine, jobs(0.0, 0.0, 0.0), limits=Limits(seconds=0.5))
    assert run.stopped == "after 0.5 s"
    assert [r.finished for r in run.requests] == [True, False, False]
    assert not engine.has_unfinished()


def test_time_in_modes_and_their_changes():
    run = drive(Engine(modes=bytes([1, 0, 0, 1])), jobs(0.0, tokens=5))
    # a look after each step: the time up to it counts for what was seen before
    assert run.mode_s == pytest.approx({"full": 0.375, "fast": 0.25})
    assert run.transitions == 2
    assert [s.mode for s in run.samples] == ["full", "fast", "fast", "full", "full"]
    assert run.counters["num_steps"] == run.counters["steps full"] == 5


def test_skip_share_is_of_the_run_alone():
    assert difference({"run rows": 10, "project rows": 0}, {"run rows": 13, "project rows": 1})["skip share"] == 0.25
    assert "skip share" not in difference({"num_steps": 1}, {"num_steps": 2})
