"""Decide which instance prefills and which one decodes.

Pure: no ids, no clock, no sockets. The controller calls it with facts and carries out what it
returns; the planner's simulator does exactly the same with simulated facts.
"""

from collections.abc import Sequence

import msgspec


class PrefillLoad(msgspec.Struct, frozen=True):
    """What waits at a prefill instance, in tokens, the running batch included; and the choices
    that it decodes beside, which a mixed instance's next prompt would join."""

    queued_tokens: int
    num_sequences: int = 0


class DecodeLoad(msgspec.Struct, frozen=True):
    """What a decode instance has taken on: blocks of its pool, and choices in its batch."""

    used_blocks: int
    total_blocks: int
    num_sequences: int


def pick_prefill(loads: Sequence[PrefillLoad]) -> int:
    """Index of the shortest queue (paper section 4.3); of equals, the one that decodes least."""
    return min(range(len(loads)), key=lambda i: (loads[i].queued_tokens, loads[i].num_sequences))


def pick_decode(loads: Sequence[DecodeLoad]) -> int:
    """Index of the least loaded instance: by share of its pool, then by batch."""
    return min(
        range(len(loads)),
        key=lambda i: (loads[i].used_blocks / loads[i].total_blocks, loads[i].num_sequences),
    )
