"""Requests' timelines as rows of spans, each with a bar that shows when it was."""

from collections.abc import Sequence

import orjson
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from daemon.admin_protocol import TimelinesAre
from daemon.console_tables import add_row, table_of
from daemon.timelines import RequestTimeline, chrome_trace

_BAR = 24


def timeline_tables(answer: TimelinesAre) -> Sequence[RenderableType]:
    shown: list[RenderableType] = []
    for timeline in answer.timelines:
        shown += [_head(timeline, answer.now_s), _span_table(timeline, answer.now_s)]
    return shown or [Text("no request has ended yet")]


def chrome_json(answer: TimelinesAre) -> bytes:
    """For chrome://tracing, Perfetto and their like."""
    return orjson.dumps(chrome_trace(answer.timelines, answer.now_s))


def _head(timeline: RequestTimeline, now_s: float) -> Text:
    took_s = (now_s if timeline.ended_s is None else timeline.ended_s) - timeline.arrived_s
    named = f" ({timeline.label})" if timeline.label else ""
    told = f"request {timeline.number}{named}: {timeline.state}, {took_s:.3f} s"
    told += f", {timeline.num_prompt} prompt + {timeline.num_output} output tokens"
    if timeline.first_token_s is not None:
        told += f", first token after {timeline.first_token_s - timeline.arrived_s:.3f} s"
    return Text(told)


def _span_table(timeline: RequestTimeline, now_s: float) -> Table:
    table = table_of("stage", "instance", "from s", "took s", "")
    end_s = now_s if timeline.ended_s is None else timeline.ended_s
    total_s = max(end_s - timeline.arrived_s, 1e-9)
    for span in timeline.spans:
        from_s = span.started_s - timeline.arrived_s
        took_s = (end_s if span.ended_s is None else span.ended_s) - span.started_s
        start = min(_BAR - 1, max(0, round(from_s / total_s * _BAR)))
        length = min(_BAR - start, max(1, round(took_s / total_s * _BAR)))
        add_row(
            table,
            span.stage,
            span.instance or "-",
            f"{from_s:.4f}",
            f"{took_s:.4f}" + ("" if span.ended_s is not None else " ..."),
            " " * start + "#" * length,
        )
    return table
