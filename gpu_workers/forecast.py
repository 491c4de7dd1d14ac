"""How long a step may take at most, by the steps seen so far. Pure.

A leader hears nothing while a step runs, so before a long one it says how long it may be silent.
What is said here must be late rather than early: who is silent for longer is taken for wedged.
"""

from gpu_workers.step_plan import StepPlan

# A step costs as much as so many tokens even if it has one only: the weights are read once.
STEP_TOKENS = 16
# A token of a prompt of that length costs twice as much as one of a short prompt. Measured on a
# CPU with a small model, where attention weighs most: 1.2 ms a token at 512, 1.5 ms at 2,048.
ATTENTION_TOKENS = 2048

# Before the first step: what a model of 7 billion parameters takes on one core for a token
# (14 GFLOP at about 100 GFLOP/s).
UNSEEN_S = 0.15
SAFETY = 4.0
FORGET = 0.9  # with each faster step: one slow step is not to count for ever,
LEAP = 2.0  # nor for all that it took, if it was stopped and not slow


def work_of(plan: StepPlan) -> float:
    """A step's size in tokens of a short prompt. Pulls are copies, so a token there is less."""
    rows = sum(row.num_new * (1 + row.num_new / ATTENTION_TOKENS) for row in plan.rows)
    return STEP_TOKENS + rows + sum(pull.handle.num_tokens for pull in plan.pulls)


class Forecast:
    """Remembers the slowest second per unit of work of late."""

    def __init__(self) -> None:
        self._slowest_s: float | None = None

    def longest_s(self, work: float) -> float:
        """A step of that size that takes longer has gone wrong."""
        slowest_s = UNSEEN_S if self._slowest_s is None else self._slowest_s
        return SAFETY * slowest_s * work

    def observe(self, work: float, took_s: float) -> None:
        """A step of that size has ended."""
        seen_s = took_s / work
        if self._slowest_s is not None:
            seen_s = min(max(seen_s, FORGET * self._slowest_s), LEAP * self._slowest_s)
        self._slowest_s = seen_s
