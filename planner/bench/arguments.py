"""The command line of `distserve bench`: from words to a plan, checked once."""

import argparse
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from planner.bench.options import PromptKind, ReplayOptions
from planner.errors import BenchError
from planner.slo import Slo
from planner.workload.catalogue import ARRIVALS, PARAMETRIC, TABLES, parse_arrivals, parse_workload
from planner.workload.lengths import LengthRules, Overlong
from planner.workload.requests import Requests
from planner.workload.workload import Workload

DESCRIPTION = """\
Replay a workload against any OpenAI-compatible service (this one, vLLM, SGLang, ...) and tell
how it did: TTFT, TPOT and inter-token latency, the five stages where the service tells them, and
which share of the requests met both targets, with 95 % intervals. With several rates, or a sweep,
also the goodput: the highest rate at which that share stays at the target.

Requests are sent at their times however late the answers to others are, and TTFT counts from the
scheduled time. A request that fails counts as one that missed both targets.
"""

EPILOG = """\
examples:
  one run: 200 chat-like requests, two each second, at most 2 s to the first token and then
  100 ms for each:
    distserve bench http://127.0.0.1:8000 --workload sharegpt --rate 2 --ttft 2s --tpot 100ms

  the curve of attainment over the rate, and the goodput:
    distserve bench http://127.0.0.1:8000 --rates 1,2,3,4 --ttft 2s --tpot 100ms --plot curve.svg

  let it find the knee by itself, beginning at 1 request per second:
    distserve bench http://127.0.0.1:8000 --sweep --rate 1 --ttft 2s --tpot 100ms

  a trace of your own (a CSV with arrival_s,input_tokens,output_tokens) at its own times:
    distserve bench http://127.0.0.1:8000 --workload my.csv --num-requests 500

  a service that takes no token ids, and wants a key:
    distserve bench https://api.example.com --prompt text --api-key-env MY_KEY --model some-model

exit codes: 0 measured, 1 the service failed, 2 wrong input
"""

_NUM_REQUESTS = 200
_RATE = 1.0


@dataclass(frozen=True)
class Plan:
    """What to run. `rates` is empty where the workload's own times are replayed, or a sweep has
    to find its rates; a sweep begins at `start`."""

    url: str
    workload: Workload
    num_requests: int
    slo: Slo
    options: ReplayOptions
    rates: tuple[float, ...]
    start: float | None
    max_runs: int
    save: Path
    plot: Path | None
    is_json: bool

    @property
    def is_sweep(self) -> bool:
        return self.start is not None

    def requests(self, rate: float | None) -> Requests:
        """At exactly that mean rate: the chance of a short draw moves gaps, not the rate."""
        drawn = self.workload.requests(self.num_requests, rate, self.options.seed)
        if rate is None or drawn.rate == float("inf"):
            return drawn
        return drawn.stretched(drawn.rate / rate)


def read_plan(argv: list[str]) -> Plan:
    """The plan that these arguments ask for.

    Raises:
        PlannerError: they do not make one; says which and why.
    """
    given = _parser().parse_args(argv)
    arrivals = parse_arrivals(given.arrivals) if given.arrivals else None
    rules = LengthRules(max_total_tokens=given.max_total_tokens, overlong=given.overlong)
    workload = parse_workload(given.workload, arrivals, rules)
    if given.plot is not None and given.plot.suffix.lower() != ".svg":
        raise BenchError(f"--plot: figures are written as SVG, so {given.plot} must end with .svg")
    return Plan(
        url=given.url,
        workload=workload,
        num_requests=_num_requests(given, workload),
        slo=Slo(given.ttft, given.tpot, given.target),
        options=_options(given),
        rates=_rates(given, workload),
        start=_start(given, workload),
        max_runs=given.max_runs,
        save=given.save,
        plot=given.plot,
        is_json=given.json,
    )


