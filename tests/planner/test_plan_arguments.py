"""From words to what is searched: nodes, settled shapes, factors of a live run, a trace's rate."""

import pickle
from pathlib import Path

import pytest

from ipc.vocabulary import Parallelism
from planner.cluster import Cluster
from planner.latency.choose import latency_model
from planner.placement.choices import Affinity, Objective
from planner.plan.arguments import read_asked
from planner.plan.options import Asked, Nodes
from planner.plan.problems import problems

A100 = "a100-sxm4-80gb"


def asked(*argv: str) -> Asked:
    return read_asked(["--model", "opt-13b", "--coefficients", "distserve-raw", *argv])


def test_without_more_words_it_is_one_node_of_eight_and_pulls_stay_within_it() -> None:
    plain = asked()
    assert plain.nodes == Nodes(1, 8, A100)
    assert plain.affinities == (Affinity.LOW,)
    assert plain.objective is Objective.GOODPUT
    assert problems(plain).first.cluster == Cluster(1, 8, A100)


def test_nodes_are_counted_or_named() -> None:
    assert asked("--nodes", "3").nodes == Nodes(3, 8, A100)
    assert asked("--nodes", "alpha, beta").nodes == Nodes(2, 8, A100, ("alpha", "beta"))


def test_both_affinities_are_two_problems_that_share_the_rest() -> None:
    high, low = problems(asked("--affinity", "both", "--rate", "5", "--seed", "4")).each
    assert (high.affinity, low.affinity) == (Affinity.HIGH, Affinity.LOW)
    assert high.rate == low.rate == 5
    assert high.seed == low.seed == 4
    assert high.workload is low.workload


def test_degrees_settle_the_shapes_and_what_is_not_said_is_one() -> None:
    assert asked().search.fixed is None
    fixed = asked("--prefill-tp", "4", "--decode-pp", "2").search.fixed
    assert fixed == (Parallelism(4, 1), Parallelism(1, 2))


def test_factors_of_a_live_run_make_steps_longer_also_in_other_processes(tmp_path: Path) -> None:
    path = tmp_path / "overheads.json"
    path.write_text('{"decode_scale": 2.0, "token_s": 0.001}')
    plan = asked("--overheads", str(path))
    choose = pickle.loads(pickle.dumps(plan.search.choose))
    steps = [
        f(plan.known, Parallelism()).decode(4, 2000).seconds(2000) for f in (choose, latency_model)
    ]
    assert steps[0] == pytest.approx(2 * steps[1])
    assert plan.settings.overheads.token_s == 0.001


def test_requests_longer_than_the_model_takes_are_left_out_and_counted() -> None:
    given = problems(asked("--workload", "synthetic:1900~0.1,64"))
    assert given.max_total_tokens == 2048
    assert (
        "of 10000 requests of synthetic:1900~0.1,64 are longer than 2048 tokens" in given.notes[0]
    )
    inputs, outputs = given.first.workload.lengths.draw(1000, 0)
    assert (inputs + outputs).max() <= 2048


def test_a_traces_own_rate_is_the_rate_to_carry(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = "".join(f"{0.5 * k},100,10\n" for k in range(101))
    path.write_text("arrival_s,input_tokens,output_tokens\n" + rows)
    given = problems(asked("--workload", str(path)))
    assert given.first.rate == pytest.approx(2, rel=0.02)
    assert "the rate is the trace's own" in given.notes[0]
    assert problems(asked("--workload", str(path), "--rate", "7")).first.rate == 7
