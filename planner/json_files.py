"""JSON as the planner reads it: what the user names, and what ships with the planner."""

from importlib.resources import files
from pathlib import Path
from typing import TypeVar

import msgspec
import orjson

from planner.errors import PlannerError

T = TypeVar("T")


def read_json(path: Path, kind: type[T]) -> T:
    """The user's file; PlannerError names it and, where one is wrong, the field."""
    try:
        return msgspec.convert(orjson.loads(path.read_bytes()), kind)
    except OSError as error:
        raise PlannerError(f"cannot read {path}: {error.strerror}") from error
    except (orjson.JSONDecodeError, msgspec.ValidationError) as error:
        raise PlannerError(f"{path}: {error}") from error


def shipped_json(package: str, name: str, kind: type[T]) -> T:
    """A file in the folder `data` of a package of ours; keys may stand for numbers."""
    content = files(package).joinpath("data", name).read_bytes()
    return msgspec.convert(orjson.loads(content), kind, strict=False)
