"""In which order prompts are prefilled: first come, first served, or by skip-join.

Pure: counts and tickets, no ids, no clock, no tensors; time is measured in tokens of prompts. The
leaders and the planner's simulator drive these very queues, and the daemon keeps one beside each
leader's to predict with. What a queue gives out belongs to a step and is in the queue no more; a
prompt with tokens left comes back when its chunk is computed.
"""

import bisect
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar, assert_never

import msgspec

from ipc.vocabulary import PrefillPolicy

T = TypeVar("T")

PATIENCE_QUANTA = 128


class WaitingPrompt(msgspec.Struct, frozen=True):
    """What a policy may know of a prompt: its tokens still to compute, the blocks it will need,
    and its places in the batch (one for each choice where they will decode here)."""

    num_tokens: int
    num_blocks: int
    num_places: int = 1


class BatchLimits(msgspec.Struct, frozen=True):
    """How much one step takes on, and which prompts go first.

    `prefill_tokens` is L_m, the shortest prompt that saturates the device (paper section 3.1);
    `max_batch` choices decode together, or prompts are prefilled together, at most.
    """

    prefill_tokens: int
    max_batch: int
    prefill_policy: PrefillPolicy = PrefillPolicy.FCFS


@dataclass(eq=False, slots=True)
class Ticket(Generic[T]):
    """A prompt from its arrival to its last chunk, and what its queue notes on it.

    `prompt` is what it still needs: tokens, and blocks and places until it has begun. It gets all
    of them when it begins and keeps them, so what has begun can always be finished.
    """

    subject: T
    arrival: int
    prompt: WaitingPrompt
    has_begun: bool = False
    is_queued: bool = False
    is_promoted: bool = False


class Turn(NamedTuple, Generic[T]):
    """So many tokens of a prompt in the next step."""

    ticket: Ticket[T]
    num_new: int


