"""What the latencies alone say before anything is simulated: floors of TTFT and TPOT, rate caps.

They place the first run of a search, and where the goodput is zero they say why.
"""

import math

import msgspec

from ipc.vocabulary import Role
from planner.bounds import (
    Pool,
    decode_rate_cap,
    prefill_rate_cap,
    tpot_floor_s,
    ttft_floor_s,
)
from planner.deployment import Group
from planner.rate_search import LOWEST_SHARE, Search
from planner.simulate.build import Built
from planner.simulator.service import InstanceModel
from planner.slo import Slo
from planner.workload.requests import Requests

CLOSE = 0.7  # goodput lies 15 to 30 % below the caps


class Outlook(msgspec.Struct, frozen=True):
    """Floors and caps of the whole service.

    Args:
        ttft_floor_s, tpot_floor_s: of the target share of the requests, each alone in the best
            instance.
        prefill_cap, decode_cap: requests per second of all instances together; the decode cap is
            under the TPOT target, with the batch and what limits it.
        rate_cap: the least of both; of mixed instances, what their time allows if each phase has
            its own share (chunked prefill may do a little better: it reads weights once for both).
    """

    ttft_floor_s: float
    tpot_floor_s: float
    prefill_cap: float
    decode_cap: float
    decode_batch: int
    decode_limit: str
    rate_cap: float


def outlook(built: Built, requests: Requests, slo: Slo, tokens_per_step: float) -> Outlook:
    """From a sample of the requests; their arrivals do not matter."""
    prefills = [(group, model) for group, model in built.groups if group.role.prefills]
    decodes = [(group, model) for group, model in built.groups if group.role.decodes]
    caps = [
        (group, decode_rate_cap(model.latency, requests, _pool(built, model), slo, tokens_per_step))
        for group, model in decodes
    ]
    ones = [
        (group, prefill_rate_cap(model.latency, requests, model.limits.prefill_tokens))
        for group, model in prefills
    ]
    by_prefill = _totals(ones)
    by_decode = _totals([(group, cap.rate) for group, cap in caps])
    largest = max((cap for _, cap in caps), key=lambda cap: cap.rate)
    share = slo.attainment
    return Outlook(
        ttft_floor_s=min(ttft_floor_s(m.latency, requests, share) for _, m in prefills),
        tpot_floor_s=min(
            tpot_floor_s(m.latency, requests, share, tokens_per_step) for _, m in decodes
        ),
        prefill_cap=sum(by_prefill),
        decode_cap=sum(by_decode),
        decode_batch=largest.batch,
        decode_limit=str(largest.limit),
        rate_cap=_rate_cap(by_prefill, by_decode),
    )


def first_search(found: Outlook) -> Search:
    """Begin a little below the caps."""
    guess = CLOSE * found.rate_cap
    if not 0 < guess < math.inf:
        guess = CLOSE * found.prefill_cap if 0 < found.prefill_cap < math.inf else 1.0
    guess = float(f"{guess:.2g}")  # it is shown: a round one reads better
    return Search(guess=guess, lowest=guess * LOWEST_SHARE, highest=guess * 1e4)


def reasons(found: Outlook, slo: Slo) -> list[str]:
    """Why no rate at all can meet the targets; empty where the floors do not say."""
    told = []
    share = f"{slo.attainment:.0%} of the requests"
    if found.ttft_floor_s > slo.ttft_s:
        told.append(
            f"TTFT: within {1000 * found.ttft_floor_s:.4g} ms at best for {share}, each alone in "
            f"an idle instance; the target is {1000 * slo.ttft_s:g} ms"
        )
    if found.tpot_floor_s > slo.tpot_s:
        told.append(
            f"TPOT: within {1000 * found.tpot_floor_s:.4g} ms at best for {share}, each alone in "
            f"its batch; the target is {1000 * slo.tpot_s:g} ms"
        )
    return told


def _pool(built: Built, model: InstanceModel) -> Pool:
    return Pool(model.kv_blocks * built.service.block_size, model.limits.max_batch)


def _totals(rates: list[tuple[Group, float]]) -> tuple[float, float]:
    """Of the instances that do this phase alone, and of the mixed ones."""
    pure = sum(group.count * rate for group, rate in rates if group.role is not Role.MIXED)
    mixed = sum(group.count * rate for group, rate in rates if group.role is Role.MIXED)
    return pure, mixed


def _rate_cap(prefill: tuple[float, float], decode: tuple[float, float]) -> float:
    """Mixed instances give the share of their time to prefill that lets both phases keep up."""
    (pure_prefill, mixed_prefill), (pure_decode, mixed_decode) = prefill, decode
    ends = min(sum(prefill), sum(decode))
    whole = mixed_prefill + mixed_decode
    if not 0 < whole < math.inf:
        return ends
    share = min(max((sum(decode) - pure_prefill) / whole, 0.0), 1.0)
    return min(pure_prefill + share * mixed_prefill, pure_decode + (1 - share) * mixed_decode, ends)
