"""The command line of `distserve simulate`: from words to a plan, checked in form."""

import argparse
from dataclasses import replace
from pathlib import Path

from ipc.vocabulary import Parallelism, PrefillPolicy, Role
from planner.arguments import (
    Load,
    Parser,
    add_load,
    add_targets,
    check_figure,
    command_parser,
    count,
    count_to,
    number,
    scale_list,
    slo,
)
from planner.deployment import Group
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
from planner.simulate.options import Bits, Deployment, Drafting, Plan
from planner.simulate.words import DESCRIPTION, EPILOG
from planner.simulator.service import MixedRules

_MAX_INSTANCES = 4_096  # of a role
_MAX_GIB = 1e6  # of a device's KV cache
_LOAD = {
    "num-requests": "simulate exactly so many and count all of them, as bench does; in a search, "
    "of its longest run; default: as many as a verdict takes, or a whole trace",
    "max-total-tokens": "longest input + output; default: the model's positions; never more than "
    "the smallest KV pool",
    "rate": "requests per second: one run, in full",
    "rates": "one line for each",
}


def read_plan(argv: list[str]) -> Plan:
    """The plan that these arguments ask for.

    Raises:
        PlannerError: they do not make one; says which and why.
    """
    given = _parser().parse_args(argv)
    check_figure(given.plot)
    rates = tuple(given.rates or ([given.rate] if given.rate else []))
    _check_together(given, rates)
    return Plan(
        deployment=deployment(given),
        load=Load.of(given),
        slo=slo(given),
        rates=rates,
        num_requests=given.num_requests,
        wants_goodput=given.goodput,
        scales=tuple(given.slo_scales or ()),
        save=given.save,
        plot=given.plot,
        is_json=given.json,
    )


def add_deployment(parser: argparse.ArgumentParser) -> None:
    """What is known, the instances, their limits, and what the service adds; `deployment` reads
    it."""
    add_knowledge(parser.add_argument_group("what is known").add_argument)
    _add_instances(parser)
    _add_limits(parser)
    _add_extras(parser)


def _parser() -> Parser:
    parser = command_parser("distserve simulate", DESCRIPTION, EPILOG)
    add_deployment(parser)
    add_load(parser, _LOAD)
    add = parser.add_argument_group("what to find").add_argument
    add("--goodput", action="store_true",
        help="search it; the rule without a rate, and to be said for a trace")  # fmt: skip
    add("--slo-scales", type=scale_list, metavar="X,X,...",
        help="at one rate, the attainment with both targets times each")  # fmt: skip
    add_targets(parser)
    add = parser.add_argument_group("output").add_argument
    add("--save", type=Path, metavar="FILE.csv", help="every request of the (last) run")
    add("--plot", type=Path, metavar="FILE.svg",
        help="attainment over the rate; of one run, over the SLO scale")  # fmt: skip
    add("--json", action="store_true", help="the report as JSON, nothing else")
    return parser


