"""From a log to a verdict: what is searched for, simulated, weighed, told and handed on."""

from dataclasses import replace

import msgspec
import numpy as np
import orjson
import pytest

from planner.goodput import Goodput
from planner.intervals import Interval
from planner.placement.choices import Candidate, Chosen, Problem
from planner.replan.decide import Tools, replan
from planner.replan.outcome import Action, Current, Outcome
from planner.replan.recent import Log
from planner.replan.rules import ReplanError, Rules
from planner.replan.shift import Figure
from planner.replan.window import LengthStats, Pattern, Window, rate_windows
from planner.workload.requests import Requests
from tests.planner.replan_series import PROBLEM, copies_of, exactly, serving, unit_goodput

RULES = Rules()
HOUR_S = 3600.0


def rated(*rates: float) -> Log:
    """Ten-minute windows of a log without requests."""
    return Log(rate_windows(rates, 600.0))


def asked(log: Log, current: Current, tools: Tools | None = None) -> Outcome:
    return replan(log, current, PROBLEM, tools or copies_of(1.0), RULES)


def logged(rate: float, *, hours: float, stretch: float = 1.0, seed: int = 0) -> Requests:
    """ShareGPT's lengths, the outputs `stretch` times as long, at Poisson arrivals."""
    drawn = PROBLEM.workload.requests(int(rate * hours * HOUR_S), rate, seed)
    longer = np.maximum((drawn.output_tokens * stretch).astype(np.int64), 1)
    return Requests(drawn.arrival_s, drawn.input_tokens, longer)


def joined(first: Requests, second: Requests, at_s: float) -> Requests:
    before = first.arrival_s < at_s
    return Requests(
        np.concatenate([first.arrival_s[before], second.arrival_s + at_s]),
        np.concatenate([first.input_tokens[before], second.input_tokens]),
        np.concatenate([first.output_tokens[before], second.output_tokens]),
    )


def test_as_planned_nothing_is_searched() -> None:
    def search(problem: Problem) -> Chosen:
        raise AssertionError("nobody asked for a placement")

    current = serving(11, 1.0, Pattern(rate=10.0))
    outcome = asked(rated(*[10.0] * 12), current, Tools(search=search))
    assert outcome.verdict.action is Action.KEEP
    assert outcome.current is current


def test_a_rise_beyond_the_goodput_adds_copies_for_the_forecast() -> None:
    outcome = asked(rated(*[10.0] * 12, 16.0, 16.0), serving(11, 1.0, Pattern(rate=10.0)))
    verdict = outcome.verdict
    assert verdict.action is Action.SWITCH
    assert verdict.proposal is not None
    assert verdict.proposal.num_copies >= 16
    assert verdict.gain is not None
    assert verdict.gain.devices_saved == 22 - verdict.proposal.num_devices
    assert verdict.gain.new_attainment > verdict.gain.old_attainment
    assert outcome.current.fleet.num_copies == verdict.proposal.num_copies
    assert outcome.current.since_s == 14 * 600.0


def test_a_fall_gives_devices_back() -> None:
    outcome = asked(rated(*[10.0] * 6, *[4.0] * 6), serving(11, 1.0, Pattern(rate=10.0)))
    assert outcome.verdict.action is Action.SWITCH
    assert outcome.current.fleet.num_copies == 5
    assert outcome.verdict.gain is not None
    assert outcome.verdict.gain.devices_saved == 12


def test_after_a_verdict_the_new_pattern_is_the_plan() -> None:
    log = rated(*[10.0] * 12, 16.0, 16.0)
    first = asked(log, serving(11, 1.0, Pattern(rate=10.0)))
    later = Log((*log.windows, *(replace_start(w, 14) for w in rated(*[16.0] * 2).windows)))
    assert asked(later, first.current).verdict.action is Action.KEEP


def replace_start(window: Window, index: int) -> Window:
    return msgspec.structs.replace(window, start_s=window.start_s + index * 600.0)


def test_within_the_hour_a_shift_waits_and_nothing_changes() -> None:
    current = serving(40, 1.0, Pattern(rate=10.0), since_s=9 * 600.0)
    outcome = asked(rated(*[10.0] * 10, 20.0, 20.0), current)
    assert outcome.verdict.action is Action.WAIT
    assert outcome.current is current
    assert outcome.verdict.look.wait_s == pytest.approx(1800.0)


def test_a_shift_that_leaves_the_placement_the_best_stays_and_is_not_searched_again() -> None:
    current = serving(14, 1.0, Pattern(rate=10.0))
    log = rated(*[10.0] * 6, *[13.0] * 6)
    outcome = asked(log, current)
    assert outcome.verdict.action is Action.STAY
    assert outcome.current.fleet == current.fleet
    assert outcome.current.planned.rate == pytest.approx(13.0, rel=0.1)
    again = asked(Log((*log.windows, replace_start(rated(13.0).windows[0], 12))), outcome.current)
    assert again.verdict.action is Action.KEEP


