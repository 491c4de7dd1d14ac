"""The daemon's answers as people read them, and as programs do.

For people: tables that fit 80 columns. For programs: one object a line, `"v": 1`, names in
snake_case, numbers in seconds and bytes. No cell is read as markup, whatever is written in it.
"""

import datetime
from collections.abc import Sequence
from typing import Any, assert_never

import msgspec
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from daemon.admin_protocol import (
    Answer,
    BooksAre,
    ConfigIs,
    Done,
    EventsAre,
    Failed,
    FailureCode,
    PlanIs,
    RequestsAre,
    SloIs,
    StatusIs,
    TimelinesAre,
    VersionIs,
    WouldDo,
)
from daemon.admin_views import AuditLine, EventLine, Status
from daemon.console_errors import CommandFailed
from daemon.console_tables import (
    add_row,
    block_table,
    detail_tables,
    load_table,
    process_table,
    table_of,
    tables_of,
    worker_table,
)
from daemon.console_timelines import timeline_tables
from ipc.journal import escaped
from ipc.placement_file import PlacementFile

JSON_VERSION = 1


def picked(answer: Answer, instance: str | None) -> Answer:
    """A status of that one instance alone, where one is named. Raises CommandFailed."""
    if not isinstance(answer, StatusIs) or instance is None:
        return answer
    status = answer.status
    found = tuple(i for i in status.instances if i.name == instance)
    if not found:
        known = ", ".join(i.name for i in status.instances) or "none"
        message = f"there is no instance {instance!r}; there are: {known}"
        raise CommandFailed(FailureCode.REFUSED, message)
    return StatusIs(msgspec.structs.replace(status, instances=found))


def plain(leaf: str, answer: Answer) -> dict[str, Any]:
    """For programs."""
    shown: dict[str, Any] = msgspec.to_builtins(answer)
    del shown["type"]
    if isinstance(answer, StatusIs):
        shown = shown["status"]
        if leaf in ("instances", "kv pools"):
            shown = {"instances": shown["instances"]}
        elif leaf == "workers":
            shown = {"workers": _workers(answer.status)}
    return {"v": JSON_VERSION, "ok": True, **shown}


def tables(leaf: str, answer: Answer, *, is_one: bool = False) -> Sequence[RenderableType]:
    """For people. `is_one`: one instance, in every detail."""
    match answer:
        case StatusIs(status):
            return _status_tables(leaf, status, is_one)
        case RequestsAre():
            return _request_tables(answer)
        case TimelinesAre():
            return timeline_tables(answer)
        case SloIs():
            return [_slo_table(answer)]
        case PlanIs(placement):
            return [_plan_table(placement)]
        case ConfigIs(config):
            return [_pairs(config)]
        case VersionIs():
            return [_pairs(msgspec.structs.asdict(answer))]
        case BooksAre(books):
            return [_book_table(books)]
        case EventsAre(events):
            return [Text(event_text(event)) for event in events]
        case WouldDo(sentences):
            return [Text(sentence) for sentence in sentences]
        case Done(said):
            return [Text(said or "done")]
        case Failed():
            raise AssertionError("a failure is raised, not shown")
        case _:
            assert_never(answer)


def event_text(event: EventLine) -> str:
    """One line."""
    when = datetime.datetime.fromtimestamp(event.at_s, datetime.UTC)
    told = f"{event.number:>6}  {when:%Y-%m-%dT%H:%M:%SZ}  {event.kind:<12}  {event.subject}"
    return escaped(f"{told}: {event.text}" if event.text else told)


def _status_tables(leaf: str, status: Status, is_one: bool) -> Sequence[RenderableType]:
    instances = status.instances
    match leaf:
        case "instances" if is_one:
            return detail_tables(instances[0])
        case "instances":
            return [process_table(instances), load_table(instances)]
        case "workers":
            return [worker_table(instances)]
        case "kv pools":
            return [block_table(instances)]
        case _:
            return tables_of(status)


def _workers(status: Status) -> list[dict[str, Any]]:
    return [
        {"instance": instance.name, **msgspec.to_builtins(worker)}
        for instance in status.instances
        for worker in instance.workers
    ]


def _request_tables(answer: RequestsAre) -> Sequence[RenderableType]:
    table = table_of(
        "request", "state", "instance", "prompt", "output", "tries", "age s", "ttft s", "id"
    )
    for line in answer.requests:
        add_row(
            table,
            line.number,
            line.state,
            line.instance or "-",
            line.num_prompt,
            line.num_output,
            line.num_retries + 1,
            f"{line.age_s:.2f}",
            _number(line.ttft_s),
            line.label or "-",
        )
    what = f"{len(answer.requests)} shown, {answer.num_open} under way"
    if answer.is_truncated:
        what += "; there are more, the list is cut"
    return [table, Text(what)]


def _slo_table(answer: SloIs) -> Table:
    targets = answer.targets
    ttft = f"ttft{_target(targets.ttft_s)}"
    tpot = f"tpot{_target(targets.tpot_s)}"
    table = table_of("window", "requests", "both", ttft, tpot, "goodput/s", "p50/p90/p99 s")
    for window in answer.windows:
        add_row(
            table,
            f"{window.window_s / 60:g} min",
            window.num_requests,
            _share(window.attainment),
            _share(window.ttft_attainment),
            _share(window.tpot_attainment),
            f"{window.goodput_per_s:.2f}",
            _percentiles("ttft", window.ttft_p50_s, window.ttft_p90_s, window.ttft_p99_s),
        )
        told = _percentiles("tpot", window.tpot_p50_s, window.tpot_p90_s, window.tpot_p99_s)
        add_row(table, "", "", "", "", "", "", told)
    return table


def _plan_table(placement: PlacementFile) -> Table:
    table = table_of("instance", "role", "unit", "tp", "pp", "stage", "node", "devices")
    for instance in placement.instances:
        for stage in instance.stages:
            add_row(
                table,
                instance.name,
                instance.role,
                instance.unit,
                instance.tp,
                instance.pp,
                stage.stage,
                stage.node,
                ",".join(map(str, stage.devices)),
            )
    return table


def _book_table(books: Sequence[AuditLine]) -> Table:
    table = table_of("instance", "audit", "free", "held", "in use", "total", "faults now/ever")
    for book in books:
        blocks = book.blocks
        answered = "agrees" if book.is_sound else "DIFFERS"
        add_row(
            table,
            book.instance,
            answered if book.has_answered else "NO ANSWER",
            blocks.free,
            blocks.held,
            blocks.in_use,
            blocks.total,
            f"{book.faults}/{book.faults_ever}",
        )
    return table


def _pairs(values: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    for key, value in values.items():
        table.add_row(Text(key), Text("-" if value is None else str(value)))
    return table


def _number(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f}"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _target(seconds: float | None) -> str:
    return "" if seconds is None else f" {seconds:g} s"


def _percentiles(name: str, *values: float | None) -> str:
    return f"{name} {'/'.join(map(_number, values))}"
