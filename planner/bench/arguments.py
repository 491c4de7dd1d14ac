"""The command line of `distserve bench`: from words to a plan, checked once."""

import argparse
import os
import re
from dataclasses import dataclass
from pathlib import Path

from planner.arguments import (
    Load,
    add_load,
    add_targets,
    check_figure,
    command_parser,
    count,
    requests_at,
    seconds,
    slo,
)
from planner.bench.options import PromptKind, ReplayOptions
from planner.errors import BenchError
from planner.slo import Slo
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
_LOAD = {
    "num-requests": "of each run; default: 200, or a whole trace if it is shorter",
    "max-total-tokens": "longest input + output that the service takes",
    "rate": "requests per second; default: 1, a trace's own for a file",
    "rates": "one run at each",
}


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
        """One run's; without a rate, at the trace's own times."""
        return requests_at(self.workload, self.num_requests, rate, self.options.seed)


def read_plan(argv: list[str]) -> Plan:
    """The plan that these arguments ask for.

    Raises:
        PlannerError: they do not make one; says which and why.
    """
    given = _parser().parse_args(argv)
    workload = Load.of(given).parsed()
    check_figure(given.plot)
    return Plan(
        url=given.url,
        workload=workload,
        num_requests=_num_requests(given, workload),
        slo=slo(given),
        options=_options(given),
        rates=_rates(given, workload),
        start=_start(given, workload),
        max_runs=given.max_runs,
        save=given.save,
        plot=given.plot,
        is_json=given.json,
    )


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("distserve bench", DESCRIPTION, EPILOG)
    parser.add_argument("url", metavar="URL", help="of the service, with or without /v1")
    add_load(parser, _LOAD)
    _add_sweep(parser)
    add_targets(parser)
    _add_sending(parser)
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
    return {"Authorization": f"Bearer {os.environ[variable]}"}


def _num_requests(given: argparse.Namespace, workload: Workload) -> int:
    if given.num_requests is None:
        return min(_NUM_REQUESTS, workload.num_rows or _NUM_REQUESTS)
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
    start: float = given.rate or workload.own_rate or _RATE
    return start
