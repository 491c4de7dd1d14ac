"""Who is let in: by facts, without a clock."""

from collections.abc import Collection

import pytest

from daemon.admission import Admission, Capacity, Line
from daemon.errors import InvalidRequest, PromptTooLong, QueueFull, SloMissed
from daemon.generation import GenerationSpec
from daemon.prompt_queue import PromptQueue
from ipc.kv_layout import RankLayout, Span
from ipc.prefill_policy import FirstComeFirstServed, SkipJoin
from ipc.vocabulary import DType, SamplingParams


class Times:
    """A hundred tokens a second in a queue; a step of one's own takes half a second more."""

    def queued_s(self, prompts: Collection[int]) -> float:
        return sum(prompts) / 100

    def alone_s(self, num_tokens: int) -> float:
        return 0.5 + num_tokens / 100


def line(
    *ahead: int,
    num_waiting: int | None = None,
    known: bool = True,
    instances: int = 1,
    policy: FirstComeFirstServed[int] | None = None,
) -> Line:
    in_order = FirstComeFirstServed[int](100)
    queue = PromptQueue(in_order if policy is None else policy, block_size=16)
    for number, num_tokens in enumerate(ahead):
        queue.add(number, number, num_tokens, now_s=-1e9)
    return Line(
        num_waiting=len(ahead) if num_waiting is None else num_waiting,
        queue=queue,
        times=Times() if known else None,
        num_instances=instances,
    )


def refusal(admission: Admission, prompts: list[int], line: Line, now_s: float = 0.0) -> QueueFull:
    with pytest.raises(QueueFull) as refused:
        admission.check(prompts, line, now_s)
    return refused.value


def layout(num_blocks: int) -> RankLayout:
    return RankLayout(Span(0, 1), Span(0, 1), num_blocks, 4, 1, DType.FP32)


def spec(num_prompt: int, max_tokens: int, num_choices: int = 1) -> GenerationSpec:
    sampling = SamplingParams(max_tokens=max_tokens, seed=1)
    return GenerationSpec(prompt=(1,) * num_prompt, sampling=sampling, num_choices=num_choices)


def test_until_the_house_is_full_nobody_is_refused_however_long_it_takes() -> None:
    admission = Admission(max_queued=3)
    admission.check([1000], line(10_000, 10_000), 0.0)
    error = refusal(admission, [1], line(10_000, 10_000, 10_000))
    assert type(error) is QueueFull
    assert "3 requests are waiting, 1 more would pass the limit of 3" in error.message


def test_a_call_enters_with_all_its_prompts_or_with_none() -> None:
    admission = Admission(max_queued=4)
    admission.check([1, 1], line(1, 1), 0.0)
    refusal(admission, [1, 1, 1], line(1, 1))


def test_a_call_that_can_never_enter_is_not_told_to_try_again() -> None:
    with pytest.raises(InvalidRequest, match="5 prompts in one request, at most 4 may wait"):
        Admission(max_queued=4).check([1] * 5, line(), 0.0)


def test_a_full_house_says_when_there_will_be_room_D13() -> None:
    """Two must leave; the mean of what waits takes 3 s."""
    for num_instances, wait_s in ((1, 6.0), (2, 3.0)):
        full = line(200, 400, 300, 300, instances=num_instances)
        error = refusal(Admission(max_queued=4), [9, 9], full)
        assert error.retry_after_s == pytest.approx(wait_s)


def test_who_is_refused_later_is_told_to_come_later_and_as_many_at_a_time_as_there_is_room() -> (
    None
):
    admission, full = Admission(max_queued=2), line(300, 300)
    waits_s = [refusal(admission, [9], full, now_s=0.5 * i).retry_after_s for i in range(4)]
    assert waits_s == [pytest.approx(3.0 + 2.5 * i) for i in range(4)]
    later = refusal(admission, [9], full, now_s=60.0)
    assert later.retry_after_s == pytest.approx(3.0), "those turns have passed"


def test_turns_that_nobody_could_wait_for_are_not_given() -> None:
    admission, full = Admission(max_queued=1), line(10_000)
    assert [refusal(admission, [9], full).retry_after_s for _ in range(3)] == [100.0, 120.0, 120.0]
    assert refusal(admission, [9], full, now_s=100.0).retry_after_s == 120.0


