"""The command line of `distserve plan`: from words to what is asked, checked in form."""

import argparse
import re
from functools import partial
from pathlib import Path

from ipc.vocabulary import Parallelism
from planner.arguments import (
    Load,
    Parser,
    add_load,
    add_targets,
    command_parser,
    count,
    count_from_zero,
    number,
    slo,
)
from planner.bench.calibrate import Calibration
from planner.deployment import Settings
from planner.devices import device_sheets
from planner.errors import PlannerError
from planner.latency.choose import Knowledge, latency_model, profile_names
from planner.latency.interface import LatencyModel
from planner.latency.profile_file import read_profile
from planner.latency.published import DEVICE as PUBLISHED_DEVICE
from planner.latency.scaled import ScaledLatency
from planner.memory import MemoryRules
from planner.placement.choices import Affinity, Objective
from planner.placement.options import Options
from planner.plan.options import Asked, Nodes, Output, Replanning
from planner.plan.words import DESCRIPTION, EPILOG
from planner.simulate.overheads import NAMES, overhead, read_overheads, with_overheads
from planner.simulator.service import Overheads

_BLOCK_SIZE = 16
_BOTH = "both"
_LOAD = {
    "num-requests": argparse.SUPPRESS,
    "max-total-tokens": "longest input + output; default: the model's positions",
    "rate": "requests per second that the placement must carry; default: one unit, the best",
    "rates": argparse.SUPPRESS,
}
_SHAPE = ("prefill_tp", "prefill_pp", "decode_tp", "decode_pp")


def read_asked(argv: list[str]) -> Asked:
    """What these arguments ask for.

    Raises:
        PlannerError: they make no sense; says which and why.
    """
    given = _parser().parse_args(argv)
    _check_together(given)
    costs, calibration = Overheads(), Calibration()
    if given.overheads is not None:
        costs, calibration = read_overheads(given.overheads)
    return Asked(
        known=Knowledge(given.model, given.device, tuple(given.profile), given.coefficients),
        nodes=_nodes(given),
        load=Load.of(given),
        slo=slo(given),
        settings=_settings(given, with_overheads(costs, given.overhead)),
        affinities=tuple(Affinity) if given.affinity == _BOTH else (Affinity(given.affinity),),
        objective=given.objective,
        search=_search(given, calibration),
        output=Output(given.out, given.plot, given.json, given.all),
        rate=given.rate,
        device_hour_price=given.device_hour_price,
        max_degree=given.max_degree,
        replanning=Replanning(given.replan, given.current) if given.replan else None,
    )


def _parser() -> Parser:
    parser = command_parser("distserve plan", DESCRIPTION, EPILOG)
    _add_knowledge(parser)
    _add_cluster(parser)
    _add_search(parser)
    add_load(parser, _LOAD)
    add_targets(parser)
    _add_limits(parser)
    add = parser.add_argument_group("replanning").add_argument
    add("--replan", type=Path, metavar="LOG.csv", help="has the load shifted, does a switch pay?")
    add("--current", type=Path, metavar="placement.json", help="the placement in use")
    add = parser.add_argument_group("output").add_argument
    add("--out", type=Path, metavar="placement.json", help="the placement, for `distserve serve`")
    add("--plot", type=Path, metavar="DIR|FILE.svg",
        help="all figures into a folder, or the attainment over the rate alone")  # fmt: skip
    add("--json", action="store_true", help="the report as JSON, nothing else")
    add("--all", action="store_true", help="every candidate that was dropped, with its reason")
    return parser


def _add_knowledge(parser: Parser) -> None:
    add = parser.add_argument_group("what is known").add_argument
    add("--model", required=True, metavar="NAME|DIR",
        help="such as opt-13b or llama-3.1-8b, or a directory with a config.json")  # fmt: skip
    add("--device", metavar="SHEET",
        help=f"for rooflines, memory and links: {', '.join(device_sheets())}; default: the "
        "coefficients' own")  # fmt: skip
    add("--profile", type=Path, action="append", default=[], metavar="FILE",
        help="a table by `distserve profile`; may be given several times")  # fmt: skip
    add("--coefficients", choices=profile_names(), metavar="NAME",
        help=f"published for OPT on A100s: {', '.join(profile_names())}")  # fmt: skip
    add("--allow-roofline", action="store_true",
        help="shapes that tables or coefficients do not know are taken from the device's "
        "roofline; otherwise they are dropped")  # fmt: skip


def _add_cluster(parser: Parser) -> None:
    add = parser.add_argument_group("cluster").add_argument
    add("--nodes", default="1", metavar="N|NAME,NAME,...", help="how many, or which; default: 1")
    add("--devices-per-node", type=count_from_zero, default=8, metavar="N", help="default: 8")


