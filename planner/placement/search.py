"""The placement search (paper sections 4.1 and 4.2), from a problem to a recommendation.

First looks at what leads, by bounds that get sharper; then the contenders, disaggregated and
colocated, at full effort on the same requests; then what follows from the answer: gains over the
baselines, cost, sensitivity. Algorithm 1 or 2 by the problem's affinity.
"""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

from planner.placement import baselines, field
from planner.placement.advice import against_it, for_it
from planner.placement.carrying import carrying
from planner.placement.choices import (
    Affinity,
    Candidate,
    Chosen,
    Dropped,
    Evaluated,
    PlacementError,
    Problem,
    System,
)
from planner.placement.close_look import Bench
from planner.placement.comparison import compared
from planner.placement.crew import Crew, Watch
from planner.placement.hunt import Hunt
from planner.placement.limits import Limits
from planner.placement.options import Options
from planner.placement.outcome import asked, cost, misses_targets, nothing_fits, too_much
from planner.placement.ranking import (
    best_choice,
    best_of,
    by_goodput,
    chosen,
    contenders,
    runner_ups,
    wins,
)
from planner.placement.results import Baseline, Found, Phase, Sensitivity
from planner.placement.sensitivity import sensitivity

NUM_CARRYING = 2  # of the placements that carry a rate on equally few devices, looked at closely


def search(
    problem: Problem,
    options: Options | None = None,
    watch: Watch | None = None,
    *,
    crew: Crew | None = None,
) -> Found:
    """The best placement, and all that was looked at on the way.

    Args:
        watch: told of every simulation that ends.
        crew: of another search of the same problem under another affinity or rate: what that one
            simulated is not simulated again.

    Raises:
        PlacementError: nothing fits, nothing meets the targets, or nothing carries the rate.
    """
    options = options or Options()
    with nullcontext(crew) if crew is not None else Crew(problem, options, watch) as workers:
        return _Search(problem, options, workers).found()


def search_both(
    problem: Problem, options: Options | None = None, watch: Watch | None = None
) -> tuple[Found, Found]:
    """Algorithms 1 and 2 for the same problem."""
    options = options or Options()
    with Crew(problem, options, watch) as crew:
        high, low = (
            search(replace(problem, affinity=affinity), options, crew=crew)
            for affinity in (Affinity.HIGH, Affinity.LOW)
        )
    return high, low


def evaluate(
    problem: Problem,
    candidates: Sequence[Candidate],
    options: Options | None = None,
    watch: Watch | None = None,
) -> list[Evaluated]:
    """These candidates at full effort, in their order: what a search is compared with.

    Raises:
        PlacementError: one of them cannot serve; says why.
    """
    options = options or Options()
    with Crew(problem, options, watch) as crew:
        limits = Limits(problem, crew.laboratory.shapes, crew.laboratory.sample)
        for group in (group for each in candidates for group in each.groups):
            if (reason := limits.refusal(group)) is not None:
                raise PlacementError(reason)
        bench = Bench(problem, crew, limits, Hunt(problem, options, crew, limits))
        return bench.look(candidates, {}, "placements")


