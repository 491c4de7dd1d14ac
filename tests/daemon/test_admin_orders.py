"""What orders and questions of consoles do, to real parts of a daemon of played processes."""

import asyncio
import copy
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from daemon.admin_commands import (
    MAX_LISTED,
    Abort,
    ApplyPlan,
    AuditBooks,
    Drain,
    GetEvents,
    GetPlan,
    GetRequests,
    GetTimelines,
    Restart,
    ScaleAdd,
    ScaleRemove,
    SetLogLevel,
    Shutdown,
    Undrain,
)
from daemon.admin_console import RefusedByState
from daemon.admin_log_levels import LogLevels
from daemon.admin_orders import NodeOperator, Reach
from daemon.admin_protocol import BooksAre, Done, EventsAre, PlanIs, RequestsAre, WouldDo
from daemon.admin_questions import MAX_SEARCHED, Sights, requests
from daemon.errors import AbortedByOperator
from daemon.event_log import EventLog
from daemon.generation import GenerationSpec
from daemon.heartbeat import Heartbeat
from daemon.node import Node
from daemon.slo import SloBook, Targets
from daemon.timelines import Timelines
from ipc.messages import Audit, Stats
from ipc.placement_file import to_json
from ipc.vocabulary import Role, SamplingParams
from tests.daemon.stage import MakeStage
from tests.daemon.test_operations import Town, town_of

SPEC = GenerationSpec(prompt=(1, 2), sampling=SamplingParams(max_tokens=4, seed=1))


class Desk:
    """An operator of a town, and what it is told."""

    def __init__(self, town: Town) -> None:
        stage = town.stage
        self.controller = stage.controller
        self.link = stage.link
        self.events = EventLog()
        self.stops: list[float | None] = []
        self.heartbeat = Heartbeat(
            stage.supervisor, self.controller.instances, stage.metrics, wedged_after_s=60.0
        )
        node = Node("played", "1.0", self.controller, stage.supervisor, events=self.events)
        reach = Reach(
            node=node,
            controller=self.controller,
            operations=town.operations,
            heartbeat=self.heartbeat,
            events=self.events,
            log_levels=LogLevels(),
            shut_down=self.stops.append,
        )
        sights = Sights(
            node=node,
            timelines=self.controller.timelines,
            slo=SloBook(Targets()),
            placement=lambda: stage.configs.placement,
            config=lambda: stage.config,
        )
        self.operator = NodeOperator(sights, reach)


@asynccontextmanager
async def desk_of(make_stage: MakeStage) -> AsyncIterator[Desk]:
    async with town_of(make_stage, prefill=1, decode=1) as town:
        yield Desk(town)


@pytest.mark.parametrize(
    ("order", "told"),
    [
        (Drain(5.0), ["the node would take nothing new", "0 requests may take 5 s"]),
        (
            Drain(5.0, "decode-0"),
            ["decode-0 would take nothing new", "0 prompts and 0 sequences may take 5 s"],
        ),
        (Restart("decode-0"), ["drain decode-0 (ready)", "replace its 1 workers"]),
        (ScaleAdd(Role.DECODE), ["start decode-1 on device 2, tp 1, pp 1"]),
        (SetLogLevel("debug"), ["all loggers without a level of their own: debug"]),
        (Shutdown(0.0), ["0 requests may take 0 s", "end the daemon and its workers"]),
    ],
)
async def test_a_dry_run_tells_and_touches_nothing(
    make_stage: MakeStage, order: Drain, told: list[str]
) -> None:
    async with desk_of(make_stage) as desk:
        before = [i.epoch for i in desk.controller.instances]
        dry = type(order)(
            **{f: getattr(order, f) for f in order.__struct_fields__} | {"dry_run": True}
        )
        assert await desk.operator.carry_out(dry) == WouldDo(tuple(told))
        assert [i.epoch for i in desk.controller.instances] == before
        assert not desk.controller.is_draining
        assert desk.stops == []
        assert desk.events.after(None, 10).events == []


