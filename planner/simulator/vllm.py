"""A colocated instance that schedules as vLLM's V1 engine does, for comparisons with it.

Set beside our own mixed instance: a prompt enters as soon as its own blocks fit, with none set
aside for growth, unless this very step had to preempt; what a preempted one computed stays in the
prefix cache until its blocks are taken; and steps are scheduled while the one before them runs
(`async_scheduling`), so that an arrival misses the step that comes next.
"""

from dataclasses import dataclass

from planner.simulator.service import InstanceModel


@dataclass(frozen=True)
class VllmModel(InstanceModel):
    """A mixed instance under vLLM's rules; needs `chunk_tokens`, its max_num_batched_tokens.

    `kv_blocks` are those that requests can have: vLLM keeps one of `num_gpu_blocks` for itself.

    Args:
        stamped_at_boundary: arrivals are the engine's own `queued_ts`, which it writes when it
            looks into its queue, between two steps. Such a request arrives at the boundary that
            is nearest to it, rather than during a step.
    """

    stamped_at_boundary: bool = False

    def latest_arrival(self, began_s: float, ended_s: float) -> float:
        """Who may enter after a step: the plan was made as it began, with those seen by then."""
        return (began_s + ended_s) / 2 if self.stamped_at_boundary else began_s


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
