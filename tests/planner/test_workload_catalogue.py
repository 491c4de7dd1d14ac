"""Workloads by name: what is drawn, that seeds and prefixes hold, and what is refused."""

from pathlib import Path

import numpy as np
import pytest

from planner.errors import WorkloadError
from planner.workload.catalogue import ARRIVALS, TABLES, parse_arrivals, parse_workload
from planner.workload.lengths import LengthRules, Overlong
from planner.workload.requests import Requests
from planner.workload.trace_file import write_trace

NAMES = [*TABLES, "synthetic:512,64", "synthetic:16..900,100~0.8", "long-context"]


@pytest.fixture
def trace(tmp_path: Path) -> Requests:
    """2,000 requests, long answers to short prompts, and slow spells with long prompts."""
    random = np.random.default_rng(8)
    slow = np.repeat(random.random(40) < 0.5, 50)
    gaps_s = random.exponential(np.where(slow, 1.0, 0.1))
    inputs = random.integers(1, 500, 2000) + np.where(slow, 1000, 0)
    outputs = 2000 - inputs + random.integers(0, 100, 2000)
    requests = Requests(np.cumsum(gaps_s), inputs, outputs)
    write_trace(tmp_path / "trace.csv", requests)
    return requests


def same(one: Requests, other: Requests) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("arrival_s", "input_tokens", "output_tokens")
    )


def every_kind(tmp_path: Path) -> list[tuple[str, str]]:
    """Workload and arrivals in every combination that there is."""
    renewals = ["poisson", "gamma:2.5", "fixed"]
    fitted = [(name, "fitted") for name in ("azure-conv", "azure-code", "mooncake-conversation")]
    file = str(tmp_path / "trace.csv")
    traced = [(file, kind) for kind in [*renewals, "replay", "resample", "fitted"]]
    return [(name, kind) for name in NAMES for kind in renewals] + fitted + traced


def test_the_first_requests_of_a_longer_draw_are_those_of_a_shorter_one(
    trace: Requests, tmp_path: Path
) -> None:
    for text, kind in every_kind(tmp_path):
        workload = parse_workload(text, parse_arrivals(kind), LengthRules(max_total_tokens=60_000))
        long = workload.requests(5000, 3.0, seed=4)
        assert same(workload.requests(1777, 3.0, seed=4), long.first(1777)), (text, kind)


def test_a_seed_reproduces_and_another_gives_other_requests(
    trace: Requests, tmp_path: Path
) -> None:
    for text, kind in every_kind(tmp_path):
        workload = parse_workload(text, parse_arrivals(kind))
        one, again, other = (workload.requests(300, 2.0, seed) for seed in (1, 1, 2))
        assert same(one, again), (text, kind)
        drawn = kind != "replay" and (text, kind) != ("synthetic:512,64", "fixed")
        assert same(one, other) != drawn, (text, kind)


def test_the_rate_scales_the_times_and_leaves_all_else(trace: Requests, tmp_path: Path) -> None:
    for text, kind in every_kind(tmp_path):
        workload = parse_workload(text, parse_arrivals(kind))
        slow, fast = workload.requests(500, 1.5, 9), workload.requests(500, 6.0, 9)
        assert np.allclose(slow.arrival_s, 4 * fast.arrival_s, rtol=1e-12), (text, kind)
        assert np.array_equal(slow.input_tokens, fast.input_tokens)


def test_other_arrivals_leave_the_lengths_as_they_are() -> None:
    """Common random numbers: burstiness is compared on the same requests."""
    poisson = parse_workload("sharegpt", parse_arrivals("poisson")).requests(400, 1.0, 3)
    gamma = parse_workload("sharegpt", parse_arrivals("gamma:3")).requests(400, 1.0, 3)
    assert np.array_equal(poisson.input_tokens, gamma.input_tokens)
    assert not np.allclose(poisson.arrival_s, gamma.arrival_s)


def test_lengths_and_gaps_are_independent_of_each_other() -> None:
    requests = parse_workload("synthetic:100~0.5,100~0.5").requests(50_000, 1.0, 0)
    gaps_s = np.diff(requests.arrival_s, prepend=0.0)
    three = np.corrcoef([gaps_s, requests.input_tokens, requests.output_tokens])
    assert np.abs(three[np.triu_indices(3, 1)]).max() < 4 / 50_000**0.5


@pytest.mark.parametrize("name", NAMES)
def test_a_named_workload_arrives_at_the_rate_asked_for(name: str) -> None:
    requests = parse_workload(name).requests(20_000, 4.0, 1)
    assert requests.rate == pytest.approx(4.0, rel=0.03)
    assert min(requests.input_tokens.min(), requests.output_tokens.min()) >= 1


