"""Arrivals and asks: traces of both formats, processes by their moments, benchmark files, lengths."""

import json

import numpy as np
import pytest
from load_workload import (
    Ask,
    benchmark_asks,
    clamp,
    draw_lengths,
    gamma_arrivals,
    mean_rate,
    random_asks,
    read_trace,
    scaled,
    stand_in_tokenizer,
)

PLAIN = "arrival_s,input_tokens,output_tokens\n0.5,100,10\n1.5,200,20\n4.5,300,30\n5.0,400,40\n"
BURST = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n"
    "45,GPT-4,10,0,10,API log\n118,GPT-4,417,276,693,Conversation log\n"
)


def rng():
    return np.random.default_rng(0)


def test_a_window_of_a_trace_starts_at_zero(tmp_path):
    path = tmp_path / "plain.csv"
    path.write_text(PLAIN)
    rows = read_trace(path, first=1, count=2)
    assert [(r.arrival_s, r.input_tokens, r.output_tokens) for r in rows] == [(0.0, 200, 20), (3.0, 300, 30)]
    assert len(read_trace(path)) == 4


def test_burstgpt_columns_without_failed_requests(tmp_path):
    path = tmp_path / "burst.csv"
    path.write_text(BURST)
    assert [(r.arrival_s, r.input_tokens, r.output_tokens) for r in read_trace(path)] == [(0.0, 472, 18), (113.0, 417, 276)]


@pytest.mark.parametrize(
    "text, window, message",
    [
        ("a,b\n1,2\n", (0, None), "columns"),
        (PLAIN + "6.0,x,1\n", (0, None), "line 6"),
        (PLAIN, (3, 2), "4 requests"),
        (PLAIN, (-1, 2), "4 requests"),
    ],
)
def test_bad_traces_are_refused(tmp_path, text, window, message):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_trace(path, *window)


def test_a_scaled_trace_has_the_rate_and_keeps_its_shape():
    arrivals = [2.0, 3.0, 7.0, 8.0]
    assert mean_rate(arrivals) == 0.5
    assert scaled(arrivals, 1.0) == [0.0, 0.5, 2.5, 3.0]
    assert mean_rate(scaled(arrivals, 7.0)) == pytest.approx(7.0)
    with pytest.raises(ValueError, match="no rate"):
        mean_rate([1.0, 1.0])


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0])
def test_gamma_gaps_have_their_mean_and_variation(cv):
    gaps = np.diff(gamma_arrivals(40_000, 5.0, cv, seed=3), prepend=0.0)
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_arrivals_of_a_seed_are_the_same_pattern_at_every_rate():
    slow, fast = (np.array(gamma_arrivals(50, rate, 2.0, seed=7)) for rate in (1.0, 4.0))
    assert np.allclose(slow, 4 * fast)
    assert not np.allclose(slow, gamma_arrivals(50, 1.0, 2.0, seed=8))
    with pytest.raises(ValueError, match="rate=0"):
        gamma_arrivals(5, 0.0, 1.0, 0)


def test_lengths_of_distributions():
    assert draw_lengths("fixed:7", 3, rng()) == [7, 7, 7]
    drawn = draw_lengths("uniform:2:4", 300, rng())
    assert set(drawn) == {2, 3, 4}
    log = draw_lengths("lognormal:100:1", 4000, rng())
    assert min(log) >= 1
    assert np.median(log) == pytest.approx(100, rel=0.1)
    for wrong in ("fixed:0", "fixed:x", "uniform:5:2", "normal:1", "lognormal:10"):
        with pytest.raises(ValueError, match=wrong):
            draw_lengths(wrong, 1, rng())


def test_random_prompts_share_what_they_are_told_to():
    asks = random_asks([5, 20, 20], [1, 2, 3], 100, rng(), shared=8)
    assert [len(a.prompt) for a in asks] == [5, 20, 20]
    assert [a.output_tokens for a in asks] == [1, 2, 3]
    assert asks[0].prompt == asks[1].prompt[:5]
    assert asks[1].prompt[:8] == asks[2].prompt[:8]
    assert asks[1].prompt[8:] != asks[2].prompt[8:]
    assert all(0 <= t < 100 for a in asks for t in a.prompt)


def write_gsm8k(path, number):
    rows = [{"question": f"How many {i}?", "answer": f"It is {i}+1=<<{i}+1={i + 1}>>{i + 1}.\n#### {i + 1}"} for i in range(number)]
    path.write_text("\n".join(json.dumps(r) for r in rows) + "\n")
    return path


def test_gsm8k_prompts_share_their_examples(tmp_path):
    asks = benchmark_asks(write_gsm8k(tmp_path / "test.jsonl", 6), write_gsm8k(tmp_path / "few.jsonl", 2), str.split, 4, rng())
    prefix = "Q: How many 0? A: It is 0+1=1. #### 1 Q: How many 1? A: It is 1+1=2. #### 2".split()
    assert all(list(a.prompt[: len(prefix)]) == prefix for a in asks)
    assert len({a.prompt for a in asks}) == 4
    assert all(a.prompt[-1] == "A:" and a.output_tokens == 5 for a in asks)  # It is i+1=j. #### j
    with pytest.raises(ValueError, match="6 questions"):
        benchmark_asks(tmp_path / "test.jsonl", None, str.split, 7, rng())


