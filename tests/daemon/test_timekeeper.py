"""Requests whose time is up: in the queue, in all, or without an instance."""

import asyncio
import time

import pytest

from daemon.deadlines import TimeLimits
from daemon.errors import NotReady, QueueFull, QueueTimeout, RequestTimeout
from daemon.text import Tokenizer
from ipc.vocabulary import FinishReason, Role
from tests.daemon.mute import MuteHouse, error_of
from tests.daemon.test_metrics import samples

LIMITS = TimeLimits(queue_s=10.0, request_s=100.0, outage_s=5.0)


def refused(house: MuteHouse) -> dict[str, float]:
    """How many by which reason; every reason is told, most of them with none."""
    counts = samples(house.metrics, "distserve_requests_refused_total")
    return {reason: count for reason, count in counts.items() if count}


def test_who_waits_too_long_for_a_prefill_is_refused_and_gives_its_place_up_D14(
    tokenizer: Tokenizer,
) -> None:
    house = MuteHouse(tokenizer, max_queued=2, time_limits=LIMITS)
    first, second = house.ask(100), house.ask(100)
    with pytest.raises(QueueFull):
        house.ask(100)
    house.begun(house.prefills()[0])
    house.wait_until(9.9)
    assert error_of(second) is None
    house.wait_until(10.0)
    error = error_of(second)
    assert isinstance(error, QueueTimeout)
    assert (error.status, error.code) == (429, "queue_timeout")
    assert 0 < error.retry_after_s <= 120
    assert house.aborted("p0") == [house.prefills()[1].request_id]
    assert error_of(first) is None, "its turn had come"
    house.ask(100)
    assert refused(house) == {"queue_full": 1, "queue_timeout": 1}


def test_prompts_that_are_packed_with_the_head_of_the_queue_are_not_timed_out_D14(
    tokenizer: Tokenizer,
) -> None:
    """Their step runs: they once were answered 429 in the middle of it."""
    house = MuteHouse(tokenizer, time_limits=LIMITS)
    packed = [house.ask(100) for _ in range(3)]
    behind = house.ask(100)
    house.wait_until(9.0)
    house.begun(*house.prefills()[:3])
    house.wait_until(50.0)
    assert [error_of(call) for call in packed] == [None] * 3
    assert isinstance(error_of(behind), QueueTimeout)


def test_a_prompt_that_waits_at_the_head_for_blocks_is_timed_out_D14(tokenizer: Tokenizer) -> None:
    house = MuteHouse(tokenizer, time_limits=LIMITS)
    first = house.ask(100)
    house.wait_until(10.0)
    assert isinstance(error_of(first), QueueTimeout)


def test_a_request_whose_prefill_was_in_time_may_decode_for_longer(tokenizer: Tokenizer) -> None:
    house = MuteHouse(tokenizer, time_limits=LIMITS)
    call = house.ask(100)
    house.now_s = 5.0
    house.prefilled(house.prefills()[0], 4.0, 5.0)
    house.wait_until(99.0)
    assert error_of(call) is None


@pytest.mark.parametrize("phase", ["prefill", "handoff", "decode"])
def test_no_request_lives_longer_than_its_limit_wherever_it_is_A15_A16_A22(
    tokenizer: Tokenizer, phase: str
) -> None:
    house = MuteHouse(tokenizer, time_limits=LIMITS)
    call = house.ask(100)
    house.begun(house.prefills()[0])
    if phase != "prefill":
        house.prefilled(house.prefills()[0], 0.0, 1.0)
    if phase == "decode":
        house.pulled(house.decodes()[0])
        house.token(house.decodes()[0])
    house.wait_until(100.0)
    error = error_of(call)
    assert isinstance(error, RequestTimeout)
    assert error.status == 504
    assert house.controller.num_open == 0
    assert house.aborted("p0" if phase == "prefill" else "d0") == [house.prefills()[0].request_id]
    assert refused(house) == {}, "it was not refused, it failed"


