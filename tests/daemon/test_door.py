"""Who is let in by the controller, and what it has learned for that from the steps that ran."""

import pytest

from daemon.door import Target
from daemon.errors import NotReady, PromptTooLong, QueueFull, SloMissed
from daemon.text import Tokenizer
from ipc.vocabulary import PrefillPolicy, Role
from tests.daemon.mute import MuteHouse
from tests.daemon.test_metrics import samples
from tests.daemon.test_prefill_times import POINTS, table


def served(house: MuteHouse, num_prompts: int, *, token_s: float = 0.01) -> None:
    """Prompts of 100 tokens, prefilled one after the other; their clients leave."""
    for _ in range(num_prompts):
        with house.ask(100):
            house.now_s += 100 * token_s
            command = house.prefills()[-1]
            house.prefilled(command, house.now_s - 100 * token_s, house.now_s)


def refusal(house: MuteHouse, num_prompt: int) -> QueueFull:
    with pytest.raises(QueueFull) as refused:
        house.ask(num_prompt)
    return refused.value


def test_until_steps_have_run_nobody_is_refused_for_the_target(tokenizer: Tokenizer) -> None:
    house = MuteHouse(tokenizer, target=Target(ttft_s=0.1))
    for _ in range(50):
        house.ask(1000)


def test_who_would_miss_the_target_by_the_steps_that_ran_is_refused(tokenizer: Tokenizer) -> None:
    """A second for 100 tokens, a target of 3 s: two may wait before one."""
    house = MuteHouse(tokenizer, target=Target(ttft_s=3.0))
    served(house, 10)
    for _ in range(3):
        house.ask(100)
    error = refusal(house, 100)
    assert isinstance(error, SloMissed)
    assert error.retry_after_s == pytest.approx(1.0)
    assert refusal(house, 200).retry_after_s == pytest.approx(3.0), "after the one before"
    counts = samples(house.metrics, "distserve_requests_refused_total")
    assert {reason: count for reason, count in counts.items() if count} == {"slo": 2}


def test_when_the_queue_has_drained_as_was_told_the_request_is_taken(tokenizer: Tokenizer) -> None:
    house = MuteHouse(tokenizer, target=Target(ttft_s=3.0))
    served(house, 10)
    for _ in range(3):
        house.ask(100)
    house.now_s += refusal(house, 100).retry_after_s
    house.prefilled(house.prefills()[-3], house.now_s - 1.0, house.now_s)
    house.ask(100)


def test_without_a_target_the_same_queue_takes_everybody_until_it_is_full(
    tokenizer: Tokenizer,
) -> None:
    house = MuteHouse(tokenizer, max_queued=20)
    served(house, 10)
    for _ in range(20):
        house.ask(100)
    assert refusal(house, 100).retry_after_s == pytest.approx(1.0)


def test_the_shortest_queue_decides_for_it_is_where_the_request_would_go(
    tokenizer: Tokenizer,
) -> None:
    house = MuteHouse(tokenizer, target=Target(ttft_s=3.0))
    served(house, 10)
    for _ in range(3):
        house.ask(100)
    refusal(house, 100)
    house.up("p1", Role.PREFILL)
    house.ask(100)


SKIP_JOIN = PrefillPolicy.SKIP_JOIN


def test_a_long_prompt_refuses_nobody_who_will_overtake_it(tokenizer: Tokenizer) -> None:
    """A second for 100 tokens, a target of 3 s. It once refused all short ones behind it."""
    in_order = MuteHouse(tokenizer, target=Target(ttft_s=3.0))
    overtaking = MuteHouse(tokenizer, target=Target(ttft_s=3.0), policy=SKIP_JOIN)
    for house in (in_order, overtaking):
        served(house, 10)
        house.ask(2000)
    assert isinstance(refusal(in_order, 100), SloMissed)
    overtaking.ask(100)
    overtaking.ask(100)
    overtaking.ask(100)
    assert isinstance(refusal(overtaking, 100), SloMissed), "short ones wait for short ones"
    assert isinstance(refusal(overtaking, 1900), SloMissed), "and long ones for all"


def test_a_step_under_way_may_be_a_chunk_of_a_long_prompt(tokenizer: Tokenizer) -> None:
    house = MuteHouse(tokenizer, target=Target(ttft_s=3.0), policy=SKIP_JOIN)
    served(house, 10)
    house.ask(2000)
    house.begun(house.prefills()[-1])
    house.ask(100)
    house.ask(100)
    assert refusal(house, 100).retry_after_s == pytest.approx(1.0)


