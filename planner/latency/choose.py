"""Pick the best latency model there is for a shape: measured, else fitted, else a roofline.

A measured table answers for its own shape, and through a fit for other pipelines of the same tp; a
named profile of published coefficients answers for the degrees it has; a roofline for all that can
be. Pulls of a shape that was not measured are not known to a fit.
"""

from dataclasses import dataclass
from pathlib import Path

from ipc.profile_table import ProfileTable
from ipc.vocabulary import Parallelism
from planner.devices import DeviceSheet, device_sheet
from planner.errors import ProfileError
from planner.latency.added_overhead import added_overhead_latency
from planner.latency.fitted import FittedLatency
from planner.latency.interface import LatencyModel
from planner.latency.measured import MeasuredLatency
from planner.latency.profile_file import read_profile
from planner.latency.published import DEVICE as PUBLISHED_DEVICE
from planner.latency.published import published_engines, published_latency
from planner.latency.roofline import RooflineLatency
from planner.latency.table_fit import fit_table
from planner.model_catalog import model_shape
from planner.model_shape import ModelShape

_SUFFIXES = ("-raw", "-added")


@dataclass(frozen=True)
class Knowledge:
    """What there is to go by for one model on one kind of device.

    Args:
        model: a name of the catalog, or a directory with a `config.json`.
        device: a device sheet's name, or None where tables are all there is.
        tables: files that `distserve profile` wrote.
        profile: a named profile of published coefficients: `distserve` or `vllm` (OPT on A100),
            with `-raw` behind it for the fits without the hand-set factors, or `-added` for
            those factors as seconds of the engine's own (`added_overhead`).
    """

    model: str
    device: str | None = None
    tables: tuple[Path, ...] = ()
    profile: str | None = None


def device_of(known: Knowledge) -> DeviceSheet | None:
    """As named, or the one that the published coefficients are of."""
    name = known.device or (PUBLISHED_DEVICE if known.profile is not None else None)
    return None if name is None else device_sheet(name)


def latency_model(known: Knowledge, parallelism: Parallelism) -> LatencyModel:
    """The best model for that shape.

    Raises:
        InfeasibleShape: the model cannot be cut that way.
        ProfileError: nothing is known of the shape, or a table is of another model.
    """
    shape = model_shape(known.model)
    shape.check(parallelism)
    tables = [_table_of(shape, path) for path in known.tables]
    for table in tables:
        if (table.tp, table.pp) == (parallelism.tp, parallelism.pp):
            return MeasuredLatency(table)
    for table in tables:
        if table.tp == parallelism.tp:
            return FittedLatency(fit_table(table), parallelism)
    if known.profile is not None:
        return _published(known.profile, known.model, parallelism)
    if known.device is not None:
        return RooflineLatency(shape, device_sheet(known.device), parallelism)
    raise ProfileError(
        f"nothing is known of {known.model} at tp {parallelism.tp}, pp {parallelism.pp}: "
        "give a profile of that shape, or a device for a roofline"
    )


def _table_of(shape: ModelShape, path: Path) -> ProfileTable:
    """A table does not know the model by the user's name for it; its KV size gives it away."""
    table = read_profile(path)
    num_cached = shape.num_layers * shape.kv_elements_per_layer(tp=1)
    if table.kv_bytes_per_token != num_cached * table.dtype.num_bytes:
        raise ProfileError(
            f"{path} is no profile of {shape.name}: it was measured with {table.model}, whose keys "
            f"and values take {table.kv_bytes_per_token} bytes a token in {table.dtype}, not "
            f"{num_cached * table.dtype.num_bytes}"
        )
    return table


def profile_names() -> list[str]:
    """The named profiles: as shipped, raw, and with the engine's own seconds added."""
    return [name + suffix for name in published_engines() for suffix in ("", *_SUFFIXES)]


def _published(profile: str, model: str, parallelism: Parallelism) -> LatencyModel:
    if profile not in profile_names():
        raise ProfileError(f"no profile {profile!r}: there are {', '.join(profile_names())}")
    engine, _, treatment = profile.partition("-")
    if treatment == "added":
        return added_overhead_latency(engine, model, parallelism)
    return published_latency(engine, model, parallelism, raw=treatment == "raw")
