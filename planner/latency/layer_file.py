"""Reading a layer profile as LLMServingSim publishes it: microseconds of kernels, in three CSVs.

Dense operations by tokens, attention by (prefill chunk, cached, decodes, context of each), output
head and sampler by sequences; every row names GPU, model and tensor-parallel degree.
"""

import csv
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from planner.errors import ProfileError


class AttentionPoint(NamedTuple):
    """What one attention call computes; `context` is that of each decode."""

    num_new: int
    num_cached: int
    batch: int
    context: int


class Owner(NamedTuple):
    """Which rows of the files belong together."""

    gpu: str
    model: str
    tp: int


@dataclass(frozen=True)
class LayerProfile:
    """Seconds: of operations by rows, of attention by what it computes."""

    dense: dict[str, list[tuple[float, float]]]
    attention: dict[AttentionPoint, float]
    per_sequence: dict[str, list[tuple[float, float]]]


@dataclass(frozen=True)
class LayerFiles:
    """Where the three files are."""

    dense: Path
    attention: Path
    per_sequence: Path

    @classmethod
    def within(cls, folder: Path) -> "LayerFiles":
        """Under the names that `llmservingsim_*_us.csv` have."""
        stem = "llmservingsim_{}_us.csv"
        dense, attention, per_sequence = (
            folder / stem.format(part) for part in ("dense", "attention", "per_sequence")
        )
        return cls(dense, attention, per_sequence)


def read_layer_profile(files: LayerFiles, owner: Owner) -> LayerProfile:
    """The owner's rows of all three files."""
    dense = _rows(files.dense, owner, ("layer", "tokens", "time_us"))
    attention = _rows(
        files.attention,
        owner,
        ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"),
    )
    per_sequence = _rows(files.per_sequence, owner, ("layer", "sequences", "time_us"))
    points = {}
    for line, (*counts, time_us) in attention:
        where = f"{files.attention}, line {line}"
        point = AttentionPoint(*(int(_number(text, where)) for text in counts))
        points[point] = _number(time_us, where) * 1e-6
    return LayerProfile(
        _curves(files.dense, dense), points, _curves(files.per_sequence, per_sequence)
    )


Rows = list[tuple[int, tuple[str, ...]]]


def _rows(path: Path, owner: Owner, columns: Sequence[str]) -> Rows:
    """(line, the columns) of the owner's rows; ProfileError if there are none."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            _check_columns(path, reader.fieldnames or (), columns)
            rows = [(reader.line_num, row) for row in reader]
    except OSError as error:
        raise ProfileError(f"cannot read {path}: {error.strerror}") from error
    mine = [(line, row) for line, row in rows if _owner(row) == tuple(map(str, owner))]
    if not mine:
        known = sorted({f"{row['gpu']} {row['model']} tp {row['tp']}" for _, row in rows})
        wanted = f"{owner.gpu} {owner.model} tp {owner.tp}"
        raise ProfileError(
            f"{path} has no rows of {wanted}: there are {', '.join(known) or 'none'}"
        )
    return [(line, tuple(row[c] or "" for c in columns)) for line, row in mine]


def _owner(row: dict[str, str]) -> tuple[str, str, str]:
    return row["gpu"], row["model"], row["tp"]


def _check_columns(path: Path, found: Iterable[str], columns: Iterable[str]) -> None:
    missing = {"gpu", "model", "tp", *columns} - set(found)
    if missing:
        raise ProfileError(f"{path} lacks the columns {', '.join(sorted(missing))}")


def _number(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise ProfileError(f"{where}: {text!r} is not a number") from error
    if not 0 <= value < float("inf"):
        raise ProfileError(f"{where}: {text} is below zero or not finite")
    return value


def _curves(path: Path, rows: Rows) -> dict[str, list[tuple[float, float]]]:
    curves: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for line, (layer, count, time_us) in rows:
        where = f"{path}, line {line}"
        curves[layer].append((_number(count, where), _number(time_us, where) * 1e-6))
    return {layer: sorted(points) for layer, points in curves.items()}
