"""Workloads and arrivals by name, as the command line takes them.

A workload is a data set (`sharegpt`), a distribution (`synthetic:512,64`) or a CSV file; arrivals
are `poisson`, `gamma:CV`, `fixed`, or what a trace gives: `replay`, `resample`, `fitted`.
"""

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np

from planner.errors import WorkloadError
from planner.parsing import finite
from planner.workload.arrival_fit import fit_arrivals
from planner.workload.arrivals import Arrivals, Evenly, Modulated, Renewal, Replay, Resampled
from planner.workload.lengths import LengthRules, SyntheticLengths, TableLengths
from planner.workload.requests import Requests
from planner.workload.rows import Blocks, Independent, InOrder, RowPicks
from planner.workload.synthetic import parse_long_context, parse_synthetic
from planner.workload.tables import LengthTable, load_table
from planner.workload.trace_file import read_trace
from planner.workload.workload import Workload

TABLES = {
    "sharegpt": "chat: ShareGPT as DistServe prepares it (mean 767 tokens in, 199 out)",
    "humaneval": "code completion: HumanEval's prompts and solutions (171 in, 98 out)",
    "longbench": "summarisation and more: LongBench clipped to 2,040 tokens (1,887 in, 88 out)",
    "azure-conv": "conversations of an Azure service in 2023 (1,155 in, 211 out)",
    "azure-code": "code completion of an Azure service in 2023 (2,048 in, 28 out)",
    "mooncake-conversation": "conversations of the Kimi service (12,035 in, 343 out)",
}
PARAMETRIC = {
    "synthetic:INPUT,OUTPUT": "each N (fixed), LOW..HIGH (uniform) or MEDIAN~SD (log-normal, SD "
    "of the natural logarithm): synthetic:512,64",
    "long-context[:input=N,spread=SD,output=N]": "prompts log-normal around a median of `input` "
    "tokens (32768) with a log-sd of `spread` (0.5), answers of `output` tokens (512)",
}
ARRIVALS = {
    "poisson": "independent exponential gaps",
    "gamma:CV": "independent Gamma gaps with that coefficient of variation (1 is Poisson)",
    "fixed": "equal gaps",
    "replay": "a trace's own times, stretched where a rate is given; the rule for CSV files",
    "resample": "blocks of a trace's neighbouring requests, gaps and lengths together",
    "fitted": "a time-varying rate times renewal gaps, fitted to a trace",
}
# Blocks this long keep most of a trace's drift: resampled Azure conversations have an IDC at
# 60 s of 14.0 in the mean, against the trace's 16.1.
BLOCK_S = 120.0
MIN_BLOCKS = 8


class ArrivalKind(StrEnum):
    """The names of `ARRIVALS` without their parameters."""

    POISSON = "poisson"
    GAMMA = "gamma"
    FIXED = "fixed"
    REPLAY = "replay"
    RESAMPLE = "resample"
    FITTED = "fitted"


@dataclass(frozen=True)
class ArrivalChoice:
    """What the user chose; the CV belongs to Gamma gaps."""

    kind: ArrivalKind
    cv: float = 1.0


POISSON = ArrivalChoice(ArrivalKind.POISSON)
REPLAY = ArrivalChoice(ArrivalKind.REPLAY)
AS_IT_IS = LengthRules()


def parse_arrivals(text: str) -> ArrivalChoice:
    """`poisson`, `gamma:2.0`, `fixed`, `replay`, `resample` or `fitted`."""
    name, colon, parameter = text.strip().partition(":")
    if name not in list(ArrivalKind):
        raise WorkloadError(f"unknown arrivals {text!r}: give one of {', '.join(ARRIVALS)}")
    kind = ArrivalKind(name)
    if kind is not ArrivalKind.GAMMA:
        if colon:
            raise WorkloadError(f"arrivals {text!r}: {name} takes no parameter")
        return ArrivalChoice(kind)
    cv = finite(parameter)
    if cv is None or not 0.01 <= cv <= 100:
        raise WorkloadError(
            f"arrivals {text!r}: gamma needs a CV between 0.01 and 100, as in gamma:2.0"
        )
    return ArrivalChoice(kind, cv)


