"""What a stage of `check-gpu` found, and what a whole check says."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec


class Verdict(StrEnum):
    """How a stage ended."""

    PASS = "PASS"
    FAIL = "FAIL"
    SKIP = "SKIP"


class Found(NamedTuple):
    """Of a stage that passed: one sentence, and figures by name."""

    detail: str
    figures: Mapping[str, Any] = MappingProxyType({})


class CheckFailed(Exception):
    """What was looked at is not as it must be; says how not."""


class Skipped(Exception):
    """The stage cannot be run here; says why."""


class Outcome(msgspec.Struct, frozen=True):
    """One stage."""

    stage: str
    verdict: Verdict
    seconds: float
    detail: str
    figures: Mapping[str, Any] = {}


class Report(msgspec.Struct, frozen=True):
    """One check of one device."""

    device: str
    started: str
    seconds: float
    stages: tuple[Outcome, ...]

    @property
    def exit_code(self) -> int:
        """0 unless a stage failed."""
        return int(any(outcome.verdict is Verdict.FAIL for outcome in self.stages))


def require(holds: bool, otherwise: str) -> None:
    """Raises CheckFailed with that sentence if it does not hold."""
    if not holds:
        raise CheckFailed(otherwise)
