"""The verdict on a replan: data for JSON, and a sentence for people."""

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from planner.intervals import Interval
from planner.placement.choices import Candidate, Chosen
from planner.replan.forecast import Forecast
from planner.replan.gain import Gain
from planner.replan.rules import Rules
from planner.replan.shift import Shift, changed_s
from planner.replan.switching import Fleet, SwitchCost
from planner.replan.window import Pattern

VERDICT_VERSION = 1


class Action(StrEnum):
    """What to do.

    `keep`: nothing has shifted. `wait`: something has, but the last replan is too recent. `stay`:
    a search was made, and a switch does not pay. `switch`: it does.
    """

    KEEP = "keep"
    WAIT = "wait"
    STAY = "stay"
    SWITCH = "switch"


@dataclass(frozen=True)
class Current:
    """The placement that serves, and what it was planned for.

    Args:
        goodput: requests per second of all copies, with the planned lengths.
        since_s: when it was last planned or looked at, on the log's clock.
        accepted_rate: a rate for which the last search found nothing that pays; only what lies
            clearly above it is an emergency again.
    """

    fleet: Fleet
    goodput: Interval
    planned: Pattern
    since_s: float
    accepted_rate: float = 0.0


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What the log says by itself, without a search.

    Args:
        is_threatened: the forecast exceeds the goodput, at this window and the one before it.
        is_oversized: it is so far below that at least one copy is idle; a plan made on a rise that
            then ended leaves such a placement, and no shift against the plan tells of it.
        is_emergency: the arrivals themselves do; no least interval holds then.
        wait_s: what is left of the least time between replans.
    """

    at_s: float
    shifts: tuple[Shift, ...]
    forecast: Forecast
    is_threatened: bool
    is_oversized: bool
    is_emergency: bool
    wait_s: float

    def recent_s(self, rules: Rules) -> float:
        """From where on the log is of the present pattern."""
        return max(self.at_s - rules.lookback_s, changed_s(self.shifts) or 0.0)

    @property
    def calls(self) -> bool:
        """Whether anything calls for another plan, now or as soon as allowed."""
        states = (self.is_threatened, self.is_oversized, self.is_emergency)
        return bool(self.shifts) or any(states)

    @property
    def fires(self) -> bool:
        return self.calls and (self.is_emergency or self.wait_s <= 0)

    def told(self) -> str:
        said = [shift.told() for shift in self.shifts]
        if self.is_emergency:
            said.append("arrivals exceed the goodput")
        elif self.is_threatened:
            said.append(f"the forecast of {self.forecast.upper:.3g} requests/s exceeds the goodput")
        elif self.is_oversized:
            said.append(f"the forecast of {self.forecast.upper:.3g} requests/s leaves copies idle")
        return "; ".join(said) or "no shift"


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """The new placement: copies of a candidate, and the rate that they carry."""

    candidate: Candidate
    num_copies: int
    num_devices: int
    goodput: Interval


class ReplanVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """All that was found. Without a search there is neither proposal nor gain nor cost."""

    version: int = VERDICT_VERSION
    action: Action
    reason: str
    look: Look
    num_devices: int
    goodput: Interval
    proposal: Proposal | None = None
    gain: Gain | None = None
    cost: SwitchCost | None = None

    def told(self) -> str:
        """One sentence."""
        head = f"{self.action}: {self.look.told()}"
        if self.proposal is None or self.gain is None or self.cost is None:
            return f"{head} ({self.reason})"
        gained, cost = self.gain.requests, self.cost
        return (
            f"{head}; {self.num_devices} -> {self.proposal.num_devices} devices gain "
            f"{gained.value:.3g} requests ({gained.low:.3g} to {gained.high:.3g}) for "
            f"{cost.requests:.3g} of switching, {cost.load_s + cost.drain_s:.0f} s ({self.reason})"
        )


@dataclass(frozen=True)
class Outcome:
    """The verdict, and what to carry on with: the next look's `current` if the verdict is obeyed.

    `chosen` is the search's answer where there was a search.
    """

    verdict: ReplanVerdict
    current: Current
    chosen: Chosen | None = None
