"""Several ranks as one engine: plans in order, steps in flight, pulls that all ranks confirm."""

from collections.abc import Sequence

import pytest

from gpu_workers.step_plan import Pull, PullResult
from ipc.messages import Abort, Event, Gone, PeerDown, Preempted, Prefilled, Pulled, Tokens
from ipc.vocabulary import Parallelism, Role
from tests.gpu_workers.group_rig import GroupRig
from tests.gpu_workers.rig import prefill, results
from tests.gpu_workers.scripted_engine import scripted_token
from tests.gpu_workers.test_scheduler import decode, prefilled, tokens_of

SHAPES = [Parallelism(2, 1), Parallelism(1, 2), Parallelism(2, 2), Parallelism(1, 4)]


def shape_name(parallelism: Parallelism) -> str:
    return f"tp{parallelism.tp}-pp{parallelism.pp}"


by_shape = pytest.mark.parametrize("shape", SHAPES, ids=shape_name)


def whole_answer(events: Sequence[Event | Tokens], seq_id: int) -> list[int]:
    (first,) = [e for e in prefilled(events) if e.request_id == seq_id // 1000]
    return [first.token_ids[seq_id % 1000], *tokens_of(events, seq_id)]


@by_shape
@pytest.mark.parametrize("chunk_tokens", [None, 5])
@pytest.mark.parametrize("seed", range(3))
def test_answers_do_not_depend_on_shape_or_order(
    shape: Parallelism, chunk_tokens: int | None, seed: int
) -> None:
    rig = GroupRig(Role.MIXED, shape, seed=seed, chunk_tokens=chunk_tokens)
    commands = [prefill(i, 3 * i, num_choices=1 + i % 2) for i in range(1, 9)]
    for command in commands:
        rig.tell(command)
    events = rig.run()
    for command in commands:
        for choice, seq_id in enumerate(command.seq_ids):
            expected = [scripted_token(command.prompt, choice, n) for n in range(8)]
            assert whole_answer(events, seq_id) == expected
    assert rig.most_in_flight == shape.pp
    assert rig.is_all_free
    assert rig.num_sequences == 0


@by_shape
def test_every_rank_carries_out_the_same_plans_in_the_same_order(shape: Parallelism) -> None:
    rig = GroupRig(Role.MIXED, shape, seed=5)
    for request_id in range(1, 7):
        rig.tell(prefill(request_id, 9))
    rig.run()
    leaders, *others = [executor.plans for executor in rig.executors]
    assert [plan.step_id for plan in leaders] == list(range(1, len(leaders) + 1))
    assert all(plans == leaders for plans in others)


def test_a_choice_is_in_one_step_at_a_time() -> None:
    rig = GroupRig(Role.DECODE, Parallelism(1, 2))
    for request_id in (1, 2, 3):
        rig.tell(decode(rig, request_id, 8))
    while sum(len(rows) for _, rows in rig.in_flight) < 3:
        rig.step()
    assert sorted(s for _, rows in rig.in_flight for s in rows) == [1000, 2000, 3000]
    plan = rig.scheduler.plan()
    assert plan is None or not plan.rows


def test_micro_batches_are_even() -> None:
    rig = GroupRig(Role.DECODE, Parallelism(1, 2))
    for request_id in range(1, 11):
        rig.tell(decode(rig, request_id, 4, max_tokens=20))
    rig.run()
    sizes = [len(plan.rows) for plan in rig.executors[0].plans if plan.rows]
    assert max(sizes) == 5
    assert sizes.count(5) >= 30  # of 190 rows; the rest while prompts come and answers end


def test_drawn_tokens_are_told_only_where_there_is_somebody_to_tell() -> None:
    rig = GroupRig(Role.MIXED, Parallelism())
    rig.tell(prefill(1, 9))
    rig.run()
    assert all(plan.drawn == () for plan in rig.executors[0].plans)


@by_shape
@pytest.mark.parametrize("seed", range(4))
def test_an_abort_at_any_moment_leaves_nothing_behind(shape: Parallelism, seed: int) -> None:
    rig = GroupRig(Role.MIXED, shape, seed=seed, chunk_tokens=6)
    commands = [prefill(i, 7, max_tokens=12) for i in range(1, 7)]
    for command in commands:
        rig.tell(command)
    events: list[Event | Tokens] = []
    for command in commands[:3]:
        for _ in range(rig.random.randrange(1, 25)):
            rig.step()
        rig.tell(Abort(command.request_id, command.seq_ids))
    events += rig.run()
    gone = {seq_id for event in events if isinstance(event, Gone) for seq_id in event.seq_ids}
    assert gone <= {1000, 2000, 3000}
    for command in commands[3:]:
        expected = [scripted_token(command.prompt, 0, n) for n in range(12)]
        assert whole_answer(events, command.seq_ids[0]) == expected
    assert rig.is_all_free
    assert rig.num_sequences == 0


def test_what_was_drawn_for_a_choice_that_has_left_is_dropped() -> None:
    rig = GroupRig(Role.MIXED, Parallelism(1, 2))
    rig.tell(prefill(1, 4, max_tokens=20))
    while not tokens_of(list(rig.scheduler.outbox), 1000):
        rig.step()
    rig.take_events()
    while not rig.num_busy:
        rig.launch()
    rig.tell(Abort(1, (1000,)))
    assert rig.scheduler.pool.num_in_use > 0
    assert results(rig.run()) == [Gone(1, (1000,))]
    assert rig.is_all_free


@by_shape
@pytest.mark.parametrize("seed", range(4))
def test_a_full_pool_preempts_with_steps_in_flight_and_goes_on(
    shape: Parallelism, seed: int
) -> None:
    rig = GroupRig(Role.DECODE, shape, seed=seed, num_blocks=12)
    commands = [decode(rig, i, 8, max_tokens=16) for i in (1, 2, 3, 4)]
    for command in commands:
        rig.tell(command)
    events = rig.run()
    preempted = [e.seq_id for e in events if isinstance(e, Preempted)]
    assert preempted
    assert 1000 not in preempted
    for command in commands:
        seq_id = command.sequences[0].seq_id
        got = tokens_of(events, seq_id)
        assert got == [scripted_token(command.prompt, 0, n) for n in range(1, 1 + len(got))]
        assert (seq_id in preempted) == (len(got) < 15)
    assert rig.is_all_free


def test_what_was_drawn_before_a_choice_left_is_not_taken_for_it_when_it_is_back() -> None:
    rig = GroupRig(Role.DECODE, Parallelism(1, 2))
    command = decode(rig, 1, 8, max_tokens=6)
    rig.tell(command)
    while not rig.num_busy:
        rig.step()
    rig.tell(Abort(1, (1000,)))
    rig.tell(command)
    assert rig.launch()
    while rig.scheduler.decodes.num_running == 0:  # the pull ends before the step is collected
        rig._follow(*rig._followers_and_boxes[0])
        rig.mail.deliver(rig.boxes[0])
        for pull in rig.exchange.finished():
            rig.scheduler.pulled(pull)
    assert rig.num_busy == 1
    events = rig.run()
    assert tokens_of(events, 1000) == [scripted_token(command.prompt, 0, n) for n in range(1, 6)]
    assert rig.is_all_free


def test_blocks_of_steps_in_flight_are_not_given_out_again() -> None:
    rig = GroupRig(Role.MIXED, Parallelism(1, 2))
    rig.tell(prefill(1, 8))
    assert rig.launch()
    rig.tell(prefill(2, 8))
    assert rig.launch()
    pool = rig.scheduler.pool
    rig.tell(Abort(1, (1000,)))
    while rig.num_busy == 2:
        rig._follow(*rig._followers_and_boxes[0])
        rig.mail.deliver(rig.boxes[0])
        rig.collect()
    assert pool.num_free == pool.num_blocks - 4  # step 2 was launched while they were in use
    rig.run()
    assert rig.is_all_free


def test_a_pull_is_told_when_the_last_rank_has_copied() -> None:
    rig = GroupRig(Role.DECODE, Parallelism(2, 2))
    slow = LateExchange()
    rig.exchanges[2].begin = slow.begin  # type: ignore[method-assign]
    rig.exchanges[2].finished = slow.finished  # type: ignore[method-assign]
    rig.tell(decode(rig, 1, 8))
    assert rig.run() == []
    slow.is_over = True
    rig.followers[1]._report_pulls()
    (pulled, *tokens) = rig.run()
    assert pulled == Pulled(1, 3 * 1024 + 50, 1.0, 9.0)
    assert len(tokens) == 7


def test_the_end_of_a_peer_is_told_in_the_order_of_plans() -> None:
    rig = GroupRig(Role.DECODE, Parallelism(2, 1), num_blocks=4)
    rig.tell(decode(rig, 1, 8))
    rig.tell(decode(rig, 2, 8))
    assert rig.launch()
    rig.tell(PeerDown("there", 5))
    assert ("there", 5) in rig.exchanges[1].known  # its plan with the pull is still to come
    events = rig.run()
    assert Gone(2, (2000,)) in events
    assert len(tokens_of(events, 1000)) == 7
    assert all(not exchange.known for exchange in rig.exchanges)


def test_prompts_of_a_prefill_instance_are_held_after_the_last_stage() -> None:
    rig = GroupRig(Role.PREFILL, Parallelism(1, 2), max_tokens=8)
    for request_id in (1, 2, 3):
        rig.tell(prefill(request_id, 8))
    assert rig.launch()
    assert rig.launch()
    assert not rig.launch()
    assert rig.scheduler.pool.num_held == 0
    events = rig.run()
    assert [e.request_id for e in events if isinstance(e, Prefilled)] == [1, 2, 3]
    assert rig.scheduler.pool.num_held == 6


class LateExchange:
    """A copy that ends when it is told to."""

    is_over = False

    def __init__(self) -> None:
        self._pulls: list[Pull] = []

    def begin(self, pull: Pull) -> None:
        self._pulls.append(pull)

    def finished(self) -> list[PullResult]:
        if not self.is_over or not self._pulls:
            return []
        pull = self._pulls.pop()
        return [PullResult(pull.handle.request_id, 50, 3.0, 9.0)]