def test_a_full_house_that_knows_no_times_says_a_second() -> None:
    admission = Admission(max_queued=1)
    assert refusal(admission, [9], line(10_000, known=False)).retry_after_s == 1.0
    assert refusal(admission, [9], line(num_waiting=1)).retry_after_s == 1.0


def test_nobody_is_told_to_wait_longer_than_clients_will_wait() -> None:
    error = refusal(Admission(max_queued=1), [9], line(100_000))
    assert error.retry_after_s == 120.0


def test_who_would_miss_the_target_is_refused_until_the_queue_has_drained_enough() -> None:
    """Own 1.5 s, target 3 s: a queue of 1.5 s is just short enough."""
    admission = Admission(max_queued=100, ttft_s=3.0)
    admission.check([100], line(100, 50), 0.0)
    error = refusal(admission, [100], line(100, 51, 200))
    assert type(error) is SloMissed
    assert error.retry_after_s == pytest.approx(2.01)
    assert "after 5.01 s, 3.51 s of them in the queue; the target is 3 s" in error.message


def test_without_an_estimate_nobody_is_refused_for_a_target() -> None:
    Admission(max_queued=100, ttft_s=0.001).check([5000], line(10_000, known=False), 0.0)


def test_a_prompt_that_misses_the_target_alone_is_taken_where_nothing_waits() -> None:
    admission = Admission(max_queued=100, ttft_s=3.0)
    admission.check([1000], line(), 0.0)
    assert refusal(admission, [1000], line(20)).retry_after_s == pytest.approx(0.2)


def test_the_prompts_of_a_call_wait_for_each_other() -> None:
    admission = Admission(max_queued=100, ttft_s=3.0)
    admission.check([100, 100], line(40), 0.0)
    assert refusal(admission, [100, 100, 100], line(40)).retry_after_s == pytest.approx(0.4)


def test_a_short_prompt_waits_for_those_alone_that_it_does_not_overtake() -> None:
    """Own 1.5 s, target 3 s; the long prompt once counted before whoever came."""
    admission, waiting = Admission(max_queued=100, ttft_s=3.0), (10_000, 100, 50)
    admission.check([100], line(*waiting, policy=SkipJoin(100)), 0.0)
    refusal(admission, [100], line(*waiting))
    behind = line(*waiting, policy=SkipJoin(100))
    error = refusal(Admission(max_queued=100, ttft_s=110.0), [20_000], behind)
    assert "102 s of them in the queue" in error.message


def test_of_a_call_the_prompt_that_is_finished_last_decides() -> None:
    """The short one overtakes the long one before it, of 4.5 s in all."""
    admission = Admission(max_queued=100, ttft_s=5.0)
    admission.check([400, 10], line(40, policy=SkipJoin(100)), 0.0)
    admission.check([10, 400], line(40, policy=SkipJoin(100)), 0.0)
    assert refusal(admission, [401, 10], line(40, policy=SkipJoin(100))).message.startswith(
        "the first token would come after 5.01 s, 0.4 s of them in the queue"
    )


def test_what_fits_the_context_but_no_pool_is_refused_with_the_limit_E5() -> None:
    capacity = Capacity(1000)
    capacity.learn("p0", layout(100))
    capacity.learn("d0", layout(10))
    capacity.check(spec(20, 20))
    for too_long in (spec(21, 20), spec(20, 21)):
        with pytest.raises(PromptTooLong, match="maximum context length is 40 tokens"):
            capacity.check(too_long)
    assert capacity.max_output(30) == 10
    with pytest.raises(PromptTooLong):
        capacity.max_output(40)


def test_choices_that_no_pool_can_hold_together_are_refused_E5() -> None:
    capacity = Capacity(1000)
    capacity.learn("d0", layout(10))
    capacity.check(spec(20, 4, num_choices=5))
    with pytest.raises(InvalidRequest, match=r"n=6 choices .* need 11 KV blocks together"):
        capacity.check(spec(20, 4, num_choices=6))