def _add_search(parser: Parser) -> None:
    add = parser.add_argument_group("search").add_argument
    add("--affinity", choices=[*Affinity, _BOTH], default=Affinity.LOW,
        help="where keys and values may travel; default: low, within a node")  # fmt: skip
    add("--objective", type=Objective, choices=list(Objective), default=Objective.GOODPUT,
        help="what is best; default: goodput")  # fmt: skip
    add("--device-hour-price", "--gpu-hour-price", type=number, metavar="PRICE",
        help="of one device: the report says what requests and tokens cost")  # fmt: skip
    for name in _SHAPE:
        role, degree = name.split("_")
        add(f"--{role}-{degree}", type=count, metavar="N",
            help=f"settle the shapes and search counts alone: {degree} of {role}")  # fmt: skip
    add("--max-degree", type=count, metavar="N", help="largest tp and pp that are looked at")
    add("--quick", action="store_true", help="no baselines and no sensitivity")
    add("--jobs", type=count, metavar="N", help="processes; default: one for each core")


def _add_limits(parser: Parser) -> None:
    add = parser.add_argument_group("limits and overheads of an instance").add_argument
    add("--prefill-tokens", type=count, metavar="N",
        help="L_m: prompts are packed up to so many tokens; default: what saturates each shape, "
        "by the latency model")  # fmt: skip
    add("--max-batch", type=count, default=256, metavar="N",
        help="sequences that decode together at most; default: 256")  # fmt: skip
    add("--kv-tokens", type=count, metavar="N",
        help="tokens that each KV pool holds; default: what weights leave of memory")  # fmt: skip
    add("--block-size", type=count, metavar="N",
        help=f"tokens in a KV block; default: {_BLOCK_SIZE}, or a profile's")  # fmt: skip
    add("--shared-link", action="store_true", help="all pulls share one link")
    add("--pull-stalls-decode", action="store_true",
        help="pulls take the place of decode steps, as on CPU workers")  # fmt: skip
    add("--overhead", type=overhead, action="append", default=[], metavar="NAME=TIME",
        help=f"the service's own time, such as decode_step=1ms: {', '.join(NAMES)}")  # fmt: skip
    add("--overheads", type=Path, metavar="FILE.json", help="the same and more from a file")


def _check_together(given: argparse.Namespace) -> None:
    """Options that need or exclude each other."""
    if given.rates is not None or given.num_requests is not None:
        option = "--rates" if given.rates is not None else "--num-requests"
        raise PlannerError(f"{option} is for `distserve simulate`: a search chooses its own")
    if given.objective is Objective.DEVICES and given.rate is None:
        raise PlannerError("--objective devices needs the --rate that they must carry")
    if (given.replan is None) != (given.current is None):
        raise PlannerError("--replan LOG.csv and --current placement.json go together")
    price = given.device_hour_price
    if price is not None and not price > 0:
        raise PlannerError(f"--device-hour-price must be above zero, not {price:g}")
    if given.out is not None and not given.out.parent.is_dir():
        raise PlannerError(f"--out: there is no folder {given.out.parent} to write into")
    if given.plot is not None and given.plot.suffix and given.plot.suffix.lower() != ".svg":
        raise PlannerError(
            f"--plot: figures are written as SVG, so {given.plot} must be a folder or end with .svg"
        )


def _nodes(given: argparse.Namespace) -> Nodes:
    device = given.device or (PUBLISHED_DEVICE if given.coefficients else None)
    if device is None:
        raise PlannerError(
            "which devices the nodes have is not known: give --device (memory and links are its "
            "sheet's, also where step times come from a profile)"
        )
    text = given.nodes.strip()
    if re.fullmatch(r"-?\d{1,6}", text):
        return Nodes(int(text), given.devices_per_node, device)
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise PlannerError(f"--nodes takes a number or names such as alpha,beta, not {text!r}")
    return Nodes(len(names), given.devices_per_node, device, names)


def _settings(given: argparse.Namespace, costs: Overheads) -> Settings:
    block_size = given.block_size
    if block_size is None:
        block_size = read_profile(given.profile[0]).block_size if given.profile else _BLOCK_SIZE
    return Settings(
        prefill_tokens=given.prefill_tokens,
        max_batch=given.max_batch,
        kv_tokens=given.kv_tokens,
        memory=MemoryRules(block_size=block_size),
        overheads=costs,
        shares_link=given.shared_link,
        pull_stalls_decode=given.pull_stalls_decode,
    )


def _search(given: argparse.Namespace, calibration: Calibration) -> Options:
    is_scaled = calibration != Calibration()
    return Options(
        num_processes=given.jobs,
        allows_roofline=given.allow_roofline,
        with_baselines=not given.quick,
        with_sensitivity=not given.quick,
        fixed=_fixed(given),
        choose=partial(_scaled_latency, calibration) if is_scaled else latency_model,
    )


def _fixed(given: argparse.Namespace) -> tuple[Parallelism, Parallelism] | None:
    """Degrees that are not given are 1, if any is."""
    degrees = [getattr(given, name) for name in _SHAPE]
    if not any(degrees):
        return None
    prefill_tp, prefill_pp, decode_tp, decode_pp = (degree or 1 for degree in degrees)
    return Parallelism(prefill_tp, prefill_pp), Parallelism(decode_tp, decode_pp)


def _scaled_latency(
    calibration: Calibration, known: Knowledge, parallelism: Parallelism
) -> LatencyModel:
    """With the factors that a live run showed (`distserve bench --validate`)."""
    model = latency_model(known, parallelism)
    return ScaledLatency(model, calibration.prefill_scale, calibration.decode_scale)
