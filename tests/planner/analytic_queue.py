"""A service whose answers are known on paper: one server, constant prefill, free decode.

Lindley's recursion gives every wait at once (W[n+1] = max(0, W[n] + S - gap)), so that hundreds
of runs take a second. The decode side takes a fixed time a token.
"""

import numpy as np

from planner.simulator.timeline import Timeline
from planner.verdict import Run
from planner.workload.requests import Floats, Requests

OUTPUT_TOKENS = 11


def poisson(num_requests: int, rate: float, seed: int) -> Requests:
    """The same unit-rate gaps at every rate; a longer draw begins with the shorter one."""
    gaps_s = np.random.default_rng(seed).exponential(1.0, num_requests) / rate
    ones = np.ones(num_requests, dtype=np.int64)
    return Requests(np.cumsum(gaps_s), 100 * ones, OUTPUT_TOKENS * ones)


def waits_s(arrival_s: Floats, service_s: float) -> Floats:
    excess_s = np.concatenate([[0.0], np.cumsum(service_s - np.diff(arrival_s))])
    return excess_s - np.minimum.accumulate(excess_s)


def served(prefill_s: float = 1.0, token_s: float = 0.01) -> Run:
    """M/D/1 prefill, when arrivals are Poisson."""

    def run(requests: Requests) -> Timeline:
        start_s = requests.arrival_s + waits_s(requests.arrival_s, prefill_s)
        end_s = start_s + prefill_s
        last_s = end_s + token_s * (requests.output_tokens - 1)
        return Timeline(requests, end_s, last_s, start_s, end_s, end_s, end_s, end_s)

    return run


def counted(run: Run) -> tuple[Run, list[int]]:
    """The same service, and how many requests each of its runs had."""
    sizes: list[int] = []

    def counting(requests: Requests) -> Timeline:
        sizes.append(len(requests))
        return run(requests)

    return counting, sizes