class FirstComeFirstServed(Generic[T]):
    """By arrival, and whole: short prompts are packed up to `max_tokens` (L_m), a longer one
    travels alone (paper section 4.3). What chunked steps have begun comes first."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._queue: list[Ticket[T]] = []  # in the order of `_rank`
        self._num_begun = 0

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def head(self) -> Ticket[T] | None:
        """The one that is next."""
        return self._queue[0] if self._queue else None

    def join(self, ticket: Ticket[T]) -> None:
        """A prompt has arrived."""
        self._insert(ticket)

    def rejoin(self, ticket: Ticket[T]) -> None:
        """A chunk of it has been computed, and tokens are left."""
        self._insert(ticket)

    def leave(self, ticket: Ticket[T]) -> None:
        """It will not be computed further, whether it was here or in a step."""
        if ticket.is_queued:
            self._remove(ticket)

    def next_step(self, *, free_blocks: int, free_places: int) -> list[Turn[T]]:
        """What runs in the next step of prompts alone; empty when nothing is here or fits."""
        count = self._num_begun or pack_prefill(
            (ticket.prompt for ticket in self._queue),
            max_tokens=self._max_tokens,
            free_blocks=free_blocks,
            free_places=free_places,
        )
        return self._take([Turn(t, t.prompt.num_tokens) for t in self._queue[:count]])

    def next_chunks(self, *, budget: int, free_blocks: int, free_places: int) -> list[Turn[T]]:
        """What fills a step's token budget beside decodes, the last prompt by a part of it."""
        return self._take(self._choose(budget, free_blocks, free_places, splits=True))

    # ---- where the queue itself is elsewhere, and this one beside it ------------------------

    def advance(self, ticket: Ticket[T], num_new: int) -> None:
        """So many tokens of a queued prompt have been computed there; none: they begin to be."""
        self._take([Turn(ticket, num_new)])
        if ticket.prompt.num_tokens:
            self.rejoin(ticket)

    def before(self, num_tokens: int) -> list[int]:
        """What goes before a prompt that comes now: how much of each is still to be computed."""
        return [ticket.prompt.num_tokens for ticket in self._queue]

    def last_of(self, prompts: Sequence[int]) -> int:
        """Which of several that come now, in this order, is finished last, by its index, if nobody
        is promoted meanwhile."""
        return len(prompts) - 1

    def level(self, num_tokens: int) -> int:
        """Those of a lower one go before such a prompt, also if they come later than it."""
        return 0

    @property
    def blocks_to_go_on(self) -> int:
        """Free blocks without which no step can run: none where something has begun, or waits."""
        if self._num_begun or not self._queue:
            return 0
        return self._queue[0].prompt.num_blocks

    # ---- how --------------------------------------------------------------------------------

    def _rank(self, ticket: Ticket[T]) -> tuple[int, int]:
        """Lower ones go first. What it is made of changes only while a ticket is not queued."""
        return (0 if ticket.has_begun else 1, ticket.arrival)

    def _choose(self, budget: int, blocks: int, places: int, *, splits: bool) -> list[Turn[T]]:
        """Turns in order while there is room; with `splits`, others than the first may be parts.

        Nothing begins once a prompt before it lacks blocks or places, but what has begun goes on:
        it holds the blocks that the other one waits for.
        """
        turns: list[Turn[T]] = []
        is_closed, begun_to_come = False, self._num_begun
        for ticket in self._queue:
            if budget <= 0 or (is_closed and not begun_to_come):
                break
            prompt = ticket.prompt
            begun_to_come -= ticket.has_begun
            lacks_room = prompt.num_blocks > blocks or prompt.num_places > places
            is_closed |= lacks_room and not ticket.has_begun
            if is_closed and not ticket.has_begun:
                continue
            num_new = min(prompt.num_tokens, budget)
            if turns and num_new < prompt.num_tokens and not splits:
                break
            turns.append(Turn(ticket, num_new))
            budget -= num_new
            blocks -= prompt.num_blocks
            places -= prompt.num_places
        return turns

    def _take(self, turns: Sequence[Turn[T]]) -> list[Turn[T]]:
        """These are in a step now."""
        for ticket, num_new in turns:
            self._remove(ticket)
            ticket.prompt = WaitingPrompt(ticket.prompt.num_tokens - num_new, 0, 0)
            ticket.has_begun = True
        return list(turns)

    def _insert(self, ticket: Ticket[T]) -> None:
        bisect.insort(self._queue, ticket, key=self._rank)
        self._num_begun += ticket.has_begun
        ticket.is_queued = True

    def _remove(self, ticket: Ticket[T]) -> None:
        index = 0
        if self._queue[0] is not ticket:
            index = bisect.bisect_left(self._queue, self._rank(ticket), key=self._rank)
            while self._queue[index] is not ticket:  # choices of one request are of equal rank
                index += 1
        del self._queue[index]
        self._num_begun -= ticket.has_begun
        ticket.is_queued = False


