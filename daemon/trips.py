"""The controller's books: which trips are under way, who has them, which blocks are held for them.

Carries out what `dispatch` says and sends the commands; what events mean is the controller's.
"""

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence

from daemon.instances import Instance, InstanceTable
from daemon.request import ENDED, Choice, Phase, Request, Trip
from ipc.kv_layout import blocks_for
from ipc.messages import Abort, Command, Decode, Prefill, Release, SequenceStart
from ipc.sockets import PeerGone
from ipc.vocabulary import KVHandle

logger = logging.getLogger(__name__)


class Held:
    """Prefilled blocks that wait at their owner, and the decode instance that may read them."""

    def __init__(self, handle: KVHandle) -> None:
        self.handle = handle
        self.reader: str | None = None


class Trips:
    """All trips that have not ended, and all blocks that have not been released."""

    def __init__(self, instances: InstanceTable, clock: Callable[[], float]) -> None:
        self._instances = instances
        self._clock = clock
        self._ids = itertools.count(1)  # request ids and sequence ids: one never equals another
        self._trips: dict[int, Trip] = {}  # by request id on the wire
        self._by_sequence: dict[int, Trip] = {}  # unfinished choices only
        self._held: dict[int, Held] = {}
        self._unplaced: list[Trip] = []  # for want of an instance: WAITING or HANDOFF
        self._num_decoding = 0
        self.on_stranded: Callable[[Trip], None] = lambda trip: None
        """Told of each trip that comes to wait for an instance."""

    def __iter__(self) -> Iterator[Trip]:
        return iter(list(self._trips.values()))

    def get(self, request_id: int) -> Trip | None:
        return self._trips.get(request_id)

    def of_sequence(self, seq_id: int) -> Trip | None:
        return self._by_sequence.get(seq_id)

    @property
    def num_queued(self) -> int:
        """Trips that do not decode yet. Looked up with every request."""
        return len(self._trips) - self._num_decoding

    def is_stranded(self, trip: Trip) -> bool:
        """No instance is up that could go on with it."""
        return trip in self._unplaced

    def count_phases(self) -> dict[str, int]:
        counts = {phase.name.lower(): 0 for phase in Phase if phase not in ENDED}
        for trip in self._trips.values():
            counts[trip.phase.name.lower()] += 1
        return counts

    # ---- a trip's way -----------------------------------------------------------------------

    def start(self, request: Request, choices: Sequence[Choice], num_retries: int = 0) -> None:
        """Send choices of equal output on a new trip."""
        sequences = {next(self._ids): choice for choice in choices}
        trip = Trip(
            next(self._ids), request, sequences, now_s=self._clock(), num_retries=num_retries
        )
        request.trips.append(trip)
        self._trips[trip.request_id] = trip
        for seq_id in trip.choices:
            self._by_sequence[seq_id] = trip
        self.place(trip)

    def start_again(self, trip: Trip, choices: Sequence[Choice]) -> None:
        """What a trip had of these choices is lost: they are prefilled again with what they have
        put out, together where that is the same token, or none.

        Longer outputs go apart, also equal ones: the door has looked whether a prompt's choices
        fit a pool together at their beginning, and whether each fits alone up to its end.
        """
        together: dict[tuple[int | None, tuple[int, ...]], list[Choice]] = {}
        for choice in choices:
            apart = choice.index if len(choice.output) > 1 else None
            together.setdefault((apart, tuple(choice.output)), []).append(choice)
        for equal in together.values():
            self.start(trip.request, equal, trip.num_retries + 1)

    def place(self, trip: Trip) -> None:
        """Dispatch a trip that no instance has, to prefill or on to decode; it waits if it must."""
        if not self._can_place(trip):
            self._unplaced.append(trip)
            self.on_stranded(trip)

    def place_waiting(self) -> None:
        """An instance has come up: try again all that waited for one, oldest first."""
        waiting = sorted(self._unplaced, key=lambda trip: trip.request.arrival)
        self._unplaced = [trip for trip in waiting if not self._can_place(trip)]

    def decodes(self, trip: Trip) -> None:
        """Its choices run."""
        trip.enter(Phase.DECODE)
        self._num_decoding += 1

    def decodes_at(self, trip: Trip, instance: Instance) -> None:
        """Count the trip's choices into an instance's decode load."""
        num_blocks = blocks_for(trip.num_tokens, instance.layout.block_size)
        for seq_id in trip.choices:
            instance.sequences[seq_id] = num_blocks

    def stop_choice(self, trip: Trip, seq_id: int) -> None:
        """Tell the leader that a choice is over, where it does not know already."""
        self._tell(trip, Abort(trip.request_id, (seq_id,)))

    def stop(self, trip: Trip) -> None:
        """Tell whoever holds the trip; free what only waits for a decode instance."""
        if trip.phase is Phase.HANDOFF and trip in self._unplaced:
            self.release(trip.request_id)
        else:
            self._tell(trip, Abort(trip.request_id, tuple(trip.choices)))

    def leave(self, trip: Trip, seq_id: int) -> None:
        """A choice is over, or goes on another trip."""
        del trip.choices[seq_id]
        self._by_sequence.pop(seq_id, None)
        instance = self._instances.get(trip.instance) if trip.instance else None
        if instance is not None:
            instance.sequences.pop(seq_id, None)

    def end(self, trip: Trip, phase: Phase) -> None:
        """The trip is over, whatever may still be heard of it."""
        self._num_decoding -= trip.phase is Phase.DECODE
        trip.enter(phase)
        trip.times.ended_s = self._clock()
        del self._trips[trip.request_id]
        if trip in self._unplaced:
            self._unplaced.remove(trip)
        for seq_id in list(trip.choices):
            self.leave(trip, seq_id)

    # ---- held blocks ------------------------------------------------------------------------

    def hold(self, request_id: int, handle: KVHandle) -> None:
        self._held[request_id] = Held(handle)

    def release(self, request_id: int) -> None:
        """The one place where held blocks are given back: their last reader has ended."""
        held = self._held.pop(request_id, None)
        if held is None:
            return
        owner = self._instances.get(held.handle.owner, held.handle.epoch)
        if owner is not None:
            self.send(owner, Release(request_id))

    def is_reading_or_read(self, name: str) -> bool:
        """Whether held blocks are there, or are to be pulled from elsewhere by it."""
        return any(name in (held.handle.owner, held.reader) for held in self._held.values())

    def owner_lost(self, name: str) -> list[Trip]:
        """Held blocks are gone with their owner. Returns the trips that lose their prompt by it.

        A reader says itself whether it has them: by `Pulled`, or by `Gone` when it hears of the
        death.
        """
        lost = [i for i, held in self._held.items() if held.handle.owner == name]
        gone = {i: self._held.pop(i) for i in lost}
        return [t for i, held in gone.items() if held.reader is None and (t := self.get(i))]

    def reader_lost(self, name: str) -> None:
        """Nothing was lost but the reader: another one may pull the same blocks."""
        for request_id, held in list(self._held.items()):
            if held.reader != name:
                continue
            held.reader = None
            if (trip := self.get(request_id)) is not None:
                self.place(trip)
            else:
                self.release(request_id)

    # ---- commands ---------------------------------------------------------------------------

    def send(self, instance: Instance, command: Command) -> None:
        try:
            instance.send(command)
        except PeerGone as error:
            # The supervisor is about to announce its death, which ends what it held.
            logger.info("%s is gone: %s", instance.name, error)

    def _tell(self, trip: Trip, command: Command) -> None:
        instance = self._instances.get(trip.instance) if trip.instance else None
        if instance is not None:
            self.send(instance, command)

    def _can_place(self, trip: Trip) -> bool:
        trip.instance = None
        return self._to_prefill(trip) if trip.phase is Phase.WAITING else self._to_decode(trip)

    def _to_prefill(self, trip: Trip) -> bool:
        if (instance := self._instances.best_prefill(trip.request.max_tokens)) is None:
            return False
        request, spec = trip.request, trip.request.spec
        command = Prefill(
            request_id=trip.request_id,
            arrival=request.arrival,
            seq_ids=tuple(trip.choices),
            choices=tuple(map(request.choice_number, trip.choices.values())),
            prompt=spec.prompt,
            output=trip.output,
            sampling=spec.sampling,
            prompt_logprobs=None if trip.output else spec.prompt_logprobs,
        )
        instance.queued.add(
            trip.request_id,
            request.arrival,
            trip.num_tokens,
            now_s=self._clock(),
            num_choices=len(trip.choices),
        )
        trip.instance = trip.times.prefill_instance = instance.name
        trip.enter(Phase.PREFILL)
        self.send(instance, command)
        return True

    def _to_decode(self, trip: Trip) -> bool:
        request, held = trip.request, self._held[trip.request_id]
        source = self._instances.get(held.handle.owner, held.handle.epoch)
        if source is None:  # its end is about to be announced, and ends this trip
            return False
        if (instance := self._instances.best_decode(request.max_tokens, source)) is None:
            return False
        command = Decode(
            request_id=trip.request_id,
            arrival=request.arrival,
            handle=held.handle,
            sequences=tuple(
                SequenceStart(seq_id, request.choice_number(choice), tuple(choice.output))
                for seq_id, choice in trip.choices.items()
            ),
            prompt=request.spec.prompt,
            sampling=request.spec.sampling,
        )
        held.reader = trip.instance = trip.times.decode_instance = instance.name
        self.decodes_at(trip, instance)
        self.send(instance, command)
        return True
