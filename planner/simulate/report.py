"""What a prediction says: one run, a curve, a sweep or a goodput, and what it was made from."""

from collections import Counter

import msgspec
import numpy as np

from planner.bench.report import Latencies, latencies
from planner.goodput import Goodput, ScaleSweep
from planner.intervals import Interval, percentile, share
from planner.latency.interface import Chunk
from planner.simulate.build import Built
from planner.simulate.outlook import Outlook
from planner.simulate.use import Use, use_of
from planner.simulator.service import InstanceModel
from planner.simulator.timeline import Timeline
from planner.slo import Slo
from planner.verdict import Verdict, margins, queue_growth
from planner.workload.requests import Requests

MIN_FOR_GROWTH = 100  # requests; fewer say nothing about whether a queue grows
PROBED_LEVELS = (0.05, 0.5, 0.95)  # quantiles of the lengths at which sources are asked for
PROBED_BATCHES = (1, 16)


class Instances(msgspec.Struct, frozen=True):
    """Equal instances. `sources` says who answered for their step times, the most used first;
    `plans_ahead`, whether the next step is launched while one runs."""

    role: str
    count: int
    tp: int
    pp: int
    prefill_tokens: int
    prefill_policy: str
    max_batch: int
    kv_tokens: int
    chunk_tokens: int | None
    rules: str
    sources: list[str]
    plans_ahead: bool = False


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One rate. Shares are over the `num_counted` requests of the run that count."""

    rate: float
    verdict: Verdict
    is_stable: bool
    queue_growth: float
    num_requests: int
    num_counted: int
    num_preemptions: int
    attainment: Interval
    ttft_attainment: Interval
    tpot_attainment: Interval
    minimal_scale: Interval
    latencies: Latencies
    use: Use | None


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints; of the last four, those that were asked for."""

    model: str
    workload: str
    ttft_target_s: float
    tpot_target_s: float
    target: float
    num_devices: int
    instances: list[Instances]
    max_total_tokens: int
    bounds: Outlook
    notes: list[str]
    took_s: float
    goodput: Goodput | None = None
    runs: list[Run] = []
    scales: ScaleSweep | None = None


def run_report(
    timeline: Timeline,
    counted: slice,
    slo: Slo,
    built: Built,
    found: tuple[Verdict, Interval] | None = None,
) -> Run:
    """Everything about one run.

    Args:
        found: what longer deliberation has found already; else the interval of these decides.
    """
    margin = margins(timeline, slo)[counted]
    ttft_s, tpot_s = timeline.ttft_s[counted], timeline.tpot_s[counted]
    attainment = found[1] if found else share(margin <= 1, margin)
    growth, grows = queue_growth(timeline) if len(timeline) >= MIN_FOR_GROWTH else (0.0, False)
    return Run(
        rate=timeline.requests.rate,
        verdict=found[0] if found else _verdict(attainment, slo),
        is_stable=not grows,
        queue_growth=growth,
        num_requests=len(timeline),
        num_counted=len(margin),
        num_preemptions=timeline.num_preemptions,
        attainment=attainment,
        ttft_attainment=share(ttft_s <= slo.ttft_s, ttft_s),
        tpot_attainment=share(tpot_s <= slo.tpot_s, tpot_s),
        minimal_scale=percentile(margin, slo.attainment),
        latencies=latencies(timeline.part(counted)),
        use=use_of(timeline, built, keeps_up=not grows),
    )


def instances(built: Built, sample: Requests) -> list[Instances]:
    """The deployment as it was understood."""
    return [
        Instances(
            role=str(group.role),
            count=group.count,
            tp=group.parallelism.tp,
            pp=group.parallelism.pp,
            prefill_tokens=model.limits.prefill_tokens,
            prefill_policy=str(model.limits.prefill_policy),
            max_batch=model.limits.max_batch,
            kv_tokens=model.kv_blocks * built.service.block_size,
            chunk_tokens=group.chunk_tokens,
            rules=str(group.rules),
            sources=_sources(model, sample),
            plans_ahead=model.plans_ahead,
        )
        for group, model in built.groups
    ]


def _sources(model: InstanceModel, sample: Requests) -> list[str]:
    """Asked for short, usual and long requests, alone and in a batch."""
    found: Counter[str] = Counter()
    inputs, totals = sample.input_tokens, sample.input_tokens + sample.output_tokens
    for level in PROBED_LEVELS:
        if model.role.prefills:
            prompt = max(1, int(np.quantile(inputs, level)))
            found[model.latency.prefill([Chunk(prompt)]).source] += 1
        if model.role.decodes:
            context = float(np.quantile(totals, level))
            for batch in PROBED_BATCHES:
                found[model.latency.decode(batch, batch * context).source] += 1
    return [str(source) for source, _ in found.most_common()]


def _verdict(attainment: Interval, slo: Slo) -> Verdict:
    if attainment.low > slo.attainment:
        return Verdict.MEETS
    return Verdict.MISSES if attainment.high < slo.attainment else Verdict.UNDECIDED
