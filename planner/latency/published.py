"""The published OPT coefficients for the A100, as named profiles.

DistServe's repository ships them for its own engine and for vLLM 0.2.3. What it ships are fits
multiplied by hand-set factors: `raw` divides those out again.
"""

from functools import cache

import msgspec

from ipc.latency import DecodeRegimes, DecodeTerms, PrefillTerms
from ipc.vocabulary import Parallelism
from planner.devices import device_sheet
from planner.errors import ProfileError
from planner.json_files import shipped_json
from planner.latency.fitted import Fit, FittedLatency, StageOverheads
from planner.latency.pull import pull_over
from planner.model_catalog import model_shape

Row = tuple[float, float, float]
DEVICE = "a100-sxm4-80gb"


class Coefficients(msgspec.Struct, frozen=True):
    """One (model, tp), in milliseconds as published."""

    threshold: int
    prefill: Row
    decode_small: Row
    decode_large: Row


class Engine(msgspec.Struct, frozen=True):
    """One engine's profiles by model and tp; `doubts` by `model/tp`."""

    prefill_factor: float
    decode_factor: float
    doubts: dict[str, str]
    models: dict[str, dict[int, Coefficients]]


class _Published(msgspec.Struct, frozen=True):
    engines: dict[str, Engine]


@cache
def published_engines() -> dict[str, Engine]:
    """What is shipped, by engine: `distserve` and `vllm`."""
    return shipped_json("planner", "opt_a100_coefficients.json", _Published).engines


def published_fit(engine: str, model: str, tp: int, *, raw: bool = False) -> Fit:
    """Coefficients as shipped, or without the hand factors; ProfileError says what there is."""
    found = _engine(engine)
    rows = _coefficients(engine, model, tp)
    fit = Fit(_prefill_terms(rows.prefill), _regimes(rows))
    if not raw:
        return fit
    return Fit(
        fit.prefill.scaled(1 / found.prefill_factor), fit.decode.scaled(1 / found.decode_factor)
    )


def doubt(engine: str, model: str, tp: int) -> str | None:
    """Why that row should not be trusted, or None."""
    return _engine(engine).doubts.get(f"{model_shape(model).name}/{tp}")


def published_latency(
    engine: str,
    model: str,
    parallelism: Parallelism,
    *,
    raw: bool = False,
    overheads: StageOverheads | None = None,
) -> FittedLatency:
    """A latency model from published coefficients; pulls go over the A100's NVLink."""
    fit = published_fit(engine, model, parallelism.tp, raw=raw)
    pull = pull_over(device_sheet(DEVICE), model_shape(model), parallelism)
    return FittedLatency(fit, parallelism, overheads=overheads, pull=pull)


def _engine(name: str) -> Engine:
    engines = published_engines()
    if name not in engines:
        raise ProfileError(f"no published profile {name!r}: there are {', '.join(engines)}")
    return engines[name]


def _coefficients(engine: str, model: str, tp: int) -> Coefficients:
    models = _engine(engine).models
    degrees = models.get(model_shape(model).name)
    if degrees is None:
        raise ProfileError(f"profile {engine} has no {model}: there are {', '.join(models)}")
    if tp not in degrees:
        known = ", ".join(str(degree) for degree in degrees)
        raise ProfileError(f"profile {engine} has no tp {tp} for {model}: there are {known}")
    return degrees[tp]


def _prefill_terms(row: Row) -> PrefillTerms:
    a, b, c = row
    return PrefillTerms(a / 1000, b / 1000, c / 1000)


def _regimes(rows: Coefficients) -> DecodeRegimes:
    small, large = (
        DecodeTerms(a / 1000, b / 1000, c / 1000)
        for a, b, c in (rows.decode_small, rows.decode_large)
    )
    return DecodeRegimes(small, large, rows.threshold)
