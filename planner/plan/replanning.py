"""`distserve plan --replan`: a log of requests held against the placement in use.

The placement file says what it was planned for; its log begins where it was taken into use.
"""

import math
from collections.abc import Callable

from ipc.placement_file import PlacementFile
from planner.intervals import Interval
from planner.placement.choices import Chosen, Problem
from planner.placement.file import PlacementFileError, load, units_of
from planner.placement.options import Options
from planner.plan.options import Replanning
from planner.replan.decide import Tools, replan
from planner.replan.evaluate import Copies
from planner.replan.outcome import Current, Outcome
from planner.replan.recent import Log
from planner.replan.rules import Rules
from planner.replan.switching import Fleet
from planner.replan.window import Pattern
from planner.workload.trace_file import read_trace

Search = Callable[[Problem], Chosen]


def replanned(asked: Replanning, problem: Problem, search: Search, options: Options) -> Outcome:
    """Has the load shifted, and does a switch pay?

    Args:
        options: of the search, so that the placement in use is as fast as what it finds.

    Raises:
        PlannerError: the log or the placement file cannot be used, or nothing serves the load.
    """
    rules = Rules()
    file = load(asked.current)
    log = Log.of(read_trace(asked.log), rules)
    copies = Copies(options)
    tools = Tools(search=search, serve=copies.service, copy_goodput=copies.goodput)
    return replan(log, in_use(file), problem, tools, rules)


def in_use(file: PlacementFile) -> Current:
    """The placement as it was planned; without its origin nothing can be held against it."""
    origin = file.origin
    if origin is None:
        raise PlacementFileError(
            "the placement in use has no origin: only what `distserve plan --out` wrote says what "
            "it was planned for"
        )
    expected = origin.load
    high = math.inf if origin.goodput.high is None else origin.goodput.high
    return Current(
        fleet=Fleet(*units_of(file)),
        goodput=Interval(origin.goodput.value, origin.goodput.low, high),
        planned=Pattern(
            rate=expected.rate or origin.goodput.value,
            mean_input=expected.mean_input_tokens,
            mean_output=expected.mean_output_tokens,
            gap_cv=expected.gap_cv,
        ),
        since_s=0.0,
    )
