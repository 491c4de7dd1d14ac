"""What the planner's commands have in common on the command line: the load, the targets, units.

The same words mean the same in `distserve bench` and `distserve simulate`, and with the same seed
both see the same requests, so that a measured run and a predicted one can be laid side by side.
"""

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from planner.errors import PlannerError, TargetError, WorkloadError
from planner.parsing import finite
from planner.slo import Slo
from planner.workload.catalogue import ARRIVALS, PARAMETRIC, TABLES, parse_arrivals, parse_workload
from planner.workload.lengths import LengthRules, Overlong
from planner.workload.requests import Requests
from planner.workload.workload import Workload


@dataclass(frozen=True)
class Load:
    """What the user asked to be sent: the workload in words, and what is done to it."""

    workload: str
    arrivals: str | None
    rules: LengthRules
    seed: int

    @classmethod
    def of(cls, given: argparse.Namespace) -> "Load":
        """The options that `add_load` added."""
        rules = LengthRules(given.length_scale, given.max_total_tokens, given.overlong)
        return cls(given.workload, given.arrivals, rules, given.seed)

    def parsed(self) -> Workload:
        """Built or read; WorkloadError says what is wrong with it."""
        arrivals = parse_arrivals(self.arrivals) if self.arrivals else None
        return parse_workload(self.workload, arrivals, self.rules)

    def limited(self, max_total_tokens: int | None) -> "Load":
        """The same under another limit on input + output."""
        return replace(self, rules=replace(self.rules, max_total_tokens=max_total_tokens))


MAX_REQUESTS = 10_000_000
"""Of one run: what memory holds."""
# Beyond these a clock in float64 no longer tells milliseconds apart, or all arrives at once.
MIN_RATE, MAX_RATE = 1e-6, 1e6
MAX_SECONDS = 1e9


class Parser(argparse.ArgumentParser):
    """Wrong usage is bad input like any other: one sentence."""

    def error(self, message: str) -> NoReturn:
        raise PlannerError(f"{message} (see {self.prog} --help)")


def command_parser(prog: str, description: str, epilog: str) -> Parser:
    """A parser whose texts stay as they are written."""
    return Parser(
        prog=prog,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_load(parser: argparse.ArgumentParser, defaults: dict[str, str]) -> None:
    """Workload, arrivals, rates.

    Args:
        defaults: help for what each command does differently, by option without dashes:
            `num-requests`, `max-total-tokens`, `rate` and `rates`.
    """
    load = parser.add_argument_group("load")
    add = load.add_argument
    add("--workload", default="sharegpt", metavar="NAME|FILE.csv",
        help=f"{', '.join([*TABLES, *PARAMETRIC])}, or a trace; default: sharegpt")  # fmt: skip
    add("--arrivals", metavar="KIND",
        help=f"{', '.join(ARRIVALS)}; default: poisson, a trace's own for a file")  # fmt: skip
    add("--num-requests", type=count_to(MAX_REQUESTS), metavar="N", help=defaults["num-requests"])
    add("--max-total-tokens", type=count, metavar="N", help=defaults["max-total-tokens"])
    add("--overlong", type=Overlong, choices=list(Overlong), default=Overlong.DROP,
        help="what happens to longer ones: left out, or prompts cut; default: drop")  # fmt: skip
    add("--length-scale", type=number, default=1.0, metavar="X",
        help="all lengths times this: what if they were longer; default: 1")  # fmt: skip
    add("--seed", type=count_from_zero, default=0, metavar="N",
        help="of all chance: the same seed gives the same requests; default: 0")  # fmt: skip
    rates = load.add_mutually_exclusive_group()
    rates.add_argument("--rate", type=rate, metavar="R", help=defaults["rate"])
    rates.add_argument("--rates", type=rate_list, metavar="R,R,...", help=defaults["rates"])


def add_targets(parser: argparse.ArgumentParser) -> None:
    """The SLO; `slo` reads it."""
    targets = parser.add_argument_group("targets")
    add = targets.add_argument
    add("--ttft", type=seconds, default=0.2, metavar="TIME",
        help="time to first token; default: 200ms")  # fmt: skip
    add("--tpot", type=seconds, default=0.1, metavar="TIME",
        help="time per output token after the first; default: 100ms")  # fmt: skip
    add("--target", type=number, default=0.9, metavar="SHARE",
        help="share of the requests that must meet both; default: 0.9")  # fmt: skip


def slo(given: argparse.Namespace) -> Slo:
    """TargetError where it cannot be."""
    return Slo(given.ttft, given.tpot, given.target)


def requests_at(workload: Workload, num_requests: int, rate: float | None, seed: int) -> Requests:
    """A run of exactly that many at exactly that mean rate: the chance of a short draw moves gaps,
    not the rate. Without a rate, at the trace's own times."""
    drawn = workload.requests(num_requests, rate, seed)
    if rate is None or drawn.rate == float("inf"):
        return drawn
    return drawn.stretched(drawn.rate / rate)


def check_figure(path: Path | None) -> None:
    """Before anything runs for minutes."""
    if path is not None and path.suffix.lower() != ".svg":
        raise PlannerError(f"--plot: figures are written as SVG, so {path} must end with .svg")


def seconds(text: str) -> float:
    """`200ms`, `2s`, `50us`, or a plain number of seconds."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*(us|ms|s|)", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"a time is written as 200ms or 2s, not {text!r}")
    value_s = float(match[1]) * {"us": 1e-6, "ms": 1e-3}.get(match[2], 1.0)
    if value_s > MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"a time must not exceed {MAX_SECONDS:g} s")
    return value_s


def number(text: str) -> float:
    """Any finite number."""
    value = finite(text)
    if value is None:
        raise argparse.ArgumentTypeError(f"{text.strip()!r} is no number")
    return value


def count(text: str) -> int:
    """A whole number from 1 on."""
    return _whole(text, 1)


def count_from_zero(text: str) -> int:
    """A whole number from 0 on."""
    return _whole(text, 0)


def count_to(most: int, least: int = 1) -> Callable[[str], int]:
    """Parses whole numbers within these bounds."""

    def bounded(text: str) -> int:
        if (value := _whole(text, least)) > most:
            raise argparse.ArgumentTypeError(f"must be at most {most}, not {value}")
        return value

    return bounded


def rate(text: str) -> float:
    """Requests per second."""
    value = finite(text)
    if value is None or not value > 0:
        raise WorkloadError(f"a rate must be above zero requests per second, not {text.strip()!r}")
    if not MIN_RATE <= value <= MAX_RATE:
        raise WorkloadError(
            f"a rate must lie between {MIN_RATE:g} and {MAX_RATE:g} requests per second, "
            f"not {text.strip()!r}"
        )
    return value


def rate_list(text: str) -> list[float]:
    """Rising, each once."""
    return _listed(text, rate)


def scale_list(text: str) -> list[float]:
    """SLO scales, rising, each once."""

    def scale(part: str) -> float:
        if not (value := number(part)) > 0:
            raise TargetError(f"an SLO scale must be above zero, not {part.strip()!r}")
        return value

    return _listed(text, scale)


def _listed(text: str, parse: Callable[[str], Any]) -> list[float]:
    return sorted({parse(part) for part in text.split(",")})


def _whole(text: str, least: int) -> int:
    if re.fullmatch(r"\s*-?\d{1,12}\s*", text) is None:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text.strip()!r}")
    if int(text) < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, not {text.strip()}")
    return int(text)
