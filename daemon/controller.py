"""Owns every request: takes it, dispatches it, deals out its tokens, and ends it exactly once.

The controller reacts: to clients (`submit`, a call that is left), to instances that come up and
go down, and to their events. It holds no sockets and never waits; what it sends to leaders goes
through `Instance.send`.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Self, assert_never

import msgspec

from daemon.admission import Capacity
from daemon.errors import Draining, NotReady, QueueFull, ServeError, WorkerFailed
from daemon.generation import Delta, GenerationSpec, StageTimes, TokenStream
from daemon.instances import Instance, InstanceTable
from daemon.metrics import Metrics
from daemon.request import ENDED, Choice, Phase, Request, Trip
from daemon.text import ChoiceText, Tokenizer
from ipc.kv_layout import blocks_for
from ipc.messages import (
    Abort,
    Command,
    Decode,
    Gone,
    Preempted,
    Prefill,
    Prefilled,
    Pulled,
    Refused,
    Release,
    SequenceStart,
    Stats,
    TokenRow,
    Tokens,
)
from ipc.sockets import PeerGone
from ipc.vocabulary import FinishReason, KVHandle, TokenLogprobs

logger = logging.getLogger(__name__)


class _Held:
    """Prefilled blocks that wait at their owner, and the decode instance that may be reading."""

    def __init__(self, handle: KVHandle) -> None:
        self.handle = handle
        self.reader: str | None = None


LeaderEvent = Prefilled | Pulled | Gone | Preempted | Refused | Stats | Tokens


class ClientCall:
    """All requests of one HTTP call and their stream. Leaving it aborts what is unfinished."""

    def __init__(self, controller: "Controller", stream: TokenStream) -> None:
        self._controller = controller
        self._stream = stream
        self.requests: list[Request] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for request in self.requests:
            self._controller.abandon(request)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Delta]:
        return await self._stream.__anext__()

    @property
    def stage_times(self) -> tuple[StageTimes, ...]:
        return tuple(s for r in self.requests if (s := r.clock.stages) is not None)


class Controller:
    """See the module's docstring. `clock` is CLOCK_MONOTONIC, shared with the workers."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        metrics: Metrics,
        capacity: Capacity,
        *,
        max_queued: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.instances = InstanceTable()
        self.is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._capacity = capacity
        self._max_queued = max_queued
        self._clock = clock
        self._arrivals = itertools.count(1)
        self._ids = itertools.count(1)
        self._open: set[Request] = set()
        self._trips: dict[int, Trip] = {}  # by request id on the wire
        self._trip_of: dict[int, Trip] = {}  # by sequence id, unfinished choices only
        self._held: dict[int, _Held] = {}  # prefilled blocks that are not released yet
        self._unplaced: list[Trip] = []  # for want of an instance: WAITING or HANDOFF

    # ---- clients ----------------------------------------------------------------------------

    def max_output(self, num_prompt: int) -> int:
        return self._capacity.max_output(num_prompt)

    def submit(self, specs: Sequence[GenerationSpec]) -> ClientCall:
        try:
            self._check(specs)
        except ServeError as error:
            self._metrics.refused(error)
            raise
        stream = TokenStream(sum(spec.num_choices for spec in specs))
        call = ClientCall(self, stream)
        first_choice = 0
        for spec in specs:
            request = self._take(spec, stream, first_choice)
            call.requests.append(request)
            first_choice += spec.num_choices
        return call

    def abandon(self, request: Request) -> None:
        """The client has left; whoever holds the request is told. Idempotent."""
        for trip in [t for t in request.trips if t.phase not in ENDED]:
            self._stop(trip)
            self._end(trip, Phase.ABORTED)

    def fail_all(self, error: ServeError) -> None:
        """End every request that is under way by an error."""
        for request in list(self._open):
            self._fail(request, error)

    async def until_idle(self) -> None:
        """Wait until no request is under way."""
        await self._idle.wait()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def phase_counts(self) -> dict[str, int]:
        """How many requests' trips are where."""
        counts = {phase.name.lower(): 0 for phase in Phase if phase not in ENDED}
        for trip in self._trips.values():
            counts[trip.phase.name.lower()] += 1
        return counts

    def _check(self, specs: Sequence[GenerationSpec]) -> None:
        if self.is_draining:
            raise Draining("the service is draining and takes no new requests")
        if not self.instances.can_serve:
            raise NotReady("no prefill and decode instances are ready to serve")
        for spec in specs:
            self._capacity.check(spec)
        queued = sum(t.phase is not Phase.DECODE for t in self._trips.values())
        if queued + len(specs) > self._max_queued:
            raise QueueFull(f"{queued} requests are waiting, {self._max_queued} may")

    def _take(self, spec: GenerationSpec, stream: TokenStream, first_choice: int) -> Request:
        request = Request(spec, next(self._arrivals), stream, self._clock())
        request.choices = [
            Choice(first_choice + i, ChoiceText(self._tokenizer, spec.stop))
            for i in range(spec.num_choices)
        ]
        self._open.add(request)
        self._idle.clear()
        self._metrics.arrived(request)
        self._travel(request, request.choices)
        return request

    # ---- trips ------------------------------------------------------------------------------

    def _travel(self, request: Request, choices: Sequence[Choice]) -> None:
        """Send choices of equal output on a new trip."""
        trip = Trip(next(self._ids), request, {next(self._ids): c for c in choices})
        request.trips.append(trip)
        self._trips[trip.request_id] = trip
        for seq_id in trip.choices:
            self._trip_of[seq_id] = trip
        self._place(trip)

    def _place(self, trip: Trip) -> None:
        """Dispatch a trip that no instance has: to prefill, or on to decode."""
        place = self._place_prefill if trip.phase is Phase.WAITING else self._place_decode
        if not place(trip):
            self._unplaced.append(trip)

    def _place_prefill(self, trip: Trip) -> bool:
        if (instance := self.instances.best_prefill()) is None:
            return False
        request, spec = trip.request, trip.request.spec
        command = Prefill(
            request_id=trip.request_id,
            arrival=request.arrival,
            seq_ids=tuple(trip.choices),
            choices=tuple(c.index - request.choices[0].index for c in trip.choices.values()),
            prompt=spec.prompt,
            output=trip.output,
            sampling=spec.sampling,
            prompt_logprobs=None if trip.output else spec.prompt_logprobs,
        )
        instance.queued[trip.request_id] = trip.num_tokens
        trip.instance = instance.name
        trip.enter(Phase.PREFILL)
        self._send(instance, command)
        return True

    def _place_decode(self, trip: Trip) -> bool:
        if (instance := self.instances.best_decode()) is None:
            return False
        request, spec = trip.request, trip.request.spec
        held = self._held[trip.request_id]
        held.reader = instance.name
        command = Decode(
            request_id=trip.request_id,
            arrival=request.arrival,
            handle=held.handle,
            sequences=tuple(
                SequenceStart(seq_id, c.index - request.choices[0].index, tuple(c.output))
                for seq_id, c in trip.choices.items()
            ),
            prompt=spec.prompt,
            sampling=spec.sampling,
        )
        self._load(instance, trip)
        trip.instance = instance.name
        self._send(instance, command)
        return True

    def _load(self, instance: Instance, trip: Trip) -> None:
        num_blocks = blocks_for(trip.num_tokens, instance.layout.block_size)
        for seq_id in trip.choices:
            instance.sequences[seq_id] = num_blocks

    def _stop(self, trip: Trip) -> None:
        """Tell whoever holds the trip; free what only waits for a decode instance."""
        instance = self.instances.get(trip.instance) if trip.instance else None
        if trip.phase is Phase.HANDOFF and trip in self._unplaced:
            self._release(trip.request_id)
        elif instance is not None:
            self._send(instance, Abort(trip.request_id, tuple(trip.choices)))

    def _end(self, trip: Trip, phase: Phase) -> None:
        """The trip is over, whatever may still be heard of it."""
        trip.enter(phase)
        self._trips.pop(trip.request_id, None)
        if trip in self._unplaced:
            self._unplaced.remove(trip)
        for seq_id in list(trip.choices):
            self._leave(trip, seq_id)
        request = trip.request
        if request.is_ended and request in self._open:
            self._open.remove(request)
            request.clock.ended_s = self._clock()
            self._metrics.ended(request, phase)
            if not self._open:
                self._idle.set()

    def _leave(self, trip: Trip, seq_id: int) -> None:
        del trip.choices[seq_id]
        self._trip_of.pop(seq_id, None)
        if trip.instance and (instance := self.instances.get(trip.instance)) is not None:
            instance.sequences.pop(seq_id, None)

    def _fail(self, request: Request, error: ServeError) -> None:
        request.stream.fail(error)
        for trip in [t for t in request.trips if t.phase not in ENDED]:
            self._stop(trip)
            self._end(trip, Phase.FAILED)

    def _release(self, request_id: int) -> None:
        """The one place where held blocks are given back: their last reader has ended."""
        held = self._held.pop(request_id, None)
        if held is None:
            return
        owner = self.instances.get(held.handle.owner, held.handle.epoch)
        if owner is not None:
            self._send(owner, Release(request_id))

    def _send(self, instance: Instance, command: Command) -> None:
        try:
            instance.send(command)
        except PeerGone as error:
            # Its death is on the way to us by the supervisor, which then ends what it held.
            logger.info("%s is gone: %s", instance.name, error)

    # ---- instances --------------------------------------------------------------------------

    def instance_up(self, instance: Instance) -> None:
        """It can be sent work; trips that waited for its like are placed."""
        self.instances.add(instance)
        self._capacity.learn(instance.name, instance.layout)
        waiting, self._unplaced = self._unplaced, []
        for trip in sorted(waiting, key=lambda t: t.request.arrival):
            self._place(trip)

    def instance_down(self, name: str, epoch: int, reason: str) -> None:
        """Every process of it has been reaped: what it ran fails, and as a reader it has ended."""
        if self.instances.remove(name, epoch) is None:
            return
        error = WorkerFailed(f"the worker {name} failed: {reason}")
        for request_id, held in list(self._held.items()):
            if held.handle.owner == name:
                self._source_lost(request_id, held, error)
            elif held.reader == name:
                self._reader_lost(request_id, held)
        for trip in list(self._trips.values()):
            if trip.instance == name:
                self._fail(trip.request, error)

    def _source_lost(self, request_id: int, held: _Held, error: ServeError) -> None:
        """Prefilled blocks are gone with their owner. A reader says itself whether it has them:
        by `Pulled`, or by `Gone` once it hears of the death."""
        del self._held[request_id]
        trip = self._trips.get(request_id)
        if trip is not None and held.reader is None:
            self._fail(trip.request, error)

    def _reader_lost(self, request_id: int, held: _Held) -> None:
        """Nothing was lost but the reader: another one may pull the same blocks."""
        held.reader = None
        trip = self._trips.get(request_id)
        if trip is None:
            self._release(request_id)
        else:
            trip.instance = None
            self._place(trip)

    # ---- events -----------------------------------------------------------------------------

    def on_event(self, name: str, epoch: int, event: LeaderEvent) -> None:
        """Act on what a leader reports; events of a dead incarnation are dropped."""
        instance = self.instances.get(name, epoch)
        if instance is None:
            return
        match event:
            case Tokens():
                for row in event.rows:
                    self._token(row, event.started_s)
            case Prefilled():
                self._prefilled(instance, event)
            case Pulled():
                self._pulled(event)
            case Preempted(seq_id):
                self._preempted(seq_id)
            case Gone():
                self._gone(instance, event)
            case Refused():
                self._refused(instance, event)
            case Stats():
                instance.stats = event
                self._metrics.observed(instance.name, event)
            case _:
                assert_never(event)

    def _token(self, row: TokenRow, started_s: float) -> None:
        trip = self._trip_of.get(row.seq_id)
        if trip is None:
            return
        trip.request.clock.decoding(started_s)
        self._deal(trip, row.seq_id, row.token_ids, row.finished, row.logprobs)
        if not trip.choices:
            self._end(trip, Phase.FINISHED)

    def _prefilled(self, instance: Instance, event: Prefilled) -> None:
        instance.queued.pop(event.request_id, None)
        if event.handle is not None:
            self._held[event.request_id] = _Held(event.handle)
        trip = self._trips.get(event.request_id)
        if trip is None:  # the client left while it was computed
            self._release(event.request_id)
            return
        trip.request.clock.prefilled(event.started_s, event.ended_s)
        keeps = event.handle is None and not all(event.finished)
        if keeps:
            self._load(instance, trip)
            trip.enter(Phase.DECODE)
        self._deal_first(trip, event)
        if not trip.choices:
            self._release(event.request_id)
            self._end(trip, Phase.FINISHED)
        elif not keeps:
            trip.instance = None
            trip.enter(Phase.HANDOFF)
            self._place(trip)

    def _deal_first(self, trip: Trip, event: Prefilled) -> None:
        """Each choice gets its first token of this trip; the first one the prompt's entries."""
        prompt_logprobs = event.prompt_logprobs
        for i, seq_id in enumerate(list(trip.choices)):
            token_ids = event.token_ids[i : i + 1]
            logprobs = event.logprobs[i : i + 1] if event.logprobs and token_ids else None
            self._deal(trip, seq_id, token_ids, event.finished[i], logprobs, prompt_logprobs)
            prompt_logprobs = None

    def _deal(
        self,
        trip: Trip,
        seq_id: int,
        token_ids: tuple[int, ...],
        finished: FinishReason | None,
        logprobs: tuple[TokenLogprobs, ...] | None,
        prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None,
    ) -> None:
        """Pass a choice's tokens on to the client; stop the leader where a stop string came."""
        request, choice = trip.request, trip.choices[seq_id]
        delta = choice.take(token_ids, finished, logprobs, request.spec.sampling.end_token_ids)
        if prompt_logprobs is not None:
            delta = msgspec.structs.replace(delta, prompt_logprobs=prompt_logprobs)
        request.stream.put(delta)
        if token_ids:
            request.clock.token(self._clock())
            self._metrics.tokens(len(token_ids))
        if delta.finished is None:
            return
        if finished is None and trip.phase is Phase.DECODE and trip.instance is not None:
            instance = self.instances.get(trip.instance)
            if instance is not None:
                self._send(instance, Abort(trip.request_id, (seq_id,)))
        self._leave(trip, seq_id)

    def _pulled(self, event: Pulled) -> None:
        self._release(event.request_id)
        trip = self._trips.get(event.request_id)
        if trip is not None:
            trip.request.clock.pulled(event.started_s, event.ended_s)
            trip.enter(Phase.DECODE)

    def _preempted(self, seq_id: int) -> None:
        """A choice gave its blocks back: it is prefilled again with what it has put out."""
        trip = self._trip_of.get(seq_id)
        if trip is None:
            return
        choice = trip.choices[seq_id]
        self._leave(trip, seq_id)
        self._travel(trip.request, [choice])
        if not trip.choices:
            self._end(trip, Phase.FINISHED)

    def _gone(self, instance: Instance, event: Gone) -> None:
        """Choices have left an instance: because we said so, or because their source died."""
        instance.queued.pop(event.request_id, None)
        self._release(event.request_id)
        trip = self._trips.get(event.request_id)
        if trip is not None and any(seq_id in trip.choices for seq_id in event.seq_ids):
            self._fail(trip.request, WorkerFailed("the worker that held the prompt has failed"))

    def _refused(self, instance: Instance, event: Refused) -> None:
        instance.queued.pop(event.request_id, None)
        self._release(event.request_id)
        trip = self._trips.get(event.request_id)
        if trip is not None:
            self._fail(trip.request, WorkerFailed(f"{instance.name} refused: {event.reason}"))
