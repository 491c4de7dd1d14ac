"""The paper's measured attainment curves (figures 8 and 9), and the same deployments simulated.

Each published point is one run of a few hundred requests, so what it is compared with is not the
long-run attainment but the spread of as many requests over many seeds.
"""

from collections.abc import Sequence
from functools import cache

import msgspec
import numpy as np

from ipc.vocabulary import Parallelism, Role
from planner.deployment import Group, Settings, service
from planner.intervals import student_t
from planner.json_files import shipped_json
from planner.latency.choose import Knowledge
from planner.simulator.run import simulate
from planner.simulator.service import Service
from planner.slo import Slo
from planner.workload.catalogue import parse_workload
from planner.workload.lengths import LengthRules
from planner.workload.workload import Workload

# What stands for each engine: its kernels as measured, and for vLLM the engine's own seconds. The
# paper's experiments gave vLLM 16,384 tokens a batch, and every engine 1,024 sequences.
COEFFICIENTS = {"distserve": "distserve-raw", "vllm": "vllm-added"}
VLLM_PREFILL_TOKENS = 16_384
MAX_BATCH = 1024
MAX_TOTAL_TOKENS = 2048  # positions of OPT


class PublishedInstance(msgspec.Struct, frozen=True):
    """One instance of a curve's deployment."""

    role: Role
    tp: int
    pp: int


class PublishedPoint(msgspec.Struct, frozen=True, array_like=True):
    """Percent of requests that met both targets; `tolerance` is of the reading."""

    per_device_rate: float
    attainment: float
    tolerance: float


class PublishedCurve(msgspec.Struct, frozen=True):
    """One engine in one experiment. `num_requests` of each run, where it is known."""

    model: str
    workload: str
    engine: str
    num_devices: int
    instances: tuple[PublishedInstance, ...]
    ttft_s: float
    tpot_s: float
    num_requests: int | None
    points: tuple[PublishedPoint, ...]

    @property
    def groups(self) -> tuple[Group, ...]:
        return tuple(Group(i.role, 1, Parallelism(i.tp, i.pp)) for i in self.instances)

    @property
    def slo(self) -> Slo:
        return Slo(self.ttft_s, self.tpot_s)

    def goodput(self, target: float = 90.0) -> float:
        """Rate per device at which the measured line crosses the target."""
        rates = [point.per_device_rate for point in self.points]
        return crossing(rates, [point.attainment for point in self.points], target)


class _Published(msgspec.Struct, frozen=True):
    curves: tuple[PublishedCurve, ...]


class SimulatedPoint(msgspec.Struct, frozen=True):
    """Over the seeds, in percent: the mean, and where one more run would lie in 95 of 100 cases."""

    per_device_rate: float
    mean: float
    low: float
    high: float

    @property
    def is_decided(self) -> bool:
        """The band is narrow enough to say something."""
        return self.high - self.low <= 10

    def holds(self, point: PublishedPoint) -> bool:
        """Whether the measured value may be one more run, up to its reading."""
        return self.low - point.tolerance <= point.attainment <= self.high + point.tolerance


@cache
def published_curves() -> tuple[PublishedCurve, ...]:
    """All that are shipped, DistServe's, vLLM's and DeepSpeed-MII's."""
    return shipped_json("planner", "paper_attainment.json", _Published).curves


def published_curve(model: str, workload: str, engine: str) -> PublishedCurve:
    """The one of that experiment and engine."""
    wanted = (model, workload, engine)
    return next(c for c in published_curves() if (c.model, c.workload, c.engine) == wanted)


def paper_service(curve: PublishedCurve) -> Service:
    """The curve's deployment on A100s, by the published coefficients of its engine."""
    tokens = VLLM_PREFILL_TOKENS if curve.engine == "vllm" else None
    known = Knowledge(curve.model, profile=COEFFICIENTS[curve.engine])
    return service(known, curve.groups, Settings(prefill_tokens=tokens, max_batch=MAX_BATCH))


def paper_load(name: str) -> Workload:
    """Under the limit of OPT's positions."""
    return parse_workload(name, rules=LengthRules(max_total_tokens=MAX_TOTAL_TOKENS))


def simulated_curve(curve: PublishedCurve, seeds: Sequence[int]) -> list[SimulatedPoint]:
    """The curve's rates, each with one run of `num_requests` for every seed."""
    assert curve.num_requests is not None, "a curve whose number of requests is known"
    setup = paper_service(curve)
    load = paper_load(curve.workload)
    simulated = []
    for point in curve.points:
        rate = point.per_device_rate * curve.num_devices
        shares = [
            100 * simulate(setup, load.requests(curve.num_requests, rate, seed)).meets(curve.slo)
            for seed in seeds
        ]
        found = one_more_run([share.mean() for share in shares])
        simulated.append(SimulatedPoint(point.per_device_rate, *found))
    return simulated


def crossing(rates: Sequence[float], shares: Sequence[float], target: float) -> float:
    """The rate at which the line through the points first falls below the target."""
    for k in range(1, len(rates)):
        if shares[k] < target <= shares[k - 1]:
            slope = (rates[k] - rates[k - 1]) / (shares[k - 1] - shares[k])
            return rates[k - 1] + (shares[k - 1] - target) * slope
    return rates[-1] if shares[-1] >= target else 0.0


def one_more_run(percents: Sequence[float]) -> tuple[float, float, float]:
    """The mean, and a prediction interval: where one more run would lie in 95 of 100 cases, as a
    normal sample has it, within what is possible."""
    mean, count = float(np.mean(percents)), len(percents)
    deviation = float(np.std(percents, ddof=1)) * (1 + 1 / count) ** 0.5
    reach = student_t(0.975, count - 1) * deviation
    return mean, max(0.0, mean - reach), min(100.0, mean + reach)
