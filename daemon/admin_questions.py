"""Answers the console's questions: looks at the node's parts, changes nothing, and is soon done.

Lists are cut at a length, and so is the search through what is open: a full house must not make
one question slow.
"""

import heapq
import os
import platform
import time
from collections.abc import Callable, Iterable
from itertools import chain, islice
from typing import assert_never

import msgspec

from daemon.admin_commands import (
    MAX_LISTED,
    GetConfig,
    GetPlan,
    GetRequests,
    GetSlo,
    GetStatus,
    GetTimelines,
    GetVersion,
    Question,
)
from daemon.admin_console import RefusedByState
from daemon.admin_protocol import (
    ADMIN_VERSION,
    Answer,
    ConfigIs,
    PlanIs,
    RequestsAre,
    SloIs,
    StatusIs,
    TimelinesAre,
    VersionIs,
)
from daemon.admin_views import RequestLine, SloWindow
from daemon.config import DaemonConfig
from daemon.node import Node
from daemon.request import Request
from daemon.slo import SloBook, WindowReport
from daemon.timelines import RequestTimeline, Timelines, state_of
from ipc.messages import PROTOCOL_VERSION
from ipc.placement_file import VERSION as PLACEMENT_VERSION
from ipc.placement_file import FileNode, PlacementFile, file_of
from ipc.vocabulary import Placement

WINDOWS_S = (60.0, 300.0, 3600.0)
MAX_SEARCHED = 2048


class Sights(msgspec.Struct, frozen=True):
    """What questions are answered from."""

    node: Node
    timelines: Timelines
    slo: SloBook
    placement: Callable[[], Placement]
    config: Callable[[], DaemonConfig]
    clock: Callable[[], float] = time.monotonic


def answer(sights: Sights, question: Question) -> Answer:
    """Raises RefusedByState: there is no such request."""
    now_s = sights.clock()
    match question:
        case GetStatus():
            return StatusIs(sights.node.status())
        case GetRequests():
            return requests(sights.timelines, question, now_s)
        case GetTimelines():
            return TimelinesAre(_timelines(sights.timelines, question), now_s)
        case GetSlo():
            windows = (sights.slo.report(now_s, window_s) for window_s in WINDOWS_S)
            return SloIs(sights.slo.targets, tuple(map(slo_window, windows)))
        case GetPlan():
            return PlanIs(placement_file(sights.placement(), sights.node.model_id))
        case GetConfig():
            return ConfigIs(msgspec.to_builtins(sights.config()))
        case GetVersion():
            return _version(sights.node)
        case _:
            assert_never(question)


def requests(timelines: Timelines, asked: GetRequests, now_s: float) -> RequestsAre:
    """Those that were asked for, and whether more would have been."""
    open_ones: Iterable[Request] = islice(timelines.open_requests(), MAX_SEARCHED)
    ended: Iterable[RequestTimeline] = timelines.ended_ones()
    state, slowest = asked.state, asked.slowest
    if state is not None:
        open_ones = (r for r in open_ones if state_of(r) == state)
        ended = (t for t in ended if t.state == state)
    if slowest is not None:  # of those under way, the first to come
        open_ones = islice(open_ones, slowest)
        ended = heapq.nlargest(slowest, ended, key=_age_s)
    elif state is None:
        ended = ()
    lines = chain((_open_line(r, now_s) for r in open_ones), (_line(t, now_s) for t in ended))
    if slowest is not None:
        found = heapq.nlargest(slowest, lines, key=lambda line: line.age_s)
    else:
        found = list(islice(lines, MAX_LISTED + 1))
    is_unseen = state is not None and timelines.num_open > MAX_SEARCHED
    is_truncated = len(found) > MAX_LISTED or is_unseen
    return RequestsAre(tuple(found[:MAX_LISTED]), is_truncated, timelines.num_open)


def slo_window(report: WindowReport) -> SloWindow:
    num = report.num_requests
    return SloWindow(
        window_s=report.window_s,
        num_requests=num,
        attainment=report.attainment,
        ttft_attainment=report.num_met_ttft / num if num else None,
        tpot_attainment=report.num_met_tpot / num if num else None,
        goodput_per_s=report.goodput_per_s,
        ttft_p50_s=report.ttft.p50_s,
        ttft_p90_s=report.ttft.p90_s,
        ttft_p99_s=report.ttft.p99_s,
        tpot_p50_s=report.tpot.p50_s,
        tpot_p90_s=report.tpot.p90_s,
        tpot_p99_s=report.tpot.p99_s,
    )


def placement_file(placement: Placement, model_id: str) -> PlacementFile:
    """As `distserve plan` would write it, so that it can be kept, edited and applied."""
    last: dict[str, int] = {}
    for segment in (segment for spec in placement.instances for segment in spec.segments):
        last[segment.node] = max(last.get(segment.node, 0), *segment.devices)
    nodes = [FileNode(name, device + 1) for name, device in last.items()]
    return file_of(placement.model or model_id, nodes, placement.instances)


def _open_line(request: Request, now_s: float) -> RequestLine:
    clock = request.clock
    return RequestLine(
        number=request.arrival,
        label=request.label,
        state=state_of(request),
        instance=request.trips[-1].instance if request.trips else None,
        num_prompt=len(request.spec.prompt),
        num_output=request.num_output,
        num_choices=request.spec.num_choices,
        num_retries=max((trip.num_retries for trip in request.trips), default=0),
        age_s=now_s - clock.arrived_s,
        ttft_s=clock.first_token_s - clock.arrived_s if clock.first_token_s else None,
    )


def _age_s(timeline: RequestTimeline) -> float:
    return (timeline.ended_s or timeline.arrived_s) - timeline.arrived_s


def _line(timeline: RequestTimeline, now_s: float) -> RequestLine:
    first_s = timeline.first_token_s
    return RequestLine(
        number=timeline.number,
        label=timeline.label,
        state=timeline.state,
        instance=timeline.spans[-1].instance if timeline.spans else None,
        num_prompt=timeline.num_prompt,
        num_output=timeline.num_output,
        num_choices=timeline.num_choices,
        num_retries=timeline.num_retries,
        age_s=(timeline.ended_s or now_s) - timeline.arrived_s,
        ttft_s=first_s - timeline.arrived_s if first_s is not None else None,
    )


def _timelines(timelines: Timelines, asked: GetTimelines) -> tuple[RequestTimeline, ...]:
    if asked.request is None:
        return tuple(islice(timelines.ended_ones(), asked.last))
    found = timelines.find(asked.request)
    if found is None:
        raise RefusedByState(f"no request {asked.request!r} is open, nor did one end of late")
    return (found,)


def _version(node: Node) -> VersionIs:
    return VersionIs(
        version=node.version,
        admin_version=ADMIN_VERSION,
        worker_protocol=PROTOCOL_VERSION,
        placement_version=PLACEMENT_VERSION,
        python=platform.python_version(),
        pid=os.getpid(),
    )