class _Search:
    def __init__(self, problem: Problem, options: Options, crew: Crew) -> None:
        self._started_s = time.perf_counter()
        self._ran_before = crew.num_simulations
        self._problem, self._options, self._crew = problem, options, crew
        limits = Limits(problem, crew.laboratory.shapes, crew.laboratory.sample)
        hunt = Hunt(problem, options, crew, limits)
        self._bench = Bench(problem, crew, limits, hunt)
        self._dropped: list[Dropped] = []
        self._rough: list[Evaluated] = []

    def found(self) -> Found:
        bench, problem = self._bench, self._problem
        items, refused = field.disaggregated(problem, self._options, bench.limits)
        ours, behind = bench.hunt.explore(items, f"{problem.affinity} affinity")
        mixed = baselines.Field()
        if self._options.with_baselines:
            mixed = baselines.explore(problem, self._options, bench.hunt, bench.limits)
        self._dropped = refused + behind + mixed.dropped
        self._rough = ours + mixed.evaluated
        if not self._rough:
            raise PlacementError(nothing_fits(problem, self._dropped))
        for_rate = self._carrying()
        near = {each.candidate: each.goodput.rate.value for each in self._rough} | for_rate
        bench.look([*self._of_interest(ours, mixed), *for_rate], near, "contenders")
        return self._answer(mixed)

    def _of_interest(self, ours: Sequence[Evaluated], mixed: baselines.Field) -> list[Candidate]:
        """The contenders, and the best of each baseline: per device, and for the rate."""
        problem = self._problem
        found = contenders(ours, problem)
        for some in mixed.found.values():
            found += [each for each in by_goodput(some)[:1] if each.per_device.value > 0]
            found += contenders(some, problem)[:1] if problem.rate is not None else []
        return [each.candidate for each in found]

    def _carrying(self) -> dict[Candidate, float]:
        """What was seen to carry the rate where counts are free, and that rate: a search that
        begins there does not end below it."""
        problem, bench, rate = self._problem, self._bench, self._problem.rate
        if rate is None or problem.affinity is not Affinity.HIGH:
            return {}
        found = carrying(problem, rate, bench.hunt, self._crew, bench.limits)
        return dict.fromkeys(found[:NUM_CARRYING], rate)

    def _answer(self, mixed: baselines.Field) -> Found:
        problem, bench = self._problem, self._bench
        apart = self._best(System.DISAGGREGATED)
        told = compared(mixed, apart.best if apart else None, bench)
        # Now those of several instances, which the comparison looked at, may be chosen too.
        together = self._best(System.PREFILL_FIRST, System.CHUNKED)
        if apart is None and together is None:
            raise PlacementError(self._why_nothing())
        recommended, reasons = self._recommended(apart, together, told)
        everything = self._everything()
        return Found(
            asked=asked(problem),
            recommended=recommended,
            disaggregated=apart,
            reasons=reasons,
            runner_ups=runner_ups(everything, recommended.best),
            phases=tuple(Phase(group, found) for group, found in bench.hunt.phases.items()),
            evaluated=tuple(by_goodput(everything)),
            dropped=tuple(self._dropped),
            baselines=told,
            sensitivity=self._sensitivity(recommended),
            cost=cost(problem, recommended, bench.sample),
            seconds=time.perf_counter() - self._started_s,
            num_simulations=self._crew.num_simulations - self._ran_before,
            num_processes=self._crew.num_processes,
        )

    def _best(self, *systems: System) -> Chosen | None:
        found = [e for e in self._bench.found.values() if e.candidate.system in systems]
        return best_choice(found, self._problem)

    def _recommended(
        self, apart: Chosen | None, together: Chosen | None, told: Sequence[Baseline]
    ) -> tuple[Chosen, tuple[str, ...]]:
        rival = self._rival(together, told)
        if apart is not None and (rival is None or not wins(rival, apart, self._problem)):
            was_sought = self._options.with_baselines
            return apart, for_it(self._problem, apart, rival, was_sought=was_sought)
        assert together is not None, "one of both was found"
        return together, against_it(self._bench, together, apart)

    def _rival(self, together: Chosen | None, told: Sequence[Baseline]) -> Chosen | None:
        """The colocated service that disaggregation is held against: of as many devices, where no
        rate says how many."""
        if self._problem.rate is not None:
            return together
        fair = best_of([each.scaled for each in told if each.scaled is not None])
        return chosen(fair, self._problem) if fair is not None else None

    def _everything(self) -> list[Evaluated]:
        """Each candidate once, as it was looked at last."""
        latest = {each.candidate: each for each in self._rough} | self._bench.found
        return list(latest.values())

    def _sensitivity(self, recommended: Chosen) -> tuple[Sensitivity, ...]:
        if not self._options.with_sensitivity:
            return ()
        bench = self._bench
        rate = self._problem.rate or recommended.rate.value
        per_copy = rate / recommended.num_copies
        return sensitivity(recommended, per_copy, bench.hunt, self._crew, bench.limits)

    def _why_nothing(self) -> str:
        able = [each for each in self._everything() if each.per_device.value > 0]
        if not able:
            return misses_targets(self._problem, self._rough)
        return too_much(self._problem, able)
