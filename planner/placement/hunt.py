"""The best candidates first: bounds get sharper only for those that still lead.

A candidate's bound starts as its analytic caps. When it leads, its phases are simulated, each
alone; when it still leads with what those carry, it is simulated as a whole. It ends when nothing
open can beat the best that was simulated: the rest is dropped, with the numbers that say so. With
n prefill and m decode shapes that takes n + m searches of phases and few of pairs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from ipc.vocabulary import Role
from planner.deployment import Group
from planner.goodput import Goodput
from planner.placement.candidates import MAX_COUNT, counted, crosses_nodes, max_copies
from planner.placement.choices import Candidate, Dropped, Evaluated, Problem
from planner.placement.crew import Crew
from planner.placement.laboratory import FindGoodput, Part, Setup
from planner.placement.limits import Limits
from planner.placement.options import Depth, Options
from planner.placement.ranking import Worth, worth

NOTHING: Worth = (False, 0.0, 0.0)
WAVE = 4  # simulated before the next look at what leads; the result depends on it, so it is fixed
SLACK = 1.05  # pairs came out at most 1 % above their weaker phase; a first look is rougher
JOINT_SHARE = 0.95  # of what the weaker phase carries alone: where a joint search begins
DECODE_SHARE = 0.85  # of the cap: where decode's begins; KV memory makes a sharp knee
PREFILL_SHARE = 0.7
BEYOND = 1.15  # of the cap: there every run fails, so that a search finds both its ends
SAME = 0.97  # ratios this close to the best one are as good: the smaller counts are taken
PARTS = {Role.PREFILL: Part.PREFILL, Role.DECODE: Part.DECODE}


@dataclass(frozen=True)
class Item:
    """A candidate still open. `is_flexible`: its counts follow what its phases carry."""

    candidate: Candidate
    is_flexible: bool = False


@dataclass(frozen=True)
class Leading:
    """An item with the counts that suit it best so far, and the rate that it cannot beat."""

    item: Item
    candidate: Candidate
    bound: float
    worth: Worth  # at that rate

    @property
    def per_device(self) -> float:
        return self.worth[1]


class Hunt:
    """First looks at the candidates of one problem."""

    def __init__(self, problem: Problem, options: Options, crew: Crew, limits: Limits) -> None:
        self.phases: dict[Group, Goodput] = {}
        self._problem, self._options = problem, options
        self._crew, self._limits = crew, limits

    def explore(
        self, items: Sequence[Item], what: str, best: Worth = NOTHING, most: int | None = None
    ) -> tuple[list[Evaluated], list[Dropped]]:
        """Those simulated as a whole, and those that cannot beat them.

        Args:
            items: none of them refused by the limits.
            best: what was found elsewhere (`highest`).
            most: simulate so many at most, those with the highest bounds, and of bounds that
                are nearly equal the smaller ones.
        """
        left, found = list(items), list[Evaluated]()
        while left and not self._is_enough(len(found), most):
            leading = self._leading(left, best)
            if not leading:
                break
            if most is not None:
                leading.sort(key=_small_first)
            if self._measure(leading[: 2 * WAVE], what):
                continue
            wave = leading if not self._options.prunes else leading[:WAVE]
            looked_at = self._simulate([one.candidate for one in wave], what)
            found += looked_at
            pairs = zip(wave, looked_at, strict=True)
            best = max([best, *(self._worth(one.item, *_rated(each)) for one, each in pairs)])
            gone = {one.item for one in wave}
            left = [item for item in left if item not in gone]
        dropped = [Dropped(one.candidate, self._behind(one, best)) for one in self._all(left)]
        return found, dropped

    def highest(self, found: Sequence[Evaluated]) -> Worth:
        """Of units that were looked at."""
        each = (worth(*_rated(one), self._problem) for one in found)
        return max(each, default=NOTHING)

    def _is_enough(self, num_found: int, most: int | None) -> bool:
        return self._options.prunes and most is not None and num_found >= most

    def carried(self, group: Group) -> float:
        """What the group can carry at most, as far as it is known."""
        cap = self._limits.cap(group)
        if group in self.phases:
            return min(cap, SLACK * self.phases[group].rate.value)
        one = replace(group, count=1)
        if one in self.phases:
            load = min(SLACK * self.phases[one].rate.value / self._limits.cap(one), 1.0)
            return cap * pooled(load, group.count)
        return cap

    def measure(self, groups: Sequence[Group], what: str) -> bool:
        """Simulate phases alone; false when all of them are known already."""
        fresh = [group for group in dict.fromkeys(groups) if self._is_open(group)]
        tasks = [self._phase_task(group) for group in fresh]
        self.phases.update(zip(fresh, self._crew.goodputs(tasks, what), strict=True))
        return bool(fresh)

    def _is_open(self, group: Group) -> bool:
        """A phase without a cap has nothing to do: nobody decodes after a single token."""
        is_known = group in self.phases or group.role not in PARTS
        return not is_known and math.isfinite(self._limits.cap(group))

    def setup(self, candidate: Candidate) -> Setup:
        return Setup(candidate.groups, crosses_nodes(candidate, self._problem.cluster))

    def _leading(self, items: Sequence[Item], best: Worth) -> list[Leading]:
        ranked = self._all(items)
        if not self._options.prunes:
            return ranked
        return [one for one in ranked if one.bound > 0 and one.worth >= best]

    def _all(self, items: Sequence[Item]) -> list[Leading]:
        """The highest bounds first; of equal ones those of fewer devices."""
        leading = [one for item in items if (one := self._composed(item)) is not None]
        return sorted(leading, key=_first)

    def _composed(self, item: Item) -> Leading | None:
        candidate = self._by_ratio(item.candidate) if item.is_flexible else item.candidate
        if candidate is None:
            return None
        bound = self._bound(candidate)
        return Leading(item, candidate, bound, self._worth(item, candidate, bound))

    def _worth(self, item: Item, candidate: Candidate, rate: float) -> Worth:
        """Counts that are free are found for a rate later on (`carrying`)."""
        if item.is_flexible:
            return True, rate / candidate.num_devices, rate / candidate.num_devices
        return worth(candidate, rate, self._problem)

    def _by_ratio(self, candidate: Candidate) -> Candidate | None:
        """The counts whose ratio suits the phases best, if they pack into the nodes; else the
        next. None where no counts do."""
        cluster = self._problem.cluster
        prefill, decode = candidate.groups
        counts = range(1, min(MAX_COUNT, cluster.num_devices) + 1)
        carried = [self.carried(replace(prefill, count=n)) for n in counts]
        taken = [self.carried(replace(decode, count=m)) for m in counts]
        devices = prefill.parallelism.num_workers, decode.parallelism.num_workers
        for n, m in _ranked_counts(devices, (carried, taken), cluster.num_devices):
            composed = counted(prefill.parallelism, decode.parallelism, (n, m))
            if max_copies(composed, cluster):
                return composed
        return None

    def _bound(self, candidate: Candidate) -> float:
        return min(self.carried(group) for group in candidate.groups)

    def _measure(self, leading: Sequence[Leading], what: str) -> bool:
        """Sharpen bounds: one instance of each shape first, then as many as the counts say."""
        groups = [group for one in leading for group in one.candidate.groups]
        if self.measure([replace(group, count=1) for group in groups], f"{what}: phases"):
            return True
        return self.measure(groups, f"{what}: phases")

    def _phase_task(self, group: Group) -> FindGoodput:
        is_near = group.role is Role.DECODE
        rate = (DECODE_SHARE if is_near else PREFILL_SHARE) * self.carried(group)
        setup, cap = Setup((group,), part=PARTS[group.role]), self._limits.cap(group)
        least = self._limits.settling(setup.groups, cap)
        return FindGoodput(setup, Depth.FIRST, rate, BEYOND * cap, least, is_near)

    def _simulate(self, candidates: Sequence[Candidate], what: str) -> list[Evaluated]:
        tasks = [self.task(candidate, Depth.FIRST) for candidate in candidates]
        found = self._crew.goodputs(tasks, f"{what}: placements")
        pairs = zip(candidates, found, strict=True)
        return [Evaluated(candidate, goodput, is_rough=True) for candidate, goodput in pairs]

    def task(self, candidate: Candidate, depth: Depth, near: float | None = None) -> FindGoodput:
        """Its goodput as a whole, sought near what is known."""
        rate, is_near = PREFILL_SHARE * self._bound(candidate), near is not None
        if near is not None:
            rate = near
        elif all(group in self.phases for group in candidate.groups):
            weakest = min(self.phases[group].rate.value for group in candidate.groups)
            rate, is_near = JOINT_SHARE * weakest, weakest > 0
        cap = self._limits.cap_of(candidate.groups)
        least = self._limits.settling(candidate.groups, cap)
        return FindGoodput(self.setup(candidate), depth, rate, BEYOND * cap, least, is_near)

    def _behind(self, one: Leading, best: Worth) -> str:
        told = f"{_carries(one.candidate, self)}: at most {one.per_device:.3g} per device"
        if one.worth[0] < best[0]:
            return f"{told}, too little for the rate on this cluster, where more was found"
        found = f"{told}, where {best[1]:.3g} was found"
        if one.worth < best:
            return found
        return f"{found} among the few with higher bounds that were simulated"


def _rated(found: Evaluated) -> tuple[Candidate, float]:
    return found.candidate, found.goodput.rate.value


def _first(one: Leading) -> tuple[bool, float, float, int]:
    fits, by_objective, per_device = one.worth
    return not fits, -by_objective, -per_device, one.candidate.num_devices


def _small_first(one: Leading) -> tuple[int, int]:
    """Bounds in steps of a tenth, then devices."""
    step = math.ceil(-math.log(max(one.per_device, 1e-12)) / math.log(1.1))
    return step, one.candidate.num_devices


def _carries(candidate: Candidate, hunt: Hunt) -> str:
    told = [f"{group.role} carries {hunt.carried(group):.3g}" for group in candidate.groups]
    return " and ".join(told) + " requests/s at most"


def pooled(load: float, count: int) -> float:
    """The load that so many servers with a common queue bear at most, at the wait that one has at
    `load`: waits go as 1 / (count * (1 - load)) under load (Sakasegawa 1977), and less before."""
    return 1 - (1 - load) / count


def _ranked_counts(
    devices: tuple[int, int], carried: tuple[list[float], list[float]], max_devices: int
) -> list[tuple[int, int]]:
    """The smallest of those as good as the best ratio; then the others, the best first."""
    scored = []
    for n, m in product(*(range(1, len(rates) + 1) for rates in carried)):
        num_devices = n * devices[0] + m * devices[1]
        if num_devices <= max_devices:
            score = min(carried[0][n - 1], carried[1][m - 1]) / num_devices
            scored.append((score, num_devices, (n, m)))
    enough = SAME * max((score for score, _, _ in scored), default=0.0)
    good = sorted((d, -score, counts) for score, d, counts in scored if score >= enough)
    rest = sorted((-score, d, counts) for score, d, counts in scored if score < enough)
    return [counts for _, _, counts in (*good, *rest)]
