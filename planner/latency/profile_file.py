"""Reading the table that `distserve profile` wrote, with clear words where it cannot be used."""

from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import orjson

from ipc.profile_table import TABLE_VERSION, ProfileTable
from planner.errors import ProfileError

MIN_POINTS = 3  # of prefill and of decode: as many as a fit has coefficients
LEAST_MS, MOST_MS = 1e-6, 1e9  # other times are slips, and squares of them no numbers any more
MOST = {"saturation_tokens": 1_000_000, "block_size": 65_536}  # tokens, as on the command line


def read_profile(path: Path) -> ProfileTable:
    """The table, checked: its version, its fields, and that it holds enough to go by."""
    try:
        body = orjson.loads(path.read_bytes())
    except OSError as error:
        raise ProfileError(f"cannot read the profile {path}: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise ProfileError(f"{path} is not a profile: {error}") from error
    _check_version(path, body)
    try:
        table = msgspec.convert(body, ProfileTable)
    except msgspec.ValidationError as error:
        raise ProfileError(f"{path}: {error}") from error
    _check_sizes(path, table)
    _check_times(path, table)
    _check_points(path, table)
    return table


def _check_version(path: Path, body: Any) -> None:
    if not isinstance(body, dict):
        raise ProfileError(f"{path} is not a profile: it holds no JSON object")
    version = body.get("version", 1)
    if version != TABLE_VERSION:
        raise ProfileError(
            f"{path} is a profile of version {version!r}, this planner reads version "
            f"{TABLE_VERSION}: measure again with `distserve profile`"
        )


def _check_sizes(path: Path, table: ProfileTable) -> None:
    for name, most in MOST.items():
        if (size := getattr(table, name)) > most:
            raise ProfileError(f"{path}: {name} is {size}, at most {most} can be")


def _check_times(path: Path, table: ProfileTable) -> None:
    for section in ("prefill", "decode", "mixed", "transfer"):
        for number, point in enumerate(getattr(table, section)):
            if not LEAST_MS <= point.ms <= MOST_MS:
                raise ProfileError(
                    f"{path}: {section}[{number}].ms is {point.ms:g}, "
                    f"not between {LEAST_MS:g} and {MOST_MS:g}"
                )


def _check_points(path: Path, table: ProfileTable) -> None:
    """Curves need points apart from one another."""
    for section in ("prefill", "decode"):
        if len(getattr(table, section)) < MIN_POINTS:
            raise ProfileError(f"{path}: {section} has fewer than {MIN_POINTS} points to go by")
    if len({point.num_prompts * point.num_tokens for point in table.prefill}) < 2:
        raise ProfileError(f"{path}: prefill has steps of one size alone, and no line through them")
    _check_apart(path, "decode", [(point.batch, point.context) for point in table.decode])
    _check_apart(path, "transfer", [point.num_tokens for point in table.transfer])


def _check_apart(path: Path, section: str, keys: Iterable[Hashable]) -> None:
    seen: set[Hashable] = set()
    for number, key in enumerate(keys):
        if key in seen:
            raise ProfileError(f"{path}: {section}[{number}] repeats an earlier point")
        seen.add(key)
