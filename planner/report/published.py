"""What the authors published beside the curves: scale sweeps, ratios, tables, as package data."""

from functools import cache
from typing import TypeVar

import msgspec

from planner.json_files import shipped_json

Point = tuple[float, float]


class ScaleCurve(msgspec.Struct, frozen=True):
    """Percent of requests that met both targets times a scale, at one rate per device."""

    model: str
    workload: str
    engine: str
    per_device_rate: float
    tolerance: float
    points: tuple[Point, ...]

    @property
    def scales(self) -> tuple[float, ...]:
        return tuple(scale for scale, _ in self.points)

    @property
    def percents(self) -> tuple[float, ...]:
        return tuple(percent for _, percent in self.points)


class Experiment(msgspec.Struct, frozen=True):
    """Of one model and data set: goodput and smallest scale at 90 % by engine, and DistServe's
    ratios to the others as the authors print them, by target in percent."""

    model: str
    workload: str
    goodput: dict[str, float]
    minimal_scale: dict[str, float]
    rate_ratios: dict[int, dict[str, float]]
    scale_ratios: dict[int, dict[str, float]]


class AccuracyRow(msgspec.Struct, frozen=True, array_like=True):
    """A row of table 2, in percent."""

    per_device_rate: float
    vllm_real: float
    vllm_simulated: float
    distserve_real: float
    distserve_simulated: float


class PlacementRow(msgspec.Struct, frozen=True, array_like=True):
    """A row of table 3."""

    model: str
    workload: str
    prefill_tp: int
    prefill_pp: int
    decode_tp: int
    decode_pp: int


class Motivation(msgspec.Struct, frozen=True):
    """Figure 1: requests per second and device under its targets."""

    source: str
    ttft_s: float
    tpot_s: float
    colocated: float
    colocated_ttft_alone: float
    prefill_alone: float
    decode_alone: float
    disaggregated_per_device: float
    ratio: float


class Breakdown(msgspec.Struct, frozen=True, array_like=True):
    """Percent of a request's time in each stage, at one rate per device."""

    per_device_rate: float
    prefill_queue: float
    prefill: float
    transfer: float
    decode_queue: float
    decode: float


class Stages(msgspec.Struct, frozen=True):
    """Figure 10: the breakdown, and percents of OPT-175B's transfers up to so many seconds."""

    source: str
    breakdown: tuple[Breakdown, ...]
    transfers: tuple[Point, ...]


class _Scales(msgspec.Struct, frozen=True):
    source: str
    curves: tuple[ScaleCurve, ...]


class _Experiments(msgspec.Struct, frozen=True):
    source: str
    experiments: tuple[Experiment, ...]


class _Accuracy(msgspec.Struct, frozen=True):
    source: str
    rows: tuple[AccuracyRow, ...]


class _Placements(msgspec.Struct, frozen=True):
    source: str
    rows: tuple[PlacementRow, ...]


Kind = TypeVar("Kind")


@cache
def scale_curves(model: str, workload: str) -> dict[str, ScaleCurve]:
    """By engine."""
    curves = _read("slo_scales.json", _Scales).curves
    return {c.engine: c for c in curves if (c.model, c.workload) == (model, workload)}


@cache
def experiment(model: str, workload: str) -> Experiment:
    found = _read("end_to_end.json", _Experiments).experiments
    return next(each for each in found if (each.model, each.workload) == (model, workload))


@cache
def accuracy_rows() -> tuple[AccuracyRow, ...]:
    return _read("table2.json", _Accuracy).rows


@cache
def placement_rows() -> tuple[PlacementRow, ...]:
    return _read("table3.json", _Placements).rows


@cache
def motivation() -> Motivation:
    return _read("figure1.json", Motivation)


@cache
def stages() -> Stages:
    return _read("figure10.json", Stages)


def _read(name: str, kind: type[Kind]) -> Kind:
    return shipped_json("planner.report", name, kind)
