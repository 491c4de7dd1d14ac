"""Reading the table that `distserve profile` wrote, with clear words where it cannot be used."""

from pathlib import Path
from typing import Any

import msgspec
import orjson

from ipc.profile_table import TABLE_VERSION, ProfileTable
from planner.errors import ProfileError


def read_profile(path: Path) -> ProfileTable:
    """The table, checked: its version, its fields, and that every time is above zero."""
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
    _check_points(path, table)
    return table


def _check_version(path: Path, body: Any) -> None:
    if not isinstance(body, dict):
        raise ProfileError(f"{path} is not a profile: it holds no JSON object")
    version = body.get("version", 1)
    if version != TABLE_VERSION:
        raise ProfileError(
            f"{path} is a profile of version {version}, this planner reads version "
            f"{TABLE_VERSION}: measure again with `distserve profile`"
        )


def _check_points(path: Path, table: ProfileTable) -> None:
    for section in ("prefill", "decode", "mixed", "transfer"):
        points = getattr(table, section)
        for number, point in enumerate(points):
            if not point.ms > 0:
                raise ProfileError(f"{path}: {section}[{number}].ms is {point.ms:g}, not above 0")
    for section, needed in (("prefill", 3), ("decode", 3)):
        if len(getattr(table, section)) < needed:
            raise ProfileError(f"{path}: {section} has fewer than {needed} points to go by")
    if table.tp < 1 or table.pp < 1:
        raise ProfileError(f"{path}: tp and pp start at 1, not {table.tp} and {table.pp}")
