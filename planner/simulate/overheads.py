"""What the service itself adds to step times: single figures, or a file of them.

A file may also hold what a calibration against a live run found: factors of the steps.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

import orjson

from planner.arguments import MAX_SECONDS, seconds
from planner.bench.calibrate import Calibration
from planner.errors import PlannerError
from planner.json_files import read_json
from planner.latency.scaled import SCALES
from planner.simulator.service import Overheads

NAMES = tuple(field.name.removesuffix("_s") for field in fields(Overheads))


def read_overheads(path: Path) -> tuple[Overheads, Calibration]:
    """Seconds and factors; PlannerError names the file and the field."""
    try:
        body = read_json(path, dict[str, float])
    except PlannerError as error:
        raise PlannerError(f"--overheads: {error}") from error
    costs = {f"{name}_s" for name in NAMES}
    factors = {"prefill_scale", "decode_scale"}
    for name, value in body.items():
        if name not in costs | factors | {"num_requests"}:
            known = ", ".join([*sorted(costs), *sorted(factors)])
            raise PlannerError(f"--overheads: {path}: no overhead {name!r}: there are {known}")
        least, most = SCALES if name in factors else (0.0, MAX_SECONDS)
        if not least <= value <= most:
            raise PlannerError(
                f"--overheads: {path}: {name} must lie between {least:g} and {most:g}, "
                f"not {value:g}"
            )
    given = Overheads(**{name: value for name, value in body.items() if name in costs})
    return given, Calibration(body.get("prefill_scale", 1.0), body.get("decode_scale", 1.0))


def write_overheads(path: Path, costs: Overheads, found: Sequence[Calibration]) -> None:
    """A file that `read_overheads` reads: all seconds, and the product of the factors.

    Raises:
        PlannerError: it cannot be written.
    """
    body = {
        **asdict(costs),
        "prefill_scale": math.prod(each.prefill_scale for each in found),
        "decode_scale": math.prod(each.decode_scale for each in found),
        "num_requests": sum(each.num_requests for each in found),
    }
    try:
        path.write_bytes(orjson.dumps(body, option=orjson.OPT_INDENT_2) + b"\n")
    except OSError as error:
        raise PlannerError(f"{path} cannot be written: {error.strerror}") from error


def overhead(text: str) -> tuple[str, float]:
    """`NAME=TIME`, such as decode_step=1.5ms."""
    name, _, value = text.partition("=")
    if name.strip() not in NAMES:
        raise PlannerError(f"--overhead {text!r}: give NAME=TIME, NAME one of {', '.join(NAMES)}")
    return f"{name.strip()}_s", seconds(value)


def with_overheads(costs: Overheads, given: list[tuple[str, float]]) -> Overheads:
    """Single figures win over those of a file."""
    return replace(costs, **dict(given))