def test_an_overload_that_no_placement_cures_is_an_emergency_once() -> None:
    """A full cluster: the search finds what there is already."""

    def search(problem: Problem) -> Chosen:
        return replace(copies_of(1.0).search(problem), num_copies=11, rate=exactly(11.0))

    log = rated(*[10.0] * 6, 15.0, 15.0)
    first = asked(log, serving(11, 1.0, Pattern(rate=10.0)), Tools(search=search))
    assert first.verdict.look.is_emergency
    assert first.verdict.action is Action.STAY
    longer = Log((*log.windows, replace_start(rated(15.0).windows[0], 8)))
    assert not asked(longer, first.current, Tools(search=search)).verdict.look.is_emergency


def test_a_gain_that_is_not_sure_does_not_switch() -> None:
    def search(problem: Problem) -> Chosen:
        chosen = copies_of(1.0).search(problem)
        return replace(chosen, rate=Interval(chosen.rate.value, 5.0, 2 * chosen.rate.value))

    current = serving(11, 1.0, Pattern(rate=10.0))
    outcome = asked(rated(*[10.0] * 6, *[13.0] * 6), current, Tools(search=search))
    assert outcome.verdict.action is Action.STAY
    assert "not sure" in outcome.verdict.reason


def test_longer_outputs_ask_for_the_goodput_that_is_left_and_may_be_an_emergency() -> None:
    def copy_goodput(problem: Problem, candidate: Candidate, guess: float) -> Goodput:
        _, outputs = problem.workload.lengths.draw(4096, 0)
        return unit_goodput(200.0 / float(outputs.mean()))

    def window(index: int, mean: float) -> Window:
        lengths = LengthStats(mean, 1.0, 3 * mean)
        return Window(
            start_s=600.0 * index, span_s=600.0, count=6000.0, inputs=lengths, outputs=lengths
        )

    planned = Pattern(rate=10.0, mean_input=200.0, mean_output=200.0)
    current = serving(11, 1.0, planned, since_s=600.0 * 10)
    log = Log((*(window(i, 200.0) for i in range(11)), window(11, 400.0), window(12, 400.0)))
    tools = replace(copies_of(0.5), copy_goodput=copy_goodput)
    verdict = asked(log, current, tools).verdict
    assert verdict.goodput.value == pytest.approx(11 * 0.5, rel=0.1)
    assert verdict.look.is_emergency
    assert verdict.action is Action.SWITCH


def test_old_and_new_are_simulated_on_the_recent_requests() -> None:
    """Prefill of ShareGPT prompts saturates the unit: three copies carry what one cannot."""
    requests = joined(logged(4.0, hours=2), logged(12.0, hours=0.5, seed=1), 2 * HOUR_S)
    log = Log.of(requests, RULES, until_s=2.5 * HOUR_S)
    verdict = asked(log, serving(1, 6.0, Pattern(rate=4.0)), copies_of(6.0)).verdict
    gained = verdict.gain
    assert verdict.action is Action.SWITCH
    assert gained is not None
    assert gained.is_simulated
    assert gained.old_attainment < 0.5 < 0.9 < gained.new_attainment
    assert gained.attainment.low > 0.4
    assert gained.requests.low < gained.requests.value < gained.requests.high


def test_the_goodput_that_is_left_is_simulated_where_nobody_else_knows_it() -> None:
    requests = joined(logged(3.0, hours=1), logged(3.0, hours=0.5, stretch=4.0), HOUR_S)
    log = Log.of(requests, RULES, until_s=1.5 * HOUR_S)
    planned = Pattern(rate=3.0, mean_input=767.0, mean_output=199.0, gap_cv=1.0)
    tools = Tools(search=copies_of(0.8).search)
    verdict = asked(log, serving(1, 4.0, planned), tools).verdict
    assert [shift.figure for shift in verdict.look.shifts] == [Figure.OUTPUT]
    assert 0.5 < verdict.goodput.low < verdict.goodput.high < 1.5
    assert verdict.action is Action.SWITCH


def test_recent_requests_are_those_of_the_last_hour() -> None:
    requests = logged(2.0, hours=2)
    rows = Log.of(requests, RULES, until_s=1.5 * HOUR_S).recent
    assert rows is not None
    inside = (requests.arrival_s >= 0.5 * HOUR_S) & (requests.arrival_s < 1.5 * HOUR_S)
    assert rows.arrival_s.tolist() == requests.arrival_s[inside].tolist()


@pytest.mark.parametrize("rates", [[10.0] * 12, [10.0] * 6 + [16.0] * 6])
def test_a_verdict_is_json_and_one_sentence(rates: list[float]) -> None:
    verdict = asked(rated(*rates), serving(11, 1.0, Pattern(rate=10.0))).verdict
    read = orjson.loads(orjson.dumps(msgspec.to_builtins(verdict)))
    assert read["version"] == 1
    assert read["action"] == verdict.action
    assert read["look"]["forecast"]["upper"] == verdict.look.forecast.upper
    assert verdict.told().startswith(f"{verdict.action}: ")
    assert "\n" not in verdict.told()


def test_an_empty_log_ends_in_one_sentence() -> None:
    with pytest.raises(ReplanError, match="at least one window"):
        Log(())