def test_the_tokens_of_a_long_prompt_are_charged_to_the_steps_that_computed_them(
    tokenizer: Tokenizer,
) -> None:
    """Chunks of 100 tokens take a second each, and so do short prompts between them. All 2,000
    tokens once were charged to the last second: whoever came then was told 0.5 ms a token."""
    house = MuteHouse(tokenizer, target=Target(ttft_s=3.0), policy=SKIP_JOIN)
    house.ask(2000)
    long = house.prefills()[-1]
    for number in range(19):
        house.chunked(long, 100, house.now_s, house.now_s + 1.0)
        house.now_s += 1.0
        if number % 3 == 0:
            served(house, 1)
    house.prefilled(long, 0.0, house.now_s + 1.0)
    for _ in range(3):
        house.ask(100)
    assert refusal(house, 100).retry_after_s == pytest.approx(1.0)


def test_a_long_prompt_is_taken_if_those_that_will_overtake_it_leave_it_time(
    tokenizer: Tokenizer,
) -> None:
    """Chats that come every 2 s take half of the time, so 8 s of work take nearly 16. Such a
    prompt was once taken for 12 s, and then overtaken until it was too late."""

    def with_chats(ttft_s: float) -> MuteHouse:
        house = MuteHouse(tokenizer, target=Target(ttft_s=ttft_s), policy=SKIP_JOIN)
        for _ in range(100):
            served(house, 1)
            house.now_s += 1.0
        house.ask(400)
        return house

    assert "after 15.2 s" in refusal(with_chats(12.0), 400).message
    with_chats(16.0).ask(400)


def test_prompts_that_are_nearly_done_count_by_what_is_left(tokenizer: Tokenizer) -> None:
    house = MuteHouse(tokenizer, target=Target(ttft_s=3.0))
    served(house, 10)
    house.ask(1000)
    house.chunked(house.prefills()[-1], 900, house.now_s, house.now_s + 9.0)
    house.ask(100)
    assert refusal(house, 200).retry_after_s == pytest.approx(1.0)


def test_an_instance_that_drains_takes_nobody_off_the_queue(tokenizer: Tokenizer) -> None:
    """It once doubled the pace at which the refused were told to come again."""
    house = MuteHouse(tokenizer, max_queued=2)
    served(house, 10)
    house.up("p1", Role.PREFILL)
    house.controller.instances.set_draining("p1", True)
    house.ask(100)
    house.ask(100)
    assert refusal(house, 100).retry_after_s == pytest.approx(1.0)


def test_a_measured_table_is_believed_from_the_first_request_on(tokenizer: Tokenizer) -> None:
    """512 tokens take 200 ms there."""
    house = MuteHouse(tokenizer, target=Target(ttft_s=0.5, table=table(*POINTS)))
    house.ask(512)
    house.ask(512)
    assert refusal(house, 512).retry_after_s == pytest.approx(0.1)


def test_a_pool_that_holds_less_than_the_model_could_take_is_told_once_E5(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    house = MuteHouse(tokenizer, max_context=50_000)
    (warning,) = caplog.messages
    assert warning == (
        "the KV pool of p0 holds 40000 tokens: requests of more, prompt and answer together, are "
        "refused, though 50000 could be served"
    )
    house.down("p0")
    house.up("p0", Role.PREFILL)
    assert len(caplog.messages) == 1
    with pytest.raises(PromptTooLong, match="maximum context length is 40000 tokens"):
        house.ask(39_993)


def test_overload_is_429_and_want_of_instances_503_D15(tokenizer: Tokenizer) -> None:
    house = MuteHouse(tokenizer, max_queued=1)
    house.ask(100)
    assert refusal(house, 100).status == 429
    house.down("d0")
    with pytest.raises(NotReady) as unready:
        house.ask(100)
    assert unready.value.status == 503


def test_of_five_thousand_requests_at_once_as_many_wait_as_may_D13(tokenizer: Tokenizer) -> None:
    house = MuteHouse(tokenizer, max_queued=100)
    served(house, 10)
    num_taken, waits_s = 0, []
    for _ in range(5000):
        try:
            house.ask(100)
            num_taken += 1
        except QueueFull as error:
            waits_s.append(error.retry_after_s)
    assert num_taken == 100 == house.controller.num_open
    assert waits_s[:100] == [pytest.approx(i + 1.0) for i in range(100)]
    assert set(waits_s[120:]) == {120.0}
