"""Compare pulled blocks with their source, where DISTSERVE_VERIFY_PULLS=1 asks for it.

A check of everything between two pools: the arithmetic of layouts, the copies, and the promise
that nobody writes to a source before its last reader has confirmed. It reads every pulled byte
twice more, so it is for tests and for finding faults, not for every day.
"""

import os
import zlib
from collections.abc import Iterable

import torch

VARIABLE = "DISTSERVE_VERIFY_PULLS"


def is_asked_for() -> bool:
    """Whether the environment asks for the check."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


def num_different(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> int:
    """How many of these pairs of source and copy have not the same bytes."""
    return sum(_checksum(source) != _checksum(copy) for source, copy in pairs)


def _checksum(part: torch.Tensor) -> int:
    """Of a part of a block, [heads, layers, 2, P, D], whether or not it is one contiguous run."""
    return zlib.crc32(part.contiguous().view(torch.uint8).cpu().numpy().data)
