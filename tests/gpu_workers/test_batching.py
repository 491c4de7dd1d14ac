"""The policies, over counts alone."""

import pytest

from gpu_workers.batching import DecodeAdmission
from ipc.kv_layout import fork_blocks
from ipc.prefill_policy import WaitingPrompt, pack_prefill


def waiting(*num_tokens: int) -> list[WaitingPrompt]:
    return [WaitingPrompt(num_tokens=n, num_blocks=-(-n // 16)) for n in num_tokens]


@pytest.mark.parametrize(
    ("queue", "free_blocks", "count"),
    [
        ((), 100, 0),
        ((100, 200, 212), 100, 3),
        ((100, 200, 213), 100, 2),
        ((900, 100), 100, 1),  # longer than L_m: travels alone
        ((100, 900), 100, 1),  # and nothing is packed beside it
        ((1,) * 20, 100, 8),  # the batch's own limit
        ((100, 100), 7, 1),  # the pool holds one
        ((100, 1), 6, 0),  # nothing overtakes the first
    ],
)
def test_short_prompts_are_packed_up_to_l_m(
    queue: tuple[int, ...], free_blocks: int, count: int
) -> None:
    packed = pack_prefill(waiting(*queue), max_tokens=512, free_blocks=free_blocks, free_places=8)
    assert packed == count


@pytest.mark.parametrize(("free_places", "count"), [(-240, 0), (0, 0), (2, 0), (3, 1), (7, 2)])
def test_a_prompt_takes_a_place_for_each_of_its_choices(free_places: int, count: int) -> None:
    queue = [WaitingPrompt(num_tokens=1, num_blocks=1, num_places=3)] * 5
    assert pack_prefill(queue, max_tokens=512, free_blocks=100, free_places=free_places) == count


def test_newcomers_leave_one_block_to_each_that_runs() -> None:
    admission = DecodeAdmission(total_blocks=100)
    assert admission.room(free_blocks=30, num_running=10) == 20
    assert admission.room(free_blocks=5, num_running=10) == 0


def test_after_a_preemption_nothing_enters_before_a_twentieth_is_free() -> None:
    admission = DecodeAdmission(total_blocks=100)
    admission.preempted()
    assert admission.room(free_blocks=4, num_running=1) == 0
    assert admission.room(free_blocks=5, num_running=1) == 4
    assert admission.room(free_blocks=4, num_running=1) == 3


def test_an_empty_instance_admits_even_after_a_preemption() -> None:
    admission = DecodeAdmission(total_blocks=100)
    admission.preempted()
    assert admission.room(free_blocks=3, num_running=0) == 3


@pytest.mark.parametrize(
    ("tokens", "choices", "blocks"), [(16, 1, 1), (16, 3, 1), (17, 1, 2), (17, 3, 4), (5, 2, 2)]
)
def test_choices_share_full_blocks_and_copy_the_partial_one(
    tokens: int, choices: int, blocks: int
) -> None:
    assert fork_blocks(tokens, choices, 16) == blocks
