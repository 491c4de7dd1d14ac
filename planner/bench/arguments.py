"""The command line of `distserve bench`: from words to a plan, checked once."""

import argparse
import os
import re
from pathlib import Path

from planner.arguments import (
    add_load,
    add_targets,
    check_figure,
    command_parser,
    count,
    seconds,
    slo,
)
from planner.bench.options import PromptKind, ReplayOptions
from planner.bench.plan import Plan
from planner.bench.side_by_side import Sent, add_side_by_side, check_together, joined
from planner.bench.words import DESCRIPTION, EPILOG
from planner.errors import BenchError
from planner.workload.workload import Workload

_RATE = 1.0
_LOAD = {
    "num-requests": "of each run; default: 200, or a whole trace if it is shorter",
    "max-total-tokens": "longest input + output that the service takes",
    "rate": "requests per second; default: 1, a trace's own for a file",
    "rates": "one run at each",
}


def read_plan(argv: list[str]) -> Plan:
    """The plan that these arguments ask for.

    Raises:
        PlannerError: they do not make one; says which and why.
    """
    given = _parser().parse_args(joined(argv))
    check_together(given)
    sent = Sent(given)
    trace = sent.trace(given.workload, given.num_requests)
    check_figure(given.plot)
    rates = _rates(given, trace.workload)
    validation = sent.validation(rates)
    return Plan(
        url=given.url,
        trace=trace,
        slo=slo(given),
        options=_options(given),
        rates=rates,
        start=_start(given, trace.workload),
        max_runs=given.max_runs,
        save=given.save,
        plot=given.plot,
        is_json=given.json,
        deployed=sent.deployed,
        validation=validation,
    )


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("distserve bench", DESCRIPTION, EPILOG)
    parser.add_argument("url", metavar="URL", help="of the service, with or without /v1")
    add_load(parser, _LOAD)
    _add_sweep(parser)
    add_targets(parser)
    _add_sending(parser)
    add_side_by_side(parser)
    output = parser.add_argument_group("output")
    add = output.add_argument
    add("--save", type=Path, default=Path("distserve-bench"), metavar="DIR",
        help="where each run's trace goes, as CSV; default: distserve-bench")  # fmt: skip
    add("--plot", type=Path, metavar="FILE.svg",
        help="attainment over the rate; of one run, over the SLO scale")  # fmt: skip
    add("--json", action="store_true", help="the report as JSON, nothing else")
    return parser


def _add_sweep(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sweep").add_argument
    add("--sweep", action="store_true", help="find the knee, beginning at --rate")
    add("--max-runs", type=count, default=10, metavar="N", help="of a sweep; default: 10")


def _add_sending(parser: argparse.ArgumentParser) -> None:
    sending = parser.add_argument_group("sending")
    add = sending.add_argument
    add("--model", metavar="ID", help="default: the first that the service lists")
    add("--prompt", type=PromptKind, choices=list(PromptKind), default=PromptKind.TOKENS,
        help="random token ids, or text for services without them; default: tokens")  # fmt: skip
    add("--token-ids", default="1000-30000", metavar="LOW-HIGH",
        help="which ids prompts are made of; default: 1000-30000")  # fmt: skip
    add("--timeout", type=seconds, default=600.0, metavar="TIME",
        help="for one answer; default: 600s")  # fmt: skip
    add("--api-key-env", metavar="NAME",
        help="the environment variable that holds the service's key")  # fmt: skip


def _options(given: argparse.Namespace) -> ReplayOptions:
    match = re.fullmatch(r"(\d{1,9})-(\d{1,9})", given.token_ids)
    if match is None:
        raise BenchError(f"--token-ids must be a range such as 1000-30000, not {given.token_ids}")
    return ReplayOptions(
        model=given.model,
        prompt=given.prompt,
        token_ids=(int(match[1]), int(match[2])),
        seed=given.seed,
        timeout_s=given.timeout,
        headers=_key_header(given.api_key_env),
    )


def _key_header(variable: str | None) -> dict[str, str]:
    if variable is None:
        return {}
    if not os.environ.get(variable):
        raise BenchError(f"--api-key-env: the environment holds no {variable}")
    if not os.environ[variable].isprintable():
        raise BenchError(
            f"--api-key-env: what {variable} holds is no key: it is not one line of text"
        )
    return {"Authorization": f"Bearer {os.environ[variable]}"}


def _rates(given: argparse.Namespace, workload: Workload) -> tuple[float, ...]:
    if given.sweep and given.rates is not None:
        raise BenchError("--sweep finds its rates itself: give --rate to begin with, or none")
    if given.rates is not None:
        return tuple(given.rates)
    if given.sweep or (given.rate is None and workload.own_rate is not None):
        return ()
    return (given.rate or _RATE,)


def _start(given: argparse.Namespace, workload: Workload) -> float | None:
    if not given.sweep:
        return None
    start: float = given.rate or workload.own_rate or _RATE
    return start
