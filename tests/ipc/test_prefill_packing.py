"""How many prompts share a step, over counts alone."""

import pytest

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
