"""Fields of bodies that nobody here has heard of: ignored, since clients send new ones all the
time, but counted, so that it is seen which of them people believe in.

A client chooses their names, so few of them are told apart and only plain ones; the rest is
counted together.
"""

import logging
import re
from collections.abc import Callable, Iterable
from itertools import islice

logger = logging.getLogger(__name__)

MAX_NAMES = 64
MAX_PER_BODY = 64
OTHER = "other"
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,39}", re.ASCII)


class UnknownFields:
    """`count` is told the name of each one that comes, or OTHER."""

    def __init__(self, count: Callable[[str], None] = lambda _: None) -> None:
        self._count = count
        self._told: set[str] = set()

    def came(self, names: Iterable[str]) -> None:
        """With one body. Each name is logged the first time."""
        for name in islice(names, MAX_PER_BODY):
            self._count(self._label(name))

    def _label(self, name: str) -> str:
        if name in self._told:
            return name
        if len(self._told) >= MAX_NAMES or not _PLAIN.fullmatch(name):
            return OTHER
        self._told.add(name)
        logger.info("requests have a field %r, which is not known here and is ignored", name)
        return name
