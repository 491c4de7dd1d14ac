"""Owns every request: takes it, follows it through its trips, deals out its tokens, ends it once.

The controller reacts: to clients (`submit`, a call that is left), to instances that come up and
go down, and to their events. It holds no sockets and never waits; its books are `Trips`.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from typing import assert_never

import msgspec

from daemon.client_call import ClientCall
from daemon.deadlines import TimeLimits
from daemon.dealing import Deal
from daemon.door import Door
from daemon.drains import Drains
from daemon.errors import Draining, RequestTimeout, ServeError, WorkerFailed
from daemon.generation import NAMELESS, GenerationSpec, Origin, TokenStream
from daemon.instances import Instance, InstanceTable
from daemon.metrics import Metrics
from daemon.request import ENDED, Choice, Phase, Request, Trip
from daemon.text import ChoiceText, Tokenizer
from daemon.timekeeper import Timekeeper
from daemon.timelines import Timelines
from daemon.trips import Trips
from ipc.messages import (
    Begun,
    Chunked,
    Gone,
    Preempted,
    Prefilled,
    Pulled,
    Refused,
    Stats,
    TokenRow,
    Tokens,
    WorkEvent,
)

LeaderEvent = WorkEvent | Tokens


class Controller:
    """See the module's docstring. `clock` is CLOCK_MONOTONIC, shared with the workers."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        metrics: Metrics,
        door: Door,
        *,
        max_retries: int = 3,
        time_limits: TimeLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.instances = InstanceTable()
        self.is_draining = False
        self.on_load: Callable[[], None] = lambda: None  # a request came or ended
        self.timelines = Timelines()
        self._trips = Trips(self.instances, clock)
        self._drains = Drains(self.instances, self._trips)
        self.timekeeper = Timekeeper(
            time_limits or TimeLimits(),
            self._trips,
            clock,
            end=self._run_out,
            wait_s=lambda request: door.wait_s(
                self.instances, request.max_tokens, len(request.spec.prompt)
            ),
        )
        self._trips.on_stranded = self.timekeeper.stranded
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._door = door
        self._max_retries = max_retries
        self._clock = clock
        self._arrivals = itertools.count(1)
        self._open: set[Request] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    # ---- clients ----------------------------------------------------------------------------

    def max_output(self, num_prompt: int) -> int:
        return self._door.capacity.max_output(num_prompt)

    def submit(self, specs: Sequence[GenerationSpec], origin: Origin = NAMELESS) -> ClientCall:
        try:
            if self.is_draining:
                raise Draining()
            self._door.check(
                specs, self.instances, num_waiting=self._trips.num_queued, now_s=self._clock()
            )
        except ServeError as error:
            self._metrics.refused(error)
            raise
        stream = TokenStream(sum(spec.num_choices for spec in specs))
        call = ClientCall(stream, self.abandon, origin)
        num_choices = 0
        for spec in specs:
            call.add(self._take(spec, stream, first_choice=num_choices))
            num_choices += spec.num_choices
        return call

    def abandon(self, request: Request) -> None:
        """The client has left; whoever holds the request is told. Idempotent."""
        self._stop_all(request, Phase.ABORTED)

    def fail_all(self, error: ServeError) -> None:
        """End every request that is under way by an error."""
        for request in list(self._open):
            self.fail(request, error)

    async def until_idle(self) -> None:
        """Wait until no request is under way."""
        await self._idle.wait()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def count_phases(self) -> dict[str, int]:
        """How many trips are where."""
        return self._trips.count_phases()

    def _take(self, spec: GenerationSpec, stream: TokenStream, *, first_choice: int) -> Request:
        request = Request(spec, next(self._arrivals), stream, self._clock())
        request.choices = [
            Choice(first_choice + i, ChoiceText(self._tokenizer, spec.stop))
            for i in range(spec.num_choices)
        ]
        self._open.add(request)
        self._idle.clear()
        self._metrics.arrived(request)
        self.timelines.arrived(request)
        self.on_load()
        self.timekeeper.arrived(request)
        self._trips.start(request, request.choices)
        return request

    # ---- endings ----------------------------------------------------------------------------

    def _run_out(self, request: Request, error: ServeError) -> None:
        """Its time is up. Before the first token it is as if it had been refused at the door."""
        if request not in self._open:  # two of its limits were due at once
            return
        if request.clock.first_token_s is None and not isinstance(error, RequestTimeout):
            self._metrics.refused(error)
        self.fail(request, error)

    def fail(self, request: Request, error: ServeError) -> None:
        """End a request by an error. Idempotent."""
        request.stream.fail(error)
        self._stop_all(request, Phase.FAILED)

    def _stop_all(self, request: Request, phase: Phase) -> None:
        for trip in [t for t in request.trips if t.phase not in ENDED]:
            self._trips.stop(trip)
            self._end(trip, phase)

    def _end(self, trip: Trip, phase: Phase) -> None:
        request = trip.request
        self._trips.end(trip, phase)
        if not request.is_ended or request not in self._open:
            return
        self._open.remove(request)
        request.clock.ended_s = self._clock()
        self._metrics.ended(request, phase)
        self.timelines.ended(request)
        self.on_load()
        self.timekeeper.ended(request)
        request.let_go()
        if not self._open:
            self._idle.set()

    # ---- instances --------------------------------------------------------------------------

    def instance_up(self, instance: Instance) -> None:
        """It can be sent work; trips that waited for its like are placed."""
        self.instances.add(instance)
        self._door.learn(instance)
        self._trips.place_waiting()

    def instance_down(self, name: str, epoch: int, reason: str) -> None:
        """Every process of it has been reaped: as a reader it has ended, and what it ran or held
        is done again elsewhere, or by its successor."""
        if self.instances.remove(name, epoch) is None:
            return
        lost = self._trips.owner_lost(name)
        self._trips.reader_lost(name)
        lost += [trip for trip in self._trips if trip.instance == name]
        for trip in lost:
            self._retry(trip, tuple(trip.choices), f"the worker {name} failed: {reason}")
        self._drains.ended(name)

    async def drain_instance(self, name: str) -> bool:
        """Give it nothing new and wait until nothing is left there: see `Drains.drain`."""
        return await self._drains.drain(name)

    def undrain_instance(self, name: str) -> None:
        """Whoever waits until nothing is left there waits no longer."""
        self._drains.take_back(name)
        self._trips.place_waiting()

    # ---- events -----------------------------------------------------------------------------

    def on_event(self, name: str, epoch: int, event: LeaderEvent) -> None:
        """Act on what a leader reports; events of a dead incarnation are dropped."""
        instance = self.instances.get(name, epoch)
        if instance is None:
            return
        match event:
            case Tokens():
                self._decoded(event)
            case Begun(request_ids):
                self._begun(instance, request_ids)
            case Chunked():
                self._door.chunked(instance, event)
            case Prefilled():
                self._prefilled(instance, event)
            case Pulled():
                self._pulled(event)
            case Preempted(seq_id):
                self._preempted(seq_id)
            case Gone():  # because we said so, or because their source died
                self._returned(instance, event, "the worker that held the prompt has failed")
            case Refused():
                self._returned(instance, event, f"{name} refused: {event.reason}")
            case Stats():
                self._metrics.observed(instance, event)
                instance.stats = event
            case _:
                assert_never(event)
        self._drains.look()

    def _decoded(self, event: Tokens) -> None:
        self._metrics.decode_step(len(event.rows))
        with Deal(self._metrics, self._clock()) as deal:
            for row in event.rows:
                if (trip := self._trips.of_sequence(row.seq_id)) is not None:
                    trip.decoding(event.started_s)
                    self._token(trip, row, deal)

    def _token(self, trip: Trip, row: TokenRow, deal: Deal) -> None:
        choice = trip.choices[row.seq_id]
        delta = choice.take(row)
        deal.pass_on(trip.request, choice, delta)
        if delta.finished is None:
            return
        self._trips.leave(trip, row.seq_id)
        if delta.finished is not row.finished:  # by a stop string, which the leader cannot see
            self._trips.stop_choice(trip, row.seq_id)
        if not trip.choices:
            self._end(trip, Phase.FINISHED)

    def _begun(self, instance: Instance, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            instance.queued.advance(request_id, 0)
            if (trip := self._trips.get(request_id)) is not None:
                self.timekeeper.begun(trip.request)

    def _prefilled(self, instance: Instance, event: Prefilled) -> None:
        self._door.prefilled(instance, event)
        if event.handle is not None:
            self._trips.hold(event.request_id, event.handle)
        trip = self._trips.get(event.request_id)
        if trip is None:  # the client left while it was computed
            self._trips.release(event.request_id)
            return
        trip.request.clock.prefilled(event.started_s, event.ended_s)
        trip.times.prefill_s = (event.started_s, event.ended_s)
        is_kept = event.handle is None and not all(event.finished)
        if is_kept:
            self._trips.decodes_at(trip, instance)
            trip.times.decode_instance = instance.name
            self._trips.decodes(trip)
        self._deal_first(trip, event)
        if not trip.choices:
            self._trips.release(event.request_id)
            self._end(trip, Phase.FINISHED)
        elif not is_kept:
            trip.enter(Phase.HANDOFF)
            self._trips.place(trip)

    def _deal_first(self, trip: Trip, event: Prefilled) -> None:
        """Each choice gets its first token of this trip; the first one the prompt's entries."""
        with Deal(self._metrics, self._clock()) as deal:
            for i, (seq_id, choice) in enumerate(list(trip.choices.items())):
                token_ids = event.token_ids[i : i + 1]
                logprobs = event.logprobs[i : i + 1] if event.logprobs and token_ids else None
                row = TokenRow(seq_id, token_ids, event.finished[i], logprobs)
                told = None if i else event.prompt_logprobs
                delta = msgspec.structs.replace(choice.take(row), prompt_logprobs=told)
                deal.pass_on(trip.request, choice, delta)
                if delta.finished is not None:
                    self._trips.leave(trip, seq_id)
                if delta.finished is not row.finished and trip.phase is Phase.DECODE:
                    self._trips.stop_choice(trip, seq_id)

    def _pulled(self, event: Pulled) -> None:
        self._metrics.pulled(event)
        self._trips.release(event.request_id)
        trip = self._trips.get(event.request_id)
        if trip is not None:
            trip.request.clock.pulled(event.started_s, event.ended_s)
            trip.times.pull_s = (event.started_s, event.ended_s)
            self._trips.decodes(trip)

    def _preempted(self, seq_id: int) -> None:
        """A choice gave its blocks back: it is prefilled again with what it has put out."""
        self._metrics.preempted()
        trip = self._trips.of_sequence(seq_id)
        if trip is None:
            return
        choice = trip.choices[seq_id]
        self._trips.leave(trip, seq_id)
        self._trips.start(trip.request, [choice], trip.num_retries)
        if not trip.choices:
            self._end(trip, Phase.REPLACED)

    def _returned(self, instance: Instance, event: Gone | Refused, reason: str) -> None:
        """Nothing of these choices is left there."""
        instance.queued.drop(event.request_id)
        self._trips.release(event.request_id)
        if (trip := self._trips.get(event.request_id)) is not None:
            self._retry(trip, event.seq_ids, reason)

    def _retry(self, trip: Trip, seq_ids: Sequence[int], reason: str) -> None:
        """What these choices had is lost: compute it again, unless that was tried too often.

        The client notices nothing: tokens that it has are part of the prompt, and draws depend on
        seed and place alone.
        """
        lost = {i: trip.choices[i] for i in seq_ids if i in trip.choices}
        if not lost:
            return
        if trip.num_retries >= self._max_retries:
            tries = trip.num_retries + 1
            self.fail(trip.request, WorkerFailed(f"given up after {tries} tries: {reason}"))
            return
        self._metrics.retried(len(lost))
        for seq_id in lost:
            self._trips.leave(trip, seq_id)
        self._trips.start_again(trip, list(lost.values()))
        if not trip.choices:
            self._end(trip, Phase.REPLACED)
