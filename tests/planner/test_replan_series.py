"""Two services' real rates, window by window: what replanning does beside an oracle.

The oracle is put in our place before every window, with the devices that we then have: a *wish* is
what it would switch to, knowing all that comes and counting devices, misses and switches as we
do. A switch agrees if the oracle would have gone the same way. A wish is clear if it differs
from what we have by more than the dead band, for at least an hour.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise

import numpy as np
import pytest

from planner.model_catalog import model_shape
from planner.replan.gain import miss_weight
from planner.replan.outcome import Action
from planner.replan.recent import longest_output_tokens
from planner.replan.rules import Rules, SwitchRates
from planner.replan.switching import Fleet, Meanwhile, change, switch_cost
from planner.replan.window import Pattern
from planner.workload.requests import Floats
from tests.planner.replan_series import (
    PROBLEM,
    SLO,
    UNIT,
    Oracle,
    Replay,
    azure_2024,
    copies_of,
    replayed,
    servegen,
    serving,
    windows_of,
)

AZURE = ("code", "conv")
SERVEGEN = ("language_m-large", "language_m-mid", "language_m-small")
AT_PEAK = 20  # copies that the busiest hours take
LATE_S = 2 * 3600.0
RATES = SwitchRates()


@dataclass(frozen=True, eq=False)
class Run:
    """A series replanned, and the oracle's wishes along the way, in copies for each window."""

    rates: Floats
    goodput: float
    rules: Rules
    replay: Replay
    knowing: Oracle

    @cached_property
    def oracle(self) -> np.ndarray:
        """The copies that it would have had by itself."""
        return np.array(self.knowing.copies(self.replay.copies[0]))

    @cached_property
    def wishes(self) -> np.ndarray:
        return np.array([self.knowing.wants(i, n) for i, n in enumerate(self.replay.copies)])

    @property
    def copies(self) -> np.ndarray:
        return np.array(self.replay.copies)

    @property
    def days(self) -> float:
        return len(self.rates) * self.rules.window_s / 86_400

    @property
    def switches(self) -> list[int]:
        """Windows after which we switched, and another followed."""
        return [i for i in self.replay.at(Action.SWITCH) if i + 1 < len(self.rates)]

    def agrees(self, index: int) -> bool:
        """With the oracle before the next window, had we not switched."""
        outcome, before = self.replay.outcomes[index], self.copies[index]
        wish = self.knowing.wants(index + 1, before) - before
        return bool(np.sign(wish) == np.sign(outcome.current.fleet.num_copies - before))

    def clear_wishes(self) -> list[tuple[int, int, int]]:
        """First and last window, and the direction, of each."""
        copies = self.copies
        clear = np.abs(self.wishes - copies) > np.maximum(self.rules.rate_band * copies, 1)
        signs = np.where(clear, np.sign(self.wishes - copies), 0)
        edges = [0, *(np.flatnonzero(np.diff(signs)) + 1), len(signs)]
        least = self.rules.least_interval_s / self.rules.window_s
        return [
            (int(a), int(b) - 1, int(signs[a]))
            for a, b in pairwise(edges)
            if signs[a] and b - a >= least
        ]

    def delays_s(self) -> list[float | None]:
        """From each clear wish to our first switch that way; None if none came in two hours."""
        late = round(LATE_S / self.rules.window_s)
        moves = np.sign(np.diff(self.copies))
        found: list[float | None] = []
        for first, _, sign in self.clear_wishes():
            hits = np.flatnonzero(moves[first : first + late] == sign)
            found.append(float(hits[0] + 1) * self.rules.window_s if len(hits) else None)
        return found

    def cost(self, copies: np.ndarray) -> float:
        """Requests' worth: devices, misses and switches."""
        oracle, moves = self.knowing, np.diff(copies)
        missed = np.maximum(self.rates - copies * self.goodput, 0.0) * SLO.attainment
        each = self.rules.window_s * (copies * self.goodput + missed / (1 - SLO.attainment))
        up, down = np.maximum(moves, 0).sum(), np.maximum(-moves, 0).sum()
        return float(each.sum() + up * oracle.up_cost + down * oracle.down_cost)

    def missed_share(self, copies: np.ndarray) -> float:
        excess = np.maximum(self.rates - copies * self.goodput, 0)
        return float(excess.sum() / self.rates.sum())

    def short_share(self, copies: np.ndarray) -> float:
        return float((self.rates > copies * self.goodput + 1e-9).mean())


