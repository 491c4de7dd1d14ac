from dataclasses import replace
from functools import cache

from ipc.vocabulary import Parallelism, Role
from planner.cluster import Cluster
from planner.goodput import Goodput
from planner.intervals import Interval
from planner.latency.published import DEVICE
from planner.placement.candidates import pair
from planner.placement.choices import Candidate, Evaluated
from planner.report.ablation import best_colocated
from planner.report.placements import Both, compared, paper_candidate
from planner.report.published import placement_rows
from planner.report.search_time import search_time_page
from planner.report.searches import for_vllm, problem, simulated
from planner.report.terms import SEARCH, Terms
from planner.slo import Slo
from planner.verdict import Effort

RUN = Effort(200, 200)
QUICK = Terms(num_seeds=2, search=replace(SEARCH, first=RUN, final=RUN, num_processes=1))
SLO = Slo(0.25, 0.1)
SMALL = Cluster(1, 3, DEVICE)


def rated(candidate: Candidate, low: float, value: float, high: float) -> tuple[Evaluated, Goodput]:
    per_device = Interval(value, low, high)
    found = Goodput(per_device, per_device, 0.9, "TTFT", True, (), 0)
    return Evaluated(candidate, found), found


@cache
def small_search() -> Both:
    row = placement_rows()[0]
    return compared(row, problem(row.model, row.workload, SLO, SMALL), QUICK)


def test_on_three_devices_the_search_is_no_worse_than_the_papers_placement() -> None:
    """OPT-13B on ShareGPT: tp 2 for prefill and one device for decode."""
    both = small_search()
    assert both.paper.num_devices == 3
    assert both.ours.per_device.high >= both.paper_goodput.per_device.value


def test_a_search_finds_what_the_same_placement_gives_by_itself() -> None:
    both = small_search()
    asked = problem("opt-13b", "sharegpt", SLO, SMALL)
    alone = simulated(both.ours.candidate, asked, QUICK, both.ours.goodput.rate.value).per_device
    assert both.ours.per_device.low <= alone.value <= both.ours.per_device.high


def test_the_papers_placements_are_cut_into_the_stages_that_both_phases_have() -> None:
    """OPT-175B: 3 and 4 ranks of each of three stages, 7 devices on a node."""
    segments = [paper_candidate(row).inter_op for row in placement_rows()]
    assert segments == [1, 1, 1, 1, 3]


def test_a_placement_is_better_only_beyond_both_intervals() -> None:
    row = placement_rows()[0]
    paper = paper_candidate(row)
    other = pair(Parallelism(1, 1), Parallelism(1, 1))
    _, papers = rated(paper, 1.5, 1.7, 1.9)
    told = {
        name: Both(row, paper, papers, rated(candidate, *ends)[0]).told
        for name, candidate, ends in (
            ("same", paper, (2.0, 2.1, 2.2)),
            ("above", other, (2.0, 2.1, 2.2)),
            ("near", other, (1.8, 2.0, 2.2)),
            ("below", other, (1.0, 1.2, 1.4)),
        )
    }
    assert told == {
        "same": "the same",
        "above": "ours is better",
        "near": "as good",
        "below": "the paper's is better",
    }


def test_the_best_colocated_shape_fits_the_cluster_and_is_known() -> None:
    asked = for_vllm(problem("opt-13b", "sharegpt", SLO, Cluster(1, 2, DEVICE)))
    best = best_colocated(asked, QUICK)
    (group,) = best.groups
    assert group.role is Role.MIXED
    assert group.parallelism.num_workers <= 2
    found = {
        shape: simulated(
            Candidate(best.system, (replace(group, parallelism=shape),)), asked, QUICK, 1.0
        )
        for shape in (Parallelism(1, 1), Parallelism(2, 1), Parallelism(1, 2))
    }
    values = {shape: goodput.per_device.value for shape, goodput in found.items()}
    assert max(values, key=lambda shape: values[shape]) == group.parallelism


def test_search_times_are_told_for_each_cluster() -> None:
    page = search_time_page(((1, 4),), QUICK)
    (row,) = page.tables[0].rows
    devices, low, high, *counts, low_s, high_s = row
    assert devices == "4"
    assert low == 11  # as the authors' enumeration has it for OPT-66B
    assert isinstance(high, float)
    assert high >= 1
    assert all(isinstance(count, float) and count > 0 for count in (*counts, low_s, high_s))
