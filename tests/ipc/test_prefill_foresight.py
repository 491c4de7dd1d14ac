"""A queue that is kept beside another one: what it foretells is what the other one does."""

from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ipc.prefill_policy import FirstComeFirstServed, SkipJoin, Ticket, Turn, WaitingPrompt

L_M = 16
SHORT_PATIENCE, LONG_PATIENCE = 8, 10_000  # quanta
Queue = FirstComeFirstServed[int]
MAKERS: list[Callable[[], Queue]] = [
    lambda: FirstComeFirstServed(L_M),
    lambda: SkipJoin(L_M, LONG_PATIENCE),
]
IMPATIENT: list[Callable[[], Queue]] = [*MAKERS, lambda: SkipJoin(L_M, SHORT_PATIENCE)]


class Pair:
    """A leader's queue, and the one beside it that hears what the leader has done."""

    def __init__(self, make: Callable[[], Queue]) -> None:
        self.leader, self.mirror = make(), make()
        self._tickets: dict[int, tuple[Ticket[int], Ticket[int]]] = {}

    def join(self, num_tokens: int) -> int:
        name = len(self._tickets)
        ours, theirs = (
            Ticket(name, name, WaitingPrompt(num_tokens, -(-num_tokens // 4))) for _ in range(2)
        )
        self._tickets[name] = ours, theirs
        self.leader.join(ours)
        self.mirror.join(theirs)
        return name

    def launch(self) -> list[Turn[int]]:
        turns = self.leader.next_step(free_blocks=1000, free_places=1000)
        for ticket, _ in turns:
            self.mirror.advance(self._tickets[ticket.subject][1], 0)
        return turns

    def collect(self, turns: list[Turn[int]]) -> list[tuple[int, int]]:
        """(name, tokens) of a step that has ended."""
        for ticket, num_new in turns:
            if ticket.prompt.num_tokens:
                self.leader.rejoin(ticket)
            self.mirror.advance(self._tickets[ticket.subject][1], num_new)
        return [(ticket.subject, num_new) for ticket, num_new in turns]

    def step(self) -> list[tuple[int, int]]:
        return self.collect(self.launch())

    def runs_with(self, free_blocks: int) -> bool:
        """Whether the leader can launch a step then."""
        return bool(self.leader.next_step(free_blocks=free_blocks, free_places=1000))

    def computed_before_the_end_of(self, name: int, under_way: list[Turn[int]]) -> int:
        """Tokens of others, until its last chunk has its turn."""
        ticket, num_others, done = self._tickets[name][0], 0, self.collect(under_way)
        while True:
            for who, num_new in done:
                if who != name:
                    num_others += num_new
                elif not ticket.prompt.num_tokens:
                    return num_others
            done = self.step()


SIZES, NEWCOMER = st.lists(st.integers(1, 300), max_size=12), st.integers(1, 200)


@pytest.mark.parametrize("make", MAKERS)
@given(sizes=SIZES, newcomer=NEWCOMER)
def test_what_goes_before_a_newcomer_is_foretold(
    make: Callable[[], Queue], sizes: list[int], newcomer: int
) -> None:
    pair = Pair(make)
    for size in sizes:
        pair.join(size)
    foretold = sum(pair.mirror.before(newcomer))
    assert foretold == pair.computed_before_the_end_of(pair.join(newcomer), [])


@pytest.mark.parametrize("make", IMPATIENT)
@given(sizes=SIZES, num_steps=st.integers(0, 12), newcomer=NEWCOMER)
def test_a_newcomer_never_waits_for_more_than_was_foretold(
    make: Callable[[], Queue], sizes: list[int], num_steps: int, newcomer: int
) -> None:
    """Also where it comes during a step, and where those who have waited long are promoted."""
    pair = Pair(make)
    for number in range(max(num_steps, len(sizes))):
        if number < len(sizes):
            pair.join(sizes[number])
        if number < num_steps:
            pair.step()
    under_way = pair.launch()
    foretold = sum(pair.mirror.before(newcomer))
    assert pair.computed_before_the_end_of(pair.join(newcomer), under_way) <= foretold


@pytest.mark.parametrize("make", MAKERS)
@given(sizes=st.lists(st.integers(1, 200), min_size=1, max_size=12))
def test_of_several_that_come_together_the_last_one_is_foretold(
    make: Callable[[], Queue], sizes: list[int]
) -> None:
    pair = Pair(make)
    last = pair.mirror.last_of(sizes)
    for size in sizes:
        pair.join(size)
    ends = [who for turns in iter(pair.step, []) for who, _ in turns]
    assert ends[-1] == last


@pytest.mark.parametrize("make", IMPATIENT)
@given(sizes=st.lists(st.integers(1, 300), min_size=1, max_size=12), num_steps=st.integers(0, 12))
@example(sizes=[300, *[L_M] * 20], num_steps=SHORT_PATIENCE)
def test_the_blocks_without_which_a_leader_cannot_go_on_are_known(
    make: Callable[[], Queue], sizes: list[int], num_steps: int
) -> None:
    """Also of one that was promoted by the last step: it was once passed over here until the next
    one, so that a leader which waited for its blocks was taken for wedged."""
    pair = Pair(make)
    for size in sizes:
        pair.join(size)
    for _ in range(num_steps):
        pair.step()
    if not len(pair.leader):
        return
    num_blocks = pair.mirror.blocks_to_go_on
    assert num_blocks == 0 or not pair.runs_with(num_blocks - 1)
    assert pair.runs_with(num_blocks)


@pytest.mark.parametrize("make", MAKERS)
def test_what_has_begun_needs_no_blocks_to_go_on(make: Callable[[], Queue]) -> None:
    queue = make()
    assert queue.blocks_to_go_on == 0
    ticket = Ticket(1, 1, WaitingPrompt(40, 10))
    queue.join(ticket)
    assert queue.blocks_to_go_on == 10
    queue.advance(ticket, 0)
    assert queue.blocks_to_go_on == 0
    assert len(queue) == 1
