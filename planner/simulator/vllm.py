"""What a colocated instance does otherwise under the rules of vLLM's V1 engine (`MixedRules`).

Set beside our own mixed instance: a prompt enters as soon as its own blocks fit, with none set
aside for growth, unless this very step had to preempt; what a preempted one computed stays in the
prefix cache until its blocks are taken; and steps are scheduled while the one before them runs
(`async_scheduling`), so that an arrival misses the step that comes next.
"""

from dataclasses import dataclass

from planner.simulator.service import MixedRules


def latest_arrival(rules: MixedRules, began_s: float, ended_s: float) -> float:
    """Who may enter after a step. Ours looks into its queue when the step ends; vLLM made the plan
    as the step began, with those seen by then."""
    if rules is MixedRules.VLLM_STAMPED:
        return (began_s + ended_s) / 2
    return began_s if rules is MixedRules.VLLM else ended_s


@dataclass
class _Left:
    """Blocks that a preempted sequence left in the queue of free ones."""

    num_blocks: int
    num_full: int
    taken_before: int
    ahead: int


class PrefixMemory:
    """How much of what preempted sequences computed is still there when they come back.

    Free blocks are taken first in, first out, and a sequence's last block is freed first. So
    counts suffice: how many blocks lay ahead of a sequence's, and how many were taken since.
    """

    def __init__(self, num_blocks: int) -> None:
        self._total = num_blocks
        self._freed = 0
        self._left: dict[int, _Left] = {}

    def freed(self, num_blocks: int) -> None:
        """Every sequence that gives its blocks back, whatever the reason."""
        self._freed += num_blocks

    def leave(self, index: int, num_blocks: int, num_full: int, free: int) -> None:
        """A preempted one's blocks have just become the last of the `free` ones."""
        self._left.pop(index, None)
        self._left[index] = _Left(num_blocks, num_full, self._taken(free), free - num_blocks)

    def find(self, index: int, free: int) -> int:
        """It comes back. Returns its full blocks that nobody has taken; they are taken now."""
        left = self._left.get(index)
        if left is None:
            return 0
        num_lost = max(0, self._taken(free) - left.taken_before - left.ahead)
        found = max(0, min(left.num_blocks - num_lost, left.num_full))
        for other_index, other in self._left.items():  # in the order in which they left
            if other_index == index:
                break
            other.ahead += found  # these are not taken from the head of the queue
        del self._left[index]
        return found

    def _taken(self, free: int) -> int:
        return self._total + self._freed - free
