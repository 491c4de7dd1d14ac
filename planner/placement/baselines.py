"""Colocated services, searched the same way: what disaggregation must beat.

vLLM as the paper had it runs whole prompts first, with tensor parallelism alone; vLLM++ takes any
parallelism (paper section 6.4); the chunked one fills a token budget with decodes and parts of
prompts, as DeepSpeed-MII and Sarathi do, over the budgets asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from planner.placement import field as candidates
from planner.placement.candidates import max_copies
from planner.placement.choices import Candidate, Dropped, Evaluated, Problem
from planner.placement.hunt import NOTHING, Hunt, Item
from planner.placement.limits import Limits
from planner.placement.options import Options
from planner.placement.ranking import Worth, by_goodput

PREFILL_FIRST = "prefill first, tensor parallel (vLLM)"
ANY_PARALLELISM = "prefill first, any parallelism (vLLM++)"
CHUNKED = "chunked prefill (MII, Sarathi)"
MOST_SCALED = 4  # instances; what they gain by sharing a queue hardly grows beyond
NUM_SHAPES = 1  # of the chunked baseline, that are simulated with every budget
MOST_SIMULATED = 4  # shapes of each kind: their goodputs differ by little, and cost much to find


@dataclass
class Field:
    """What was simulated of each baseline, and what was not."""

    found: dict[str, list[Evaluated]] = field(default_factory=dict)
    dropped: list[Dropped] = field(default_factory=list)

    @property
    def evaluated(self) -> list[Evaluated]:
        return list(dict.fromkeys(each for found in self.found.values() for each in found))


def explore(problem: Problem, options: Options, hunt: Hunt, limits: Limits) -> Field:
    """First looks at all three."""
    all_of = Field()
    items, refused = candidates.mixed(problem, limits, None)
    all_of.dropped += refused
    plain = [item for item in items if _is_plain(item)]
    piped = [item for item in items if not _is_plain(item)]
    ours = all_of.found[PREFILL_FIRST] = _explore(hunt, all_of, plain, PREFILL_FIRST)
    best = hunt.highest(ours)
    all_of.found[ANY_PARALLELISM] = ours + _explore(hunt, all_of, piped, ANY_PARALLELISM, best)
    all_of.found[CHUNKED] = _chunked(problem, options, hunt, limits, all_of)
    return all_of


def _chunked(
    problem: Problem, options: Options, hunt: Hunt, limits: Limits, all_of: Field
) -> list[Evaluated]:
    """One budget for all shapes, then every budget for the best of them."""
    budgets = options.chunk_tokens
    if not budgets:
        return []
    middle = budgets[len(budgets) // 2]
    items, refused = candidates.mixed(problem, limits, middle)
    all_of.dropped += refused
    found = _explore(hunt, all_of, items, CHUNKED)
    best = by_goodput(found)[: NUM_SHAPES if options.prunes else len(found)]
    others = [
        Item(_with_budget(each.candidate, budget))
        for budget in budgets
        if budget != middle
        for each in best
    ]
    return found + _explore(hunt, all_of, others, CHUNKED, hunt.highest(found))


def scaled(unit: Evaluated, num_devices: int, problem: Problem) -> Candidate:
    """As many instances of the unit behind one dispatcher as those devices hold, up to a few."""
    candidate = unit.candidate
    wanted = min(round(num_devices / candidate.num_devices), MOST_SCALED)
    count = min(max(wanted, 1), max_copies(candidate, problem.cluster))
    return replace(candidate, groups=(replace(candidate.groups[0], count=count),))


def _explore(
    hunt: Hunt, all_of: Field, items: Sequence[Item], what: str, best: Worth = NOTHING
) -> list[Evaluated]:
    found, dropped = hunt.explore(items, what, best, MOST_SIMULATED)
    all_of.dropped += dropped
    return found


def _is_plain(item: Item) -> bool:
    return item.candidate.groups[0].parallelism.pp == 1


def _with_budget(candidate: Candidate, budget: int) -> Candidate:
    return replace(candidate, groups=(replace(candidate.groups[0], chunk_tokens=budget),))
