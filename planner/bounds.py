"""What no schedule can beat, computed from latencies alone: floors of TTFT and TPOT, caps of rate.

A search asks these first: a shape below its floors is infeasible at any rate, and goodput lies
below the caps, usually by 15 to 30 %, which is what bursts and admission cost. So the caps place
the first runs and prune the hopeless; they are never an answer.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from planner.latency.interface import Chunk, LatencyModel, decode_pace
from planner.slo import Slo
from planner.workload.requests import Ints, Requests

NUM_QUANTILES = 64  # lengths are looked at through so many of their quantiles


class Limit(StrEnum):
    """What a decode batch runs into first."""

    SLO = "tpot"
    KV = "kv memory"
    ENGINE = "largest batch"


@dataclass(frozen=True)
class Pool:
    """What a decode instance holds at most: tokens in its KV cache, sequences in its batch."""

    kv_tokens: int
    max_batch: int


@dataclass(frozen=True)
class DecodeCap:
    """The rate that one decode instance sustains with its largest batch, and what limits it."""

    rate: float
    batch: int
    limit: Limit


def ttft_floor_s(latency: LatencyModel, requests: Requests, attainment: float) -> float:
    """The TTFT that the target share of prompts can meet at best: alone in an idle instance."""
    length = math.ceil(float(np.quantile(requests.input_tokens, attainment)))
    return _prefill_s(latency, length, 1) * latency.num_stages


def tpot_floor_s(
    latency: LatencyModel, requests: Requests, attainment: float, tokens_per_step: float = 1.0
) -> float:
    """The TPOT that the target share of requests can meet at best: alone in its batch.

    `tokens_per_step` is above one with speculative decoding. Requests of one token have no TPOT.
    """
    contexts = requests.input_tokens + requests.output_tokens / 2
    contexts = np.where(requests.output_tokens > 1, contexts, 0.0)
    context = float(np.quantile(contexts, attainment))
    if context == 0:
        return 0.0
    return _decode_s(latency, 1, context) / tokens_per_step


def prefill_rate_cap(latency: LatencyModel, requests: Requests, saturation_tokens: int) -> float:
    """1/E[S] of one prefill instance, where S is a prompt's share of the best batch it can be in.

    That batch holds prompts as long as itself, packed up to L_m. With pipeline stages a batch
    leaves in every time of the slowest one.
    """
    lengths = _quantiles(requests.input_tokens)
    shares_s = [_packed_s(latency, int(length), saturation_tokens) for length in lengths]
    mean_s = float(np.mean(shares_s)) * latency.slowest.prefill
    return 1 / mean_s if mean_s > 0 else math.inf


def decode_rate_cap(
    latency: LatencyModel,
    requests: Requests,
    pool: Pool,
    slo: Slo | None = None,
    tokens_per_step: float = 1.0,
) -> DecodeCap:
    """B / (E[steps] * step(B)) of one decode instance, B the least of three batches.

    The SLO's is the largest whose step meets the TPOT target; without an SLO the cap is that of
    stability. A request takes one step less than it has tokens: prefill draws the first one.
    """
    steps = np.maximum(requests.output_tokens - 1, 0) / tokens_per_step
    mean_steps = float(steps.mean())
    if mean_steps == 0:
        return DecodeCap(math.inf, pool.max_batch, Limit.ENGINE)
    context = mean_context(requests)
    batches = {Limit.ENGINE: pool.max_batch, Limit.KV: int(pool.kv_tokens / context)}
    if slo is not None:
        target_s = slo.tpot_s * tokens_per_step
        batches[Limit.SLO] = _largest_batch(latency, context, target_s, pool.max_batch)
    limit = min(batches, key=lambda name: batches[name])
    batch = batches[limit]
    if batch < 1:
        return DecodeCap(0.0, batch, limit)
    return DecodeCap(batch / (mean_steps * _decode_s(latency, batch, context)), batch, limit)


def mean_context(requests: Requests) -> float:
    """Mean length of a sequence in a decode batch: each request counts for as long as it stays."""
    steps = np.maximum(requests.output_tokens - 1, 0)
    if not steps.any():
        return float(requests.input_tokens.mean())
    contexts = requests.input_tokens + requests.output_tokens / 2
    return float((contexts * steps).sum() / steps.sum())


def _packed_s(latency: LatencyModel, length: int, saturation_tokens: int) -> float:
    """Least stage time per prompt over batches of equal ones; powers of two stand for all."""
    most = max(saturation_tokens // length, 1)
    counts = {most} | {2**power for power in range(most.bit_length())}
    return min(_prefill_s(latency, length, count) / count for count in counts)


def _largest_batch(latency: LatencyModel, context: float, target_s: float, most: int) -> int:
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        fits = _decode_s(latency, middle, context) <= target_s
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _prefill_s(latency: LatencyModel, length: int, count: int) -> float:
    """One stage's time."""
    return latency.prefill([Chunk(length)] * count).seconds


def _decode_s(latency: LatencyModel, batch: int, context: float) -> float:
    """Time of a token: all stages, each with its share of the batch as a micro-batch."""
    num_stages = latency.num_stages
    micro = math.ceil(batch / num_stages)
    step_s = latency.decode(micro, micro * context).seconds(micro * context) * num_stages
    return step_s * decode_pace(latency, math.ceil(batch / micro))


def _quantiles(lengths: Ints) -> Ints:
    """As many lengths that stand for all, the middle of each of the equal shares."""
    levels = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES
    return np.quantile(lengths, levels, method="inverted_cdf").astype(np.int64)