@pytest.mark.parametrize(
    ("order", "why"),
    [
        (Abort("7"), "no request '7' is open"),
        (Drain(1.0, "d9"), "no instance 'd9' is up; there are: "),
        (Undrain(), "the node is not draining"),
        (Undrain("decode-0"), "decode-0 is not draining"),
        (Restart("d9"), "there is no instance 'd9'"),
        (ScaleRemove("decode-0"), "nobody would be left to decode"),
        (ScaleAdd(Role.DECODE, tp=3), "decode-1 cannot run"),
        (ApplyPlan("{"), "not JSON"),
    ],
)
@pytest.mark.parametrize("dry_run", [False, True])
async def test_what_cannot_be_is_refused_tried_or_not(
    make_stage: MakeStage, order: Abort, why: str, dry_run: bool
) -> None:
    async with desk_of(make_stage) as desk:
        fields = {f: getattr(order, f) for f in order.__struct_fields__} | {"dry_run": dry_run}
        with pytest.raises(RefusedByState, match=why):
            await desk.operator.carry_out(type(order)(**fields))


async def test_an_aborted_request_ends_by_an_error_of_its_own(make_stage: MakeStage) -> None:
    async with desk_of(make_stage) as desk:
        with desk.controller.submit([SPEC]) as call:
            number = str(call.requests[0].arrival)
            assert await desk.operator.carry_out(Abort(number)) == Done(
                f"request {number} is ended"
            )
            with pytest.raises(AbortedByOperator):
                await anext(call)
        with pytest.raises(RefusedByState):
            await desk.operator.carry_out(Abort(number))


async def test_a_drain_tells_its_beginning_and_its_end(make_stage: MakeStage) -> None:
    async with desk_of(make_stage) as desk:
        assert await desk.operator.carry_out(Drain(5.0)) == Done("drained")
        await desk.operator.carry_out(Undrain())
        await desk.operator.carry_out(Drain(5.0, "decode-0"))
        await desk.operator.carry_out(Undrain("decode-0"))
        told = [(e.kind.value, e.subject) for e in desk.events.after(0, 20).events]
        ordered = ("ordered", "console")
        assert told == [
            *(ordered, ("drain_began", "node"), ("drain_ended", "node")),
            *(ordered, ("drain_ended", "node")),
            *(ordered, ("drain_began", "decode-0"), ("drain_ended", "decode-0")),
            *(ordered, ("drain_ended", "decode-0")),
        ]


async def test_an_instance_that_is_taken_back_was_not_drained(make_stage: MakeStage) -> None:
    """Whoever waited for the drain was told that it had come to its end."""
    async with desk_of(make_stage) as desk:
        with desk.controller.submit([SPEC]):
            draining = asyncio.ensure_future(desk.operator.carry_out(Drain(5.0, "prefill-0")))
            await asyncio.sleep(0)
            await desk.operator.carry_out(Undrain("prefill-0"))
            with pytest.raises(RefusedByState, match="prefill-0 was taken back before"):
                await draining


async def test_a_shutdown_has_a_drain_time_of_its_own(make_stage: MakeStage) -> None:
    async with desk_of(make_stage) as desk:
        for deadline_s in (None, 0.0, 7.0):
            await desk.operator.carry_out(Shutdown(deadline_s))
        assert desk.stops == [None, 0.0, 7.0]


async def test_the_placement_that_runs_can_be_applied_and_is_told(make_stage: MakeStage) -> None:
    async with desk_of(make_stage) as desk:
        shown = desk.operator.answer(GetPlan())
        assert isinstance(shown, PlanIs)
        text = to_json(shown.placement).decode()
        dry = await desk.operator.carry_out(ApplyPlan(text, dry_run=True))
        assert dry == WouldDo(("keep prefill-0, decode-0",))
        await desk.operator.carry_out(ApplyPlan(text))
        assert desk.events.after(None, 1).events[0].kind == "plan_applied"


async def test_an_audit_waits_for_every_leaders_answer(make_stage: MakeStage) -> None:
    async with desk_of(make_stage) as desk:

        def answer(epoch: int, command: object) -> None:
            instance = next(i for i in desk.controller.instances if i.epoch == epoch)
            if isinstance(command, Audit) and instance.name == "decode-0":
                stats = Stats(blocks_total=8, blocks_free=8, beat=command.beat)
                desk.controller.on_event(instance.name, epoch, stats)
                for life in desk.heartbeat.silent(command.beat):
                    if life.epoch == epoch:
                        desk.heartbeat.answered((life.leader, epoch), command.beat)

        desk.link.on_sent = answer
        books = await desk.operator.carry_out(AuditBooks(wait_s=0.05))
        assert isinstance(books, BooksAre)
        found = {book.instance: book for book in books.books}
        assert found["decode-0"].is_sound
        assert found["decode-0"].blocks.free == 8
        assert not found["prefill-0"].has_answered
        assert not found["prefill-0"].is_sound