def test_bbh_answers_are_as_long_as_the_reasoning_in_the_examples(tmp_path):
    task, examples = tmp_path / "task.json", tmp_path / "task.txt"
    task.write_text(json.dumps({"canary": "CANARY", "examples": [{"input": f"sort {i}", "target": "x"} for i in range(5)]}))
    examples.write_text("CANARY line\n-----\nSort these.\n\nQ: one\nA: a b c.\n\nQ: two\nA: a b c d e.\n")
    asks = benchmark_asks(task, examples, str.split, 5, rng())
    assert [a.output_tokens for a in asks] == [3, 5, 3, 5, 3]
    assert all(a.prompt[:2] == ("Sort", "these.") and "CANARY" not in a.prompt for a in asks)
    with pytest.raises(ValueError, match="length of answers"):
        benchmark_asks(task, None, str.split, 2, rng())
    task.write_text("[]")
    with pytest.raises(ValueError, match="JSON object"):
        benchmark_asks(task, examples, str.split, 1, rng())


def test_shuffled_examples_are_all_there_in_orders_of_their_own(tmp_path):
    files = write_gsm8k(tmp_path / "test.jsonl", 6), write_gsm8k(tmp_path / "few.jsonl", 4)
    plain, shuffled = (benchmark_asks(*files, str.split, 6, rng(), shuffle) for shuffle in (False, True))
    assert len({a.prompt[:40] for a in plain}) == 1 < len({a.prompt[:40] for a in shuffled})
    assert {tuple(sorted(a.prompt[:40])) for a in shuffled} == {tuple(sorted(plain[0].prompt[:40]))}
    again = benchmark_asks(*files, str.split, 6, rng(), True)
    assert again == shuffled, "equal for all arms"


def test_a_folder_of_tasks_has_the_examples_of_each(tmp_path):
    tasks, shots = tmp_path / "tasks", tmp_path / "shots"
    tasks.mkdir(), shots.mkdir()
    for name, answer in (("one", "a b"), ("two", "a b c d")):
        (tasks / f"{name}.json").write_text(json.dumps({"examples": [{"input": f"{name} {i}", "target": "x"} for i in range(3)]}))
        (shots / f"{name}.txt").write_text(f"CANARY\n-----\nDo {name}.\n\nQ: one\nA: {answer}\n")
    asks = benchmark_asks(tasks, shots, str.split, 6, rng())
    assert {(a.prompt[1], a.prompt[-3], a.output_tokens) for a in asks} == {("one.", "one", 2), ("two.", "two", 4)}
    assert len({a.prompt for a in asks}) == 6
    with pytest.raises(ValueError, match="folder of tasks"):
        benchmark_asks(tasks, shots / "one.txt", str.split, 2, rng())
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="none has 0 questions"):
        benchmark_asks(tmp_path / "none", None, str.split, 1, rng())


def test_the_stand_in_tokenizer_keeps_prefixes():
    tokenize = stand_in_tokenizer(1000)
    assert tokenize("Natalia sold 48 clips.\n") == tokenize("Natalia sold 48 ") + tokenize("clips.\n")
    assert len(tokenize("clips, 48")) == 4  # clip s , 48
    assert all(10 <= t < 990 for t in tokenize("some words of no meaning"))


def test_clamp_says_how_many_it_changed():
    asks = [Ask((1, 2, 3), 5), Ask((1,), 2)]
    assert clamp(asks, 2, 4) == ([Ask((1, 2), 4), Ask((1,), 2)], 1)
    assert clamp(asks, None, None) == (asks, 0)


def test_lengths_of_a_trace_under_other_arrivals(tmp_path, monkeypatch, capsys):
    """The requests of the window, in order, at arrivals of their own."""
    import load

    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n" + "".join(f"{i},{20 + i},{3 + i}\n" for i in range(9)))
    line = f"load --shape smollm2 --arrivals gamma --rates 5 --first 2 --requests 6 --lengths {trace} --max-input 25"
    monkeypatch.setattr("sys.argv", line.split())
    workload = load.Workload(load.parse_arguments(None))
    jobs = workload.jobs(workload.asks(0), 5.0, 0)
    assert [len(j.ask.prompt) for j in jobs] == [22, 23, 24, 25, 25, 25] and workload.num_cut == 2
    assert [j.ask.output_tokens for j in jobs] == [5, 6, 7, 8, 9, 10]
    gaps = [b.arrival_s - a.arrival_s for a, b in zip(jobs, jobs[1:])]
    assert len({round(g, 6) for g in gaps}) == 5, "not those of the trace, which are all alike"
    assert workload.benchmark is None, "its prompts are random ids"
    monkeypatch.setattr("sys.argv", [*line.split(), "--examples", "shots.jsonl"])
    with pytest.raises(SystemExit):
        load.parse_arguments(None)
    assert "--examples needs --lengths with the file of a benchmark" in capsys.readouterr().err
