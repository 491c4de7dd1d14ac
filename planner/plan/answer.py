"""Carry out what is asked: search for each affinity, place the better answer, or replan."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ipc.placement_file import PlacementFile
from planner.placement.assign import node_names
from planner.placement.choices import Chosen, PlacementError, Problem
from planner.placement.crew import Crew, Watch
from planner.placement.file import chosen_file
from planner.placement.known_shapes import KnownShapes
from planner.placement.results import Found
from planner.placement.search import search
from planner.plan.options import Asked, Replanning
from planner.plan.problems import problems
from planner.plan.replanning import replanned
from planner.plan.report import Planned, better
from planner.plan.told import recommendation
from planner.replan.outcome import Outcome


@dataclass
class Answerer:
    """Answers one command.

    Args:
        today: the date that a placement bears.
        watch: told how far a search is.
    """

    asked: Asked
    today: str
    watch: Watch | None = None
    problem: Problem | None = field(default=None, init=False)  # of the last answer

    def plan(self) -> Planned:
        """Search for each affinity, and place the better answer on the nodes.

        Raises:
            PlannerError: something cannot be, or nothing can do what is asked.
        """
        started_s = time.perf_counter()
        given = problems(self.asked)
        # A wrong name is told before the search, not after it.
        node_names(given.first.cluster, self.asked.nodes.names)
        searches, failures = self._searched(given.each)
        best = better(searches)
        self.problem = next(p for p in given.each if p.affinity is best.asked.affinity)
        file = self._placed(self.problem, best.recommended)
        return Planned(
            best=best,
            searches=searches,
            file=file,
            recommendation=recommendation(best, file),
            notes=(*given.notes, *failures),
            took_s=time.perf_counter() - started_s,
        )

    def replan(self, asked: Replanning) -> tuple[Outcome, PlacementFile | None]:
        """The verdict, and the new placement where there was a search.

        Raises:
            PlannerError: as above, and of the log or the placement in use.
        """
        problem = problems(self.asked).first
        outcome = replanned(asked, problem, self._search, self.asked.search)
        if outcome.chosen is None:
            return outcome, None
        assert self.problem is not None, "what was chosen was searched for"
        return outcome, self._placed(self.problem, outcome.chosen)

    def _searched(self, each: Sequence[Problem]) -> tuple[tuple[Found, ...], list[str]]:
        """What one affinity cannot do, another may; what one simulated serves the other."""
        options = self.asked.search
        found: list[Found] = []
        failures: list[str] = []
        with Crew(each[0], options, self.watch) as crew:
            for problem in each:
                try:
                    found.append(search(problem, options, crew=crew))
                except PlacementError as error:
                    if len(each) == 1:
                        raise
                    failures.append(f"{problem.affinity} affinity: {error}")
        if not found:
            raise PlacementError("; ".join(failures))
        return tuple(found), failures

    def _search(self, problem: Problem) -> Chosen:
        self.problem = problem
        return search(problem, self.asked.search, self.watch).recommended

    def _placed(self, problem: Problem, chosen: Chosen) -> PlacementFile:
        shapes = KnownShapes(problem, self.asked.search)
        return chosen_file(problem, chosen, shapes, self.today, self.asked.nodes.names)
