"""What runs next in decode: admission, preemption, micro-batches. Plain rules over counts.

Pure: no ids, no clock, no tensors. The leaders carry out what these say; the planner's simulator
asks the very same functions with simulated counts.
"""


class DecodeAdmission:
    """Whether a prompt may enter decode: its blocks plus one growth block per running sequence
    fit. After a preemption nothing enters until a share of the pool is free again, so that the
    preempted one does not come straight back to be preempted again."""

    def __init__(self, total_blocks: int, resume_share: float = 0.05) -> None:
        self._resume_blocks = int(total_blocks * resume_share)
        self._recovering = False

    def preempted(self) -> None:
        self._recovering = True

    def room(self, *, free_blocks: int, num_running: int) -> int:
        """How many blocks newcomers may take now."""
        if self._recovering and free_blocks < self._resume_blocks and num_running > 0:
            return 0
        self._recovering = False
        return max(0, free_blocks - num_running)


def micro_batch_rows(num_running: int, num_micro_batches: int) -> int:
    """How many running sequences a decode step takes at most, so that as many steps as a pipeline
    has stages are equally large: stages wait least when micro-batches are even (paper section
    4.3: pipeline bubbles come from batches that differ)."""
    return -(-num_running // num_micro_batches)
