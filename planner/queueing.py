"""Queues on paper: the paper's Eq. 1 to 3, and the textbook formulas around them.

They bound a search before anything is simulated, and check the simulator where it must agree
with them: Poisson arrivals, first come first served, one server, no batching. An overloaded
queue waits for ever: infinity, not an error. Rates are requests per second, times seconds.
"""

import math

import numpy as np
from scipy import special

from planner.errors import TargetError
from planner.workload.requests import Floats


def single_ttft_s(rate: float, prefill_s: float, num_replicas: int = 1) -> float:
    """Mean TTFT of M/D/1 prefill, D + R*D^2 / (2*(1 - R*D)) (arXiv 2401.09670, Eq. 1).

    Stable below 1/D. Replicas take random shares of the arrivals, R/N each.
    """
    return prefill_s + mg1_wait_s(rate / num_replicas, prefill_s)


def inter_op_ttft_s(rate: float, prefill_s: float, num_replicas: int = 1) -> float:
    """Mean TTFT over two pipeline stages, D + R*D^2 / (4*(2 - R*D)) (Eq. 2). Stable below 2/D.

    Each stage takes D/2; the first one spaces the prompts out, so they wait once.
    """
    return prefill_s + mg1_wait_s(rate / num_replicas, prefill_s / 2)


def intra_op_ttft_s(rate: float, prefill_s: float, speedup: float, num_replicas: int = 1) -> float:
    """Mean TTFT of two-way tensor parallelism, D/K + R*D^2 / (2*K*(K - R*D)) (Eq. 3).

    `speedup` is K, between 1 and 2. Stable below K/D.
    """
    if speedup <= 0:
        raise TargetError(f"a speed-up must be above zero, not {speedup:g}")
    return single_ttft_s(rate, prefill_s / speedup, num_replicas)


def crossover_rate(prefill_s: float, speedup: float) -> float:
    """The rate from which pipeline stages give a lower mean TTFT than tensor parallelism.

    Eq. 2 = Eq. 3 in x = R*D comes to x^2 - (K+2)*x + 8*K*(K-1)/(3*K-2) = 0; the smaller root is
    the one below both limits: 0 without a speed-up, 2/D with a perfect one.
    """
    if not 1 <= speedup <= 2:
        raise TargetError(f"the speed-up of two devices lies between 1 and 2, not {speedup:g}")
    product = 8 * speedup * (speedup - 1) / (3 * speedup - 2)
    total = speedup + 2
    return (total - math.sqrt(max(total**2 - 4 * product, 0.0))) / 2 / prefill_s


def mg1_wait_s(rate: float, mean_s: float, service_scv: float = 0.0) -> float:
    """Mean wait for general service times and Poisson arrivals (Pollaczek-Khinchine).

    `service_scv` is their squared coefficient of variation, 0 for constant ones.
    """
    return kingman_wait_s(rate, mean_s, service_scv=service_scv)


def kingman_wait_s(
    rate: float, mean_s: float, *, arrival_scv: float = 1.0, service_scv: float
) -> float:
    """Mean wait for any renewal arrivals (Kingman 1961): exact for Poisson, close under load."""
    load = _load(rate, mean_s)
    if load >= 1:
        return math.inf
    return load / (1 - load) * (arrival_scv + service_scv) / 2 * mean_s


def md1_wait_share(rate: float, service_s: float, wait_s: float) -> float:
    """P(wait <= wait_s) of M/D/1, by Franx's formula (2001): sums of positive terms only, so it
    holds its digits where Erlang's alternating series has none left."""
    load = _load(rate, service_s)
    if load >= 1 or wait_s < 0:
        return 0.0
    intervals = int(wait_s / service_s) + 1
    waiting = np.cumsum(_md1_in_system(load, intervals))[1:]  # P(at most 0, 1, ... wait)
    mean_arrivals = load * (intervals - wait_s / service_s)
    counts = np.arange(intervals)
    arrivals = np.exp(
        special.xlogy(counts, mean_arrivals) - mean_arrivals - special.gammaln(counts + 1)
    )
    return float(min(waiting[intervals - 1 :: -1] @ arrivals, 1.0))


def md1_wait_percentile_s(rate: float, service_s: float, level: float) -> float:
    """The wait that a share `level` of the requests does not exceed, to a millionth of a
    service time."""
    if not 0 < level < 1:
        raise TargetError(f"a percentile's level lies between 0 and 1, not {level:g}")
    if _load(rate, service_s) >= 1:
        return math.inf
    low_s, high_s = 0.0, service_s
    while md1_wait_share(rate, service_s, high_s) < level:
        low_s, high_s = high_s, 2 * high_s
    while high_s - low_s > 1e-6 * service_s:
        middle_s = (low_s + high_s) / 2
        enough = md1_wait_share(rate, service_s, middle_s) >= level
        low_s, high_s = (low_s, middle_s) if enough else (middle_s, high_s)
    return high_s if low_s > 0 or md1_wait_share(rate, service_s, 0.0) < level else 0.0


def _md1_in_system(load: float, up_to: int) -> Floats:
    """P(0), P(1), ... P(up_to) requests in the system.

    Up- and down-crossings of each level balance (Ramaswami 1988), which again adds and never
    subtracts: p[n]*P(no arrival) = p[0]*P(A >= n) + sum over i of p[i]*P(A >= n - i + 1).
    """
    at_least = special.gammainc(np.arange(up_to + 2), load)  # P(A >= n) of Poisson arrivals
    at_least[0] = 1.0
    shares = np.empty(up_to + 1)
    shares[0] = 1 - load
    for n in range(1, up_to + 1):
        upwards = shares[0] * at_least[n] + shares[1:n] @ at_least[n:1:-1]
        shares[n] = upwards * math.exp(load)
    return shares


def _load(rate: float, service_s: float) -> float:
    if not (rate >= 0 and service_s > 0):
        raise TargetError(
            f"a queue needs a rate of at least zero and a service time above it, "
            f"not {rate:g}/s and {service_s:g} s"
        )
    return rate * service_s
