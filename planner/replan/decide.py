"""Replanning as a function: a log and the placement that serves give a verdict.

A look at the log is cheap and may be taken at every window. Only where it fires is the search
run, and what it finds compared with what serves. Nothing is kept between calls but what the
outcome hands back.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from planner.goodput import Goodput
from planner.intervals import Interval
from planner.model_catalog import model_shape
from planner.placement.choices import Candidate, Chosen, Problem
from planner.replan.evaluate import Copies, run
from planner.replan.gain import (
    Attained,
    Gain,
    Side,
    Simulate,
    by_goodput,
    by_simulation,
    gain,
    miss_weight,
)
from planner.replan.look import NUM_CONFIRMING, look
from planner.replan.outcome import Action, Current, Look, Outcome, Proposal, ReplanVerdict
from planner.replan.recent import Log, longest_output_tokens, recent_problem
from planner.replan.rules import Rules, SwitchRates
from planner.replan.shift import Figure
from planner.replan.switching import Fleet, Meanwhile, SwitchCost, change, switch_cost
from planner.replan.window import pattern_of
from planner.simulator.service import Service

PlacementSearch = Callable[[Problem], Chosen]
Serve = Callable[[Problem, Candidate], Service]
CopyGoodput = Callable[[Problem, Candidate, float], Goodput]
_COPIES = Copies()


@dataclass(frozen=True)
class Tools:
    """What a replan is made with; the search is the planner's own, everything else has a default.

    Args:
        search: the best placement for a problem and its rate; a PlannerError of it is the caller's.
        serve: one copy of a candidate, as the search simulates it.
        copy_goodput: of one copy of a candidate; the last argument is a first guess.
    """

    search: PlacementSearch
    serve: Serve = _COPIES.service
    copy_goodput: CopyGoodput = _COPIES.goodput
    simulate: Simulate = run
    switch: SwitchRates = field(default_factory=SwitchRates)


def replan(
    log: Log, current: Current, problem: Problem, tools: Tools, rules: Rules | None = None
) -> Outcome:
    """Has the pattern shifted, what would suit it, and does the switch pay?

    Args:
        problem: the one that the placement was planned for; its rate and workload are replaced by
            the recent ones.

    Raises:
        PlannerError: the search finds no placement for the recent pattern.
    """
    rules = rules or Rules()
    seen, goodput = look(log.windows, current, rules), current.goodput
    recent = log.since(seen.recent_s(rules))
    now = recent_problem(recent, problem, seen.forecast.upper)
    if any(shift.figure is not Figure.RATE for shift in seen.shifts):
        goodput = _goodput_now(now, current, tools)
        seen = look(log.windows, current, rules, goodput.value)
    side = Side(current.fleet, goodput)
    if not seen.fires:
        return Outcome(_unsearched(seen, side), current)
    return _searched(recent, side, now, tools, (seen, rules))


def _unsearched(seen: Look, side: Side) -> ReplanVerdict:
    reason = f"the last plan is younger than allowed by {seen.wait_s:.0f} s"
    return ReplanVerdict(
        action=Action.WAIT if seen.calls else Action.KEEP,
        reason=reason if seen.calls else "as planned",
        look=seen,
        num_devices=side.fleet.num_devices,
        goodput=side.goodput,
    )


def _searched(
    recent: Log, old: Side, now: Problem, tools: Tools, seen_by: tuple[Look, Rules]
) -> Outcome:
    seen, rules = seen_by
    chosen = tools.search(now)
    new = Side(Fleet(chosen.best.candidate, chosen.num_copies), chosen.rate)
    found = gain(
        old,
        new,
        _attained(recent, (old, new), now, tools),
        (seen.forecast.upper, rules.horizon_s),
        now.slo,
    )
    cost = _cost(old, new.fleet, now, tools.switch)
    pays, reason = _pays(old.fleet, new.fleet, found, cost)
    verdict = ReplanVerdict(
        action=Action.SWITCH if pays else Action.STAY,
        reason=reason,
        look=seen,
        num_devices=old.fleet.num_devices,
        goodput=old.goodput,
        proposal=_proposal(chosen),
        gain=found,
        cost=cost,
    )
    side = new if pays else old
    return Outcome(verdict, _carried_on(recent, side, seen, accepts=not pays), chosen)


def _carried_on(recent: Log, side: Side, seen: Look, *, accepts: bool) -> Current:
    """Whatever was decided, it was decided for the recent pattern: that is the plan from now on."""
    last = recent.windows[-NUM_CONFIRMING:]
    return Current(
        fleet=side.fleet,
        goodput=side.goodput,
        planned=pattern_of(recent.windows, seen.forecast.level),
        since_s=seen.at_s,
        accepted_rate=max(window.rate for window in last) if accepts else 0.0,
    )


def _goodput_now(now: Problem, current: Current, tools: Tools) -> Interval:
    """The placement's goodput under the recent pattern."""
    fleet = current.fleet
    guess = max(current.goodput.value / fleet.num_copies, 1e-3)
    found = tools.copy_goodput(now, fleet.candidate, guess).rate
    return found.divided(1 / fleet.num_copies)


def _attained(recent: Log, sides: tuple[Side, Side], now: Problem, tools: Tools) -> Attained:
    rows, rate = recent.rows, now.rate
    assert rate is not None, "the recent problem has the forecast's rate"
    if rows is None:
        return by_goodput(*sides, rate, now.slo)
    old, new = (side.fleet for side in sides)
    services = tools.serve(now, old.candidate), tools.serve(now, new.candidate)
    stretched = (
        rows.stretched(rows.rate * old.num_copies / rate),
        rows.stretched(rows.rate * new.num_copies / rate),
    )
    return by_simulation(services, stretched, now.slo, tools.simulate)


def _cost(old: Side, new: Fleet, now: Problem, rates: SwitchRates) -> SwitchCost:
    changed = change(old.fleet, new, model_shape(now.known.model), now.settings.memory)
    meanwhile = Meanwhile(
        rate=now.rate or 0.0,
        goodput=old.goodput.value,
        # No token is meant to take longer than the target.
        drain_s=longest_output_tokens(now) * now.slo.tpot_s,
        miss_weight=miss_weight(now.slo),
        free_devices=max(now.cluster.num_devices - old.fleet.num_devices, 0),
    )
    return switch_cost(old.fleet, changed, meanwhile, rates)


def _pays(old: Fleet, new: Fleet, found: Gain, cost: SwitchCost) -> tuple[bool, str]:
    if old == new:
        return False, "the same placement is still the best"
    if found.requests.low > cost.requests:
        return True, "the gain outweighs the switch"
    if found.requests.value > cost.requests:
        return False, "the gain is not sure to outweigh the switch"
    return False, "the switch costs more than it gains"


def _proposal(chosen: Chosen) -> Proposal:
    return Proposal(
        candidate=chosen.best.candidate,
        num_copies=chosen.num_copies,
        num_devices=chosen.num_devices,
        goodput=chosen.rate,
    )