class SkipJoin(FirstComeFirstServed[T]):
    """Short prompts go before long ones, which are computed in chunks and let newcomers in between.

    The multi-level feedback queue with skip-join of FastServe (Wu et al., arXiv 2305.05920, section
    4.1): level k has the quantum 2^k L_m, and a prompt, whose work is known, joins the first level
    whose quantum covers it, instead of sinking to it. The lowest nonempty level goes first, by
    arrival within it. FastServe's jobs are preempted between tokens; a prefill is one long
    iteration, so here it is cut: a step takes L_m tokens of a long prompt, the shortest chunk that
    keeps the device busy, and what is left rises with each chunk, having less to do. Prompts that
    fit L_m together are packed as ever.

    Nobody starves. A prompt is promoted to the top level, where arrival alone counts, once the
    tokens computed exceed those that had come before it by `patience_quanta` L_m. So before its
    last chunk at most that many tokens, and one step's, are computed of prompts that came after
    it; besides what prompts begun before still lack, where it has to wait for their blocks, and
    steps that fill a pipeline behind chunks of its own. Those that are prefilled again are in
    their old place, as with first come, first served.
    """

    def __init__(self, max_tokens: int, patience_quanta: int = PATIENCE_QUANTA) -> None:
        super().__init__(max_tokens)
        self._patience = patience_quanta * max_tokens
        self._num_joined = 0  # tokens, of all that have come
        self._num_past = 0  # of these: given out to steps, or left
        self._due: deque[tuple[int, Ticket[T]]] = deque()  # (`_num_past` at promotion, who)

    def join(self, ticket: Ticket[T]) -> None:
        if self._rank(ticket)[0]:  # else it is at the top already
            self._due.append((self._num_joined + self._patience, ticket))
        self._num_joined += ticket.prompt.num_tokens
        super().join(ticket)

    def leave(self, ticket: Ticket[T]) -> None:
        super().leave(ticket)
        self._pass_by(ticket.prompt.num_tokens)

    def next_step(self, *, free_blocks: int, free_places: int) -> list[Turn[T]]:
        turns = self._choose(self._max_tokens, free_blocks, free_places, splits=False)
        return self._take(turns)

    def before(self, num_tokens: int) -> list[int]:
        """Those of its level and below, and whoever is promoted before its last chunk; and, as the
        step under way may be one of a longer prompt's, a chunk of such a prompt, or all of it where
        a chunk less makes it as short."""
        level = self.level(num_tokens)
        num_first = bisect.bisect_left(self._queue, (level + 1, 0), key=self._rank)
        left = {ticket: ticket.prompt.num_tokens for ticket in self._queue[:num_first]}
        if (begun := next((t for t in self._queue[num_first:] if t.has_begun), None)) is not None:
            rest = begun.prompt.num_tokens - self._max_tokens
            is_near = rest <= 0 or self.level(rest) <= level
            left[begun] = begun.prompt.num_tokens if is_near else self._max_tokens
        num_own = (num_tokens - 1) // self._max_tokens * self._max_tokens  # before its last chunk
        num_past = self._num_past + sum(left.values()) + num_own
        for due, ticket in self._due:
            if due > num_past:
                break
            if ticket.is_queued:
                num_past += ticket.prompt.num_tokens - left.get(ticket, 0)
                left[ticket] = ticket.prompt.num_tokens
        return list(left.values())

    def last_of(self, prompts: Sequence[int]) -> int:
        return max(range(len(prompts)), key=lambda i: (self.level(prompts[i]), i))

    def level(self, num_tokens: int) -> int:
        return ((num_tokens - 1) // self._max_tokens).bit_length()

    def _rank(self, ticket: Ticket[T]) -> tuple[int, int]:
        level = 0 if ticket.is_promoted else self.level(ticket.prompt.num_tokens)
        return (level, ticket.arrival)

    def _take(self, turns: Sequence[Turn[T]]) -> list[Turn[T]]:
        super()._take(turns)
        self._pass_by(sum(turn.num_new for turn in turns))
        return list(turns)

    def _pass_by(self, num_tokens: int) -> None:
        """That many have gone before those who wait; who has let enough of them by is promoted."""
        self._num_past += num_tokens
        while self._due and self._due[0][0] <= self._num_past:
            ticket = self._due.popleft()[1]
            if not ticket.is_queued:
                ticket.is_promoted = True  # in a step, or gone
                continue
            self._remove(ticket)
            ticket.is_promoted = True
            self._insert(ticket)


def prefill_queue(limits: BatchLimits) -> FirstComeFirstServed[T]:
    """The queue of the policy that the limits name."""
    match limits.prefill_policy:
        case PrefillPolicy.FCFS:
            return FirstComeFirstServed(limits.prefill_tokens)
        case PrefillPolicy.SKIP_JOIN:
            return SkipJoin(limits.prefill_tokens)
        case _:
            assert_never(limits.prefill_policy)


def pack_prefill(
    waiting: Iterable[WaitingPrompt], *, max_tokens: int, free_blocks: int, free_places: int
) -> int:
    """How many prompts from the head of the queue run together in the next prefill step.

    First come, first served: short prompts are packed up to `max_tokens` (L_m), a longer one
    travels alone, and nothing overtakes a prompt that has no room yet (paper section 4.3).
    """
    count, num_tokens = 0, 0
    for prompt in waiting:
        free_blocks -= prompt.num_blocks
        free_places -= prompt.num_places
        num_tokens += prompt.num_tokens
        is_full = count > 0 and num_tokens > max_tokens
        if is_full or free_blocks < 0 or free_places < 0:
            break
        count += 1
    return count