@pytest.mark.parametrize("num_standing", [0, 1])
async def test_an_audit_fails_by_the_faults_that_stand_and_not_by_old_ones(
    make_stage: MakeStage, num_standing: int
) -> None:
    """Once a fault had been counted, it failed until the worker was restarted."""
    async with desk_of(make_stage) as desk:
        for instance in desk.controller.instances:
            instance.stats = Stats(audit_failures=3, audit_standing=num_standing)
        desk.link.on_sent = lambda epoch, command: [
            desk.heartbeat.answered((life.leader, epoch), command.beat)
            for life in desk.heartbeat.silent(1)
            if isinstance(command, Audit) and life.epoch == epoch
        ]
        books = await desk.operator.carry_out(AuditBooks(wait_s=5.0))
        assert isinstance(books, BooksAre)
        assert [book.is_sound for book in books.books] == [num_standing == 0] * 2
        assert {(book.faults, book.faults_ever) for book in books.books} == {(num_standing, 3)}


async def test_who_follows_events_waits_for_the_next_one_or_for_its_time(
    make_stage: MakeStage,
) -> None:
    async with desk_of(make_stage) as desk:
        assert await desk.operator.carry_out(GetEvents(0, 0.01)) == EventsAre((), 0, 0)
        waiting = asyncio.ensure_future(desk.operator.carry_out(GetEvents(0, 30.0)))
        await asyncio.sleep(0)
        await desk.operator.carry_out(SetLogLevel("info", "daemon.nobody"))
        answer = await asyncio.wait_for(waiting, 5)
        assert isinstance(answer, EventsAre)
        assert answer.events[0].text == "SetLogLevel level=info logger=daemon.nobody"


async def test_requests_are_listed_by_state_and_by_their_age(make_stage: MakeStage) -> None:
    async with desk_of(make_stage) as desk:
        with desk.controller.submit([SPEC]), desk.controller.submit([SPEC, SPEC]) as call:
            call.requests[0].label = "mine"
            listed = desk.operator.answer(GetRequests())
            assert isinstance(listed, RequestsAre)
            assert [r.number for r in listed.requests] == [1, 2, 3]
            assert not listed.is_truncated
            (shown,) = desk.operator.answer(GetTimelines("mine")).timelines  # type: ignore[union-attr]
            assert shown.number == 2
            slowest = desk.operator.answer(GetRequests(slowest=1))
            assert isinstance(slowest, RequestsAre)
            assert [r.number for r in slowest.requests] == [1]
        ended = desk.operator.answer(GetRequests("aborted"))
        assert isinstance(ended, RequestsAre)
        assert [r.number for r in ended.requests] == [1, 3, 2], "latest end first"
        assert desk.operator.answer(GetRequests("prefill")) == RequestsAre((), False, 0)


async def test_a_full_house_is_listed_in_part_and_says_so(make_stage: MakeStage) -> None:
    async with desk_of(make_stage) as desk:
        timelines = Timelines()
        with desk.controller.submit([SPEC]) as call:
            for number in range(MAX_SEARCHED + 1):
                twin = copy.copy(call.requests[0])
                twin.arrival = number
                timelines.arrived(twin)
            answer = requests(timelines, GetRequests("prefill"), now_s=0.0)
            assert (len(answer.requests), answer.is_truncated) == (MAX_LISTED, True)
            assert requests(timelines, GetRequests("decode"), now_s=0.0).is_truncated


async def test_a_log_level_that_is_set_twice_goes_back_to_the_first() -> None:
    levels, target = LogLevels(), logging.getLogger("daemon.nobody")
    target.setLevel(logging.WARNING)
    levels.set("debug", "daemon.nobody", 60.0)
    levels.set("info", "daemon.nobody", 60.0)
    assert target.level == logging.INFO
    levels.close()
    assert target.level == logging.WARNING
    levels.set("debug", "daemon.nobody", 0.01)
    levels.set("error", "daemon.nobody", None)
    levels.close()
    assert target.level == logging.ERROR, "for good"
    target.setLevel(logging.NOTSET)
