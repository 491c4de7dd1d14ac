"""How a workload is sent: what prompts are made of, and how long an answer may take."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from planner.errors import BenchError


class PromptKind(StrEnum):
    """Token ids have exactly the length that is asked for; text is for services without them."""

    TOKENS = "tokens"
    TEXT = "text"


def _nobody(_: int) -> None:
    """Nobody watches the progress."""


@dataclass(frozen=True)
class ReplayOptions:
    """What all requests of a replay have in common.

    Args:
        model: the model's id; None for the first one that the service lists.
        token_ids: prompts are drawn from this range, the end excluded. The default avoids the
            special tokens that vocabularies begin or end with.
        timeout_s: for one answer, from its sending; a later one has failed.
        headers: sent with each request, such as the authorisation.
        on_end: called with the number of requests that have ended, after each one.
    """

    model: str | None = None
    prompt: PromptKind = PromptKind.TOKENS
    token_ids: tuple[int, int] = (1_000, 30_000)
    seed: int = 0
    timeout_s: float = 600.0
    headers: Mapping[str, str] = field(default_factory=dict)
    on_end: Callable[[int], None] = _nobody

    def __post_init__(self) -> None:
        low, high = self.token_ids
        if not 0 <= low < high:
            raise BenchError(f"token ids must be a range such as 1000-30000, not {low}-{high}")
        if not self.timeout_s > 0:
            raise BenchError(f"the time for an answer must be above zero, not {self.timeout_s:g} s")
