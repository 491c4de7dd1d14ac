"""Figure 1: what one A100 carries of both phases, and of each alone (OPT-13B, 512 in, 64 out).

A phase alone is one instance of it behind or before so many of the other that those do not matter.
All of it is one engine, so that what is compared is the phases being together or apart.
"""

import math
from dataclasses import dataclass

import numpy as np

from ipc.vocabulary import Parallelism, Role
from planner.deployment import Group, Settings, service
from planner.goodput import Goodput, goodput
from planner.latency.choose import Knowledge, latency_model
from planner.latency.interface import Chunk
from planner.paper_curves import COEFFICIENTS, VLLM_PREFILL_TOKENS
from planner.queueing import md1_wait_percentile_s
from planner.report.contents import Cell, Column, Drawing, Line, Origin, Page, Panel, Table
from planner.report.published import Motivation, motivation
from planner.report.terms import Terms
from planner.simulator.run import simulate
from planner.simulator.service import Service
from planner.slo import Slo
from planner.verdict import Effort, Experiment
from planner.workload.catalogue import parse_workload

MODEL = "opt-13b"
ENGINE, OTHER_ENGINE = COEFFICIENTS["vllm"], COEFFICIENTS["distserve"]
LOAD = "synthetic:512,64"
PROMPT_TOKENS = 512
MANY = 4  # instances of the phase that must not matter
RATES = (0.5, 1, 1.6, 2.3, 3, 4, 5.6, 7, 8.5, 10, 12, 14)
NUM_REQUESTS = 1_000
EFFORT = Effort(2_000, 8_000)


@dataclass(frozen=True)
class Case:
    """A deployment, and which targets count for it; `paper` is requests/s of all its
    devices, where the paper has it."""

    label: str
    service: Service
    slo: Slo
    paper: float | None
    num_devices: int


@dataclass(frozen=True)
class Percentiles:
    """P90 at each of the rates."""

    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]


def figure_1(terms: Terms) -> Page:
    """Colocated, prefill alone, decode alone, and 2 prefill + 1 decode."""
    paper = motivation()
    cases = _cases(paper, terms)
    found = list(goodputs(terms).values())
    return Page(
        name="fig1",
        title="Figure 1: one A100, OPT-13B, 512 tokens in and 64 out",
        sources=(
            "measured: section 1 of the paper and the authors' article; the rates alone, for the "
            "figure prints no other numbers",
            f"simulated: {ENGINE} throughout, but for the last row; goodput over runs of up to "
            f"{EFFORT.cap} requests with 95 % intervals, percentiles over {NUM_REQUESTS} requests "
            f"and {terms.runs}",
        ),
        tables=(_table(cases, found, paper, terms),),
        drawings=(_drawing(cases, paper, terms),),
        notes=(_note(paper),),
    )


def goodputs(terms: Terms, effort: Effort = EFFORT) -> dict[str, Goodput]:
    """By case."""
    return {case.label: _goodput(case, terms, effort) for case in _cases(motivation(), terms)}


def _cases(paper: Motivation, terms: Terms) -> list[Case]:
    both = Slo(paper.ttft_s, paper.tpot_s, terms.share)
    ttft, tpot = Slo(paper.ttft_s, math.inf, terms.share), Slo(math.inf, paper.tpot_s, terms.share)
    colocated, disaggregated = _colocated(), paper.disaggregated_per_device
    return [
        Case("colocated", colocated, both, paper.colocated, 1),
        Case("colocated, TTFT alone", colocated, ttft, paper.colocated_ttft_alone, 1),
        Case("prefill alone", _split(1, MANY, ENGINE), ttft, paper.prefill_alone, 1),
        Case("decode alone", _split(MANY, 1, ENGINE), tpot, paper.decode_alone, 1),
        Case("2 prefill + 1 decode", _split(2, 1, ENGINE), both, 3 * disaggregated, 3),
        Case(f"  by {OTHER_ENGINE}", _split(2, 1, OTHER_ENGINE), both, None, 3),
    ]


def _colocated() -> Service:
    known = Knowledge(MODEL, profile=ENGINE)
    return service(known, (Group(Role.MIXED, 1),), Settings(prefill_tokens=VLLM_PREFILL_TOKENS))


def _split(num_prefill: int, num_decode: int, profile: str) -> Service:
    known = Knowledge(MODEL, profile=profile)
    groups = (Group(Role.PREFILL, num_prefill), Group(Role.DECODE, num_decode))
    return service(known, groups, Settings())


def _goodput(case: Case, terms: Terms, effort: Effort) -> Goodput:
    terms.watch(f"goodput, {case.label}")
    experiment = Experiment(
        run=lambda requests: simulate(case.service, requests),
        draw=parse_workload(LOAD).requests,
        slo=case.slo,
        effort=effort,
    )
    return goodput(experiment, case.num_devices)


