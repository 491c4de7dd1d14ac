"""The options of `distserve bench` that bring in the simulator: --simulate and --validate."""

import argparse
import shlex
from collections.abc import Sequence

from planner.arguments import Load, command_parser, count, rate
from planner.bench.calibrate import MIN_REQUESTS
from planner.bench.plan import Deployed, Trace, Validation
from planner.errors import BenchError, PlannerError
from planner.simulate.arguments import add_deployment, deployment
from planner.simulate.build import build
from planner.simulate.fitting_load import fitting_load
from planner.workload.workload import Workload

NUM_REQUESTS = 200
_DESCRIPTION = "What is deployed, as `distserve bench --simulate` takes it in one string.\n"
_EPILOG = """\
example:
  distserve bench http://127.0.0.1:8000 --rate 1 \\
    --simulate "--model models/smollm2 --profile profile.json --kv-cache-gib 1"
"""
_ONLY_VALIDATE = ("calibrate_rate", "calibrate_requests", "test_workload", "repeat", "knee")


def add_side_by_side(parser: argparse.ArgumentParser) -> None:
    """What is deployed, and how the simulator is put to the test."""
    add = parser.add_argument_group("beside the simulator").add_argument
    add("--simulate", metavar='"OPTIONS"',
        help="what is deployed, as options of `distserve simulate` in one string: the same "
        'requests are simulated too; --simulate "--help" lists them')  # fmt: skip
    add("--validate", action="store_true",
        help="calibrate the simulator on one live run, test it on others: each of --rates live "
        "and simulated, other seeds; writes calibration.json to --save")  # fmt: skip
    add("--calibrate-rate", type=rate, metavar="R",
        help="requests per second of the calibration, on --workload; default: the lowest of "
        "--rates")  # fmt: skip
    add("--calibrate-requests", type=count, metavar="N",
        help=f"of the calibration, at least {MIN_REQUESTS}; default: {NUM_REQUESTS}")  # fmt: skip
    add("--test-workload", action="append", metavar="NAME|FILE.csv",
        help="test on this one; may be given several times; default: --workload")  # fmt: skip
    add("--repeat", type=count, metavar="N",
        help="replay each test trace so many times: how far two live runs differ; "
        "default: 1")  # fmt: skip
    add("--knee", action="store_true", default=None,
        help="also search each test workload's goodput, live and simulated, beyond --rates "
        "(up to --max-runs more runs)")  # fmt: skip


def joined(argv: Sequence[str]) -> list[str]:
    """With the options of --simulate in the same word: by itself, a word that begins with dashes
    might be taken for an option of bench."""
    words = list(argv)
    if "--simulate" in words[:-1]:
        at = words.index("--simulate")
        words[at : at + 2] = [f"--simulate={words[at + 1]}"]
    return words


def check_together(given: argparse.Namespace) -> None:
    """What one of these options needs or excludes."""
    for name in _ONLY_VALIDATE:
        if not given.validate and getattr(given, name) is not None:
            raise BenchError(f"--{name.replace('_', '-')} is for --validate")
    if not given.validate:
        return
    if given.simulate is None:
        raise BenchError("--validate needs --simulate: what is deployed there?")
    if given.sweep:
        raise BenchError("--validate tests at --rates; with --knee it also searches the goodput")
    if given.rate is None and given.rates is None:
        raise BenchError("--validate needs --rates: those at which to test")


class Sent:
    """The load of a command: what fits the deployment, where one is given."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._deployed = None if given.simulate is None else _deployed(given.simulate)
        self._notes: list[str] = []

    @property
    def deployed(self) -> Deployed | None:
        """With notes on all that was read so far."""
        if self._deployed is None:
            return None
        found = self._deployed
        return Deployed(found.words, found.built, (*found.notes, *self._notes))

    def trace(self, name: str, num_requests: int | None) -> Trace:
        """Of the workload of that name; by default some, or a whole trace if it is shorter."""
        workload = self._workload(name)
        if num_requests is None:
            num_requests = min(NUM_REQUESTS, workload.num_rows or NUM_REQUESTS)
        return Trace(workload, num_requests)

    def validation(self, rates: Sequence[float]) -> Validation | None:
        """None without --validate."""
        given = self._given
        if not given.validate:
            return None
        calibration = self.trace(given.workload, given.calibrate_requests)
        if calibration.num_requests < MIN_REQUESTS:
            raise BenchError(
                f"calibration needs {MIN_REQUESTS} requests at least, not "
                f"{calibration.num_requests} (--calibrate-requests)"
            )
        names = dict.fromkeys(given.test_workload or [given.workload])
        return Validation(
            calibration=calibration,
            rate=given.calibrate_rate or min(rates),
            tests=tuple(self.trace(name, given.num_requests) for name in names),
            num_replays=given.repeat or 1,
            wants_knee=bool(given.knee),
        )

    def _workload(self, name: str) -> Workload:
        load = Load.of(argparse.Namespace(**(vars(self._given) | {"workload": name})))
        if self._deployed is None:
            return load.parsed()
        fitting = fitting_load(load, self._deployed.built)
        if fitting.note is not None and fitting.note not in self._notes:
            self._notes.append(fitting.note)
        return fitting.workload


def _deployed(words: str) -> Deployed:
    parser = command_parser("--simulate", _DESCRIPTION, _EPILOG)
    add_deployment(parser)
    try:
        built = build(deployment(parser.parse_args(shlex.split(words))))
    except PlannerError as error:
        raise BenchError(f"--simulate: {error}") from error
    except ValueError as error:
        raise BenchError(f"--simulate: {words!r} cannot be split into words: {error}") from error
    return Deployed(words, built, built.notes)
