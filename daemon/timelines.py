"""What became of each request, span by span: for the console's `trace` and Chrome's trace viewer.

Pure: made of a request's trips, of which each remembers when and where it was. Holds the open
requests that it is told of and the last ones that have ended; knows nothing of texts or tokens.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator

import msgspec

from daemon.request import ENDED, Request, Trip

MAX_ENDED = 1024


class Span(msgspec.Struct, frozen=True):
    """One stage of one trip; CLOCK_MONOTONIC seconds. `ended_s` is None while it goes on."""

    stage: str
    instance: str | None
    started_s: float
    ended_s: float | None


class RequestTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """A request from its arrival on. `label` is the client's X-Request-Id."""

    number: int
    label: str
    state: str
    num_prompt: int
    num_output: int
    num_choices: int
    num_retries: int
    arrived_s: float
    first_token_s: float | None
    ended_s: float | None
    spans: tuple[Span, ...]


class Timelines:
    """Open requests, and the last `MAX_ENDED` that have ended."""

    def __init__(self, max_ended: int = MAX_ENDED) -> None:
        self._open: dict[int, Request] = {}
        self._ended: deque[RequestTimeline] = deque(maxlen=max_ended)
        self.on_ended: Callable[[Request, RequestTimeline], None] = lambda request, timeline: None

    def arrived(self, request: Request) -> None:
        self._open[request.arrival] = request

    def ended(self, request: Request) -> None:
        del self._open[request.arrival]
        self._ended.append(timeline_of(request))
        self.on_ended(request, self._ended[-1])

    @property
    def num_open(self) -> int:
        return len(self._open)

    def open(self) -> Iterator[RequestTimeline]:
        """Oldest first."""
        return map(timeline_of, self._open.values())

    def open_requests(self) -> Iterable[Request]:
        """Oldest first; the requests themselves, which cost nothing."""
        return self._open.values()

    def find_open(self, word: str) -> Request | None:
        """By number or label; of several with one label, the latest."""
        if word.isdecimal() and (request := self._open.get(int(word))) is not None:
            return request
        return next((r for r in reversed(self._open.values()) if r.label == word), None)

    def ended_ones(self) -> Iterator[RequestTimeline]:
        """Latest first."""
        return reversed(self._ended)

    def find(self, word: str) -> RequestTimeline | None:
        """By number or label; of several with one label, the latest."""
        if (request := self.find_open(word)) is not None:
            return timeline_of(request)
        return next((t for t in self.ended_ones() if word in (str(t.number), t.label)), None)


def timeline_of(request: Request) -> RequestTimeline:
    """What is known of a request now."""
    clock = request.clock
    return RequestTimeline(
        number=request.arrival,
        label=request.label,
        state=state_of(request),
        num_prompt=len(request.spec.prompt),
        num_output=request.num_output,
        num_choices=request.spec.num_choices,
        num_retries=max((trip.num_retries for trip in request.trips), default=0),
        arrived_s=clock.arrived_s,
        first_token_s=clock.first_token_s,
        ended_s=clock.ended_s,
        spans=tuple(span for trip in request.trips for span in _spans(trip)),
    )


def state_of(request: Request) -> str:
    """The phase of the trip that is furthest behind; once all have ended, how the last one did."""
    under_way = [trip.phase for trip in request.trips if trip.phase not in ENDED]
    phase = min(under_way, key=lambda p: p.value) if under_way else request.trips[-1].phase
    return phase.name.lower()


def chrome_trace(timelines: Iterable[RequestTimeline], now_s: float) -> dict[str, object]:
    """The Trace Event Format's JSON object ("complete" events, microseconds): a row for each
    request, a slice for each span, instances as arguments. Open spans end now."""
    events: list[dict[str, object]] = []
    for timeline in timelines:
        row = {"pid": 1, "tid": timeline.number}
        name = timeline.label or f"request {timeline.number}"
        events.append({"ph": "M", "name": "thread_name", "args": {"name": name}, **row})
        for span in timeline.spans:
            ended_s = now_s if span.ended_s is None else span.ended_s
            events.append(
                {
                    "ph": "X",
                    "name": span.stage,
                    "ts": round(span.started_s * 1e6),
                    "dur": round(max(0.0, ended_s - span.started_s) * 1e6),
                    "args": {"instance": span.instance},
                    **row,
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _spans(trip: Trip) -> Iterator[Span]:
    """The paper's five stages of one trip, as far as it has come."""
    times, end_s = trip.times, trip.times.ended_s
    if times.prefill_s is None:
        yield Span("prefill_queue", times.prefill_instance, times.started_s, end_s)
        return
    started_s, prefilled_s = times.prefill_s
    yield Span("prefill_queue", times.prefill_instance, times.started_s, started_s)
    yield Span("prefill", times.prefill_instance, started_s, prefilled_s)
    if times.pull_s is not None:
        pull_started_s, pulled_s = times.pull_s
        yield Span("decode_queue", times.decode_instance, prefilled_s, pull_started_s)
        yield Span("transfer", times.decode_instance, pull_started_s, pulled_s)
        prefilled_s = pulled_s
    if times.decode_started_s is not None:
        yield Span("decode_queue", times.decode_instance, prefilled_s, times.decode_started_s)
        yield Span("decode", times.decode_instance, times.decode_started_s, end_s)
    elif end_s is None:
        yield Span("decode_queue", times.decode_instance, prefilled_s, None)