def test_drawn_lengths_have_the_means_that_the_names_promise() -> None:
    promised = {"sharegpt": (767, 199), "humaneval": (171, 98), "azure-conv": (1155, 211)}
    for name, (inputs, outputs) in promised.items():
        requests = parse_workload(name).requests(40_000, 1.0, 2)
        assert requests.input_tokens.mean() == pytest.approx(inputs, rel=0.02), name
        assert requests.output_tokens.mean() == pytest.approx(outputs, rel=0.02), name


def test_a_replay_is_the_trace(trace: Requests, tmp_path: Path) -> None:
    workload = parse_workload(str(tmp_path / "trace.csv"))
    assert workload.num_rows == 2000
    assert same(workload.requests(2000), trace)


def test_a_replay_stretched_to_a_rate_has_it(trace: Requests, tmp_path: Path) -> None:
    workload = parse_workload(str(tmp_path / "trace.csv"))
    assert workload.requests(2000, 7.0).rate == pytest.approx(7.0)
    assert workload.own_rate == pytest.approx(trace.rate)


def test_resampling_keeps_gaps_inputs_and_outputs_together(trace: Requests, tmp_path: Path) -> None:
    workload = parse_workload(str(tmp_path / "trace.csv"), parse_arrivals("resample"))
    drawn = workload.requests(20_000, seed=6)
    triples = set(
        zip(
            np.diff(trace.arrival_s).round(6),
            trace.input_tokens[1:],
            trace.output_tokens[1:],
            strict=True,
        )
    )
    gaps_s = np.diff(drawn.arrival_s).round(6)
    ours = zip(gaps_s, drawn.input_tokens[1:], drawn.output_tokens[1:], strict=True)
    assert float(np.mean([triple in triples for triple in ours])) > 0.99
    assert np.corrcoef(drawn.input_tokens, drawn.output_tokens)[0, 1] == pytest.approx(
        np.corrcoef(trace.input_tokens, trace.output_tokens)[0, 1], abs=0.01
    )


def test_fitted_arrivals_run_at_the_rate_of_their_trace_by_default() -> None:
    workload = parse_workload("azure-conv", parse_arrivals("fitted"))
    assert workload.own_rate == pytest.approx(5.53, abs=0.01)
    assert workload.requests(20_000).rate == pytest.approx(5.53, rel=0.05)


def test_uniform_and_log_normal_lengths_are_what_they_say() -> None:
    requests = parse_workload("synthetic:10..20,200~0.5").requests(50_000, 1.0, 1)
    assert set(requests.input_tokens.tolist()) == set(range(10, 21))
    assert np.median(requests.output_tokens) == pytest.approx(200, rel=0.02)
    assert np.log(requests.output_tokens).std() == pytest.approx(0.5, rel=0.02)


def test_long_context_takes_its_parameters_by_name() -> None:
    requests = parse_workload("long-context:output=100,input=8000,spread=0").requests(50, 1.0)
    assert set(requests.input_tokens.tolist()) == {8000}
    assert set(requests.output_tokens.tolist()) == {100}


def test_a_limit_drops_what_is_longer(trace: Requests, tmp_path: Path) -> None:
    rules = LengthRules(max_total_tokens=1000)
    for text in ("azure-conv", "synthetic:800~1,100", str(tmp_path / "trace.csv")):
        if text.endswith(".csv"):
            rules = LengthRules(max_total_tokens=2050)
        drawn = parse_workload(text, rules=rules).requests(3000, 1.0)
        assert (drawn.input_tokens + drawn.output_tokens).max() <= (rules.max_total_tokens or 0)


def test_a_dropped_request_leaves_the_others_at_their_times(
    trace: Requests, tmp_path: Path
) -> None:
    stay = trace.input_tokens + trace.output_tokens <= 2050
    rules = LengthRules(max_total_tokens=2050)
    workload = parse_workload(str(tmp_path / "trace.csv"), rules=rules)
    assert workload.num_rows == int(stay.sum())
    kept = Requests(trace.arrival_s[stay], trace.input_tokens[stay], trace.output_tokens[stay])
    assert same(workload.requests(int(stay.sum())), kept)


def test_clipping_shortens_the_prompt_and_keeps_the_answer() -> None:
    rules = LengthRules(max_total_tokens=1000, overlong=Overlong.CLIP)
    drawn = parse_workload("synthetic:1500,300", rules=rules).requests(5, 1.0)
    assert (drawn.input_tokens[0], drawn.output_tokens[0]) == (700, 300)
    drawn = parse_workload("synthetic:1500,3000", rules=rules).requests(5, 1.0)
    assert (drawn.input_tokens[0], drawn.output_tokens[0]) == (1, 999)


