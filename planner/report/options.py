"""What `distserve report paper` was asked for."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Plan:
    """Args:
    only: names of pages, in the order of the report.
    out: where drawings and the JSON of each page go; None draws nothing.
    """

    only: tuple[str, ...]
    percent: int
    num_seeds: int
    out: Path | None
    is_json: bool