@cache
def run(name: str) -> Run:
    rates, window_s = (azure_2024(name), 433.0) if name in AZURE else (servegen(name), 600.0)
    rules = Rules(window_s=window_s)
    goodput = float(np.quantile(rates, 0.99)) / AT_PEAK
    first = int(np.ceil(1.1 * rates[0] / goodput))
    current = serving(first, goodput, Pattern(rate=float(rates[0])))
    replay = replayed(windows_of(rates, window_s), current, copies_of(goodput), rules)
    return Run(rates, goodput, rules, replay, _oracle(rates, goodput, rules))


def _oracle(rates: Floats, goodput: float, rules: Rules) -> Oracle:
    """With the planner's own price of one copy more, and of one less."""
    shape, memory = model_shape(PROBLEM.known.model), PROBLEM.settings.memory
    meanwhile = Meanwhile(
        rate=goodput,
        goodput=2 * goodput,
        drain_s=longest_output_tokens(PROBLEM) * SLO.tpot_s,
        miss_weight=miss_weight(SLO),
        free_devices=100,
    )
    prices = [
        switch_cost(
            Fleet(UNIT, 2), change(Fleet(UNIT, 2), Fleet(UNIT, n), shape, memory), meanwhile, RATES
        ).requests
        for n in (3, 1)
    ]
    return Oracle(rates, goodput, rules.window_s, rules, prices[0], prices[1])


@pytest.mark.parametrize("name", [*AZURE, *SERVEGEN])
def test_nothing_fires_twice_in_an_hour_unless_the_goodput_is_exceeded(name: str) -> None:
    found = run(name)
    fired = found.replay.at(Action.SWITCH, Action.STAY)
    seen = [found.replay.outcomes[i].verdict.look for i in fired]
    assert len(seen) > 5 * found.days
    for before, after in pairwise(seen):
        assert after.is_emergency or after.at_s - before.at_s >= 3600 - 1e-6


@pytest.mark.parametrize("name", [*AZURE, *SERVEGEN])
def test_an_emergency_is_one(name: str) -> None:
    found = run(name)
    for index in found.replay.at(Action.SWITCH):
        if found.replay.outcomes[index].verdict.look.is_emergency:
            heard = found.rates[: index + 1]
            last_two = heard[heard > 0][-2:]
            assert (last_two > found.copies[index] * found.goodput).all()


# Measured 0.85, 0.82, 0.76, 0.77 and 0.88; half of the rest are steps of a single copy.
@pytest.mark.parametrize("name", [*AZURE, *SERVEGEN])
def test_the_oracle_would_have_gone_the_same_way_in_most_switches(name: str) -> None:
    found = run(name)
    assert np.mean([found.agrees(index) for index in found.switches]) > 0.7


# Measured: one of 175 missed, mean delays of 48 to 64 minutes (a wish may foresee what comes).
@pytest.mark.parametrize("name", [*AZURE, *SERVEGEN])
def test_what_the_oracle_clearly_wishes_is_done_within_two_hours(name: str) -> None:
    delays_s = run(name).delays_s()
    done_s = [delay for delay in delays_s if delay is not None]
    assert len(delays_s) >= 5
    assert len(done_s) >= len(delays_s) - 1
    assert np.mean(done_s) < 4500


# Measured: 1.09 to 1.15 times the oracle's device-hours, all told 1.09 to 1.20 times its cost.
@pytest.mark.parametrize("name", [*AZURE, *SERVEGEN])
def test_it_costs_little_more_than_the_oracle_and_far_less_than_the_peak(name: str) -> None:
    found = run(name)
    always = np.full(len(found.rates), np.ceil(found.rates.max() / found.goodput))
    assert found.copies.sum() < 1.2 * found.oracle.sum()
    assert found.cost(found.copies) < 1.25 * found.cost(found.oracle)
    assert found.cost(found.copies) < 0.7 * found.cost(always)


# Measured 5.5, 5.4, 10.3, 10.3 and 8.2 % of the time: ServeGen's windows vary by a sixth from one
# to the next, which nobody can follow that acts once an hour. (The oracle: 13, 12, 11, 11, 12 %.)
@pytest.mark.parametrize(
    ("name", "most"), [*((n, 0.07) for n in AZURE), *((n, 0.12) for n in SERVEGEN)]
)
def test_demand_exceeds_the_goodput_for_little_of_the_time_and_by_little(
    name: str, most: float
) -> None:
    found = run(name)
    assert found.short_share(found.copies) < min(most, found.short_share(found.oracle))
    assert found.missed_share(found.copies) < 0.2 * most
