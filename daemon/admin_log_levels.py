"""Log levels as an operator sets them, for good or for a while.

A level that was set for a while goes back by itself to what it was before the first of them, so
that a busy daemon is not left talking after whoever wanted to listen has gone.
"""

import asyncio
import logging

import msgspec

logger = logging.getLogger(__name__)


class _Loan(msgspec.Struct, frozen=True):
    """The level to go back to, and when."""

    before: int
    end: asyncio.TimerHandle


class LogLevels:
    """Of this process's loggers; the empty name is the root's."""

    def __init__(self) -> None:
        self._loans: dict[str, _Loan] = {}

    def set(self, level: str, name: str, for_s: float | None) -> str:
        """What came of it, in words."""
        told = describe(level, name, for_s)
        target = logging.getLogger(name or None)
        loan = self._loans.pop(name, None)
        before = target.level if loan is None else loan.before
        if loan is not None:
            loan.end.cancel()
        target.setLevel(level.upper())
        if for_s is not None:
            end = asyncio.get_running_loop().call_later(for_s, self._revert, name)
            self._loans[name] = _Loan(before, end)
        return told

    def close(self) -> None:
        """Give all loans back at once."""
        for name, loan in list(self._loans.items()):
            loan.end.cancel()
            self._revert(name)

    def _revert(self, name: str) -> None:
        loan = self._loans.pop(name)
        logging.getLogger(name or None).setLevel(loan.before)
        level = logging.getLevelName(loan.before).lower() if loan.before else "the root's"
        logger.info("the log level of %s is %s again", name or "the root", level)


def describe(level: str, name: str, for_s: float | None) -> str:
    """What `set` does, in words."""
    whom = f"the logger {name}" if name else "all loggers without a level of their own"
    until = f", for {for_s:g} s" if for_s is not None else ""
    return f"{whom}: {level}{until}"
