"""The report of a check for people, as Markdown: device, stages, figures beside their floors."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from gpu_workers.check_gpu.outcome import Outcome, Report, Verdict

Row = Sequence[object]

DECODE_KINDS = {
    "eager": "decode_eager_ms",
    "captured": "decode_captured_ms",
    "as served": "decode_served_ms",
}


def told(report: Report) -> str:
    """All of it; sections of stages that were not run are left out."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield f"# Check of {report.device}, {report.started or 'not begun'}"
    yield ""
    yield from _device(report.figures("probe"))
    counts = {v: sum(o.verdict is v for o in report.stages) for v in Verdict}
    yield (
        f"{counts[Verdict.PASS]} stages passed, {counts[Verdict.FAIL]} failed, "
        f"{counts[Verdict.SKIP]} were skipped, in {report.seconds:.0f} s."
    )
    yield ""
    yield from _table(
        ("stage", "", "seconds", "what it found"),
        ([o.stage, o.verdict, f"{o.seconds:.1f}", o.detail] for o in report.stages),
    )
    yield from _decode(report.figures("steps"))
    yield from _prefill(report.figures("steps"))
    yield from _pulls(report.figures("bandwidth"))
    yield from _small(report.figures("bandwidth"))
    yield from _others(report)
    for outcome in report.stages:
        yield from _log(outcome)


def _device(probe: Mapping[str, Any]) -> Iterator[str]:
    if not probe:
        return
    yield from _table(("", "what is there"), ((k, _plain(v)) for k, v in probe.items() if v))


def _decode(steps: Mapping[str, Any]) -> Iterator[str]:
    """Batches downwards; figures that came through JSON have text for keys."""
    floors = _by_number(steps.get("decode_floor_ms"))
    if not floors:
        return
    yield "## Decode steps, ms"
    yield ""
    if (copy_gb_s := steps.get("copy_gb_s")) is not None:
        yield (
            f"Contexts of 512 tokens. The floor is weights and cache read once, at the "
            f"{copy_gb_s:,.0f} GB/s of a plain copy (bytes read and written)."
        )
        yield ""
    kinds = {name: _by_number(steps.get(key)) for name, key in DECODE_KINDS.items()}
    yield from _decode_table({name: ms for name, ms in kinds.items() if ms}, floors)


def _decode_table(
    kinds: Mapping[str, Mapping[int, float]], floors: Mapping[int, float]
) -> Iterator[str]:
    """The last kind that was measured is compared with the floor."""
    last = list(kinds.values())[-1] if kinds else {}
    yield from _table(
        ("batch", *kinds, "floor", "times the floor"),
        (
            [
                batch,
                *(_number(ms.get(batch)) for ms in kinds.values()),
                _number(floor),
                _ratio(last.get(batch), floor),
            ]
            for batch, floor in floors.items()
        ),
    )


def _prefill(steps: Mapping[str, Any]) -> Iterator[str]:
    prompts = {k.split()[1]: v for k, v in steps.items() if k.startswith("prefill ")}
    if not prompts:
        return
    yield "## Prompts"
    yield ""
    if (rate := steps.get("product_tflop_s")) is not None:
        yield f"The floor is their operations at the {rate:,.0f} TFLOP/s of a large product."
        yield ""
    yield from _table(
        ("tokens", "tokens/s", "ms", "floor, ms", "times the floor"),
        (
            [
                length,
                f"{found['tokens_per_s']:,.0f}",
                _number(found["ms"]),
                _number(found["floor_ms"]),
                _ratio(found["ms"], found["floor_ms"]),
            ]
            for length, found in prompts.items()
        ),
    )


PULL_COLUMNS = {
    "scattered": "pull_gb_s",
    "one by one": "single_gb_s",
    "in one batch": "batch_gb_s",
    "side by side": "merged_gb_s",
    "by way of the host": "host_gb_s",
    "beside work": "beside_work_gb_s",
    "plain copy": "copy_gb_s",
    "share": "share",
    "work beside takes, times": "work_takes_times",
}


def _pulls(bandwidth: Mapping[str, Any]) -> Iterator[str]:
    blocks = {k: v for k, v in bandwidth.items() if not k.startswith("runs of ")}
    if not blocks:
        return
    yield "## Pulls out of another process's pool, GB/s"
    yield ""
    yield "What arrives, not what is read and written; beside it a copy of as much within one pool."
    yield ""
    yield from _table(
        ("blocks of", *PULL_COLUMNS),
        (
            [size, *(_number(found.get(key)) for key in PULL_COLUMNS.values())]
            for size, found in blocks.items()
        ),
    )


def _small(bandwidth: Mapping[str, Any]) -> Iterator[str]:
    runs = {k: v for k, v in bandwidth.items() if k.startswith("runs of ")}
    if not runs:
        return
    yield "Scattered runs, one by one and gathered into one call:"
    yield ""
    yield from _table(
        ("", "one by one", "in one batch"),
        ([k, _number(v["single_gb_s"]), _number(v["batch_gb_s"])] for k, v in runs.items()),
    )


def _others(report: Report) -> Iterator[str]:
    """Figures that have no table of their own, as they are."""
    shown = {"probe", "steps", "bandwidth"}
    rows = [
        (outcome.stage, name, _plain(value))
        for outcome in report.stages
        if outcome.stage not in shown
        for name, value in outcome.figures.items()
    ]
    if rows:
        yield "## Other figures"
        yield ""
        yield from _table(("stage", "", ""), rows)


def _log(outcome: Outcome) -> Iterator[str]:
    if outcome.verdict is Verdict.FAIL and outcome.log:
        yield f"## What {outcome.stage} said last"
        yield ""
        yield from (f"    {line}" for line in outcome.log.splitlines())
        yield ""


def _table(titles: Row, rows: Iterable[Row]) -> Iterator[str]:
    yield _row(titles)
    yield "|" + "---|" * len(titles)
    yield from map(_row, rows)
    yield ""


def _row(cells: Row) -> str:
    """Nothing that was found may end a cell or a line."""
    texts = (str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells)
    return "| " + " | ".join(texts) + " |"


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(one)}" for key, one in value.items())
    if isinstance(value, list | tuple):
        return "; ".join(map(_plain, value))
    if value is None:
        return "none"
    return _number(value)


def _number(value: Any) -> str:
    """Four digits that count."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _ratio(ms: float | None, floor_ms: float) -> str:
    return "" if ms is None else f"{ms / floor_ms:.2f}"


def _by_number(figures: Mapping[Any, float] | None) -> dict[int, float]:
    return {int(key): value for key, value in (figures or {}).items()}