def _table(cases: list[Case], found: list[Goodput], paper: Motivation, terms: Terms) -> Table:
    base = found[0].per_device.value
    rows: list[tuple[Cell, ...]] = []
    for case, ours in zip(cases, found, strict=True):
        seen = case.paper / case.num_devices if case.paper is not None else None
        times = seen / paper.colocated if seen is not None else None
        value, low, high = ours.per_device.value, ours.per_device.low, ours.per_device.high
        times_ours = value / base if base else None
        rows.append((case.label, seen, value, f"{low:.3g}-{high:.3g}", times, times_ours))
    columns = (
        Column("requests/s per GPU"),
        Column("measured", ".2g"),
        Column("ours", ".3g"),
        Column("95 %"),
        Column("over colocated, measured", ".1f"),
        Column("ours", ".1f"),
    )
    slo = f"TTFT {paper.ttft_s:g} s, TPOT {paper.tpot_s:g} s"
    title = f"goodput at {terms.percent} % (the paper's: 90 %), {slo}"
    return Table(title, columns, tuple(rows))


def _drawing(cases: list[Case], paper: Motivation, terms: Terms) -> Drawing:
    colocated, _, prefill, decode, *_ = cases
    both = _percentiles(colocated, terms)
    upper = (
        _line("colocated", both.ttft_s),
        _line("prefill alone", _percentiles(prefill, terms).ttft_s),
        _point("colocated", paper.colocated_ttft_alone, paper.ttft_s),
        _point("prefill alone", paper.prefill_alone, paper.ttft_s),
    )
    lower = (
        _line("colocated", both.tpot_s),
        _line("decode alone", _percentiles(decode, terms).tpot_s),
        _point("colocated", paper.colocated, paper.tpot_s),
        _point("decode alone", paper.decode_alone, paper.tpot_s),
    )
    axis = "Requests/s"
    ttft = Panel("Time to first token", axis, "P90 (s)", upper, paper.ttft_s, 2 * paper.ttft_s)
    tpot = Panel("Time per token", axis, "P90 (s)", lower, paper.tpot_s, 2 * paper.tpot_s)
    return Drawing("fig1", (ttft, tpot))


def _percentiles(case: Case, terms: Terms) -> Percentiles:
    """At each rate the mean over the seeds of each run's 90th percentile."""
    load = parse_workload(LOAD)
    ttft_s: list[float] = []
    tpot_s: list[float] = []
    for rate in RATES:
        terms.watch(f"{case.label} at {rate:g}")
        runs = [simulate(case.service, load.requests(NUM_REQUESTS, rate, s)) for s in terms.seeds]
        ttft_s.append(float(np.mean([np.percentile(run.ttft_s, 90) for run in runs])))
        tpot_s.append(float(np.mean([np.percentile(run.tpot_s, 90) for run in runs])))
    return Percentiles(tuple(ttft_s), tuple(tpot_s))


def _line(label: str, values_s: tuple[float, ...]) -> Line:
    return Line(label, Origin.SIMULATED, RATES, values_s)


def _point(label: str, rate: float, level_s: float) -> Line:
    """The paper's: the rate that just holds the target."""
    return Line(label, Origin.MEASURED, (rate,), (level_s,))


def _note(paper: Motivation) -> str:
    chunks, one = [Chunk(PROMPT_TOKENS)], Parallelism()
    ours_s, other_s = (
        latency_model(Knowledge(MODEL, profile=profile), one).prefill(chunks).seconds
        for profile in (ENGINE, OTHER_ENGINE)
    )
    implied_s = _implied_prefill_s(paper.prefill_alone, paper.ttft_s)
    return (
        f"{paper.prefill_alone:g} requests/s with P90 within {paper.ttft_s:g} s are a prefill of "
        f"{1000 * implied_s:.0f} ms (M/D/1); {ENGINE} has {1000 * ours_s:.0f} ms for "
        f"{PROMPT_TOKENS} tokens, {OTHER_ENGINE} {1000 * other_s:.0f} ms: that fits an "
        "engine of the former's kind"
    )


def _implied_prefill_s(rate: float, target_s: float) -> float:
    """The constant prefill time with which M/D/1 has its P90 at the target, by bisection."""
    low_s, high_s = 0.0, min(1 / rate, target_s)
    for _ in range(40):
        middle_s = (low_s + high_s) / 2
        is_short = middle_s + md1_wait_percentile_s(rate, middle_s, 0.9) <= target_s
        low_s, high_s = (middle_s, high_s) if is_short else (low_s, middle_s)
    return low_s
