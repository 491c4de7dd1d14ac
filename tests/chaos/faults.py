"""What can happen to an instance and to the messages on its link."""

import random
from collections.abc import Callable
from enum import Enum, auto
from itertools import product

from tests.end_to_end.wire import Mailbox


class Fault(Enum):
    """Faults of messages come in both directions: up from the leader, down to it."""

    DEATH = auto()
    FROZEN = auto()
    DROPPED_UP = auto()
    DROPPED_DOWN = auto()
    DUPLICATED_UP = auto()
    DUPLICATED_DOWN = auto()
    REORDERED_UP = auto()
    REORDERED_DOWN = auto()
    CORRUPT_UP = auto()
    CORRUPT_DOWN = auto()
    STALE_UP = auto()
    STALE_DOWN = auto()
    SLOW = auto()
    PRESSURE = auto()

    @property
    def is_reordering(self) -> bool:
        return self in (Fault.REORDERED_UP, Fault.REORDERED_DOWN)

    @property
    def is_deadly(self) -> bool:
        """Whether an incarnation ends by it."""
        return self not in (Fault.SLOW, Fault.PRESSURE)


Meddle = Callable[[Mailbox, random.Random], bool]
"""False where the mailbox holds nothing yet that it could be done to."""


def drop(mailbox: Mailbox, dice: random.Random) -> bool:
    if mailbox:
        del mailbox[dice.randrange(len(mailbox))]
        return True
    return False


def duplicate(mailbox: Mailbox, dice: random.Random) -> bool:
    if mailbox:
        mailbox.append(dice.choice(mailbox))
        return True
    return False


def corrupt(mailbox: Mailbox, dice: random.Random) -> bool:
    """One bit, anywhere in the header or in the payload."""
    if mailbox:
        index = dice.randrange(len(mailbox))
        frames = [bytearray(frame) for frame in mailbox[index]]
        frame = dice.choice(frames)
        bit = dice.randrange(8 * len(frame))
        frame[bit // 8] ^= 1 << bit % 8
        mailbox[index] = [bytes(frame) for frame in frames]
        return True
    return False


MEDDLING: dict[Fault, Meddle] = {
    Fault[f"{name}_{direction}"]: meddle
    for (name, meddle), direction in product(
        {
            "DROPPED": drop,
            "DUPLICATED": duplicate,
            "CORRUPT": corrupt,
        }.items(),
        ("UP", "DOWN"),
    )
}
