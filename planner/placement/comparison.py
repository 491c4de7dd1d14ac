"""The best disaggregated placement against the baselines, each on as many devices."""

from planner.placement.baselines import Field, scaled
from planner.placement.choices import Candidate, Evaluated
from planner.placement.close_look import Bench
from planner.placement.ranking import best_of, ratio
from planner.placement.results import Baseline


def compared(mixed: Field, apart: Evaluated | None, bench: Bench) -> tuple[Baseline, ...]:
    """One entry for each kind of colocated service."""
    units = {name: _unit(found, bench) for name, found in mixed.found.items()}
    able = {name: unit for name, unit in units.items() if unit is not None}
    grown = _grown(able, apart, bench)
    gains = {}
    if apart is not None:
        rate = apart.per_device.value
        pairs = [bench.comparison(apart.candidate, e.candidate, rate) for e in grown.values()]
        found = bench.crew.comparisons(pairs, "against the baselines")
        gains = dict(zip(grown, found, strict=True))
    return tuple(
        _nothing(name)
        if unit is None
        else Baseline(
            name=name,
            unit=unit,
            scaled=grown[name],
            gain=ratio(apart.per_device, grown[name].per_device) if apart is not None else None,
            attainment_gain=gains.get(name),
        )
        for name, unit in units.items()
    )


def _unit(found: list[Evaluated], bench: Bench) -> Evaluated | None:
    """The best one that was looked at closely."""
    close = [bench.found[e.candidate] for e in found if e.candidate in bench.found]
    return best_of(close)


def _grown(
    units: dict[str, Evaluated], apart: Evaluated | None, bench: Bench
) -> dict[str, Evaluated]:
    """As many instances behind one dispatcher, or one that takes its share of the requests by
    itself, whichever carries more per device: what has several is compared with several."""
    if apart is None:
        return units
    wanted: dict[str, Candidate] = {}
    near: dict[Candidate, float] = {}
    for name, unit in units.items():
        candidate = scaled(unit, apart.candidate.num_devices, bench.problem)
        wanted[name] = candidate
        near[candidate] = candidate.groups[0].count * unit.goodput.rate.value
    found = bench.look(list(wanted.values()), near, "baselines on as many devices")
    return {
        name: max(unit, together, key=lambda each: each.per_device.value)
        for (name, unit), together in zip(units.items(), found, strict=True)
    }


def _nothing(name: str) -> Baseline:
    return Baseline(name, None, reason="no instance of this kind meets the targets at any rate")
