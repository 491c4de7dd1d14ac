"""What is known of each shape on the cluster's device: its instance as the simulator takes it.

Pulls go over the link within a node. A candidate that no node has room for pulls across nodes by
the sheet's slower link, also where affinity is high: the paper's Algorithm 1 takes fast links
everywhere for granted, and where the sheet has them, nothing changes.
"""

from dataclasses import replace

from ipc.vocabulary import Parallelism
from planner.deployment import Group, instance_model
from planner.errors import ProfileError
from planner.latency.choose import Knowledge
from planner.latency.interface import LatencyModel
from planner.latency.pull import WithPull, pull_over
from planner.model_catalog import model_shape
from planner.placement.candidates import crosses_nodes
from planner.placement.choices import Candidate, Problem
from planner.placement.options import Options
from planner.simulator.service import InstanceModel, Service


class KnownShapes:
    """Instances by group, each made once."""

    def __init__(self, problem: Problem, options: Options) -> None:
        self._problem = problem
        self._choose = options.choose
        self._allows_roofline = options.allows_roofline
        self._here = replace(problem.known, device=problem.cluster.device)
        # A device beside a profile or a table would answer for shapes that those do not know.
        is_profiled = problem.known.profile is not None or bool(problem.known.tables)
        self._known = replace(problem.known, device=None) if is_profiled else self._here
        self._latencies: dict[Parallelism, LatencyModel] = {}
        self._instances: dict[Group, InstanceModel] = {}

    def instance(self, group: Group) -> InstanceModel:
        """One instance of the group.

        Raises:
            InfeasibleShape: it does not fit its devices, with the reason.
            ProfileError: nothing is known of its shape.
        """
        one = replace(group, count=1)
        if one not in self._instances:
            latency = self._latency(group.parallelism)
            self._instances[one] = instance_model(self._here, one, self._problem.settings, latency)
        return self._instances[one]

    def service(self, groups: tuple[Group, ...], *, across_nodes: bool = False) -> Service:
        """All instances of the groups."""
        instances: list[InstanceModel] = []
        for group in groups:
            one = self.instance(group)
            if across_nodes:
                one = replace(one, latency=self._far(one.latency, group.parallelism))
            instances += [one] * group.count
        settings = self._problem.settings
        return Service(
            instances=tuple(instances),
            block_size=settings.memory.block_size,
            overheads=settings.overheads,
            shares_link=settings.shares_link,
            pull_stalls_decode=settings.pull_stalls_decode,
            speculation=settings.speculation,
        )

    def unit(self, candidate: Candidate) -> Service:
        """One copy of the candidate on the problem's cluster."""
        across_nodes = crosses_nodes(candidate, self._problem.cluster)
        return self.service(candidate.groups, across_nodes=across_nodes)

    def _latency(self, parallelism: Parallelism) -> LatencyModel:
        if parallelism not in self._latencies:
            model = self._best_known(parallelism)
            self._latencies[parallelism] = model if _can_pull(model) else self._near(parallelism)
        return self._latencies[parallelism]

    def _best_known(self, parallelism: Parallelism) -> LatencyModel:
        try:
            return self._choose(self._known, parallelism)
        except ProfileError:
            if not self._allows_roofline:
                raise
            bare = Knowledge(self._known.model, device=self._problem.cluster.device)
            return self._choose(bare, parallelism)

    def _near(self, parallelism: Parallelism) -> LatencyModel:
        sheet, shape = self._problem.cluster.sheet, model_shape(self._known.model)
        return WithPull(self._best_known(parallelism), pull_over(sheet, shape, parallelism))

    def _far(self, model: LatencyModel, parallelism: Parallelism) -> LatencyModel:
        sheet, shape = self._problem.cluster.sheet, model_shape(self._known.model)
        return WithPull(model, pull_over(sheet, shape, parallelism, across_nodes=True))


def _can_pull(model: LatencyModel) -> bool:
    try:
        model.transfer(1)
    except ProfileError:
        return False
    return True
