"""Traces on disk: CSV files whose header names arrival_s, input_tokens and output_tokens.

Other columns are ignored and the order is free. Times are seconds that never fall; lengths are
whole tokens, at least one. A file that is anything else ends in one sentence that names its line.
"""

import csv
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import numpy as np

from planner.errors import WorkloadError
from planner.parsing import finite
from planner.workload.requests import Requests

COLUMNS = ("arrival_s", "input_tokens", "output_tokens")
# Far above any context window: a larger number is a wrong column or a wrong unit.
MAX_TOKENS = 1_000_000_000
# Unix times in seconds pass; in milliseconds they would be a wrong unit, and far beyond that a
# clock in float64 no longer tells milliseconds apart.
MAX_ARRIVAL_S = 1e10


def read_trace(path: Path) -> Requests:
    """The requests of a CSV file, in its order."""
    arrival_s: list[float] = []
    input_tokens: list[int] = []
    output_tokens: list[int] = []
    for where, (arrival, prompt, output) in read_columns(path, COLUMNS):
        arrival_s.append(_time(where, arrival, arrival_s[-1] if arrival_s else 0.0))
        input_tokens.append(parse_tokens(where, "input_tokens", prompt))
        output_tokens.append(parse_tokens(where, "output_tokens", output))
    return Requests(
        np.array(arrival_s, np.float64),
        np.array(input_tokens, np.int64),
        np.array(output_tokens, np.int64),
    )


def write_trace(path: Path, requests: Requests) -> None:
    """Write what `read_trace` reads back, the times to the last bit."""
    columns = (requests.arrival_s, requests.input_tokens, requests.output_tokens)
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            writer.writerows(zip(*(column.tolist() for column in columns), strict=True))
    except OSError as error:
        raise WorkloadError(f"{path}: cannot be written: {error.strerror}") from error


def read_columns(path: Path, wanted: tuple[str, ...]) -> Iterator[tuple[str, list[str]]]:
    """For each row of a CSV file, its place ("FILE, line N") and the wanted fields, in order.

    Blank lines are passed over; a file without rows is refused.
    """
    num_rows = 0
    try:
        with _open(path) as file:
            for row in _fields(path, file, wanted):
                num_rows += 1
                yield row
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path}: is not a text file (UTF-8)") from error
    except csv.Error as error:
        raise WorkloadError(f"{path}: is not a CSV file: {error}") from error
    if num_rows == 0:
        raise WorkloadError(f"{path}: holds no requests below its header")


def parse_tokens(where: str, column: str, text: str) -> int:
    """A length in tokens; `12.0` passes, since some tools write whole numbers so."""
    value = _number(where, column, text)
    if not value.is_integer():
        raise WorkloadError(f"{where}: {column} must be a whole number, not {text.strip()}")
    if not 1 <= value <= MAX_TOKENS:
        raise WorkloadError(
            f"{where}: {column} must lie between 1 and {MAX_TOKENS}, not {text.strip()}"
        )
    return int(value)


def _open(path: Path) -> TextIO:
    if not os.path.isfile(path):
        raise WorkloadError(
            f"{path}: {'is not a file' if os.path.exists(path) else 'no such file'}"
        )
    try:
        return path.open(encoding="utf-8-sig", newline="")
    except OSError as error:
        raise WorkloadError(f"{path}: cannot be read: {error.strerror}") from error


def _fields(path: Path, file: TextIO, wanted: tuple[str, ...]) -> Iterator[tuple[str, list[str]]]:
    reader = csv.reader(file)
    header = [name.strip() for name in next(reader, [])]
    columns = _columns(path, header, wanted)
    for fields in reader:
        if not fields:
            continue
        where = f"{path}, line {reader.line_num}"
        if len(fields) != len(header):
            raise WorkloadError(f"{where}: has {len(fields)} fields, the header {len(header)}")
        yield where, [fields[column] for column in columns]


def _columns(path: Path, header: list[str], wanted: tuple[str, ...]) -> list[int]:
    if not header:
        raise WorkloadError(f"{path}, line 1: is empty; it must name {', '.join(wanted)}")
    for name in wanted:
        if header.count(name) != 1:
            how = "lacks the column" if name not in header else "repeats the column"
            raise WorkloadError(f"{path}, line 1: the header {how} {name}")
    return [header.index(name) for name in wanted]


def _time(where: str, text: str, before_s: float) -> float:
    value = _number(where, "arrival_s", text)
    if value < 0:
        raise WorkloadError(f"{where}: arrival_s must be zero or above, not {text.strip()}")
    if value > MAX_ARRIVAL_S:
        raise WorkloadError(
            f"{where}: arrival_s must not exceed {MAX_ARRIVAL_S:g} seconds, not {text.strip()}"
        )
    if value < before_s:
        raise WorkloadError(
            f"{where}: arrival_s falls from {before_s:g} to {value:g}; times must never fall"
        )
    return value


def _number(where: str, column: str, text: str) -> float:
    if not text.strip():
        raise WorkloadError(f"{where}: {column} is empty")
    value = finite(text)
    if value is None:
        raise WorkloadError(f"{where}: {column} is not a number: {text.strip()[:40]!r}")
    return value