def seconds(text: str) -> float:
    """`200ms`, `2s`, or a plain number of seconds."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*(ms|s|)", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"a time is written as 200ms or 2s, not {text!r}")
    return float(match[1]) / (1000 if match[2] == "ms" else 1)


class _Parser(argparse.ArgumentParser):
    """Wrong usage is bad input like any other: one sentence."""

    def error(self, message: str) -> NoReturn:
        raise BenchError(f"{message} (see distserve bench --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="distserve bench",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", metavar="URL", help="of the service, with or without /v1")
    _add_load(parser)
    _add_targets(parser)
    _add_sending(parser)
    output = parser.add_argument_group("output")
    add = output.add_argument
    add("--save", type=Path, default=Path("distserve-bench"), metavar="DIR",
        help="where each run's trace goes, as CSV; default: distserve-bench")  # fmt: skip
    add("--plot", type=Path, metavar="FILE.svg",
        help="attainment over the rate; of one run, over the SLO scale")  # fmt: skip
    add("--json", action="store_true", help="the report as JSON, nothing else")
    return parser


def _add_load(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    add = load.add_argument
    add("--workload", default="sharegpt", metavar="NAME|FILE.csv",
        help=f"{', '.join([*TABLES, *PARAMETRIC])}, or a trace; default: sharegpt")  # fmt: skip
    add("--arrivals", metavar="KIND",
        help=f"{', '.join(ARRIVALS)}; default: poisson, a trace's own for a file")  # fmt: skip
    add("--num-requests", type=int, metavar="N",
        help="of each run; default: 200, or a whole trace if it is shorter")  # fmt: skip
    add("--max-total-tokens", type=int, metavar="N",
        help="longest input + output that the service takes")  # fmt: skip
    add("--overlong", type=Overlong, choices=list(Overlong), default=Overlong.DROP,
        help="what happens to longer ones: left out, or prompts cut; default: drop")  # fmt: skip
    rate = load.add_mutually_exclusive_group()
    rate.add_argument("--rate", type=_rate, metavar="R",
                      help="requests per second; default: 1, a trace's own for a file")  # fmt: skip
    rate.add_argument("--rates", type=_rate_list, metavar="R,R,...", help="one run at each")
    add("--sweep", action="store_true", help="find the knee, beginning at --rate")
    add("--max-runs", type=int, default=10, metavar="N", help="of a sweep; default: 10")


def _add_targets(parser: argparse.ArgumentParser) -> None:
    targets = parser.add_argument_group("targets")
    add = targets.add_argument
    add("--ttft", type=seconds, default=0.2, metavar="TIME",
        help="time to first token; default: 200ms")  # fmt: skip
    add("--tpot", type=seconds, default=0.1, metavar="TIME",
        help="time per output token after the first; default: 100ms")  # fmt: skip
    add("--target", type=float, default=0.9, metavar="SHARE",
        help="share of the requests that must meet both; default: 0.9")  # fmt: skip


def _add_sending(parser: argparse.ArgumentParser) -> None:
    sending = parser.add_argument_group("sending")
    add = sending.add_argument
    add("--model", metavar="ID", help="default: the first that the service lists")
    add("--prompt", type=PromptKind, choices=list(PromptKind), default=PromptKind.TOKENS,
        help="random token ids, or text for services without them; default: tokens")  # fmt: skip
    add("--token-ids", default="1000-30000", metavar="LOW-HIGH",
        help="which ids prompts are made of; default: 1000-30000")  # fmt: skip
    add("--seed", type=int, default=0, help="of arrivals, lengths and prompts; default: 0")
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
    return {"Authorization": f"Bearer {os.environ[variable]}"}


def _num_requests(given: argparse.Namespace, workload: Workload) -> int:
    if given.num_requests is None:
        return min(_NUM_REQUESTS, workload.num_rows or _NUM_REQUESTS)
    if given.num_requests < 1:
        raise BenchError(f"--num-requests must be at least 1, not {given.num_requests}")
    return int(given.num_requests)


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
    if given.max_runs < 1:
        raise BenchError(f"--max-runs must be at least 1, not {given.max_runs}")
    start: float = given.rate or workload.own_rate or _RATE
    return start


def _rate_list(text: str) -> list[float]:
    return sorted({_rate(part) for part in text.split(",")})


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = float("nan")
    if not 0 < rate < float("inf"):
        raise BenchError(f"a rate must be above zero requests per second, not {text.strip()!r}")
    return rate
