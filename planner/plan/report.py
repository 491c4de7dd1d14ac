"""The answer to `distserve plan`: one search for each affinity, and the placement of the better."""

from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from ipc.placement_file import PlacementFile
from planner.placement.choices import Affinity, Objective
from planner.placement.results import Found

VERSION = 1


@dataclass(frozen=True)
class Planned:
    """What `--json` prints, and the tables show.

    Args:
        searches: by affinity, in the order asked for; `best` is one of them.
        file: the placement of the best one on the cluster's nodes.
        took_s: of everything, reading and placing too.
    """

    best: Found
    searches: tuple[Found, ...]
    file: PlacementFile
    recommendation: str
    notes: tuple[str, ...]
    took_s: float


def better(searches: tuple[Found, ...]) -> Found:
    """By the objective, of equal ones with fewer devices; but what cannot be told from it, on as
    few devices and within nodes, is better still: it can be served."""
    best = min(searches, key=_rank)
    within = (each for each in searches if each.asked.affinity is Affinity.LOW)
    return next((each for each in within if _is_as_good(each, best)), best)


def _rank(found: Found) -> tuple[float, float]:
    chosen = found.recommended
    if found.asked.objective is Objective.DEVICES:
        return chosen.num_devices, -chosen.rate.value
    return -chosen.best.per_device.value, chosen.num_devices


def _is_as_good(found: Found, best: Found) -> bool:
    ours, theirs = found.recommended, best.recommended
    is_tie = ours.best.per_device.value >= theirs.best.per_device.low
    return is_tie and ours.num_devices <= theirs.num_devices


def to_json(planned: Planned) -> str:
    """All of it; an end of an interval that was not found is null."""
    return as_text(
        {
            "version": VERSION,
            "recommendation": planned.recommendation,
            "placement": planned.file,
            "searches": planned.searches,
            "notes": planned.notes,
            "took_s": planned.took_s,
        }
    )


def as_text(answer: Any) -> str:
    """Indented JSON."""
    body = msgspec.to_builtins(answer, str_keys=True)
    return orjson.dumps(body, option=orjson.OPT_INDENT_2).decode()
