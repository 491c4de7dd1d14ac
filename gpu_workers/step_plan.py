"""What a leader tells the ranks of its instance to do in one step, and what comes back.

The plan is the executor's only input, in-process too: every rank keeps its own table of sequences
and changes it only as plans say, so that all ranks always agree. A plan says what changed, not
what is. Within a plan the order is: drawn, removed, unmapped, added, blocks, copies, pulls, rows.
"""

import msgspec

from ipc.vocabulary import KVHandle, SamplingParams, TokenLogprobs


class NewSequence(msgspec.Struct, frozen=True):
    """A sequence enters the ranks' tables, with the tokens it has so far.

    `num_computed` tokens have their keys and values in the pool already (pulled, or shared with
    the sequence it was forked from). A prompt that several choices share is one sequence with
    several `choices`: when its row draws, it draws once for each of them.
    """

    sequence: int
    choices: tuple[int, ...]
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    num_computed: int
    sampling: SamplingParams
    prompt_logprobs: int | None = None


class NewBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Blocks appended to a sequence's table."""

    sequence: int
    block_ids: tuple[int, ...]


class BlockCopy(msgspec.Struct, frozen=True, array_like=True):
    """One whole block copied inside the pool: the partial block of a forked prompt."""

    source: int
    target: int


class Pull(msgspec.Struct, frozen=True):
    """Copy a handle's blocks out of its owner's pools into ours."""

    handle: KVHandle
    into: tuple[int, ...]


class DrawnToken(msgspec.Struct, frozen=True, array_like=True):
    """A token that a sequence has gained since the last plan; the rank that drew it has it."""

    sequence: int
    token_id: int


class Row(msgspec.Struct, frozen=True, array_like=True):
    """Compute the next `num_new` tokens of a sequence; `draws` if a token is to be drawn after.

    The number of tokens computed before is the rank's own count, which advances at launch.
    """

    sequence: int
    num_new: int
    draws: bool


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step of one micro-batch.

    `unmapped` names (instance, epoch) whose pools are to be forgotten from here on: ranks do that
    in the order of plans, so that no plan names a pool that a rank has forgotten already.
    """

    step_id: int
    micro_batch: int = 0
    drawn: tuple[DrawnToken, ...] = ()
    removed: tuple[int, ...] = ()
    unmapped: tuple[tuple[str, int], ...] = ()
    added: tuple[NewSequence, ...] = ()
    blocks: tuple[NewBlocks, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    pulls: tuple[Pull, ...] = ()
    rows: tuple[Row, ...] = ()


class RowResult(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What a drawing row drew: one token per choice of its sequence, in their order.

    `prompt_logprobs` has one entry per prompt token, the first one None; it comes when the last
    chunk of a prompt that asked for it has been computed.
    """

    sequence: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


class StepResult(msgspec.Struct, frozen=True):
    """The drawing rows of a step, in the plan's order."""

    step_id: int
    rows: tuple[RowResult, ...]


class PullResult(msgspec.Struct, frozen=True):
    """A pull that has ended on this rank. Times are CLOCK_MONOTONIC seconds.

    `num_different` counts parts of blocks that are not what their source is; it is known only
    where pulls are verified. `loss` says why not all was copied, if it was not.
    """

    request_id: int
    num_bytes: int
    started_s: float
    ended_s: float
    num_different: int = 0
    loss: str = ""

    @property
    def is_lost(self) -> bool:
        """Its source ended before all was copied, or did not give it."""
        return bool(self.loss)
