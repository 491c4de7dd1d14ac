"""What a stage of `check-gpu` found, and what a whole check says."""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

import msgspec


class Verdict(StrEnum):
    """How a stage ended."""

    PASS = "PASS"
    FAIL = "FAIL"
    SKIP = "SKIP"


Note = Callable[[str, Any], None]
"""Takes a figure by its name, as soon as it is known: what was found before a stage failed, or ran
out of its time, is kept."""


class CheckFailed(Exception):
    """What was looked at is not as it must be; says how not."""


class Skipped(Exception):
    """The stage cannot be run here; says why."""


class Outcome(msgspec.Struct, frozen=True):
    """One stage. `log` is what its processes said last, where it did not pass."""

    stage: str
    verdict: Verdict
    seconds: float
    detail: str
    figures: Mapping[str, Any] = {}
    log: str = ""


class Report(msgspec.Struct, frozen=True):
    """One check of one device."""

    device: str
    started: str
    seconds: float
    stages: tuple[Outcome, ...]

    @property
    def exit_code(self) -> int:
        """0 if a stage passed and none failed: of what was only skipped nothing is known."""
        verdicts = {outcome.verdict for outcome in self.stages}
        return int(Verdict.FAIL in verdicts or Verdict.PASS not in verdicts)

    def figures(self, stage: str) -> Mapping[str, Any]:
        """Of that stage; none where it was not run."""
        return next((one.figures for one in self.stages if one.stage == stage), {})


def require(holds: bool, otherwise: str) -> None:
    """Raises CheckFailed with that sentence if it does not hold."""
    if not holds:
        raise CheckFailed(otherwise)
