"""Where a search's simulations are run: one per process, with the models and the draws it keeps.

A task is small, frozen and says everything that its answer depends on beside the problem, so that
answers can be kept by task, whichever process found them. All tasks see the same requests.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from planner.deployment import Group
from planner.goodput import Goodput, goodput
from planner.intervals import Interval, paired_difference
from planner.placement.choices import Objective, Problem
from planner.placement.first_look import first_look
from planner.placement.known_shapes import KnownShapes
from planner.placement.limits import MOST_REQUESTS
from planner.placement.options import Depth, Options
from planner.placement.phase import without_decode, without_prefill
from planner.placement.variation import AS_IT_IS, Variation, varied
from planner.rate_search import LOWEST_SHARE, Search
from planner.simulator.run import simulate
from planner.simulator.service import Service
from planner.slo import Slo
from planner.verdict import Experiment, RatePoint, Run, attainment_at, steady
from planner.workload.requests import Requests
from planner.workload.workload import Workload

UNBOUNDED_S = 1e9  # a target that nobody misses, where there is no SLO
BELOW, ABOVE = 1.3, 1.12  # how far from a good guess the answer is sought


class Part(StrEnum):
    """What of a service is simulated: all of it, or one phase while the other costs nothing."""

    WHOLE = "whole"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class Setup:
    """Instances, and whether they pull across nodes."""

    groups: tuple[Group, ...]
    across_nodes: bool = False
    part: Part = Part.WHOLE

    @property
    def num_devices(self) -> int:
        return sum(group.count * group.parallelism.num_workers for group in self.groups)


@dataclass(frozen=True)
class FindGoodput:
    """The goodput of a setup. The guess says where to begin, and whether it is a good one; the
    number of runs depends on it, the answer hardly.

    Args:
        cap: no rate above it is tried.
        least: requests that a run must have to see the setup settled.
    """

    setup: Setup
    depth: Depth
    guess: float
    cap: float
    least: int
    is_near: bool = False
    variation: Variation = AS_IT_IS


@dataclass(frozen=True)
class CheckRate:
    """The attainment of a setup at one rate."""

    setup: Setup
    rate: float
    least: int
    variation: Variation = AS_IT_IS


@dataclass(frozen=True)
class Compare:
    """Attainment of the first less that of the second, each at the same rate per device."""

    first: Setup
    second: Setup
    rate_per_device: float
    least: int


Task = FindGoodput | CheckRate | Compare
Answer = Goodput | RatePoint | Interval


class Laboratory:
    """Runs tasks of one problem."""

    def __init__(self, problem: Problem, options: Options) -> None:
        self.shapes = KnownShapes(problem, options)
        self._problem = problem
        self._options = options
        self._draws: dict[Variation, _Draws] = {}

    @property
    def sample(self) -> Requests:
        """All requests that any run will have, for their lengths."""
        return self._drawn(AS_IT_IS).everything

    def find(self, task: FindGoodput) -> Goodput:
        """A search near a good guess is widened where that did not hold."""
        experiment = self._experiment(task.setup, task.least, task.variation, task.depth)
        seek = first_look if task.depth is Depth.FIRST else goodput
        tolerance = self._options.tolerance(task.depth)
        guess = min(task.guess, task.cap) if task.guess > 0 else 1.0
        if task.is_near:
            close = Search(guess, guess / BELOW, min(guess * ABOVE, task.cap), tolerance)
            found = seek(experiment, task.setup.num_devices, close)
            if found.is_bounded and found.rate.value > 0:
                return found
        search = Search(guess, guess * LOWEST_SHARE, task.cap, tolerance)
        return seek(experiment, task.setup.num_devices, search)

    def check(self, task: CheckRate) -> RatePoint:
        experiment = self._experiment(task.setup, task.least, task.variation)
        return attainment_at(experiment, task.rate)

    def compare(self, task: Compare) -> Interval:
        """Over the same requests: their arrivals and lengths cancel (common random numbers)."""
        slo, count = self._slo(Part.WHOLE), max(self._options.final.cap, task.least)
        hits = []
        for setup in (task.first, task.second):
            rate = task.rate_per_device * setup.num_devices
            timeline = self._run(setup)(self._drawn(AS_IT_IS).draw(count, rate, 0))
            hits.append((timeline.meets(slo), steady(timeline)))
        first = max(window.first for _, window in hits)
        last = max(first + 1, min(window.last for _, window in hits))
        return paired_difference(hits[0][0][first:last], hits[1][0][first:last])

    def run(self, task: Task) -> Answer:
        match task:
            case FindGoodput():
                return self.find(task)
            case CheckRate():
                return self.check(task)
            case Compare():
                return self.compare(task)

    def _experiment(
        self, setup: Setup, least: int, variation: Variation, depth: Depth = Depth.FINAL
    ) -> Experiment:
        effort = self._options.effort(depth)
        start, cap = max(effort.start, least), max(effort.cap, least)
        return Experiment(
            run=self._run(setup),
            draw=self._drawn(variation).draw,
            slo=self._slo(setup.part),
            seed=self._problem.seed,
            effort=replace(effort, start=start, cap=cap),
        )

    def _run(self, setup: Setup) -> Run:
        service, seed = self._service(setup), self._problem.seed
        if setup.part is Part.PREFILL:
            return lambda requests: simulate(service, _first_tokens(requests), seed=seed)
        return lambda requests: simulate(service, requests, seed=seed)

    def _service(self, setup: Setup) -> Service:
        if setup.part is Part.WHOLE:
            return self.shapes.service(setup.groups, across_nodes=setup.across_nodes)
        instances = [self.shapes.instance(g) for g in setup.groups for _ in range(g.count)]
        overheads = self._problem.settings.overheads
        block_size = self._problem.settings.memory.block_size
        if setup.part is Part.PREFILL:
            return Service(without_decode(instances), block_size, overheads)
        settings = self._problem.settings
        return replace(
            Service(without_prefill(instances), block_size, overheads),
            shares_link=settings.shares_link,
            pull_stalls_decode=settings.pull_stalls_decode,
            speculation=settings.speculation,
        )

    def _slo(self, part: Part) -> Slo:
        """Without an SLO the rate is the highest at which no queue grows."""
        slo = self._problem.slo
        if self._problem.objective is Objective.THROUGHPUT:
            slo = Slo(UNBOUNDED_S, UNBOUNDED_S, slo.attainment)
        match part:
            case Part.WHOLE:
                return slo
            case Part.PREFILL:
                return replace(slo, tpot_s=math.inf)
            case Part.DECODE:
                return replace(slo, ttft_s=math.inf)

    def _drawn(self, variation: Variation) -> "_Draws":
        if variation not in self._draws:
            workload = varied(self._problem.workload, variation)
            count = max(self._options.first.cap, self._options.final.cap, MOST_REQUESTS)
            self._draws[variation] = _Draws(workload, count, self._problem.seed)
        return self._draws[variation]


class _Draws:
    """The longest draw at one request per second; every run takes its beginning, stretched."""

    def __init__(self, workload: Workload, count: int, seed: int) -> None:
        self.everything = workload.requests(count, 1.0, seed)

    def draw(self, count: int, rate: float, seed: int) -> Requests:
        return self.everything.first(count).stretched(1 / rate)


def _first_tokens(requests: Requests) -> Requests:
    """Requests that end with their prefill: what decode would do to them is left out."""
    ones = np.ones_like(requests.output_tokens)
    return Requests(requests.arrival_s, requests.input_tokens, ones)
