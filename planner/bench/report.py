"""What a run says: latencies, stages, attainment with intervals, failures, and its own limits."""

from collections import Counter

import msgspec
import numpy as np

from planner.bench.live_run import LiveRun
from planner.intervals import Interval, share
from planner.simulator.timeline import Timeline
from planner.slo import Slo
from planner.verdict import margins
from planner.workload.requests import Bools, Floats

# A client that sends this much too late, or this busy, does not keep up.
_LATE_SHARE_OF_TTFT = 0.05
_BUSY = 0.8


class Distribution(msgspec.Struct, frozen=True):
    """Of some seconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values_s: Floats) -> "Distribution | None":
        """None where nothing is known."""
        known = values_s[~np.isnan(values_s)]
        if not len(known):
            return None
        p50, p90, p99 = np.percentile(known, (50, 90, 99))
        return cls(float(known.mean()), float(p50), float(p90), float(p99))


class Failed(msgspec.Struct, frozen=True):
    """How many failed in one way, and what the first of them said."""

    count: int
    example: str


class Latencies(msgspec.Struct, frozen=True):
    """Of the requests that have an answer, live or simulated. TPOT is of those with two tokens or
    more; a stage that nobody tells is missing."""

    ttft_s: Distribution | None
    tpot_s: Distribution | None
    end_to_end_s: Distribution | None
    stages_s: dict[str, Distribution]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One run under one SLO. `rate` is of the arrivals, the others of what was answered."""

    rate: float
    num_requests: int
    num_answered: int
    failures: dict[str, Failed]
    duration_s: float
    answers_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    ttft_target_s: float
    tpot_target_s: float
    attainment: Interval
    ttft_attainment: Interval
    tpot_attainment: Interval
    latencies: Latencies
    inter_token_s: Distribution | None
    lateness_s: Distribution | None
    client_cpu: float | None
    notes: list[str]


def latencies(timeline: Timeline) -> Latencies:
    """The same figures for a simulated and a live run."""
    has_steps = timeline.requests.output_tokens > 1
    stages = {name: Distribution.of(values) for name, values in timeline.stages_s().items()}
    if stages["prefill"] is None:
        stages = {}
    return Latencies(
        ttft_s=Distribution.of(timeline.ttft_s),
        tpot_s=Distribution.of(timeline.tpot_s[has_steps]),
        end_to_end_s=Distribution.of(timeline.last_token_s - timeline.requests.arrival_s),
        stages_s={name: stage for name, stage in stages.items() if stage is not None},
    )


def summarise(run: LiveRun, slo: Slo) -> Summary:
    """Everything there is to say; a request that failed misses both targets."""
    answered = run.timeline.requests
    return Summary(
        rate=run.requests.rate,
        num_requests=len(run),
        num_answered=len(answered),
        failures=_failures(run),
        duration_s=run.duration_s,
        answers_per_s=len(answered) / run.duration_s,
        input_tokens_per_s=float(answered.input_tokens.sum()) / run.duration_s,
        output_tokens_per_s=float(answered.output_tokens.sum()) / run.duration_s,
        ttft_target_s=slo.ttft_s,
        tpot_target_s=slo.tpot_s,
        attainment=share(*judged(run, margins(run.timeline, slo), 1.0)),
        ttft_attainment=share(*judged(run, run.timeline.ttft_s, slo.ttft_s)),
        tpot_attainment=share(*judged(run, run.timeline.tpot_s, slo.tpot_s)),
        latencies=latencies(run.timeline),
        inter_token_s=Distribution.of(run.gaps_s),
        lateness_s=Distribution.of(run.lateness_s),
        client_cpu=_client_cpu(run),
        notes=_notes(run, slo),
    )


def judged(run: LiveRun, of_answered: Floats, limit: float) -> tuple[Bools, Floats]:
    """Which of all requests stay within the limit, and the values that decide it; a request that
    failed is beyond any."""
    values = np.full(len(run), np.inf)
    values[run.is_answered] = of_answered
    return values <= limit, values


def keeps_up(run: LiveRun, slo: Slo) -> bool:
    """Whether the client sent its requests in time."""
    lateness_s = run.lateness_s[~np.isnan(run.lateness_s)]
    if not len(lateness_s):
        return True
    return float(np.percentile(lateness_s, 99)) <= _LATE_SHARE_OF_TTFT * slo.ttft_s


def _failures(run: LiveRun) -> dict[str, Failed]:
    """By kind, the most frequent first."""
    first = {failure.kind: failure.message for failure in reversed(run.failures)}
    counts = Counter(failure.kind for failure in run.failures)
    return {kind: Failed(count, first[kind]) for kind, count in counts.most_common()}


def _client_cpu(run: LiveRun) -> float | None:
    """Share of one core that the client itself used."""
    return None if run.client_cpu_s is None else run.client_cpu_s / run.duration_s


def _notes(run: LiveRun, slo: Slo) -> list[str]:
    """What a reader must know before trusting the figures."""
    notes = []
    if not keeps_up(run, slo):
        notes.append(
            "the bench could not keep up: 1 % of the requests were sent "
            f"{1000 * float(np.nanpercentile(run.lateness_s, 99)):.0f} ms late or more"
        )
    if (busy := _client_cpu(run)) is not None and busy > _BUSY:
        notes.append(f"the bench used {busy:.0%} of a core: its own delays are in the latencies")
    if run.num_short:
        notes.append(f"{run.num_short} answers have other lengths than were asked for")
    if not run.is_counted:
        notes.append("the service tells no usage: each of its events was counted as one token")
    return notes + _note_on_events(run)


def _note_on_events(run: LiveRun) -> list[str]:
    num_tokens = int(run.timeline.requests.output_tokens.sum())
    if not run.num_events or num_tokens <= run.num_events:
        return []
    per_event = num_tokens / run.num_events
    return [f"{per_event:.2f} tokens per event: inter-token latency is between events"]
