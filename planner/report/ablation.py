"""Figure 11: what disaggregation and what the search add, all simulated, as in the paper.

vLLM at the paper's tp 4, vLLM++ with the parallelism that is best for it, DistServe with
placements of Algorithm 2 (low node affinity) and of Algorithm 1 (high).
"""

from itertools import product
from operator import itemgetter

from ipc.vocabulary import Parallelism, Role
from planner.deployment import Group
from planner.errors import InfeasibleShape, ProfileError
from planner.placement.choices import Affinity, Candidate, Problem, System
from planner.plan.told import short_candidate
from planner.report import explained
from planner.report.contents import Cell, Column, Drawing, Page, Panel, Table
from planner.report.runs import Setting, Swept, over_rates, over_scales
from planner.report.searches import (
    for_vllm,
    problem,
    searched,
    simulated,
    told_effort,
    unit_service,
)
from planner.report.terms import Terms
from planner.slo import Slo

MODEL, WORKLOAD = "opt-66b", "sharegpt"
SLO = (0.4, 0.1)
RATES = (0.0625, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75)
SCALES = (1.2, 1.0, 0.8, 0.6, 0.4)
SCALES_RATE = 0.375
REQUESTS_PER_DEVICE = 100
VLLM = Parallelism(4, 1)
DEGREES = (1, 2, 4, 8)


def figure_11(terms: Terms) -> Page:
    """Attainment over the rate and over the SLO scale."""
    asked = problem(MODEL, WORKLOAD, Slo(*SLO, terms.share))
    settings = [*_vllm(for_vllm(asked), terms), *_distserve(asked, terms)]
    slo = Slo(*SLO)
    by_rate = [over_rates(each, slo, RATES, terms) for each in settings]
    by_scale = [over_scales(each, slo, SCALES_RATE, SCALES, terms) for each in settings]
    names = tuple(each.label for each in settings)
    return Page(
        "fig11",
        f"Figure 11: ablation, {MODEL} on {WORKLOAD}",
        (
            "nothing here is measured: the paper's figure is simulated too, and its numbers are "
            "not printed",
            f"simulated: TTFT {SLO[0]:g} s and TPOT {SLO[1]:g} s, as in the authors' script; vLLM "
            f"by vllm-added, DistServe by distserve-raw; {REQUESTS_PER_DEVICE} requests for each "
            f"GPU (the script: 25, which end within a minute), {terms.runs}; {told_effort(terms)}",
            *(f"{each.label}: {each.known}" for each in settings),
        ),
        (
            _table("attainment by rate per GPU, %", names, by_rate, "rate/GPU"),
            _table(f"attainment by SLO scale at {SCALES_RATE:g}/GPU, %", names, by_scale, "scale"),
        ),
        (_drawing(settings, by_rate, by_scale, terms),),
        (
            "in the paper vLLM++ is as good as vLLM (tp 4 is already its best) and "
            "DistServe-High better than DistServe-Low",
            explained.FREE_STAGES,
        ),
    )


def _distserve(asked: Problem, terms: Terms) -> list[Setting]:
    settings = []
    affinities = (Affinity.LOW, Affinity.HIGH)
    for affinity, found in zip(affinities, searched(asked, affinities, terms), strict=True):
        assert found.disaggregated is not None, "without baselines there is nothing else"
        unit = found.disaggregated.best.candidate
        settings.append(_setting(f"DistServe-{affinity.title()}", unit, asked, terms))
    return settings


def _vllm(asked: Problem, terms: Terms) -> list[Setting]:
    """As in the paper, and the best."""
    best = best_colocated(asked, terms)
    return [
        _setting("vLLM", _colocated(VLLM), asked, terms),
        _setting("vLLM++", best, asked, terms),
    ]


def best_colocated(asked: Problem, terms: Terms) -> Candidate:
    """Of all shapes that are known and fit the cluster."""
    rated: list[tuple[float, Candidate]] = []
    for tp, pp in product(DEGREES, DEGREES):
        candidate = _colocated(Parallelism(tp, pp))
        if candidate.num_devices > asked.cluster.num_devices:
            continue
        terms.watch(f"vLLM++ {short_candidate(candidate)}")
        try:
            found = simulated(candidate, asked, terms, 0.3 * candidate.num_devices)
        except (InfeasibleShape, ProfileError):
            continue
        rated.append((found.per_device.value, candidate))
    return max(rated, key=itemgetter(0))[1]


def _colocated(parallelism: Parallelism) -> Candidate:
    return Candidate(System.PREFILL_FIRST, (Group(Role.MIXED, 1, parallelism),))


def _setting(label: str, candidate: Candidate, asked: Problem, terms: Terms) -> Setting:
    return Setting(
        label=label,
        service=unit_service(candidate, asked, terms),
        workload=asked.workload,
        num_requests=REQUESTS_PER_DEVICE * candidate.num_devices,
        known=short_candidate(candidate),
    )


def _table(title: str, names: tuple[str, ...], swept: list[Swept], axis: str) -> Table:
    found = [dict(zip(each.at, each.spreads, strict=True)) for each in swept]
    rows: list[tuple[Cell, ...]] = [
        (at, *(each[at].told if at in each else None for each in found))
        for at in max((each.at for each in swept), key=len)
    ]
    columns = (Column(axis, ".3g"), *(Column(name) for name in names))
    return Table(title, columns, tuple(rows))


def _drawing(
    settings: list[Setting], by_rate: list[Swept], by_scale: list[Swept], terms: Terms
) -> Drawing:
    def panel(axis: str, swept: list[Swept], *, falls: bool) -> Panel:
        lines = tuple(
            each.line(setting.label, setting.origin)
            for setting, each in zip(settings, swept, strict=True)
        )
        target = float(terms.percent)
        return Panel("Ablation", axis, "SLO attainment (%)", lines, target, 102, falls)

    over_rate = panel("Requests/s per GPU", by_rate, falls=False)
    return Drawing("fig11", (over_rate, panel("SLO scale", by_scale, falls=True)))
