"""What gathers in a plan between two launches."""

from gpu_workers.draft import Draft
from gpu_workers.step_plan import DrawnToken


def test_two_tokens_of_a_sequence_since_the_last_plan_are_both_told_in_order() -> None:
    draft = Draft()
    draft.drew(7, 40)
    draft.drew(8, 50)
    draft.drew(7, 41)
    draft.remove(9)
    assert draft.take().drawn == (DrawnToken(7, 40), DrawnToken(8, 50), DrawnToken(7, 41))
    draft.remove(10)
    assert draft.take().drawn == ()
