"""What runs next: prefill packing, decode admission, preemption. Plain rules over counts.

Pure: no ids, no clock, no tensors. The leaders carry out what these say; the planner's simulator
asks the very same functions with simulated counts.
"""

from collections.abc import Iterable

import msgspec

from ipc.kv_layout import blocks_for
from ipc.vocabulary import PrefillPolicy


class WaitingPrompt(msgspec.Struct, frozen=True):
    """What a policy may know of a prompt: its tokens still to compute, the blocks it will need,
    and its places in the batch (one for each choice where they will decode here)."""

    num_tokens: int
    num_blocks: int
    num_places: int = 1


class BatchLimits(msgspec.Struct, frozen=True):
    """How much one step takes on, and which prompts go first (`gpu_workers.prefill_policy`).

    `prefill_tokens` is L_m, the shortest prompt that saturates the device (paper section 3.1);
    `max_batch` choices decode together, or prompts are prefilled together, at most.
    """

    prefill_tokens: int
    max_batch: int
    prefill_policy: PrefillPolicy = PrefillPolicy.FCFS


def pack_prefill(
    waiting: Iterable[WaitingPrompt], *, max_tokens: int, free_blocks: int, free_places: int
) -> int:
    """How many prompts from the head of the queue run together in the next prefill step.

    First come, first served: short prompts are packed up to `max_tokens` (L_m), a longer one
    travels alone, and nothing overtakes a prompt that has no room yet (paper section 4.3).
    """
    count, num_tokens = 0, 0
    for prompt in waiting:
        free_blocks -= prompt.num_blocks
        free_places -= prompt.num_places
        num_tokens += prompt.num_tokens
        is_full = count > 0 and num_tokens > max_tokens
        if is_full or free_blocks < 0 or free_places < 0:
            break
        count += 1
    return count


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


def fork_blocks(num_tokens: int, num_choices: int, block_size: int) -> int:
    """Blocks that a prompt of so many computed tokens takes for all its choices together.

    Full blocks are shared by all; each choice after the first has its own copy of a partial one.
    """
    has_partial = num_tokens % block_size != 0
    return blocks_for(num_tokens, block_size) + (num_choices - 1 if has_partial else 0)


def micro_batch_rows(num_running: int, num_micro_batches: int) -> int:
    """How many running sequences a decode step takes at most, so that as many steps as a pipeline
    has stages are equally large: stages wait least when micro-batches are even (paper section
    4.3: pipeline bubbles come from batches that differ)."""
    return -(-num_running // num_micro_batches)
