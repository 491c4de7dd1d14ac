"""A run's trace as CSV: a workload file with what became of each request.

The first three columns are those of any workload, so that a trace can be replayed, live or
simulated, with the lengths that it really had. Times are seconds from the first arrival; what is
not known, such as the times of a request that failed, is empty.
"""

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from planner.bench.live_run import Failure, LiveRun, staged_timeline
from planner.errors import WorkloadError
from planner.parsing import finite
from planner.workload.requests import Bools, Floats
from planner.workload.trace_file import read_columns, read_trace

COLUMNS = (
    "arrival_s",
    "input_tokens",
    "output_tokens",
    "sent_s",
    "ttft_s",
    "tpot_s",
    "first_token_s",
    "last_token_s",
    "prefill_s",
    "transfer_s",
    "decode_queue_s",
    "error",
)
_TIMES = ("first_token_s", "last_token_s")
_STAGES = ("prefill_s", "transfer_s", "decode_queue_s")


def write_run(path: Path, run: LiveRun) -> None:
    """One row for each request, in order of arrival; `error` holds "kind: message".

    Raises:
        WorkloadError: the file cannot be written.
    """
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(COLUMNS)
            rows.writerows(zip(*_columns(run), strict=True))
    except OSError as error:
        raise WorkloadError(f"{path}: cannot be written: {error.strerror}") from error


def read_run(path: Path) -> LiveRun:
    """The run that was written, without what a trace does not hold: gaps between tokens.

    Raises:
        WorkloadError: it is no such trace; says where.
    """
    requests = read_trace(path)
    errors = [fields[0] for _, fields in read_columns(path, ("error",))]
    is_answered = np.array([not error for error in errors], dtype=np.bool_)
    first_s, last_s = _known(path, _TIMES, is_answered).T
    stages_s = _floats(path, _STAGES)[is_answered]
    return LiveRun(
        requests=requests,
        sent_s=_known(path, ("sent_s",), np.ones_like(is_answered))[:, 0],
        is_answered=is_answered,
        timeline=staged_timeline(requests.part(is_answered), first_s, last_s, stages_s),
        failures=tuple(_failure(number, text) for number, text in enumerate(errors) if text),
        gaps_s=np.empty(0),
        num_events=None,
        is_counted=True,
        duration_s=float(np.append(last_s, requests.arrival_s[-1]).max()),
    )


def _columns(run: LiveRun) -> list[Sequence[str]]:
    """In the order of `COLUMNS`."""
    timeline, is_answered = run.timeline, run.is_answered
    lengths = [run.requests.input_tokens.copy(), run.requests.output_tokens.copy()]
    lengths[0][is_answered] = timeline.requests.input_tokens
    lengths[1][is_answered] = timeline.requests.output_tokens
    stages_s = timeline.stages_s()
    of_answered = (
        timeline.ttft_s,
        timeline.tpot_s,
        timeline.first_token_s,
        timeline.last_token_s,
        stages_s["prefill"],
        stages_s["transfer"],
        stages_s["decode_queue"],
    )
    errors = {failure.number: f"{failure.kind}: {failure.message}" for failure in run.failures}
    return [
        _texts(run.requests.arrival_s),
        *([str(length) for length in column] for column in lengths),
        _texts(run.sent_s),
        *(_texts(_spread(values, run)) for values in of_answered),
        [errors.get(number, "") for number in range(len(run))],
    ]


def _spread(of_answered: Floats, run: LiveRun) -> Floats:
    values = np.full(len(run), np.nan)
    values[run.is_answered] = of_answered
    return values


def _texts(values: Floats) -> list[str]:
    """To the microsecond."""
    return ["" if np.isnan(value) else f"{value:.6f}" for value in values]


def _failure(number: int, text: str) -> Failure:
    kind, _, message = text.partition(": ")
    return Failure(number, kind, message)


def _known(path: Path, columns: tuple[str, ...], rows: Bools) -> Floats:
    """These rows of the columns, where nothing may be missing, float64[R, C]."""
    values = _floats(path, columns)[rows]
    for column, known_s in zip(columns, values.T, strict=True):
        if np.isnan(known_s).any():
            raise WorkloadError(f"{path}: {column} is missing for a request without an error")
    return values


def _floats(path: Path, columns: tuple[str, ...]) -> Floats:
    """NaN where a field is empty, float64[N, C]."""
    rows = read_columns(path, columns)
    return np.array(
        [
            [_seconds(where, *field) for field in zip(columns, fields, strict=True)]
            for where, fields in rows
        ]
    )


def _seconds(where: str, column: str, text: str) -> float:
    if not text:
        return float("nan")
    if (value := finite(text)) is None:
        raise WorkloadError(f"{where}: {column} is no number of seconds: {text!r}")
    return value