def test_lengths_scale_by_ten_percent_with_the_same_requests() -> None:
    plain = parse_workload("sharegpt").requests(5000, 1.0, 1)
    longer = parse_workload("sharegpt", rules=LengthRules(scale=1.1)).requests(5000, 1.0, 1)
    assert np.array_equal(longer.input_tokens, np.rint(plain.input_tokens * 1.1))
    assert longer.output_tokens.mean() == pytest.approx(1.1 * plain.output_tokens.mean(), rel=1e-2)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("shareGPT", "unknown workload 'shareGPT': give one of sharegpt, humaneval,"),
        ("", "unknown workload '': give one of"),
        ("sharegpt:3", "workload 'sharegpt:3': sharegpt takes no parameters"),
        ("nowhere/trace.csv", "nowhere/trace.csv: no such file"),
        ("synthetic", "synthetic needs an input and an output length: each of the two is"),
        ("synthetic:512", "synthetic needs an input and an output length"),
        ("synthetic:0,64", "synthetic '0': a length must be a whole number from 1 to 10000000"),
        ("synthetic:512,-1", "synthetic '-1': a length must be a whole number"),
        ("synthetic:512,6.5", "synthetic '6.5': a length must be a whole number"),
        ("synthetic:9..3,64", "synthetic '9..3': the range must not fall"),
        ("synthetic:512~9,64", "the spread of log-normal lengths must lie between 0 and 3"),
        ("long-context:depth=3", "long-context does not know 'depth=3': it takes input=N"),
        ("long-context:input=", "long-context input: a length must be a whole number"),
        ("long-context:spread=wide", "the spread of log-normal lengths must lie between 0 and 3"),
    ],
)
def test_a_workload_that_cannot_be_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        parse_workload(text)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("uniform", "unknown arrivals 'uniform': give one of poisson, gamma:CV, fixed"),
        ("gamma", "arrivals 'gamma': gamma needs a CV between 0.01 and 100, as in gamma:2.0"),
        ("gamma:0", "arrivals 'gamma:0': gamma needs a CV between"),
        ("gamma:nan", "arrivals 'gamma:nan': gamma needs a CV between"),
        ("poisson:2", "arrivals 'poisson:2': poisson takes no parameter"),
    ],
)
def test_arrivals_that_cannot_be_are_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        parse_arrivals(text)
    assert str(caught.value).startswith(sentence)


def test_every_listed_kind_of_arrivals_is_understood() -> None:
    assert [parse_arrivals(text.replace("CV", "2")).kind for text in ARRIVALS] == [
        text.partition(":")[0] for text in ARRIVALS
    ]


def test_what_a_workload_has_no_times_for_is_refused() -> None:
    with pytest.raises(WorkloadError, match="sharegpt has no arrival times to fit"):
        parse_workload("sharegpt", parse_arrivals("fitted"))
    with pytest.raises(WorkloadError, match="azure-conv is built in without arrival times, so "):
        parse_workload("azure-conv", parse_arrivals("replay"))
    with pytest.raises(WorkloadError, match="nothing to resample: give a CSV file"):
        parse_workload("synthetic:1,1", parse_arrivals("resample"))


def test_a_trace_without_a_span_replays_but_takes_no_rate(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n" + "4,10,10\n" * 60)
    assert parse_workload(str(path)).requests(60).arrival_s.tolist() == [4.0] * 60
    for kind in ("replay", "resample"):
        workload = parse_workload(str(path), parse_arrivals(kind))
        with pytest.raises(WorkloadError, match=r"burst\.csv: all requests arrive at once, so"):
            workload.requests(60, 1.0)
    with pytest.raises(WorkloadError, match=r"burst\.csv: arrivals are fitted to at least 50"):
        parse_workload(str(path), parse_arrivals("fitted"))
    assert parse_workload(str(path), parse_arrivals("poisson")).requests(100, 2.0, 1).rate > 1


def test_numbers_that_cannot_be_are_refused() -> None:
    workload = parse_workload("humaneval")
    with pytest.raises(WorkloadError, match="the rate must be above zero requests a second, not 0"):
        workload.requests(10, 0.0)
    with pytest.raises(WorkloadError, match="the rate must be above zero requests a second"):
        workload.requests(10, float("nan"))
    with pytest.raises(WorkloadError, match="humaneval has no rate of its own here: give one"):
        workload.requests(10)
    with pytest.raises(WorkloadError, match="number of requests must be at least 1, not 0"):
        workload.requests(0, 1.0)
    with pytest.raises(WorkloadError, match="the seed must be zero or above, not -1"):
        workload.requests(10, 1.0, -1)
    with pytest.raises(WorkloadError, match="the length scale must be above zero, not 0"):
        LengthRules(scale=0)
    with pytest.raises(WorkloadError, match=r"input \+ output must be at least 2 tokens, not 1"):
        LengthRules(max_total_tokens=1)


def test_a_limit_that_nothing_fits_under_is_refused() -> None:
    rules = LengthRules(max_total_tokens=10)
    with pytest.raises(WorkloadError, match="no request of sharegpt fits under the limit of 10"):
        parse_workload("sharegpt", rules=rules)
    with pytest.raises(WorkloadError, match="hardly any request of these lengths fits"):
        parse_workload("synthetic:512,64", rules=rules).requests(10, 1.0)
