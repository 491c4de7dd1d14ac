"""The recommended placement under another rate, other lengths, burstier arrivals."""

from planner.goodput import Goodput
from planner.placement.choices import Chosen
from planner.placement.crew import Crew
from planner.placement.hunt import Hunt
from planner.placement.laboratory import CheckRate, FindGoodput
from planner.placement.limits import Limits
from planner.placement.options import Depth
from planner.placement.results import Sensitivity
from planner.placement.variation import Variation
from planner.verdict import RatePoint

RATES = {"rate -20 %": 0.8, "rate +20 %": 1.2}
VARIATIONS = {
    "lengths -10 %": Variation(lengths=0.9),
    "lengths +10 %": Variation(lengths=1.1),
    "arrival CV x 2": Variation(cv=2.0),
}


def sensitivity(
    best: Chosen, rate: float, hunt: Hunt, crew: Crew, limits: Limits
) -> tuple[Sensitivity, ...]:
    """At the rate of one copy, and its goodput where the workload itself is another."""
    candidate, setup = best.best.candidate, hunt.setup(best.best.candidate)
    least = limits.settling(candidate.groups, rate)
    fitting = {
        change: variation
        for change, variation in VARIATIONS.items()
        if limits.holds(candidate.groups, variation.lengths)
    }
    checks = [CheckRate(setup, rate * factor, least) for factor in RATES.values()]
    checks += [CheckRate(setup, rate, least, variation) for variation in fitting.values()]
    points = crew.checks(checks, "sensitivity: attainment")
    cap = 2 * limits.cap_of(candidate.groups)  # shorter requests may carry more
    searches = [
        FindGoodput(setup, Depth.FIRST, best.best.goodput.rate.value, cap, least, True, variation)
        for variation in fitting.values()
    ]
    goodputs = crew.goodputs(searches, "sensitivity: goodput")
    seen = dict(zip((*RATES, *fitting), points, strict=True))
    found = dict(zip(fitting, goodputs, strict=True))
    return tuple(_told(each, seen.get(each), found.get(each)) for each in (*RATES, *VARIATIONS))


def _told(change: str, point: RatePoint | None, found: Goodput | None) -> Sensitivity:
    if point is None:
        reason = "the longest requests no longer fit the KV pools"
        return Sensitivity(change, None, reason=reason)
    return Sensitivity(change, point.attainment, found.per_device if found is not None else None)
