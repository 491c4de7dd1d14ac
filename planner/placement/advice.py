"""Why to disaggregate, or why not, in sentences with the numbers at hand (paper section 7)."""

from ipc.vocabulary import Role
from planner.intervals import Interval
from planner.latency.interface import Chunk
from planner.placement.choices import Chosen, Objective, Problem
from planner.placement.close_look import Bench
from planner.placement.ranking import is_surely_more

FEW = 4  # devices, up to which a ratio of phases can hardly be met
SLOW_PULL = 0.5  # of the prompt's own prefill


def for_it(
    problem: Problem, disaggregated: Chosen, colocated: Chosen | None, *, was_sought: bool
) -> tuple[str, ...]:
    """The disaggregated placement is recommended."""
    if colocated is None:
        if not was_sought:
            return ("no colocated service was looked at",)
        rate = "" if problem.rate is None else " and carries the rate"
        return (f"no colocated service was found that meets the targets{rate}",)
    told = [_per_device(disaggregated.best.per_device, colocated.best.per_device)]
    if problem.rate is not None and disaggregated.num_devices != colocated.num_devices:
        told.append(
            f"the rate takes {disaggregated.num_devices} devices so, and "
            f"{colocated.num_devices} with the best colocated service"
        )
    return tuple(told)


def against_it(bench: Bench, colocated: Chosen, disaggregated: Chosen | None) -> tuple[str, ...]:
    """A colocated placement is recommended."""
    problem = bench.problem
    told = [_by_how_much(problem, colocated, disaggregated)]
    if problem.objective is Objective.THROUGHPUT:
        told.append(
            "without latency targets nothing is gained by keeping the phases apart, and a "
            "colocated instance is never idle in one phase while the other has work"
        )
    if problem.cluster.num_devices <= FEW:
        told.append(
            f"{problem.cluster.num_devices} devices leave hardly a choice of how many prefill "
            "and how many decode, and every phase needs its own copy of the weights"
        )
    if disaggregated is not None:
        told += _slow_pulls(disaggregated, bench)
    return tuple(told)


def _per_device(ours: Interval, theirs: Interval) -> str:
    verdict = "disaggregation and the best colocated service are within the uncertainty"
    if is_surely_more(ours, theirs):
        verdict = f"disaggregation carries {ours.value / theirs.value:.2f} times as much per device"
    if is_surely_more(theirs, ours):
        verdict = (
            f"the best colocated service carries {theirs.value / ours.value:.2f} times as much "
            "per device"
        )
    return f"{verdict}: {ours.value:.3g} against {theirs.value:.3g} requests/s"


def _by_how_much(problem: Problem, colocated: Chosen, disaggregated: Chosen | None) -> str:
    if disaggregated is None:
        return "no disaggregated placement can be, or carries what is asked: the list says why"
    if (
        problem.objective is Objective.DEVICES
        and colocated.num_devices != disaggregated.num_devices
    ):
        return (
            f"colocated instances carry the rate on {colocated.num_devices} devices, "
            f"a disaggregated placement needs {disaggregated.num_devices}"
        )
    ours, theirs = colocated.best.per_device, disaggregated.best.per_device
    return (
        f"a colocated service carries {ours.value:.3g} requests/s per device, the best "
        f"disaggregated one {theirs.value:.3g}"
    )


def _slow_pulls(disaggregated: Chosen, bench: Bench) -> list[str]:
    setup = bench.hunt.setup(disaggregated.best.candidate)
    service = bench.shapes.service(setup.groups, across_nodes=setup.across_nodes)
    tokens = round(float(bench.sample.input_tokens.mean()))
    decode = next(each for each in service.instances if each.role is Role.DECODE)
    prefill = next(each for each in service.instances if each.role is Role.PREFILL)
    pull_s = decode.latency.transfer(tokens).seconds
    prefill_s = prefill.latency.prefill([Chunk(tokens)]).seconds * prefill.latency.num_stages
    if pull_s < SLOW_PULL * prefill_s:
        return []
    return [
        f"the link is slow for such prompts: a pull of {tokens} tokens takes "
        f"{1000 * pull_s:.3g} ms, their prefill {1000 * prefill_s:.3g} ms"
    ]
