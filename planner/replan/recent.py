"""The recent workload: what a search plans for, and what old and new placement are compared on."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from planner.placement.choices import Problem
from planner.placement.variation import ScaledLengths
from planner.replan.rules import ReplanError, Rules
from planner.replan.window import Pattern, Window, pattern_of, rows_between, summarise
from planner.workload.arrivals import Resampled
from planner.workload.lengths import TableLengths
from planner.workload.requests import Requests
from planner.workload.rows import Blocks
from planner.workload.workload import Workload

LEAST_ROWS = 200  # fewer tell too little of an attainment
MOST_ROWS = 8_000  # the latest are simulated: seconds, not minutes
BLOCK_S = 120.0  # neighbours that stay together, as in the resampling of traces
LEAST_BLOCKS = 8
NUM_DRAWN = 4_096


@dataclass(frozen=True, eq=False)
class Log:
    """A workload log: windows in order of time, and the recent requests where there are any.

    All times are on the log's clock.
    """

    windows: tuple[Window, ...]
    recent: Requests | None = None

    def __post_init__(self) -> None:
        if not self.windows:
            raise ReplanError("an empty log says nothing: give at least one window")

    @classmethod
    def of(cls, requests: Requests, rules: Rules, until_s: float | None = None) -> Self:
        """Of a log of requests, up to the last whole window."""
        windows = summarise(requests, rules.window_s, until_s=until_s)
        end_s = windows[-1].end_s
        return cls(windows, rows_between(requests, end_s - rules.lookback_s, end_s))

    def since(self, start_s: float) -> Self:
        """The part from there on, without windows in which nobody came if any did."""
        windows = [w for w in self.windows if w.start_s >= start_s - 1e-6] or self.windows[-1:]
        kept = tuple(window for window in windows if window.count > 0) or tuple(windows)
        if self.recent is None:
            return type(self)(kept)
        return type(self)(kept, rows_between(self.recent, start_s, windows[-1].end_s))

    @property
    def rows(self) -> Requests | None:
        """Enough recent requests to simulate, or None."""
        if self.recent is None or len(self.recent) < LEAST_ROWS:
            return None
        first = max(len(self.recent) - MOST_ROWS, 0)
        start_s = self.recent.arrival_s[first]
        return Requests(
            self.recent.arrival_s[first:] - start_s,
            self.recent.input_tokens[first:],
            self.recent.output_tokens[first:],
        )


def recent_problem(recent: Log, problem: Problem, rate: float) -> Problem:
    """The same question about the recent workload at that rate.

    The log's own requests, resampled in blocks; from summaries, the workload that the problem
    has, with its lengths scaled to the recent means.
    """
    rows = recent.rows
    if rows is None:
        workload = _scaled(problem, pattern_of(recent.windows, rate))
    else:
        most = max(1, len(rows) // LEAST_BLOCKS)
        picks = Blocks(int(np.clip(BLOCK_S * rows.rate, 1, most)))
        lengths = TableLengths(rows.input_tokens, rows.output_tokens, picks)
        arrivals = Resampled(rows, picks)
        workload = Workload("recent", "the log's recent requests", lengths, arrivals, len(rows))
    return replace(problem, workload=workload, rate=rate)


def longest_output_tokens(problem: Problem) -> float:
    """Of 99 in 100 requests."""
    _, outputs = problem.workload.lengths.draw(NUM_DRAWN, problem.seed)
    return float(np.quantile(outputs, 0.99))


def _scaled(problem: Problem, pattern: Pattern) -> Workload:
    if pattern.mean_input is None or pattern.mean_output is None:
        return problem.workload
    lengths = problem.workload.lengths
    inputs, outputs = lengths.draw(NUM_DRAWN, problem.seed)
    of_inputs = pattern.mean_input / float(inputs.mean())
    of_outputs = pattern.mean_output / float(outputs.mean())
    return replace(problem.workload, lengths=ScaledLengths(lengths, of_inputs, of_outputs))
