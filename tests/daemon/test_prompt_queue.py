"""The daemon's copy of a leader's queue: what it counts, and what it forgets."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.prompt_queue import PromptQueue
from ipc.prefill_policy import FirstComeFirstServed, SkipJoin


def queue(policy: FirstComeFirstServed[int] | None = None, *, keeps: bool = False) -> PromptQueue:
    in_order = FirstComeFirstServed[int](100)
    return PromptQueue(in_order if policy is None else policy, block_size=16, keeps=keeps)


def test_what_is_left_of_each_prompt_is_counted() -> None:
    prompts = queue()
    prompts.add(1, arrival=1, num_tokens=100, now_s=0.0)
    prompts.add(2, arrival=2, num_tokens=50, now_s=0.0)
    prompts.advance(1, 0)
    prompts.advance(1, 60)
    assert (len(prompts), prompts.num_tokens, prompts.left()) == (2, 90, [40, 50])
    assert prompts.finish(1) == 40
    assert prompts.finish(1) is None
    prompts.drop(2)
    prompts.drop(2)
    assert (len(prompts), prompts.num_tokens, prompts.left()) == (0, 0, [])


def test_news_of_a_prompt_that_has_come_back_change_nothing() -> None:
    prompts = queue()
    prompts.add(1, arrival=1, num_tokens=100, now_s=0.0)
    prompts.drop(1)
    prompts.advance(1, 0)
    prompts.advance(1, 30)
    assert prompts.num_tokens == 0


def test_the_blocks_of_choices_that_decode_there_are_needed_from_the_beginning() -> None:
    for keeps, num_blocks in ((False, 2), (True, 4)):
        prompts = queue(keeps=keeps)
        prompts.add(1, arrival=1, num_tokens=17, num_choices=3, now_s=0.0)
        assert prompts.blocks_to_go_on == num_blocks


def test_an_older_request_that_is_prefilled_again_has_its_old_place() -> None:
    prompts = queue()
    prompts.add(7, arrival=5, num_tokens=160, now_s=0.0)
    prompts.add(8, arrival=2, num_tokens=16, now_s=0.0)
    assert prompts.blocks_to_go_on == 1


@pytest.mark.parametrize("policy", [FirstComeFirstServed[int](10), SkipJoin[int](10)])
def test_a_queue_that_nobody_asks_remembers_nothing_of_those_that_are_gone(
    policy: FirstComeFirstServed[int],
) -> None:
    prompts = queue(policy)
    for number in range(3000):
        prompts.add(number, arrival=number, num_tokens=45, now_s=0.0)
        prompts.advance(number, 0)
        prompts.advance(number, 30)
        if number % 3:
            prompts.finish(number)
        else:
            prompts.drop(number)
    assert len(prompts) == len(policy) == 0
    assert len(getattr(policy, "_due", ())) < 100


NEWS = st.sampled_from(["comes", "begins", "chunk", "finishes", "is dropped"])
MAKERS: list[Callable[[], FirstComeFirstServed[int]]] = [
    lambda: FirstComeFirstServed(10),
    lambda: SkipJoin(10, patience_quanta=2),
]


@pytest.mark.parametrize("make", MAKERS)
@given(news=st.lists(st.tuples(NEWS, st.integers(0, 5), st.integers(1, 60)), max_size=40))
def test_whatever_is_heard_in_whatever_order_the_sums_are_those_of_what_is_left(
    make: Callable[[], FirstComeFirstServed[int]], news: list[tuple[str, int, int]]
) -> None:
    """Also what is heard of a prompt that has gone, or twice."""
    prompts, lefts = queue(policy := make()), dict[int, int]()
    for what, request_id, num_tokens in news:
        left = lefts.get(request_id, 0)
        match what:
            case "comes" if not left:
                prompts.add(request_id, request_id, num_tokens, now_s=0.0)
                lefts[request_id] = num_tokens
            case "begins":
                prompts.advance(request_id, 0)
            case "chunk":
                prompts.advance(request_id, num_tokens)
                if num_tokens < left:
                    lefts[request_id] -= num_tokens
            case "finishes":
                assert prompts.finish(request_id) == lefts.pop(request_id, None)
            case "is dropped":
                prompts.drop(request_id)
                lefts.pop(request_id, None)
        assert prompts.left() == list(lefts.values())
        assert prompts.num_tokens == sum(lefts.values()) >= sum(prompts.before(1))
        assert len(policy) == len(prompts) == len(lefts)