def _add_instances(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("instances (default: --prefill 1 --decode 1)").add_argument
    for role, text in _ROLES.items():
        add(f"--{role}", type=count_to(_MAX_INSTANCES, 0), metavar="N", help=text)
        add(f"--{role}-tp", type=count, metavar="N", help="of each, tensor parallel; default: 1")
        add(f"--{role}-pp", type=count, metavar="N", help="of each, pipeline stages; default: 1")
    add("--chunk-tokens", type=count, metavar="N",
        help="mixed ones: token budget of a step, prompts in chunks; without it, waiting prompts "
        "run whole and first")  # fmt: skip
    add("--mixed-rules", choices=("ours", "vllm"), default="ours",
        help="mixed ones, with --chunk-tokens: as we or as vLLM's engine admits prompts and "
        "preempts (its max_num_batched_tokens is --chunk-tokens); default: ours")  # fmt: skip


_ROLES = {
    Role.PREFILL: "instances that only prefill",
    Role.DECODE: "instances that only decode",
    Role.MIXED: "instances that do both",
}


def _add_limits(parser: argparse.ArgumentParser) -> None:
    limits = parser.add_argument_group("limits of an instance")
    add = limits.add_argument
    pool = limits.add_mutually_exclusive_group()
    add_limits(add, pool.add_argument)
    pool.add_argument("--kv-cache-gib", type=number, metavar="GIB", help="or GiB of each device")
    add("--weight-bits", type=number, metavar="N", help="quantised weights; default: the model's")
    add("--kv-bits", type=number, metavar="N", help="quantised keys and values; default: 16")
    add("--compute-bits", type=int, choices=(8, 16), help="8: the device's fp8 rate")


def _add_extras(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("links, speculation, overheads").add_argument
    add_links(add)
    add("--across-nodes", action="store_true", help="pulls go over the device sheet's network")
    add("--speculate", type=_drafting, metavar="G:ACCEPTANCE[:MODEL]",
        help="draft G tokens a step, each accepted with that probability, by that draft model "
        "(without one: for nothing)")  # fmt: skip
    add_overheads(add)


def _check_together(given: argparse.Namespace, rates: tuple[float, ...]) -> None:
    """Options that exclude each other."""
    if given.goodput and rates:
        raise PlannerError("--goodput finds its rates itself: leave --rate and --rates out")
    if given.slo_scales and (given.goodput or len(rates) > 1):
        raise PlannerError("--slo-scales looks at one rate: give --rate alone")
    if given.save is not None and len(rates) > 1:
        raise PlannerError("--save holds one run: give --rate, not --rates")


def _check_rules(given: argparse.Namespace) -> None:
    """What only mixed instances have."""
    if given.chunk_tokens is not None and not given.mixed:
        raise PlannerError("--chunk-tokens is for mixed instances, and there are none")
    if MixedRules(given.mixed_rules).are_vllms and given.chunk_tokens is None:
        raise PlannerError(
            "--mixed-rules vllm needs --mixed and --chunk-tokens: vLLM's engine prefills in chunks"
        )
    if given.prefill_policy is not PrefillPolicy.FCFS and given.chunk_tokens and not given.prefill:
        raise PlannerError(
            f"--prefill-policy {given.prefill_policy} is for steps of prompts alone, and with "
            "--chunk-tokens and no prefill instances there are none"
        )


def deployment(given: argparse.Namespace) -> Deployment:
    """What the options that `add_deployment` added ask for.

    Raises:
        PlannerError: two of them do not go together, or one cannot be.
    """
    _check_rules(given)
    if (gib := given.kv_cache_gib) is not None and not 0 < gib <= _MAX_GIB:
        bound = "above zero" if gib <= 0 else f"at most {_MAX_GIB:g}"
        raise PlannerError(f"--kv-cache-gib must be {bound}, not {gib:g}")
    for name in ("weight_bits", "kv_bits"):
        if (bits := getattr(given, name)) is not None and not 1 <= bits <= 64:
            option = name.replace("_", "-")
            raise PlannerError(f"--{option} must lie between 1 and 64, not {bits:g}")
    overheads, calibration = costs(given)
    return Deployment(
        known=knowledge(given),
        groups=_groups(given),
        settings=settings(given, overheads),
        bits=Bits(given.weight_bits, given.kv_bits, given.compute_bits),
        drafting=given.speculate,
        kv_cache_gib=given.kv_cache_gib,
        across_nodes=given.across_nodes,
        calibration=calibration,
    )


def _groups(given: argparse.Namespace) -> tuple[Group, ...]:
    """One for each role that has instances; one prefill and one decode where nothing is said."""
    counts = {role: getattr(given, role) for role in _ROLES}
    if all(number is None for number in counts.values()):
        counts |= {Role.PREFILL: 1, Role.DECODE: 1}
    groups = []
    for role, number_of in counts.items():
        tp, pp = getattr(given, f"{role}_tp"), getattr(given, f"{role}_pp")
        if not number_of and (tp or pp):
            raise PlannerError(f"--{role}-{'tp' if tp else 'pp'} without {role} instances")
        if number_of:
            group = Group(role, number_of, Parallelism(tp or 1, pp or 1))
            groups.append(_mixed(group, given) if role is Role.MIXED else group)
    return tuple(groups)


def _mixed(group: Group, given: argparse.Namespace) -> Group:
    rules = MixedRules(given.mixed_rules)
    return replace(group, chunk_tokens=given.chunk_tokens, rules=rules)


def _drafting(text: str) -> Drafting:
    """`4:0.7` or `4:0.7:opt-1.3b`."""
    num_drafted, _, rest = text.partition(":")
    acceptance, _, model = rest.partition(":")
    try:
        drafting = Drafting(int(num_drafted), float(acceptance), model or None)
    except ValueError:
        raise PlannerError(
            f"--speculate takes G:ACCEPTANCE[:MODEL] such as 4:0.7, not {text!r}"
        ) from None
    if drafting.num_drafted < 1 or not 0 <= drafting.acceptance < 1:
        raise PlannerError(
            "--speculate drafts at least 1 token, and accepts with a probability from 0 to "
            f"below 1, not {text!r}"
        )
    return drafting
