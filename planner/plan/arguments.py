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
    count_to,
    number,
    slo,
)
from planner.bench.calibrate import Calibration
from planner.errors import PlannerError
from planner.instance_arguments import (
    add_knowledge,
    add_limits,
    add_links,
    add_overheads,
    costs,
    knowledge,
    settings,
)
from planner.latency.choose import Knowledge, latency_model
from planner.latency.interface import LatencyModel
from planner.latency.published import DEVICE as PUBLISHED_DEVICE
from planner.latency.scaled import ScaledLatency
from planner.parsing import finite
from planner.placement.choices import Affinity, Objective
from planner.placement.options import Options
from planner.plan.options import Asked, Nodes, Output, Replanning
from planner.plan.words import DESCRIPTION, EPILOG

_BOTH = "both"
_MAX_NODES, _MAX_DEVICES = 10_000, 1_024  # of a cluster, of a node
_MAX_PRICE = 1e9
_MAX_JOBS = 256
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
    overheads, calibration = costs(given)
    return Asked(
        known=knowledge(given),
        nodes=_nodes(given),
        load=Load.of(given),
        slo=slo(given),
        settings=settings(given, overheads),
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
    add_knowledge(add)
    add("--allow-roofline", action="store_true",
        help="shapes that tables or coefficients do not know are taken from the device's "
        "roofline; otherwise they are dropped")  # fmt: skip


def _add_cluster(parser: Parser) -> None:
    add = parser.add_argument_group("cluster").add_argument
    add("--nodes", default="1", metavar="N|NAME,NAME,...", help="how many, or which; default: 1")
    add(
        "--devices-per-node",
        type=count_to(_MAX_DEVICES, 0),
        default=8,
        metavar="N",
        help="default: 8",
    )


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
    add(
        "--jobs",
        type=count_to(_MAX_JOBS),
        metavar="N",
        help="processes; default: one for each core",
    )


def _add_limits(parser: Parser) -> None:
    add = parser.add_argument_group("limits and overheads of an instance").add_argument
    add_limits(add, add)
    add_links(add)
    add_overheads(add)


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
    if price is not None and price > _MAX_PRICE:
        raise PlannerError(f"--device-hour-price must be at most {_MAX_PRICE:g}, not {price:g}")
    if given.out is not None and not given.out.parent.is_dir():
        raise PlannerError(f"--out: there is no folder {given.out.parent} to write into")
    if given.out is not None and given.out.is_dir():
        raise PlannerError(f"--out: {given.out} is a folder, not a file to write")
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
    if re.fullmatch(r"-?\d{1,12}", text):
        if int(text) > _MAX_NODES:
            raise PlannerError(f"--nodes must be at most {_MAX_NODES}, not {text}")
        return Nodes(int(text), given.devices_per_node, device)
    names = tuple(name.strip() for name in text.split(","))
    if not all(names) or _is_number(text):
        raise PlannerError(f"--nodes takes a number or names such as alpha,beta, not {text!r}")
    return Nodes(len(names), given.devices_per_node, device, names)


def _is_number(text: str) -> bool:
    """A slip such as 1.5 or nan, which is no name."""
    return text == "nan" or finite(text) is not None


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
