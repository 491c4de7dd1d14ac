"""A request's life: its choices, its trips through prefill and decode, its five stages.

A *trip* carries one or more choices of a request through prefill and then decode. A request
starts with one trip for all its choices; one that was preempted, or whose worker died, goes on a
new trip with the tokens that it has. A trip's phases are one enum and a table of allowed steps.
"""

from enum import Enum, auto

from daemon.generation import Delta, GenerationSpec, StageTimes, TokenStream
from daemon.text import ChoiceText
from ipc.messages import TokenRow
from ipc.vocabulary import FinishReason


class Phase(Enum):
    """Where a trip is."""

    WAITING = auto()  # no instance has it
    PREFILL = auto()  # queued or running on a prefill (or mixed) instance
    HANDOFF = auto()  # prefilled, its blocks held, waiting for a decode instance to pull them
    DECODE = auto()
    FINISHED = auto()
    REPLACED = auto()  # its last choices go on in other trips; never how a request ends
    ABORTED = auto()  # the client left
    FAILED = auto()


ENDED = frozenset({Phase.FINISHED, Phase.REPLACED, Phase.ABORTED, Phase.FAILED})

NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.PREFILL}) | ENDED,
    Phase.PREFILL: frozenset({Phase.HANDOFF, Phase.DECODE}) | ENDED,
    Phase.HANDOFF: frozenset({Phase.DECODE}) | ENDED,
    Phase.DECODE: ENDED,
    Phase.FINISHED: frozenset(),
    Phase.REPLACED: frozenset(),
    Phase.ABORTED: frozenset(),
    Phase.FAILED: frozenset(),
}


class StageClock:
    """When a request passed each of the paper's stages (section 6.3), CLOCK_MONOTONIC seconds.

    A later trip (after preemption) changes nothing that was marked: its time counts as decode.
    """

    def __init__(self, arrived_s: float) -> None:
        self.arrived_s = arrived_s
        self.prefill_s: tuple[float, float] | None = None
        self.pull_s: tuple[float, float] | None = None
        self.decode_started_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.ended_s: float | None = None

    def prefilled(self, started_s: float, ended_s: float) -> None:
        self.prefill_s = self.prefill_s or (started_s, ended_s)

    def pulled(self, started_s: float, ended_s: float) -> None:
        self.pull_s = self.pull_s or (started_s, ended_s)

    def decoding(self, started_s: float) -> None:
        if self.decode_started_s is None:
            self.decode_started_s = started_s

    def token(self, now_s: float) -> None:
        if self.first_token_s is None:
            self.first_token_s = now_s
        self.last_token_s = now_s

    @property
    def stages(self) -> StageTimes | None:
        """The five stages once the request has ended; None before, or when it never ran."""
        if self.ended_s is None or self.prefill_s is None:
            return None
        started, prefilled = self.prefill_s
        if self.decode_started_s is None:  # it ended on its first token
            return StageTimes(started - self.arrived_s, self.ended_s - started, 0.0, 0.0, 0.0)
        pull_started, pull_ended = self.pull_s or (prefilled, prefilled)
        transfer_s = pull_ended - pull_started
        return StageTimes(
            prefill_queue_s=started - self.arrived_s,
            prefill_s=prefilled - started,
            transfer_s=transfer_s,
            decode_queue_s=self.decode_started_s - prefilled - transfer_s,
            decode_s=self.ended_s - self.decode_started_s,
        )


class TripTimes:
    """When and where one trip passed its stages, CLOCK_MONOTONIC seconds; for timelines."""

    def __init__(self, started_s: float) -> None:
        self.started_s = started_s
        self.prefill_instance: str | None = None
        self.prefill_s: tuple[float, float] | None = None
        self.decode_instance: str | None = None
        self.pull_s: tuple[float, float] | None = None
        self.decode_started_s: float | None = None
        self.ended_s: float | None = None


class Choice:
    """One continuation of a prompt: its tokens, its text, and how it ended."""

    def __init__(self, index: int, text: ChoiceText) -> None:
        self.index = index
        self.output: list[int] = []
        self.finished: FinishReason | None = None
        self._text = text
        self._told_s: float | None = None

    def gap_s(self, now_s: float) -> float | None:
        """Tokens are passed on: how long after the ones before; None with the first ones."""
        before_s, self._told_s = self._told_s, now_s
        return None if before_s is None else now_s - before_s

    def take(self, row: TokenRow) -> Delta:
        """Tokens have come: append them, and end by a stop string where one is completed.

        The token that made the leader end a choice is counted, but is no part of its text.
        """
        token_ids, ended = row.token_ids, row.finished
        self.output += token_ids
        shown = token_ids[:-1] if ended is FinishReason.STOP else token_ids
        text, is_stopped = self._text.push(shown)
        if is_stopped:
            ended = FinishReason.STOP
        elif ended is not None:
            text += self._text.flush()
        self.finished = ended
        return Delta(self.index, text, token_ids, row.logprobs, ended)


class Request:
    """One prompt of a client's call. `label` is what the client calls it, if anything, and
    `traceparent` the span of the client's that it belongs to."""

    label = ""
    traceparent = ""

    def __init__(
        self, spec: GenerationSpec, arrival: int, stream: TokenStream, arrived_s: float
    ) -> None:
        self.spec = spec
        self.arrival = arrival
        self.stream = stream
        self.clock = StageClock(arrived_s)
        self.choices: list[Choice] = []
        self.trips: list[Trip] = []

    @property
    def is_ended(self) -> bool:
        return all(trip.phase in ENDED for trip in self.trips)

    @property
    def max_tokens(self) -> int:
        """How long one of its sequences may become."""
        return len(self.spec.prompt) + self.spec.sampling.max_tokens

    def let_go(self) -> None:
        """It has ended, and its trips know it no more: in a circle, prompt and answer would stay
        in memory until the garbage collector comes."""
        for trip in self.trips:
            del trip.request

    def choice_number(self, choice: Choice) -> int:
        """Counted within this prompt, as seeds are."""
        return choice.index - self.choices[0].index

    @property
    def num_output(self) -> int:
        return sum(len(choice.output) for choice in self.choices)


class Trip:
    """Some choices of a request on their way through prefill and decode.

    `num_retries` says how often their work was lost before: with a worker, or by a refusal.
    """

    def __init__(
        self,
        request_id: int,
        request: Request,
        choices: dict[int, Choice],
        *,
        now_s: float,
        num_retries: int = 0,
    ) -> None:
        self.request_id = request_id  # on the wire; new for each trip
        self.request = request
        self.choices = choices  # by sequence id, unfinished ones only
        self.num_retries = num_retries
        self.times = TripTimes(now_s)
        self.phase = Phase.WAITING
        self.instance: str | None = None  # who has it now
        self.output = tuple(next(iter(choices.values())).output)

    @property
    def num_tokens(self) -> int:
        """Tokens to prefill."""
        return len(self.request.spec.prompt) + len(self.output)

    def decoding(self, started_s: float) -> None:
        """A step of its choices, which began then; the first one counts."""
        if self.times.decode_started_s is None:
            self.times.decode_started_s = started_s
            self.request.clock.decoding(started_s)

    def enter(self, phase: Phase) -> None:
        assert phase in NEXT[self.phase], f"trip {self.request_id}: {self.phase} -> {phase}"
        self.phase = phase