def test_a_request_without_an_instance_waits_for_one_but_not_for_ever_B13(
    tokenizer: Tokenizer,
) -> None:
    house = MuteHouse(tokenizer, time_limits=LIMITS)
    call = house.ask(100)
    house.down("p0")
    with pytest.raises(NotReady):
        house.ask(100)
    house.wait_until(4.9)
    assert error_of(call) is None
    house.wait_until(5.0)
    error = error_of(call)
    assert isinstance(error, NotReady)
    assert (error.status, error.code) == (503, "not_ready")
    assert refused(house) == {"not_ready": 2}
    assert house.controller.num_open == 0


def test_an_instance_that_comes_in_time_gets_what_waited_for_it(tokenizer: Tokenizer) -> None:
    house = MuteHouse(tokenizer, time_limits=LIMITS)
    call = house.ask(100)
    house.down("p0")
    house.wait_until(4.0)
    house.up("p0", Role.PREFILL)
    house.wait_until(9.0)
    assert error_of(call) is None
    assert [len(command.prompt) for command in house.prefills()] == [100, 100]


def test_others_that_come_up_do_not_prolong_an_outage(tokenizer: Tokenizer) -> None:
    house = MuteHouse(tokenizer, time_limits=LIMITS)
    call = house.ask(100)
    house.down("p0")
    for now_s in (2.0, 4.0):
        house.wait_until(now_s)
        house.up(f"d{now_s:g}", Role.DECODE)
    house.wait_until(5.0)
    assert isinstance(error_of(call), NotReady)


def test_a_second_outage_is_counted_anew(tokenizer: Tokenizer) -> None:
    house = MuteHouse(tokenizer, time_limits=TimeLimits(outage_s=5.0))
    call = house.ask(100)
    for now_s in (0.0, 4.0):
        house.wait_until(now_s)
        house.down("p0")
        house.wait_until(now_s + 3.0)
        house.up("p0", Role.PREFILL)
    house.down("p0")
    house.wait_until(11.9)
    assert error_of(call) is None
    house.wait_until(12.0)
    assert isinstance(error_of(call), NotReady)


def test_blocks_that_wait_for_a_decode_instance_are_freed_when_none_comes_B13(
    tokenizer: Tokenizer,
) -> None:
    house = MuteHouse(tokenizer, time_limits=LIMITS)
    call = house.ask(100)
    house.down("d0")
    house.prefilled(house.prefills()[0], 0.0, 1.0)
    house.wait_until(5.0)
    assert isinstance(error_of(call), NotReady)
    assert "Release" in type(house.sent["p0"][-1]).__name__
    assert refused(house) == {}, "a token has been sent: that is a failure"


def test_a_request_of_which_two_limits_are_due_at_once_is_refused_once(
    tokenizer: Tokenizer,
) -> None:
    limits = TimeLimits(queue_s=5.0, request_s=100.0, outage_s=5.0)
    house = MuteHouse(tokenizer, time_limits=limits)
    house.ask(100)
    house.down("p0")
    house.wait_until(5.0)
    assert sum(refused(house).values()) == 1
    assert house.controller.num_open == 0


def test_requests_that_end_leave_no_deadline_behind(tokenizer: Tokenizer) -> None:
    house = MuteHouse(tokenizer, time_limits=LIMITS)
    gone, done = house.ask(100), house.ask(100)
    with gone:
        pass
    house.prefilled(house.prefills()[1], 0.0, 1.0)
    house.pulled(house.decodes()[0])
    house.token(house.decodes()[0], FinishReason.LENGTH)
    assert house.controller.num_open == 0
    assert len(house.controller.timekeeper._deadlines) == 0
    house.wait_until(1000.0)
    assert error_of(done) is None


async def test_the_clock_is_looked_at_when_something_is_due_and_not_before(
    tokenizer: Tokenizer,
) -> None:
    looks = 0

    def clock() -> float:
        nonlocal looks
        looks += 1
        return time.monotonic()

    limits = TimeLimits(queue_s=0.3, request_s=0.2, outage_s=5.0)
    house = MuteHouse(tokenizer, time_limits=limits, clock=clock)
    async with asyncio.TaskGroup() as tasks:
        keeper = tasks.create_task(house.controller.timekeeper.run())
        await asyncio.sleep(0)  # it waits, without a deadline
        call = house.ask(100)
        with pytest.raises(RequestTimeout):
            await anext(call)
        keeper.cancel()
    assert looks < 20
