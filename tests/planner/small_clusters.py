"""Small placement problems with a latency model of straight lines: searches take no time."""

from ipc.vocabulary import Parallelism
from planner.cluster import Cluster
from planner.deployment import Settings
from planner.latency.choose import Knowledge
from planner.latency.interface import LatencyModel
from planner.placement.choices import Affinity, Objective, Problem
from planner.placement.options import Options
from planner.slo import Slo
from planner.verdict import Effort
from planner.workload.catalogue import parse_workload
from tests.planner.line_model import LineModel

QUICK = Effort(400, 400)


def lines(known: Knowledge, parallelism: Parallelism) -> LatencyModel:
    """Two ranks are 1.6 times as fast as one."""
    speed = parallelism.tp**0.7
    return LineModel(
        prefill_s=(0.01 / speed, 150e-6 / speed),
        decode_s=(0.02 / speed, 0.3e-6 / speed, 100e-6 / speed),
        num_stages=parallelism.pp,
    )


def small_problem(
    num_nodes: int = 1,
    per_node: int = 4,
    *,
    affinity: Affinity = Affinity.HIGH,
    objective: Objective = Objective.GOODPUT,
    slo: Slo | None = None,
    rate: float | None = None,
    workload: str = "synthetic:300..700,10..30",
    kv_tokens: int = 20_000,
    price: float | None = None,
) -> Problem:
    return Problem(
        known=Knowledge("opt-1.3b"),
        cluster=Cluster(num_nodes, per_node, "a100-sxm4-80gb"),
        workload=parse_workload(workload),
        slo=slo or Slo(0.3, 0.035),
        affinity=affinity,
        objective=objective,
        settings=Settings(kv_tokens=kv_tokens, max_batch=64),
        rate=rate,
        device_hour_price=price,
        max_degree=2,
    )


def quick(**more: object) -> Options:
    given = {
        "first": QUICK,
        "final": QUICK,
        "num_processes": 1,
        "with_baselines": False,
        "with_sensitivity": False,
        "chunk_tokens": (512,),
        "choose": lines,
    } | more
    return Options(**given)  # type: ignore[arg-type]
