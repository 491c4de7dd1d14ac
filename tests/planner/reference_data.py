"""Where tests find the raw measurements, which the repository does not hold."""

import csv
from pathlib import Path

import pytest

DATA = Path(__file__).parents[3] / "shared" / "data"


def reference_file(name: str) -> Path:
    """A raw file of measurements; the test is skipped where it is not there."""
    path = DATA / "reference" / name
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    return path


def reference_rows(name: str) -> list[dict[str, str]]:
    with reference_file(name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
