"""The queues alone: who is given out, in which order, and that nobody waits for ever."""

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc.prefill_policy import (
    BatchLimits,
    FirstComeFirstServed,
    SkipJoin,
    Ticket,
    Turn,
    WaitingPrompt,
    prefill_queue,
)
from ipc.vocabulary import PrefillPolicy

L_M = 16
PATIENCE_QUANTA = 8
BLOCK_SIZE = 4
POLICIES = [FirstComeFirstServed, SkipJoin]


def ticket(name: int, num_tokens: int) -> Ticket[int]:
    return Ticket(name, name, WaitingPrompt(num_tokens, -(-num_tokens // BLOCK_SIZE)))


def joined(queue: FirstComeFirstServed[int], *sizes: int, first_name: int = 0) -> list[Ticket[int]]:
    tickets = [ticket(first_name + i, size) for i, size in enumerate(sizes)]
    for each in tickets:
        queue.join(each)
    return tickets


def step(
    queue: FirstComeFirstServed[int], free_blocks: int = 1000, free_places: int = 1000
) -> list[tuple[int, int]]:
    """Give out a step and compute it at once: (name, tokens) of its turns."""
    turns = queue.next_step(free_blocks=free_blocks, free_places=free_places)
    come_back(queue, turns)
    return [(turn.ticket.subject, turn.num_new) for turn in turns]


def come_back(queue: FirstComeFirstServed[int], turns: list[Turn[int]]) -> None:
    for each, _ in turns:
        if each.prompt.num_tokens:
            queue.rejoin(each)


def steps(queue: FirstComeFirstServed[int]) -> list[list[tuple[int, int]]]:
    """Until nothing is left."""
    return list(iter(lambda: step(queue), []))


def test_the_limits_name_the_queue() -> None:
    assert type(prefill_queue(BatchLimits(L_M, 8))) is FirstComeFirstServed
    assert type(prefill_queue(BatchLimits(L_M, 8, PrefillPolicy.SKIP_JOIN))) is SkipJoin


def test_first_come_first_served_reads_prompts_whole_and_in_order() -> None:
    queue = FirstComeFirstServed[int](L_M)
    joined(queue, 10, 100, 5, 6, 30)
    assert steps(queue) == [[(0, 10)], [(1, 100)], [(2, 5), (3, 6)], [(4, 30)]]


def test_short_prompts_go_before_long_ones_and_long_ones_in_chunks() -> None:
    queue = SkipJoin[int](L_M)
    joined(queue, 40, 10, 20)
    assert steps(queue) == [[(1, 10)], [(2, 16)], [(2, 4)], [(0, 16)], [(0, 16)], [(0, 8)]]


@pytest.mark.parametrize(
    ("sizes", "order"),
    [
        ((17, 16), [1, 0]),  # one quantum covers 16 tokens ...
        ((33, 32), [1, 0]),  # ... two 32 ...
        ((65, 64), [1, 0]),  # ... and four 64
        ((32, 17), [0, 1]),  # those of one level are taken by arrival,
        ((64, 33), [0, 1]),
        ((16, 1), [0]),  # and do not overtake where they do not fit beside
    ],
)
def test_a_prompt_joins_the_first_level_whose_quantum_covers_it(
    sizes: tuple[int, ...], order: list[int]
) -> None:
    queue = SkipJoin[int](L_M)
    joined(queue, *sizes)
    begun = [name for turns in steps(queue) for name, _ in turns]
    assert list(dict.fromkeys(begun))[: len(order)] == order


def test_a_prompt_that_comes_between_two_chunks_of_a_long_one_goes_first() -> None:
    queue = SkipJoin[int](L_M)
    joined(queue, 100)
    assert step(queue) == [(0, 16)]
    joined(queue, 10, first_name=1)
    assert step(queue) == [(1, 10)]
    assert step(queue) == [(0, 16)]


def test_short_prompts_and_ends_of_long_ones_are_packed_to_l_m() -> None:
    queue = SkipJoin[int](L_M)
    joined(queue, 20)
    assert step(queue) == [(0, 16)]
    joined(queue, 6, 6, 1, first_name=1)
    assert steps(queue) == [[(0, 4), (1, 6), (2, 6)], [(3, 1)]]


def test_what_is_left_of_a_long_prompt_rises() -> None:
    """Its last 16 tokens are of the top level: one of 40 that came before waits for them."""
    queue = SkipJoin[int](L_M)
    joined(queue, 32)
    assert step(queue) == [(0, 16)]
    queue.join(Ticket(-1, -1, WaitingPrompt(40, 10)))
    assert step(queue) == [(0, 16)]


def test_chunks_fill_a_budget_beside_decodes() -> None:
    for kind in POLICIES:
        queue = kind(L_M)
        joined(queue, 10, 30)
        turns = queue.next_chunks(budget=24, free_blocks=100, free_places=9)
        assert [turn.num_new for turn in turns] == [10, 14]
        come_back(queue, turns)
        assert [t.num_new for t in queue.next_chunks(budget=24, free_blocks=0, free_places=0)] == [
            16
        ]


def test_what_chunked_steps_have_begun_is_finished_first() -> None:
    queue = FirstComeFirstServed[int](L_M)
    joined(queue, 40)
    come_back(queue, queue.next_chunks(budget=10, free_blocks=100, free_places=9))
    queue.join(Ticket(-1, -1, WaitingPrompt(4, 1)))
    assert steps(queue) == [[(0, 30)], [(-1, 4)]]


def test_nothing_begins_behind_a_prompt_without_room_but_what_has_begun_goes_on() -> None:
    queue = SkipJoin[int](L_M)
    joined(queue, 40)
    assert step(queue) == [(0, 16)]  # it holds 10 blocks of 12
    joined(queue, 12, 4, first_name=1)
    assert step(queue, free_blocks=2) == [(0, 16)]
    assert step(queue, free_blocks=2) == [(0, 8)]
    assert step(queue, free_blocks=2) == []
    assert step(queue, free_blocks=12) == [(1, 12), (2, 4)]


def test_a_prompt_without_places_for_its_choices_waits_like_one_without_blocks() -> None:
    queue = SkipJoin[int](L_M)
    queue.join(Ticket(0, 0, WaitingPrompt(4, 1, num_places=3)))
    assert step(queue, free_places=2) == []
    assert step(queue, free_places=3) == [(0, 4)]


@pytest.mark.parametrize("kind", POLICIES)
def test_one_that_leaves_is_not_given_out(kind: type[FirstComeFirstServed[int]]) -> None:
    queue = kind(L_M)
    first, second, _ = joined(queue, 6, 40, 6)
    queue.leave(first)
    come_back(queue, queue.next_chunks(budget=20, free_blocks=99, free_places=9))
    queue.leave(second)
    queue.leave(second)
    assert {name for turns in steps(queue) for name, _ in turns} <= {2}


def test_choices_of_equal_arrival_are_told_apart() -> None:
    queue = SkipJoin[int](L_M)
    tickets = [Ticket(name, 5, WaitingPrompt(40, 10)) for name in range(3)]
    for each in tickets:
        queue.join(each)
    queue.leave(tickets[1])
    assert sorted({name for turns in steps(queue) for name, _ in turns}) == [0, 2]


def test_a_stream_of_short_prompts_passes_a_long_one_for_so_long_and_no_longer() -> None:
    queue = SkipJoin[int](L_M, PATIENCE_QUANTA)
    (long,) = joined(queue, 40)
    passed = 0
    while not long.has_begun and passed < 100:
        joined(queue, L_M, first_name=passed + 1)
        turns = step(queue)
        passed += len(turns) if turns[0][0] else 0
    assert passed == PATIENCE_QUANTA
    joined(queue, L_M, first_name=passed + 1)
    assert [step(queue) for _ in range(3)] == [[(0, 16)], [(0, 8)], [(passed + 1, 16)]]


def test_those_who_left_do_not_make_others_wait() -> None:
    """Their tokens count as if they had been computed: they were before the long one."""
    queue = SkipJoin[int](L_M, PATIENCE_QUANTA)
    for each in joined(queue, *[1000] * 10):
        queue.leave(each)
    (long,) = joined(queue, 40, first_name=10)
    for passed in range(PATIENCE_QUANTA + 1):
        assert not long.has_begun
        joined(queue, L_M, first_name=100 + passed)
        step(queue)
    assert long.has_begun


SIZES = st.integers(1, 200)
ARRIVALS = st.lists(st.tuples(st.integers(0, 6), SIZES), min_size=1, max_size=60)


@given(ARRIVALS)
def test_so_many_tokens_of_later_prompts_go_first_and_no_more(
    arrivals: list[tuple[int, int]],
) -> None:
    """The bound of `SkipJoin`, up to the last chunk: its patience and one step."""
    queue = SkipJoin[int](L_M, PATIENCE_QUANTA)
    later: dict[int, int] = {}  # of each prompt that is not done: tokens of later ones
    to_come = deque(arrivals)
    name = 0
    while to_come or later:
        while to_come and to_come[0][0] == 0:
            joined(queue, to_come.popleft()[1], first_name=name)
            later[name] = 0
            name += 1
        if to_come:
            to_come[0] = (to_come[0][0] - 1, to_come[0][1])
        turns = queue.next_step(free_blocks=10**6, free_places=10**6)
        come_back(queue, turns)
        for each, num_new in turns:
            if not each.prompt.num_tokens:
                del later[each.subject]
            for earlier in later:
                later[earlier] += num_new if earlier < each.subject else 0
        assert max(later.values(), default=0) <= (PATIENCE_QUANTA + 1) * L_M


@dataclass
class Pool:
    """Blocks of a prefill instance: taken by what begins, back when a reader has pulled it."""

    free: int
    held: deque[int] = field(default_factory=deque)

    def take(self, turns: list[Turn[int]], sizes: dict[int, int]) -> None:
        for each, num_new in turns:
            if each.prompt.num_tokens + num_new == sizes[each.subject]:
                self.free -= -(-sizes[each.subject] // BLOCK_SIZE)
        assert self.free >= 0


@pytest.mark.parametrize("kind", POLICIES)
@given(
    arrivals=st.lists(st.sampled_from([4, 30, 60, 130, 200]), min_size=4, max_size=40),
    num_blocks=st.integers(50, 64),
    in_flight=st.integers(1, 4),
    choices=st.randoms(use_true_random=False),
)
def test_a_full_pool_never_ends_in_a_circle(
    kind: type[FirstComeFirstServed[int]],
    arrivals: list[int],
    num_blocks: int,
    in_flight: int,
    choices: object,
) -> None:
    """Any order of arrivals, ends of steps and pulls: as long as nothing is under way and nothing
    is held, somebody can run; and nobody is in two steps."""
    queue, pool = kind(L_M), Pool(num_blocks)
    sizes = dict(enumerate(arrivals))
    under_way: deque[list[Turn[int]]] = deque()
    to_come, done = deque(sizes), 0

    def arrive() -> bool:
        if to_come:
            name = to_come.popleft()
            joined(queue, sizes[name], first_name=name)
            return True
        return False

    def launch() -> bool:
        if len(under_way) < in_flight:
            turns = queue.next_step(free_blocks=pool.free, free_places=8)
            pool.take(turns, sizes)
            busy = {turn.ticket.subject for step in under_way for turn in step}
            assert not busy & {turn.ticket.subject for turn in turns}
            if turns:
                under_way.append(turns)
                return True
        return False

    def collect() -> bool:
        if under_way:
            turns = under_way.popleft()
            come_back(queue, turns)
            pool.held += [t.ticket.subject for t in turns if not t.ticket.prompt.num_tokens]
            return True
        return False

    def pulled() -> bool:
        nonlocal done
        if pool.held:
            pool.free += -(-sizes[pool.held.popleft()] // BLOCK_SIZE)
            done += 1
            return True
        return False

    acts = [arrive, launch, collect, pulled]
    while done < len(sizes):
        choices.shuffle(acts)  # type: ignore[attr-defined]
        assert any(act() for act in acts), "everybody waits for everybody"
    assert pool.free == num_blocks
