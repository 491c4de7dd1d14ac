"""Steps of a sequence that are launched before the one before them has been collected."""

import random
from collections import deque
from typing import Any

import msgspec
import pytest

from gpu_workers.prefill_side import Owner
from gpu_workers.scheduler import Scheduler
from ipc.messages import (
    Abort,
    Decode,
    Event,
    Gone,
    MixedPolicy,
    Preempted,
    Prefill,
    Prefilled,
    SequenceStart,
    Tokens,
)
from ipc.prefill_policy import BatchLimits
from ipc.vocabulary import FinishReason, KVHandle, PrefillPolicy, Role
from tests.gpu_workers.rig import BLOCK_SIZE, Rig, prefill
from tests.gpu_workers.scripted_engine import scripted_token


class Ahead(Rig):
    """A mixed instance whose sequences may have two steps under way."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        max_in_flight: int = 2,
        chunk_tokens: int | None = None,
        engine: tuple[Any, Any] | None = None,
    ) -> None:
        super().__init__(Role.MIXED, num_blocks=num_blocks, engine=engine)
        self.max_in_flight = max_in_flight
        self.scheduler = Scheduler(
            Owner(self.name, self.epoch),
            Role.MIXED,
            MixedPolicy(chunk_tokens),
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            limits=BatchLimits(32, 16, PrefillPolicy.FCFS),
            max_in_flight=max_in_flight,
        )
        self.under_way: deque[Any] = deque()
        self.events: list[Event | Tokens] = []

    def launch(self) -> bool:
        """Plan and launch one step, if there is one to plan."""
        plan = self.scheduler.plan()
        self.check()
        if plan is None:
            return False
        self.under_way.append((plan, self.executor.launch(plan)))
        self.scheduler.launched(plan, 1.0)
        return True

    def collect(self) -> None:
        _, launched = self.under_way.popleft()
        result = self.executor.collect(launched)
        self.scheduler.collect(result, started_s=1.0, ended_s=2.0)
        self.events += self.take_events()
        self.check()

    @property
    def num_busy(self) -> int:
        return sum(bool(plan.rows) for plan, _ in self.under_way)

    def turn(self) -> bool:
        """As the leader's loop: launch what can be planned; collect when enough is under way, or
        when nothing more can be planned."""
        has_launched = self.launch()
        while self.under_way and (not has_launched or self.num_busy >= self.max_in_flight):
            self.collect()
            has_launched = True
        return bool(has_launched or self.under_way)

    def finish(self) -> None:
        while self.turn():
            pass

    def decoded(self) -> dict[int, list[int]]:
        """Tokens of decode steps, by sequence."""
        found: dict[int, list[int]] = {}
        for event in self.events:
            if isinstance(event, Tokens):
                for row in event.rows:
                    found.setdefault(row.seq_id, []).extend(row.token_ids)
        return found


def expected(command: Prefill, first: int, last: int) -> list[int]:
    return [scripted_token(command.prompt, 0, index) for index in range(first, last)]


def begun(rig: Ahead, command: Prefill) -> None:
    """Its prompt is done: it is about to decode."""
    rig.tell(command)
    rig.launch()
    rig.collect()


def test_a_sequences_next_step_is_launched_before_its_last_has_ended_and_no_third() -> None:
    rig = Ahead()
    begun(rig, prefill(1, 6, max_tokens=8))
    assert [rig.launch() for _ in range(3)] == [True, True, False]
    rig.collect()
    assert rig.launch()


def test_all_tokens_come_in_order_and_none_too_many() -> None:
    rig = Ahead()
    commands = [prefill(number, 5, max_tokens=3 + number) for number in (1, 2, 3)]
    for command in commands:
        rig.tell(command)
    rig.finish()
    found = rig.decoded()
    for command in commands:
        limit = command.sampling.max_tokens
        assert found[command.seq_ids[0]] == expected(command, 1, limit)
    assert rig.is_all_free


def test_a_token_that_was_drawn_behind_the_end_is_dropped() -> None:
    command = prefill(1, 6, max_tokens=20)
    end = scripted_token(command.prompt, 0, 3)
    sampling = msgspec.structs.replace(command.sampling, end_token_ids=(end,))
    rig = Ahead()
    rig.tell(msgspec.structs.replace(command, sampling=sampling))
    rig.finish()
    rows = [row for event in rig.events if isinstance(event, Tokens) for row in event.rows]
    assert [row.token_ids[0] for row in rows] == expected(command, 1, 4)
    assert rows[-1].finished is FinishReason.STOP
    assert rig.is_all_free


def test_blocks_of_a_sequence_that_ended_wait_for_its_step_under_way_A6() -> None:
    rig = Ahead()
    begun(rig, prefill(1, 6, max_tokens=8))
    rig.launch()
    rig.launch()
    rig.tell(Abort(1, (1000,)))
    assert not rig.is_all_free
    rig.collect()
    rig.collect()
    rig.finish()
    assert rig.is_all_free
    assert rig.decoded() == {}


@pytest.mark.parametrize(
    "changes", [{"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.2}]
)
def test_who_looks_at_its_own_tokens_waits_for_each(changes: dict[str, float]) -> None:
    rig = Ahead()
    command = prefill(1, 6, max_tokens=6)
    sampling = msgspec.structs.replace(command.sampling, **changes)
    begun(rig, msgspec.structs.replace(command, sampling=sampling))
    assert [rig.launch(), rig.launch()] == [True, False]
    rig.finish()
    assert rig.decoded()[1000] == expected(command, 1, 6)


def test_a_choice_that_comes_back_does_not_get_its_former_selfs_tokens() -> None:
    rig = Ahead()
    command = prefill(1, 6, max_tokens=8)
    begun(rig, command)
    rig.launch()
    rig.launch()
    rig.tell(Abort(1, (1000,)))
    rig.know("prefill-0", 1)
    output = tuple(expected(command, 0, 4))
    handle = KVHandle("prefill-0", 1, 7, (0, 1, 2), 9)
    starts = (SequenceStart(1000, 0, output),)
    rig.tell(Decode(7, 7, handle, starts, command.prompt, command.sampling))
    rig.launch()
    for pull in rig.exchange.finished():  # it is back while its former self is under way
        rig.scheduler.pulled(pull)
    rig.finish()
    assert rig.decoded()[1000] == expected(command, 4, 8)
    assert rig.is_all_free


def run_all(rig: Ahead, seed: int) -> dict[int, list[int]]:
    """Prompts that come and go in a pool too small for all; preempted ones are told again."""
    dice = random.Random(seed)
    commands = {
        number: prefill(number, dice.randint(1, 20), max_tokens=dice.randint(1, 14))
        for number in range(1, 25)
    }
    drawn: dict[int, list[int]] = {number: [] for number in commands}
    waiting = list(commands)
    aborted: set[int] = set()
    seen = 0
    while waiting or rig.under_way or rig.turn():
        if waiting and dice.random() < 0.4:
            rig.tell(commands[waiting.pop(0)])
        if dice.random() < 0.05:
            number = dice.choice(list(commands))
            aborted.add(number)
            rig.tell(Abort(number, (1000 * number,)))
        rig.turn()
        rig.events += rig.take_events()
        for event in rig.events[seen:]:
            match event:
                case Prefilled(request_id, token_ids):
                    drawn[request_id] += token_ids
                case Tokens(_, rows):
                    for row in rows:
                        drawn[row.seq_id // 1000] += row.token_ids
                case Preempted(seq_id):
                    number = seq_id // 1000
                    output = tuple(drawn[number])
                    commands[number] = msgspec.structs.replace(commands[number], output=output)
                    rig.tell(commands[number])
                case Gone():
                    pass
        seen = len(rig.events)
    for number, command in commands.items():
        whole = expected(command, 0, command.sampling.max_tokens)
        assert drawn[number] == whole[: len(drawn[number])]
        assert number in aborted or drawn[number] == whole
    return drawn


@pytest.mark.parametrize("seed", range(6))
def test_under_pressure_and_aborts_every_token_is_right_and_no_block_is_lost(seed: int) -> None:
    rig = Ahead(num_blocks=14)
    run_all(rig, seed)
    rig.finish()
    assert rig.is_all_free
    assert rig.num_sequences == 0


def test_the_pool_is_small_enough_to_preempt() -> None:
    rigs = [Ahead(num_blocks=14) for _ in range(6)]
    for seed, rig in enumerate(rigs):
        run_all(rig, seed)
    assert sum(rig.scheduler.decodes.num_preempted for rig in rigs) > 0