def parse_workload(
    text: str, arrivals: ArrivalChoice | None = None, rules: LengthRules = AS_IT_IS
) -> Workload:
    """The workload of that name or file.

    Args:
        text: a name of `TABLES`, one of `PARAMETRIC` with its parameters, or a CSV file.
        arrivals: Poisson by default, but a file's own times for a CSV file.
        rules: applied to the lengths; with a trace, a dropped request leaves its gap to the next.
    """
    name, colon, parameters = text.strip().partition(":")
    if name in TABLES:
        if colon:
            raise WorkloadError(f"workload {text!r}: {name} takes no parameters")
        return _from_table(load_table(name), arrivals or POISSON, rules)
    if name in ("synthetic", "long-context"):
        parse = parse_synthetic if name == "synthetic" else parse_long_context
        lengths = SyntheticLengths(*parse(parameters), rules)
        return Workload(
            text.strip(), "lengths by parameters", lengths, _untraced(name, arrivals or POISSON)
        )
    if text.endswith(".csv") or os.sep in text or (text and os.path.exists(text)):
        return _from_trace(Path(text), arrivals or REPLAY, rules)
    names = ", ".join([*TABLES, "synthetic", "long-context"])
    raise WorkloadError(f"unknown workload {text!r}: give one of {names}, or a CSV file")


def _from_table(table: LengthTable, choice: ArrivalChoice, rules: LengthRules) -> Workload:
    inputs, outputs, kept = rules.apply(
        np.array(table.input_tokens, np.int64), np.array(table.output_tokens, np.int64)
    )
    if not kept.any():
        raise _nothing_fits(table.name, rules)
    lengths = TableLengths(inputs[kept], outputs[kept], Independent())
    if choice.kind is ArrivalKind.FITTED and table.arrivals is not None:
        return Workload(table.name, table.source, lengths, Modulated(table.arrivals))
    return Workload(table.name, table.source, lengths, _untraced(table.name, choice))


def _untraced(name: str, choice: ArrivalChoice) -> Arrivals:
    match choice.kind:
        case ArrivalKind.POISSON:
            return Renewal.with_cv(1.0)
        case ArrivalKind.GAMMA:
            return Renewal.with_cv(choice.cv)
        case ArrivalKind.FIXED:
            return Evenly()
        case ArrivalKind.FITTED:
            raise WorkloadError(f"{name} has no arrival times to fit: give a CSV file")
        case ArrivalKind.REPLAY | ArrivalKind.RESAMPLE:
            raise WorkloadError(
                f"{name} is built in without arrival times, so there is nothing to "
                f"{choice.kind}: give a CSV file"
            )


def _from_trace(path: Path, choice: ArrivalChoice, rules: LengthRules) -> Workload:
    whole = read_trace(path)
    inputs, outputs, kept = rules.apply(whole.input_tokens, whole.output_tokens)
    if not kept.any():
        raise _nothing_fits(str(path), rules)
    trace = Requests(whole.arrival_s[kept], inputs[kept], outputs[kept])
    picks = InOrder() if choice.kind is ArrivalKind.REPLAY else _blocks(trace)
    lengths = TableLengths(trace.input_tokens, trace.output_tokens, picks)
    try:
        arrivals = _traced(trace, choice, picks)
    except WorkloadError as error:
        raise WorkloadError(f"{path}: {error}") from error
    return Workload(str(path), f"the trace {path}", lengths, arrivals, len(trace))


def _traced(trace: Requests, choice: ArrivalChoice, picks: RowPicks) -> Arrivals:
    match choice.kind:
        case ArrivalKind.REPLAY:
            return Replay(trace)
        case ArrivalKind.RESAMPLE:
            return Resampled(trace, picks)
        case ArrivalKind.FITTED:
            return Modulated(fit_arrivals(trace.arrival_s))
        case _:
            return _untraced("the trace", choice)


def _blocks(trace: Requests) -> Blocks:
    """Two minutes of requests each, but short enough that a trace has several of them."""
    most = max(1, len(trace) // MIN_BLOCKS)
    return Blocks(int(np.clip(BLOCK_S * trace.rate, 1, most)))


def _nothing_fits(name: str, rules: LengthRules) -> WorkloadError:
    return WorkloadError(
        f"no request of {name} fits under the limit of {rules.max_total_tokens} tokens"
    )
