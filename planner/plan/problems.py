"""From what is asked to what is searched: the cluster, the load that the model can take, problems.

One problem for each affinity; they share everything else.
"""

from dataclasses import dataclass

from planner.arguments import Load
from planner.cluster import Cluster
from planner.errors import PlannerError
from planner.model_catalog import model_shape
from planner.placement.choices import Problem
from planner.plan.options import Asked
from planner.workload.lengths import Lengths, Overlong, TableLengths
from planner.workload.requests import Ints
from planner.workload.workload import Workload

NUM_SAMPLED = 10_000  # of lengths that come from parameters


@dataclass(frozen=True)
class Problems:
    """What is searched, and what a reader must know about it, in whole sentences."""

    each: tuple[Problem, ...]
    max_total_tokens: int
    notes: tuple[str, ...]

    @property
    def first(self) -> Problem:
        """For what they share."""
        return self.each[0]


def problems(asked: Asked) -> Problems:
    """Check what is asked in substance.

    Raises:
        PlannerError: the model, the cluster or the load cannot be; says why.
    """
    nodes = asked.nodes
    cluster = Cluster(nodes.count, nodes.devices_each, nodes.device)
    limit = model_shape(asked.known.model).max_positions
    limit = min(asked.load.rules.max_total_tokens or limit, limit)
    workload = asked.load.limited(limit).parsed()
    rate = asked.rate or workload.own_rate
    if rate == float("inf"):
        raise PlannerError(f"{workload.name}: all requests arrive at once: give a --rate")
    each = tuple(
        Problem(
            known=asked.known,
            cluster=cluster,
            workload=workload,
            slo=asked.slo,
            affinity=affinity,
            objective=asked.objective,
            settings=asked.settings,
            rate=rate,
            device_hour_price=asked.device_hour_price,
            seed=asked.load.seed,
            max_degree=asked.max_degree,
        )
        for affinity in asked.affinities
    )
    return Problems(each, limit, tuple(_notes(asked, workload, limit)))


def _notes(asked: Asked, workload: Workload, limit: int) -> list[str]:
    notes = []
    if asked.rate is None and workload.own_rate is not None:
        notes.append(f"the rate is the trace's own, {workload.own_rate:.3g} requests per second")
    total_tokens = _total_tokens(asked.load)
    num_over = int((total_tokens > limit).sum())
    if num_over:
        fate = "left out" if asked.load.rules.overlong is Overlong.DROP else "cut"
        notes.append(
            f"{num_over} of {len(total_tokens)} requests of {workload.name} are longer than "
            f"{limit} tokens and were {fate}"
        )
    return notes


def _total_tokens(load: Load) -> Ints:
    """Of all rows there are, or of a sample."""
    lengths: Lengths = load.limited(None).parsed().lengths
    if isinstance(lengths, TableLengths):
        return lengths.input_tokens + lengths.output_tokens
    inputs, outputs = lengths.draw(NUM_SAMPLED, load.seed)
    return inputs + outputs
