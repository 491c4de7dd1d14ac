"""What a replay gave: the answers as a timeline like a simulated one, and every failure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.bench.events import Answer
from planner.simulator.timeline import Timeline
from planner.workload.requests import Bools, Floats, Requests


@dataclass(frozen=True)
class Failure:
    """Request `number` of the run has no answer."""

    number: int
    kind: str
    message: str


@dataclass(frozen=True, eq=False)
class LiveRun:
    """N requests, of which M were answered.

    Args:
        requests: as they were to be sent, the first one at 0 s, N.
        sent_s: when each was really sent, float64[N].
        is_answered: bool[N].
        timeline: the answered ones with the lengths that they really had, M.
        failures: the others, in order.
        gaps_s: between consecutive events of one answer, over all answers, float64[G].
        num_events: events that held tokens; None when unknown, as in a trace that was read back.
        is_counted: the service told the number of tokens of every answer.
        duration_s: from the start to the last end.
        client_cpu_s: what the client itself took; None when unknown.
    """

    requests: Requests
    sent_s: Floats
    is_answered: Bools
    timeline: Timeline
    failures: tuple[Failure, ...]
    gaps_s: Floats
    num_events: int | None
    is_counted: bool
    duration_s: float
    client_cpu_s: float | None = None

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def lateness_s(self) -> Floats:
        """How much later than scheduled the client sent each request, float64[N]."""
        return self.sent_s - self.requests.arrival_s

    @property
    def num_short(self) -> int:
        """Answers with another number of tokens than was asked for."""
        wanted = self.requests.output_tokens[self.is_answered]
        return int((wanted != self.timeline.requests.output_tokens).sum())


@dataclass(frozen=True)
class Clocks:
    """Readings around a run: `start_s` and `end_s` by the clock of the answers' events."""

    start_s: float
    end_s: float
    client_cpu_s: float


def live_run(
    requests: Requests, sent_s: Floats, results: Sequence[Answer | Failure], clocks: Clocks
) -> LiveRun:
    """The run that these results make; one for each request, `sent_s` from the start."""
    answers = [result for result in results if isinstance(result, Answer)]
    is_answered = np.array([isinstance(result, Answer) for result in results], dtype=np.bool_)
    gaps = [np.diff(answer.event_s) for answer in answers]
    return LiveRun(
        requests=requests,
        sent_s=sent_s,
        is_answered=is_answered,
        timeline=_timeline(_answered_requests(requests, is_answered, answers), answers, clocks),
        failures=tuple(result for result in results if isinstance(result, Failure)),
        gaps_s=np.concatenate(gaps) if gaps else np.empty(0),
        num_events=sum(len(answer.event_s) for answer in answers),
        is_counted=all(answer.is_counted for answer in answers),
        duration_s=clocks.end_s - clocks.start_s,
        client_cpu_s=clocks.client_cpu_s,
    )


def staged_timeline(
    requests: Requests, first_token_s: Floats, last_token_s: Floats, stages_s: Floats
) -> Timeline:
    """A timeline from the client's times and the service's durations, float64[M, 3] of prefill,
    transfer and decode queue; NaN where it tells none.

    The two have no clock in common. The first token leaves when the prefill ends, so that is where
    they are joined: what a request spends on its way counts as prefill queue, and the five stages
    add up to the latency that the client saw.
    """
    prefill_s, transfer_s, decode_queue_s = stages_s.T
    pull_start_s = first_token_s + decode_queue_s
    return Timeline(
        requests=requests,
        first_token_s=first_token_s,
        last_token_s=last_token_s,
        prefill_start_s=first_token_s - prefill_s,
        prefill_end_s=np.where(np.isnan(prefill_s), np.nan, first_token_s),
        pull_start_s=pull_start_s,
        pull_end_s=pull_start_s + transfer_s,
        decode_start_s=pull_start_s + transfer_s,
    )


def _answered_requests(
    requests: Requests, is_answered: Bools, answers: Sequence[Answer]
) -> Requests:
    """With the lengths that the service counted."""
    planned = requests.input_tokens[is_answered]
    inputs = [answer.input_tokens for answer in answers]
    return Requests(
        requests.arrival_s[is_answered],
        np.array(
            [given or asked for given, asked in zip(inputs, planned, strict=True)], dtype=np.int64
        ),
        np.array([answer.output_tokens for answer in answers], dtype=np.int64),
    )


def _timeline(requests: Requests, answers: Sequence[Answer], clocks: Clocks) -> Timeline:
    first_s = np.array([answer.event_s[0] for answer in answers], dtype=np.float64)
    last_s = np.array([answer.event_s[-1] for answer in answers], dtype=np.float64)
    stages_s = np.full((len(answers), 3), np.nan)
    for row, answer in zip(stages_s, answers, strict=True):
        if (stages := answer.stages) is not None:
            row[:] = stages.prefill_s, stages.transfer_s, stages.decode_queue_s
    return staged_timeline(requests, first_s - clocks.start_s, last_s - clocks.start_s, stages_s)
