"""The plan's report from results made by hand: what is marked, counted, compared and preferred."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from ipc.placement_file import FileNode, PlacementFile, file_of
from ipc.vocabulary import InstanceSpec, Parallelism, Role, Segment
from planner.deployment import Group
from planner.goodput import Goodput
from planner.intervals import Interval
from planner.placement.choices import (
    Affinity,
    Candidate,
    Chosen,
    Dropped,
    Evaluated,
    Objective,
    System,
)
from planner.placement.file import PlacementFileError, units_of
from planner.placement.results import Asked, Baseline, Cost, Found, RunnerUp, Sensitivity
from planner.plan.command import pictured
from planner.plan.report import Planned, better
from planner.plan.tables import NUM_RUNNER_UPS, show
from planner.plan.told import recommendation, told_dropped
from planner.slo import Slo

ASKED = Asked(
    model="opt-13b",
    device="a100-sxm4-80gb",
    num_nodes=1,
    devices_per_node=8,
    workload="sharegpt",
    slo=Slo(0.25, 0.1),
    affinity=Affinity.LOW,
    objective=Objective.GOODPUT,
    rate=None,
    device_hour_price=2.0,
    seed=0,
)


def pair(tp: int = 2, inter_op: int = 1) -> Candidate:
    groups = (
        Group(Role.PREFILL, 1, Parallelism(tp, inter_op)),
        Group(Role.DECODE, 1, Parallelism(1, inter_op)),
    )
    return Candidate(System.DISAGGREGATED, groups, inter_op)


def mixed(chunk_tokens: int | None = None) -> Candidate:
    system = System.CHUNKED if chunk_tokens else System.PREFILL_FIRST
    return Candidate(system, (Group(Role.MIXED, 1, Parallelism(), chunk_tokens),))


def evaluated(
    candidate: Candidate, per_device: float, *, is_bounded: bool = True, is_rough: bool = False
) -> Evaluated:
    each = Interval(per_device, 0.9 * per_device, 1.1 * per_device)
    rate = each.divided(1 / candidate.num_devices)
    found = Goodput(rate, each, 0.9, "TPOT", is_bounded, points=(), num_runs=1)
    return Evaluated(candidate, found, is_rough)


def found(best: Evaluated, num_copies: int = 1, **more: object) -> Found:
    chosen = Chosen(best, num_copies, best.goodput.rate.divided(1 / num_copies))
    plain = Found(
        asked=ASKED,
        recommended=chosen,
        disaggregated=chosen,
        reasons=("disaggregation carries 2.00 times as much",),
        runner_ups=(),
        phases=(),
        evaluated=(best,),
        dropped=(),
        baselines=(
            Baseline("chunked prefill", evaluated(mixed(512), 1.0), gain=Interval(2, 1.5, 2.5)),
            Baseline("prefill first", None, reason="nothing of that kind meets the targets"),
        ),
        sensitivity=(Sensitivity("rate +20 %", Interval(0.5, 0.4, 0.6)),),
        cost=Cost(6.0, 0.25, 0.3, 1.2),
        seconds=1.0,
        num_simulations=12,
        num_processes=2,
    )
    return replace(plain, **more)  # type: ignore[arg-type]


def placed(*specs: tuple[str, str, int]) -> PlacementFile:
    """Instances of one device each, as (role, node, device)."""
    instances = [
        InstanceSpec(f"{role}-0", Role(role), Parallelism(), (Segment(node, (device,)),))
        for role, node, device in specs
    ]
    return file_of("opt-13b", [FileNode("a", 8), FileNode("b", 8)], instances)


TOGETHER = placed(("prefill", "a", 0), ("decode", "a", 1))
APART = placed(("prefill", "a", 0), ("decode", "b", 0))


def shown(result: Found, *, shows_all: bool = False) -> str:
    planned = Planned(result, (result,), TOGETHER, "Recommended: it.", ("a note",), 1.5)
    console = Console(file=io.StringIO(), width=80)
    show(planned, console, shows_all=shows_all)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def row(text: str, words: str) -> str:
    return next(line for line in text.splitlines() if words in line)


def test_the_paragraph_says_what_how_much_why_and_at_what_cost() -> None:
    told = recommendation(found(evaluated(pair(), 2.0), num_copies=2), TOGETHER)
    assert told == (
        "Recommended: 2 copies of 1 prefill (tp 2, pp 1) + 1 decode (tp 1, pp 1), 6 devices in "
        "all. It carries 12 (10.8 to 13.2) requests per second, 2 (1.8 to 2.2) per device, and is "
        "limited by TPOT. Disaggregation carries 2.00 times as much. It costs 6 per hour: 0.25 "
        "per 1,000 requests, 0.3 per million tokens (1.2 per million output tokens)."
    )


def test_a_goodput_without_an_end_is_a_least_one() -> None:
    told = recommendation(found(evaluated(pair(), 2.0, is_bounded=False)), TOGETHER)
    assert "It carries at least 6 requests per second, at least 2 per device" in told


def test_what_cannot_be_served_yet_is_said_with_the_pair() -> None:
    told = recommendation(found(evaluated(pair(), 2.0)), APART)
    assert "It cannot be served yet" in told
    assert "prefill-0 stage 0 (a) and decode-0 stage 0 (b)" in told
    assert "It cannot be served yet" not in recommendation(found(evaluated(pair(), 2.0)), TOGETHER)


def test_ties_are_marked_and_first_looks_bear_a_tilde() -> None:
    tie = RunnerUp(evaluated(pair(tp=1), 1.9), is_tie=True)
    rough = RunnerUp(evaluated(mixed(), 1.2, is_rough=True), is_tie=False)
    text = shown(found(evaluated(pair(), 2.0), runner_ups=(tie, rough)))
    assert row(text, "1 prefill 2x1 + 1 decode 1x1").startswith(" best")
    assert row(text, "1 prefill 1x1 + 1 decode 1x1").startswith(" tie")
    assert "~1.2 (1.08 to 1.32)" in row(text, "1 mixed 1x1 ")


def test_runner_ups_beyond_the_first_are_shown_on_demand() -> None:
    many = tuple(RunnerUp(evaluated(mixed(n), 1.0), is_tie=False) for n in range(101, 120))
    some, every = (
        shown(found(evaluated(pair(), 2.0), runner_ups=many), shows_all=a) for a in (False, True)
    )
    assert some.count("mixed 1x1, chunks of 1") == NUM_RUNNER_UPS
    assert every.count("mixed 1x1, chunks of 1") == len(many)


def test_the_best_disaggregated_placement_is_shown_beside_a_colocated_winner() -> None:
    apart = Chosen(evaluated(pair(), 1.5), 1, Interval(4.5, 4, 5))
    text = shown(found(evaluated(mixed(), 2.0), disaggregated=apart))
    assert row(text, "1 mixed 1x1 ").startswith(" best")
    assert "1.5 (1.35 to 1.65)" in row(text, "1 prefill 2x1 + 1 decode 1x1")


def test_baselines_come_with_gains_or_with_the_reason_why_there_is_none() -> None:
    text = shown(found(evaluated(pair(), 2.0)))
    assert "x 2 (1.5 to 2.5)" in row(text, "chunked prefill ")
    assert "prefill first: nothing of that kind meets the targets" in text


def test_what_was_dropped_is_counted_by_kind_and_listed_on_demand() -> None:
    dropped = (
        Dropped(pair(4), "prefill at tp 4, pp 1: TTFT 66 ms at best for the target share"),
        Dropped(pair(8), "at most 1 per device, where 2 was found"),
        Dropped(pair(6), "at most 0.5 per device, where 2 was found"),
        Dropped(pair(5), "it does not fit a100: weights take 99 GiB"),
        Dropped(pair(3), "for a reason that nobody has thought of"),
    )
    counts = [line.split(",")[0].strip() for line in told_dropped(dropped)]
    assert counts == [
        "2: cannot beat what was found",
        "1: above a target even for a request alone",
        "1: not enough memory",
        "1: other",
    ]
    result = found(evaluated(pair(), 2.0), dropped=dropped)
    assert "where 2 was found" in shown(result)
    assert "at most 0.5 per device" not in shown(result)
    assert "at most 0.5 per device" in shown(result, shows_all=True)


def test_notes_sensitivity_and_effort_are_told() -> None:
    text = shown(found(evaluated(pair(), 2.0)))
    assert "a note" in text
    assert "50.0%  40.0% to 60.0%" in row(text, "rate +20 %")
    assert "searched in 1.5 s: 12 simulations on 2 processes" in text


def of(affinity: Affinity, per_device: float, num_copies: int, objective: Objective) -> Found:
    asked = replace(ASKED, affinity=affinity, objective=objective)
    return found(evaluated(pair(), per_device), num_copies, asked=asked)


def test_of_two_affinities_the_better_is_taken() -> None:
    high = of(Affinity.HIGH, 3.0, 1, Objective.GOODPUT)
    low = of(Affinity.LOW, 2.0, 1, Objective.GOODPUT)
    assert better((high, low)) is high


def test_of_two_that_cannot_be_told_apart_the_one_within_nodes_is_taken() -> None:
    high = of(Affinity.HIGH, 2.1, 1, Objective.GOODPUT)
    low = of(Affinity.LOW, 2.0, 1, Objective.GOODPUT)
    assert better((high, low)) is low
    assert better((high, of(Affinity.LOW, 2.0, 2, Objective.GOODPUT))) is high


def test_with_fewest_devices_as_the_objective_goodput_comes_second() -> None:
    few = of(Affinity.HIGH, 2.0, 1, Objective.DEVICES)
    fast = of(Affinity.LOW, 3.0, 2, Objective.DEVICES)
    assert better((few, fast)) is few


def test_a_figure_has_each_candidate_once_the_recommendation_first() -> None:
    best = evaluated(mixed(), 2.0)
    baselines = (Baseline("vLLM", best), Baseline("chunked", evaluated(mixed(512), 0.0)))
    apart = Chosen(evaluated(pair(), 1.5), 1, Interval(4.5, 4, 5))
    other = evaluated(pair(tp=4), 1.0)
    result = found(best, disaggregated=apart, baselines=baselines, evaluated=(best, other))
    drawn = pictured(result)
    assert [line.label for line in drawn.systems] == ["colocated, prefill first", "disaggregated"]
    assert drawn.others == (other,)
    assert drawn.per_device == 2.0


def test_a_file_gives_back_the_candidate_that_it_is_copies_of() -> None:
    two = replace_units(TOGETHER, 2)
    candidate, num_copies = units_of(two)
    groups = (Group(Role.PREFILL, 1, Parallelism()), Group(Role.DECODE, 1, Parallelism()))
    assert (candidate.system, candidate.groups) == (System.DISAGGREGATED, groups)
    assert num_copies == 2


def test_units_that_differ_are_copies_of_nothing() -> None:
    specs = [*TOGETHER.placement.instances]
    specs.append(InstanceSpec("mixed-0", Role.MIXED, Parallelism(), (Segment("a", (7,)),), unit=1))
    with pytest.raises(PlacementFileError, match="units are of 2 kinds"):
        units_of(file_of("opt-13b", TOGETHER.nodes, specs))


def replace_units(file: PlacementFile, count: int) -> PlacementFile:
    """So many copies of the file's one unit, on other devices."""
    specs = [
        InstanceSpec(
            f"{spec.role}-{unit}",
            spec.role,
            spec.parallelism,
            (Segment("a", (spec.segments[0].devices[0] + 2 * unit,)),),
            unit,
        )
        for unit in range(count)
        for spec in file.placement.instances
    ]
    return file_of(file.model, file.nodes, specs)
